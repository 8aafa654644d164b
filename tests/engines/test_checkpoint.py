# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as the public package writes them, and what strangers may have made of them."""

from __future__ import annotations

import json
import random
import resource
import struct
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from engines import model_config
from engines.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from engines.model_config import ModelConfig
from services.common.errors import FabricError, FailedPreconditionError, NotFoundError
from tests.engines.models import SMALL, config_document, make_weights, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_the_public_package_writes_is_read_bit_by_bit(tmp_path: Path, dtype: Any, parts: int) -> None:
    write_checkpoint(tmp_path, SMALL, dtype, parts=parts)
    weights = make_weights(SMALL, dtype)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint) == set(weights)
        assert len(checkpoint.files()) == parts
        for name, expected in weights.items():
            found = checkpoint[name]
            assert found.dtype == expected.dtype
            assert found.shape == expected.shape
            assert found.tobytes() == expected.tobytes()
            assert not found.flags.writeable
        with pytest.raises(KeyError):
            checkpoint["nothing"]


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, SMALL, np.float32, seed=seed)
    digests = [Checkpoint.open(tmp_path / name).digest() for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_reading_one_tensor_reads_that_one(tmp_path: Path) -> None:
    """A file of 4 GB with one tensor of 1 KB in use takes no 4 GB of memory."""
    header = {
        "large": {"dtype": "BF16", "shape": [1 << 31], "data_offsets": [0, 1 << 32]},
        "small": {"dtype": "F32", "shape": [256], "data_offsets": [1 << 32, (1 << 32) + 1024]},
    }
    path = write_file(tmp_path, header)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 32) + 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint["small"].sum() == 0
        assert checkpoint["large"].shape == (1 << 31,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def write_file(directory: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / SINGLE_FILE
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def tensor(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (tensor(data_offsets=[0, 4]), b"x" * 8, "tensor 't' has 4 bytes, and F32 of [2] takes 8"),
        (tensor(data_offsets=[8, 0]), b"x" * 8, "tensor 't' has -8 bytes"),
        (tensor(data_offsets=[0, 8]), b"x" * 7, "and the file has"),
        (tensor(), b"x" * 9, "1 bytes behind the last tensor belong to none"),
        (tensor(data_offsets=[4, 12]), b"x" * 12, "tensor 't' begins at byte"),
        (tensor(data_offsets=[-4, 4]), b"x" * 8, "data_offsets that are not two whole numbers from 0"),
        (tensor(data_offsets=[0, 8.0]), b"x" * 8, "data_offsets that are not two whole numbers from 0"),
        (tensor(data_offsets=[0]), b"x" * 8, "data_offsets that are not two whole numbers from 0"),
        (tensor(shape=[True, 2]), b"x" * 8, "a shape that is not up to 8 whole numbers from 0"),
        (tensor(shape=[1] * 9), b"x" * 8, "a shape that is not up to 8 whole numbers from 0"),
        (tensor(shape=[1 << 61, 1 << 61]), b"x" * 8, "tensor 't' has 8 bytes, and F32 of"),
        (tensor(shape=[10**100]), b"x" * 8, "a shape that is not up to 8 whole numbers from 0"),
        (tensor(dtype="I64"), b"x" * 8, "the number format 'I64', known are F32, F16, BF16, F8_E4M3"),
        (tensor(dtype=["F32"]), b"x" * 8, "the number format ['F32']"),
        (tensor(more=1), b"x" * 8, "other members than dtype, shape and data_offsets"),
        ({"t": [1]}, b"", "other members than dtype, shape and data_offsets"),
        ([1, 2], b"", "is no JSON object"),
        (b"", b"", "is no JSON document"),
        (b'{"a": NaN}', b"", "NaN is no number"),
        (b"[" * 200_000, b"", "is no JSON document"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", "is no JSON document"),
        (b'{"t": {}, "t": {}}', b"", "'t' is given twice"),
        (b"\xff\xfe", b"", "is no JSON document"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_header_that_lies_is_one_sentence(tmp_path: Path, header: Any, data: bytes, says: str) -> None:
    path = write_file(tmp_path, header, data)
    with pytest.raises(FailedPreconditionError) as raised:
        Checkpoint.open(tmp_path)
    assert says in raised.value.message
    assert raised.value.message.startswith(str(path))
    assert len(raised.value.message) < 700


def test_two_tensors_never_share_bytes(tmp_path: Path) -> None:
    header = tensor() | {"u": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    write_file(tmp_path, header, b"x" * 8)
    with pytest.raises(FailedPreconditionError, match=r"tensor 'u' begins at byte .* where the last one ends"):
        Checkpoint.open(tmp_path)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, ml_dtypes.bfloat16)
    path = tmp_path / SINGLE_FILE
    whole = path.read_bytes()
    rng = random.Random(20261129)
    for end in [0, 1, 7, 8, 9, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(200))]:
        path.write_bytes(whole[:end])
        with pytest.raises(FailedPreconditionError):
            Checkpoint.open(tmp_path)


def test_noise_in_a_header_never_ends_in_anything_but_a_typed_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, np.float16)
    path = tmp_path / SINGLE_FILE
    whole = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(20261129)
    refused = 0
    for _ in range(1_000):
        spoilt = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            spoilt[rng.randrange(header_end)] = rng.randrange(256)
        path.write_bytes(spoilt)
        try:
            with Checkpoint.open(tmp_path) as checkpoint:
                for name in checkpoint:
                    assert checkpoint[name].nbytes == checkpoint.places[name].end - checkpoint.places[name].begin
        except FabricError:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({}, "has no weight_map of 1 to"),
        ({"a": "../other.safetensors"}, "is no plain file name ending in .safetensors"),
        ({"a": "/etc/passwd"}, "is no plain file name ending in .safetensors"),
        ({"a": ".hidden.safetensors"}, "is no plain file name ending in .safetensors"),
        ({"a": 7}, "is no plain file name ending in .safetensors"),
    ],
)
def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path, weight_map: Any, says: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(FailedPreconditionError, match=says):
        Checkpoint.open(tmp_path)


def test_an_index_and_its_files_agree_or_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, np.float32, parts=2)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    moved = dict(index["weight_map"]) | {"model.norm.weight": "model-00001-of-00002.safetensors"}
    moved |= {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(FailedPreconditionError, match="and the index says"):
        Checkpoint.open(tmp_path)
    more = index["weight_map"] | {"lost.weight": "model-00001-of-00002.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": more}))
    with pytest.raises(FailedPreconditionError, match=r"tensor 'lost.weight' and 0 more are in no file"):
        Checkpoint.open(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFoundError, match="no such file"):
        Checkpoint.open(tmp_path)


