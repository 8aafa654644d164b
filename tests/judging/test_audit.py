# SPDX-License-Identifier: Apache-2.0
"""Honest conversions pass; each mistake that converters make fails by the tensor's name, with what happened."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from engines.audit.conversion import AuditResult, audit
from engines.audit.model import open_tensors
from services.common.errors import FailedPreconditionError, NotFoundError, UnimplementedError
from tests.judging import weights
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engines.llama_tool import LlamaTool
    from tests.judging.weights import Weights

KINDS = gguf.GGMLQuantizationType
FORMATS = (
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_0", "q5_1", "q5_k", "q4_0", "q4_1", "q4_k", "iq4_nl", "iq4_xs", "mxfp4",
    "q3_k", "iq3_s",
)  # fmt: skip


def finding(result: AuditResult, tensor: str) -> tuple[str, str]:
    """Kind and sentence of the one finding about a tensor, which must be the first."""
    assert not result.holds
    about = [(each.kind, each.sentence) for each in result.findings if each.tensor == tensor]
    assert about, [(each.tensor, each.kind, each.sentence) for each in result.findings]
    return about[0]


@pytest.fixture(scope="module")
def loadable(real_weights: Weights, packaged_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real layers as a file that libllama can load."""
    path = tmp_path_factory.mktemp("loadable") / "source.gguf"
    return weights.write_gguf(path, real_weights, KINDS.F32, vocabulary_of=packaged_model)


@pytest.mark.parametrize("dtype", FORMATS)
def test_honest_quantisation_of_every_type_holds(
    dtype: str, loadable: Path, trained: Path, tool: LlamaTool, tmp_path: Path
) -> None:
    converted = tmp_path / f"{dtype}.gguf"
    tool.quantize(loadable, converted, dtype, threads=2)
    result = audit(trained, converted)
    assert result.findings == ()
    assert dtype in {each.dtype for each in result.tensors}
    assert len(result.tensors) == 9 * weights.LAYERS + 2


