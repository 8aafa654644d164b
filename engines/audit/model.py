# SPDX-License-Identifier: Apache-2.0
"""Models of the llama and qwen2 families as files store them: one name for each weight, however it lies.

Three schemes are known. Checkpoints as trained (`model.layers.0.self_attn.q_proj.weight`; `.kernel` for matrices that
are stored with rows and columns exchanged; `qkv_proj` and `gate_up_proj` for fused ones), GGUF files
(`blk.0.attn_q.weight`, whose query and key rows stand in the interleaved rotary order where the architecture is
`llama`, and in that of the checkpoint where it is `qwen2`), and TensorRT-LLM checkpoints
(`transformer.layers.0.attention.qkv.weight` with `weights_scaling_factor`). Each weight becomes a `View` under its
role: `embedding`, `layers.0.q`, `layers.0.q.bias`, `layers.0.down`, `final_norm`, `head`, …; scales of activations and
of the cache, which have no counterpart to be compared with, are kept by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engines.audit.gguf_file import open_gguf
from engines.audit.safetensors_file import SUFFIX, open_safetensors
from engines.audit.view import Scale, View
from services.common.contract import CONTRACT_FILE
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from engines.audit.storage import Stored, TensorFile

_TRAINED: Final = {
    "self_attn.q_proj": ("q",),
    "self_attn.k_proj": ("k",),
    "self_attn.v_proj": ("v",),
    "self_attn.qkv_proj": ("q", "k", "v"),
    "self_attn.o_proj": ("o",),
    "mlp.gate_proj": ("gate",),
    "mlp.up_proj": ("up",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.down_proj": ("down",),
    "input_layernorm": ("attention_norm",),
    "post_attention_layernorm": ("mlp_norm",),
}
_GGUF: Final = {
    "attn_q": ("q",),
    "attn_k": ("k",),
    "attn_v": ("v",),
    "attn_qkv": ("q", "k", "v"),
    "attn_output": ("o",),
    "ffn_gate": ("gate",),
    "ffn_up": ("up",),
    "ffn_down": ("down",),
    "attn_norm": ("attention_norm",),
    "ffn_norm": ("mlp_norm",),
}
_VENDOR: Final = {
    "attention.qkv": ("q", "k", "v"),
    "attention.dense": ("o",),
    "mlp.fc": ("gate",),
    "mlp.gate": ("up",),
    "mlp.proj": ("down",),
    "input_layernorm": ("attention_norm",),
    "post_layernorm": ("mlp_norm",),
}
"""Linear layers of each scheme and the roles that they hold, in the order of their rows."""
_WHOLE: Final = {
    "model.embed_tokens": "embedding",
    "model.norm": "final_norm",
    "lm_head": "head",
    "token_embd": "embedding",
    "output_norm": "final_norm",
    "output": "head",
    "transformer.vocab_embedding": "embedding",
    "transformer.ln_f": "final_norm",
}
_LAYER: Final = re.compile(r"(?P<prefix>model\.layers|blk|transformer\.layers)\.(?P<number>\d{1,5})\.(?P<linear>.+)")
_SCHEMES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "model.layers": _TRAINED,
    "blk": _GGUF,
    "transformer.layers": _VENDOR,
}
_WEIGHT_SCALES: Final = ("weight_scale", "weight_scale_inv", "weights_scaling_factor")
"""Suffixes of what stored weights are multiplied by; the one called `inv` is multiplied by all the same."""
_OTHER_SCALES: Final = (
    "input_scale", "activation_scaling_factor", "kv_cache_scaling_factor", "k_scale", "v_scale", "output_scale",
)  # fmt: skip
"""Suffixes of scales of activations and of the cache."""
_INTERLEAVED: Final = {"llama": True, "qwen2": False}
"""Known architectures of GGUF files, and whether the rotary halves of each head are interleaved in them."""
_ARCHITECTURE: Final = "general.architecture"
_COMPUTED: Final = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Ends of names of tensors that follow from the configuration."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What decides where fused and rotated rows lie."""

    heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class Model:
    """The tensors of one side, by role."""

    file: TensorFile
    geometry: Geometry | None
    """Absent where the side itself does not say it."""
    views: Mapping[str, View]
    scales: Mapping[str, Stored]
    """Scales of activations and of the cache, by their name in the file."""
    unknown: tuple[str, ...]
    """Tensors whose place in the model is not known."""