def test_a_directory_without_a_checkpoint_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=f"neither {SINGLE_FILE} nor {INDEX_FILE}"):
        Checkpoint.open(tmp_path)


def test_the_figures_of_a_model_come_from_its_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, np.float32)
    assert model_config.read(tmp_path) == ModelConfig(SMALL, True, 8192, (2,))
    old = config_document(SMALL)
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "eos_token_id"):
        del old[name]
    read = model_config.parse("old", json.dumps(old).encode())
    assert (read.shape.kv_heads, read.shape.head_size, read.shape.rope_theta) == (4, 16, 10_000.0)
    assert (read.tied_embeddings, read.end_token_ids) == (False, ())
    newer = config_document(SMALL) | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert model_config.parse("newer", json.dumps(newer).encode()).shape.rope_theta == 5e5


def changed(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda document: document | changes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed(num_hidden_layers=0), "num_hidden_layers: 0, expected integer from 1 to 4096"),
        (changed(hidden_size="64"), 'hidden_size: "64", expected integer from 1'),
        (changed(vocab_size=10**40), "vocab_size: 1000"),
        (changed(num_attention_heads=True), "num_attention_heads: true, expected integer"),
        (changed(num_key_value_heads=3), "num_key_value_heads: 3, expected a divisor of num_attention_heads, 4"),
        (changed(head_dim=15), "head_dim: 15, expected an even number"),
        (changed(rms_norm_eps=-1e-5), "rms_norm_eps: -1e-05, expected number above 0"),
        (changed(architectures=["QwenForCausalLM"]), "architectures: list of 1 item, expected one of LlamaForCausalLM"),
        (changed(hidden_act="gelu"), 'hidden_act: "gelu", expected "silu"'),
        (changed(attention_bias=True), "attention_bias: true, expected false"),
        (changed(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "rope_scaling: object, expected none"),
        (changed(sliding_window=4096), "sliding_window: 4096, expected none"),
        (changed(quantization_config={"quant_method": "fp8"}), "quantization_config: object, expected none"),
        (changed(eos_token_id=[2, 500]), "eos_token_id: list of 2 items, expected ids below vocab_size, 101"),
        (changed(tie_word_embeddings="yes"), 'tie_word_embeddings: "yes", expected true or false'),
        (lambda document: {k: v for k, v in document.items() if k != "hidden_size"}, "hidden_size: absent"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_the_network_does_not_have_is_refused_by_name(
    change: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    with pytest.raises(FailedPreconditionError) as raised:
        model_config.parse("config.json", json.dumps(change(config_document(SMALL))).encode())
    assert says in raised.value.message


@pytest.mark.parametrize("text", [b"", b"[]", b"{" * 100, b'{"a": 1, "a": 2}', b"\xff", b"{" + b" " * (1 << 20)])
def test_a_config_that_is_none_is_one_sentence(text: bytes) -> None:
    with pytest.raises(FailedPreconditionError) as raised:
        model_config.parse("config.json", text)
    assert raised.value.message.startswith("config.json: ")