@pytest.mark.parametrize("form", ["plain", "fused", "kernel"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_layouts_of_checkpoints_hold(
    form: str, dtype: str, trained: Path, real_weights: Weights, tmp_path: Path
) -> None:
    converted = weights.write_trained(tmp_path / "converted", real_weights, dtype, form=form)
    result = audit(trained, converted)
    assert result.findings == ()
    assert {each.dtype for each in result.tensors} == {{"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]}


def test_a_vendor_checkpoint_in_fp8_holds(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    result = audit(trained, weights.write_vendor(tmp_path / "fp8", real_weights))
    assert result.findings == ()
    assert {each.dtype for each in result.tensors} == {"f8_e4m3", "bf16"}
    assert any("24 rows more" in note for note in result.notes), "the padded output matrix is told"
    head = next(each for each in result.tensors if each.role == "head")
    assert head.source_name == "model.embed_tokens.weight", "tied in the source"


def test_the_interleaving_is_that_of_the_files_that_exist(
    trained: Path, packaged_model: Path, real_weights: Weights
) -> None:
    # The writer of tests permutes by its own formula, row by row; the packaged file was made by the upstream converter.
    with open_tensors(packaged_model) as file:
        stored = file.tensors["blk.0.attn_q.weight"]
        rows = file.rows(stored, 0, stored.rows)
    assert np.array_equal(rows, weights.interleaved(real_weights["layers.0.q"], weights.HEADS))


def times_1000(role: str, rows: slice = slice(None)) -> Callable[[Weights], None]:
    def plant(spoiled: Weights) -> None:
        spoiled[role][rows] *= 1000

    return plant


def one_value(spoiled: Weights) -> None:
    row = spoiled["layers.1.up"][77]
    row[int(np.abs(row).argmax())] *= 1000


def swapped(a: str, b: str) -> Callable[[Weights], None]:
    def plant(spoiled: Weights) -> None:
        spoiled[a], spoiled[b] = spoiled[b], spoiled[a]

    return plant


def transposed(role: str) -> Callable[[Weights], None]:
    def plant(spoiled: Weights) -> None:
        values = spoiled[role]
        spoiled[role] = np.ascontiguousarray(values.T).reshape(values.shape)

    return plant


def shifted_row(spoiled: Weights) -> None:
    spoiled["layers.0.gate"][300] = np.roll(spoiled["layers.0.gate"][300], 1)


def shifted_rows(spoiled: Weights) -> None:
    spoiled["layers.0.up"][:] = np.roll(spoiled["layers.0.up"], 1, axis=0)


def not_numbers(spoiled: Weights) -> None:
    spoiled["layers.0.v"][5, 5] = np.nan


def negated(spoiled: Weights) -> None:
    spoiled["layers.1.down"] *= -1


def halves(spoiled: Weights) -> None:
    spoiled["layers.0.k"] = weights.interleaved(spoiled["layers.0.k"], weights.KV_HEADS)


def swapped_rows(spoiled: Weights) -> None:
    spoiled["layers.1.o"][[10, 20]] = spoiled["layers.1.o"][[20, 10]]


PLANTED = {
    "1000 times": (times_1000("layers.1.down"), "layers.1.mlp.down_proj", "factor", "1000 times"),
    "1000 times a row": (
        times_1000("layers.1.down", slice(40, 43)), "layers.1.mlp.down_proj", "row_factor", "3 of 576 rows are wrong",
    ),
    "1000 times a value": (one_value, "layers.1.mlp.up_proj", "value", "row 77"),
    "k for v": (
        swapped("layers.0.k", "layers.0.v"), "layers.0.self_attn.k_proj", "swapped", "the source calls layers.0.v",
    ),
    "gate for up": (
        swapped("layers.1.gate", "layers.1.up"), "layers.1.mlp.gate_proj", "swapped", "the source calls layers.1.up",
    ),
    "wrong transpose, square": (transposed("layers.0.o"), "layers.0.self_attn.o_proj", "transposed", "exchanged"),
    "wrong transpose, not square": (transposed("layers.0.down"), "layers.0.mlp.down_proj", "transposed", "exchanged"),
    "shifted row": (shifted_row, "layers.0.mlp.gate_proj", "shifted_row", "the values of row 300 are shifted by +1"),
    "shifted rows": (shifted_rows, "layers.0.mlp.up_proj", "shifted_rows", "row n holds row n - 1"),
    "swapped rows": (swapped_rows, "layers.1.self_attn.o_proj", "swapped_rows", "of the source"),
    "NaN": (not_numbers, "layers.0.self_attn.v_proj", "not_numbers", "1 of its values are NaN"),
    "negated": (negated, "layers.1.mlp.down_proj", "negated", "wrong sign"),
    "rotary order": (halves, "layers.0.self_attn.k_proj", "rotary_order", "other rotary order"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_mistake_fails_by_name(what: str, dtype: str, trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    plant, linear, kind, words = PLANTED[what]
    spoiled = real_weights.copy()
    plant(spoiled)
    result = audit(trained, weights.write_trained(tmp_path / "spoiled", spoiled, dtype))
    said = finding(result, f"model.{linear}.weight")
    assert said[0] == kind, said
    assert words in said[1]
    others = {each.tensor for each in result.findings} - {f"model.{linear}.weight"}
    assert len(others) <= 1, "only what was exchanged with it may fail beside it"


QUANTISED = [what for what in PLANTED if what not in ("NaN",)]


@pytest.mark.parametrize("what", QUANTISED)
@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_0])
def test_a_mistake_shows_below_quantisation(
    what: str, kind: gguf.GGMLQuantizationType, trained: Path, real_weights: Weights, tmp_path: Path
) -> None:
    plant, linear, expected, _ = PLANTED[what]
    spoiled = real_weights.copy()
    plant(spoiled)
    result = audit(trained, weights.write_gguf(tmp_path / "spoiled.gguf", spoiled, kind))
    names = {
        "self_attn.k_proj": "attn_k", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    number, _, rest = linear.removeprefix("layers.").partition(".")
    said = finding(result, f"blk.{number}.{names[rest]}.weight")
    # A block format spreads one value's 1000 times over the values that share its scale.
    assert said[0] == expected or what == "1000 times a value", said


def test_swapped_queries_and_keys_in_a_fused_tensor(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    result = audit(trained, weights.write_vendor(tmp_path / "swapped", real_weights, order=("k", "q", "v")))
    said = {each.sentence for each in result.findings if each.tensor == "transformer.layers.0.attention.qkv.weight"}
    assert said == {
        "it begins with row 0 of what the source calls layers.0.k",
        "it begins with row 384 of what the source calls layers.0.q",
    }


def test_a_scale_that_was_left_at_one(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    converted = weights.write_vendor(tmp_path / "unit", real_weights, unit_scale_of="1.mlp.proj")
    kind, sentence = finding(audit(trained, converted), "transformer.layers.1.mlp.proj.weight")
    assert kind == "unit_scale"
    assert "transformer.layers.1.mlp.proj.weights_scaling_factor is exactly 1.0" in sentence


def test_cache_scales_that_were_left_at_one(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    converted = weights.write_vendor(tmp_path / "units", real_weights, cache_scales=(1.0, 1.0))
    kind, sentence = finding(audit(trained, converted), "transformer.layers.0.attention.kv_cache_scaling_factor")
    assert kind == "scale"
    assert "exactly 1.0" in sentence
    assert audit(trained, converted, accept_unit_scales=True).holds


def test_a_scale_that_is_no_number(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    converted = weights.write_vendor(tmp_path / "nan", real_weights, cache_scales=(0.02, float("nan")))
    assert (
        "no positive numbers"
        in finding(audit(trained, converted), "transformer.layers.1.attention.kv_cache_scaling_factor")[1]
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_wrong_byte_order(dtype: str, trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    converted = weights.write_trained(tmp_path / "swapped", real_weights, dtype)
    name = "model.layers.1.self_attn.q_proj.weight"
    with open_tensors(converted) as file:
        stored = file.tensors[name]
    path = converted / "model.safetensors"
    data = bytearray(path.read_bytes())
    width = stored.row_bytes // stored.columns
    place = slice(stored.offset, stored.offset + stored.size_bytes)
    data[place] = np.frombuffer(bytes(data[place]), np.uint8).reshape(-1, width)[:, ::-1].tobytes()
    path.write_bytes(bytes(data))
    assert finding(audit(trained, converted), name)[0] == "byte_order"


@pytest.mark.parametrize("kind", [KINDS.F16, KINDS.Q4_0])
def test_a_layer_of_another_checkpoint(
    kind: gguf.GGMLQuantizationType, trained: Path, real_weights: Weights, packaged_model: Path, tmp_path: Path
) -> None:
    other = weights.real(packaged_model, (0, 17))
    spoiled = real_weights.copy()
    for role in [role for role in spoiled.by_role if role.startswith("layers.1.")]:
        spoiled[role] = other[role]
    result = audit(trained, weights.write_gguf(tmp_path / "mixed.gguf", spoiled, kind))
    layer = [each for each in result.findings if each.kind == "foreign_layer"]
    assert len(layer) == 1
    assert "layer 1 is from another checkpoint" in layer[0].sentence
    assert not [each.tensor for each in result.findings if each.tensor.startswith("blk.0.")]


def test_a_layer_of_a_checkpoint_that_is_alike(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    spoiled = real_weights.copy()
    for role, values in spoiled.by_role.items():
        if role.startswith("layers.1.") and values.ndim == 2:
            values += rng.normal(0, 0.02 * values.std(), values.shape).astype(np.float32)
    result = audit(trained, weights.write_trained(tmp_path / "alike", spoiled, "bfloat16"))
    assert "a checkpoint that is alike" in finding(result, "model.layers.1.mlp.up_proj.weight")[1]


def test_what_is_missing_or_too_much(trained: Path, real_weights: Weights, tmp_path: Path) -> None:
    spoiled = real_weights.copy()
    del spoiled.by_role["layers.0.v"]
    spoiled["head"] = spoiled["embedding"][::-1]
    result = audit(trained, weights.write_trained(tmp_path / "missing", spoiled))
    assert finding(result, "model.layers.0.self_attn.v_proj.weight") == ("missing", "the conversion has no layers.0.v")
    assert not [each for each in result.findings if each.tensor == "model.embed_tokens.weight"]
    assert finding(result, "lm_head.weight")[0] != "extra", "compared with the embedding, to which the source ties it"


@pytest.mark.slow
def test_the_same_full_model_takes_no_more_memory(packaged_model: Path, loadable: Path, trained: Path) -> None:
    engine = ROOT / "build" / "engines" / "smollm2-135m" / "model.gguf"
    small, large = peak(trained, loadable), peak(packaged_model, engine)
    assert large["bytes_read"] > 3 * small["bytes_read"]
    assert large["peak_kib"] - small["peak_kib"] < 64 * 1024, (small, large)
    assert large["findings"] == 0


def peak(source: Path, converted: Path) -> dict[str, int]:
    """Audits in a process of its own and returns its largest memory."""
    code = (
        "import json, re, sys; from pathlib import Path; from engines.audit.conversion import audit\n"
        "r = audit(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        # Not getrusage(): what that tells begins with the size of the process that started this one.
        "status = Path('/proc/self/status').read_text()\n"
        "print(json.dumps({'peak_kib': int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]), "
        "'bytes_read': r.bytes_read, 'findings': len(r.findings)}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(converted)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("cut", [3, 20, 100, 400, 5000, 1_000_000])
def test_files_that_are_cut_short(cut: int, loadable: Path, trained: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(loadable.read_bytes()[:cut])
    with pytest.raises(FailedPreconditionError, match=r"short\.gguf"):
        audit(trained, short)
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:cut])
    with pytest.raises(FailedPreconditionError, match=r"model\.safetensors"):
        audit(trained, folder)


def test_headers_that_lie(loadable: Path, trained: Path, tmp_path: Path) -> None:
    good = bytearray(loadable.read_bytes())
    for place, value in ((8, 1 << 60), (16, 1 << 60), (4, 0x03000000), (4, 9)):
        lie = bytearray(good)
        struct.pack_into("<I" if place == 4 else "<Q", lie, place, value)
        path = tmp_path / "lie.gguf"
        path.write_bytes(bytes(lie))
        with pytest.raises(FailedPreconditionError, match=r"lie\.gguf"):
            audit(trained, path)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 64]}}',
        b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": 1}',
        b'{"a": {"dtype": "F32", "shape": [true, 4], "data_offsets": [0, 16]}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_hostile_headers_of_safetensors(header: bytes, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(FailedPreconditionError, match="hostile"):
        audit(trained, path)


def test_tensors_that_share_bytes(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "shared.safetensors"
    one = '{"dtype": "F32", "shape": [2], "data_offsets": [%d, %d]}'
    header = f'{{"a": {one % (0, 8)}, "b": {one % (4, 12)}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(FailedPreconditionError, match="a and b share bytes"):
        audit(trained, path)


def test_what_is_not_there_or_split(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        audit(trained, tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="holds no"):
        audit(trained, tmp_path)
    for rank in range(2):
        (tmp_path / f"rank{rank}.safetensors").write_bytes(b"")
    with pytest.raises(UnimplementedError, match="2 ranks"):
        audit(trained, tmp_path)