def open_tensors(path: Path) -> TensorFile:
    """Opens weights: a GGUF or safetensors file, a checkpoint folder, or an engine directory that holds one of them.

    Raises:
        NotFoundError: There is nothing, or no weights in it.
        FailedPreconditionError: It cannot be read, or holds several sets of weights.
        UnimplementedError: It is a checkpoint that is split over ranks.
        OSError: A file cannot be opened.
    """
    if not path.exists():
        raise NotFoundError(f"there is no file or folder {path}")
    if not path.is_dir():
        return open_safetensors(path) if path.suffix == SUFFIX else open_gguf(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise FailedPreconditionError(f"{path} holds {len(found)} GGUF files, expected one: name the file")
    if found:
        return open_gguf(found[0])
    if (path / CONTRACT_FILE).is_file() and not any(path.glob(f"*{SUFFIX}")):
        raise NotFoundError(f"{path} holds no weights that can be read: name the checkpoint that it was built from")
    return open_safetensors(path)


def geometry_of(file: TensorFile) -> Geometry | None:
    """Heads and their size, where the side says them.

    Raises:
        FailedPreconditionError: It says that the model is of another family, or contradicts itself.
    """
    said = file.metadata
    architecture = said.get(_ARCHITECTURE)
    if architecture is not None and architecture not in _INTERLEAVED:
        known = ", ".join(map(repr, _INTERLEAVED))
        raise FailedPreconditionError(f"{file.path}: the architecture is {architecture!r}; the audit knows {known}")
    names = (
        tuple(
            f"{architecture}.{name}" for name in ("attention.head_count", "attention.head_count_kv", "embedding_length")
        )
        if architecture
        else ("num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    heads, hidden = said.get(names[0]), said.get(names[2])
    if heads is None or hidden is None:
        return None
    kv_heads = said.get(names[1]) or heads
    head_size = said.get("head_dim") or said.get("head_size") or said.get(f"{architecture}.attention.key_length")
    if not all(type(each) is int and each > 0 for each in (heads, kv_heads, hidden)):
        raise FailedPreconditionError(f"{file.path}: {', '.join(names)} are not all whole numbers above 0")
    return Geometry(heads, kv_heads, head_size if type(head_size) is int and head_size > 0 else hidden // heads)


def read_model(file: TensorFile, geometry: Geometry | None) -> Model:
    """Finds the role of every tensor.

    Args:
        file: The open weights.
        geometry: Heads and their size, from this side or the other one.

    Raises:
        FailedPreconditionError: Rows are fused or rotated and nobody says how, or two tensors have one role.
    """
    views: dict[str, View] = {}
    scales: dict[str, Stored] = {}
    unknown: list[str] = []
    for name, stored in file.tensors.items():
        if name.endswith(_COMPUTED):
            continue
        stem, _, suffix = name.rpartition(".")
        if suffix in _WEIGHT_SCALES:
            if not any(f"{stem}.{each}" in file.tensors for each in ("weight", "kernel")):
                unknown.append(name)
            continue
        if suffix in _OTHER_SCALES:
            scales[name] = stored
            continue
        found = list(_views(file, stored, stem, suffix, geometry))
        if not found:
            unknown.append(name)
        for view in found:
            if view.role in views:
                raise FailedPreconditionError(
                    f"{file.path}: {name} and {views[view.role].stored.name} both hold {view.role}"
                )
            views[view.role] = view
    if not any(role.startswith("layers.") for role in views):
        raise FailedPreconditionError(
            f"{file.path}: no tensor has a name by which models of the llama and qwen2 families call them"
        )
    return Model(file, geometry, views, scales, tuple(sorted(unknown)))


def _views(file: TensorFile, stored: Stored, stem: str, suffix: str, geometry: Geometry | None) -> Iterator[View]:
    if suffix not in ("weight", "kernel", "bias"):
        return
    scale = _scale(file, stem) if suffix != "bias" else None
    exchanged = suffix == "kernel"
    if stem in _WHOLE:
        yield View.whole(_WHOLE[stem], stored, scale=scale, exchanged=exchanged)
        return
    match = _LAYER.fullmatch(stem)
    roles = _SCHEMES[match["prefix"]].get(match["linear"]) if match else None
    if match is None or roles is None:
        return
    end = ".bias" if suffix == "bias" else ""
    interleaved = match["prefix"] == "blk" and _INTERLEAVED[file.metadata.get(_ARCHITECTURE, "llama")]
    whole = View.whole("", stored, scale=scale, exchanged=exchanged, per_row=bool(end))
    start = 0
    for role, rows in zip(roles, _extents(file, stored.name, roles, whole.rows, geometry), strict=True):
        head = _head_rows(file, role, rows, geometry) if interleaved and role in ("q", "k") else 0
        yield whole.part(f"layers.{match['number']}.{role}{end}", start, rows, head_rows=head)
        start += rows


def _extents(
    file: TensorFile, name: str, roles: tuple[str, ...], rows: int, geometry: Geometry | None
) -> tuple[int, ...]:
    """How many rows each role has."""
    if len(roles) == 1:
        return (rows,)
    if roles == ("gate", "up"):
        return (rows // 2, rows - rows // 2)
    if geometry is None:
        raise FailedPreconditionError(f"{file.path}: {name} is fused, and neither side says how many heads there are")
    keys = geometry.kv_heads * geometry.head_size
    queries = geometry.heads * geometry.head_size
    if queries + 2 * keys != rows:
        raise FailedPreconditionError(
            f"{file.path}: {name} has {rows} rows, and {geometry.heads} query and {geometry.kv_heads} key heads of "
            f"{geometry.head_size} make {queries + 2 * keys}"
        )
    return (queries, keys, keys)


def _head_rows(file: TensorFile, role: str, rows: int, geometry: Geometry | None) -> int:
    if geometry is None:
        raise FailedPreconditionError(f"{file.path} does not say how many heads the model has")
    heads = geometry.heads if role == "q" else geometry.kv_heads
    if rows % heads or rows // heads % 2:
        raise FailedPreconditionError(f"{file.path}: {rows} rows of {role} do not fill {heads} heads with two halves")
    return rows // heads


def _scale(file: TensorFile, stem: str) -> Scale | None:
    for suffix in _WEIGHT_SCALES:
        if stored := file.tensors.get(f"{stem}.{suffix}"):
            return Scale.read(file, stored)
    return None
