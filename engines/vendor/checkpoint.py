# SPDX-License-Identifier: Apache-2.0
"""What the quantised checkpoint must have before hours are spent on an engine of it.

The vendor's exporter writes a checkpoint without complaint where calibration never ran: scales of activations are left
out, or scales of the cache are all exactly 1.0. An engine of such a checkpoint builds, runs, and is wrong. This is a
gate, not an audit: `ifab engine audit` compares every value.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines.checkpoint import Checkpoint
from engines.plain_file import open_plain
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from pathlib import Path

    from engines.card_tier import CardSet

_CONFIG: Final = "config.json"
_LINEARS: Final = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


def check(directory: Path, cards: CardSet, layers: int) -> None:
    """Holds a quantised checkpoint to what an FP8 engine needs.

    Raises:
        NotFoundError: A rank's file is missing.
        FailedPreconditionError: It is quantised otherwise, cut for other cards, a file is damaged, or scales are
            missing, not positive and finite, or were never calibrated.
    """
    said = _config(directory / _CONFIG)
    quantization = said.get("quantization")
    formats = quantization if isinstance(quantization, dict) else {}
    mapping = said.get("mapping")
    cut = mapping if isinstance(mapping, dict) else {}
    wanted = {
        "quantization.quant_algo": (formats.get("quant_algo"), "FP8"),
        "quantization.kv_cache_quant_algo": (formats.get("kv_cache_quant_algo"), "FP8"),
        "mapping.tp_size": (cut.get("tp_size"), cards.tensor_parallel),
        "mapping.pp_size": (cut.get("pp_size"), cards.pipeline_parallel),
        "num_hidden_layers": (said.get("num_hidden_layers"), layers),
    }
    wrong = [f"{name} is {found!r}, expected {right!r}" for name, (found, right) in wanted.items() if found != right]
    if wrong:
        raise FailedPreconditionError(f"{directory / _CONFIG}: " + "; ".join(wrong))
    stages = np.array_split(np.arange(layers), cards.pipeline_parallel)
    for rank in range(cards.count):
        with Checkpoint.open_file(directory / f"rank{rank}.safetensors") as checkpoint:
            _check_rank(checkpoint, rank, len(stages[rank // cards.tensor_parallel]))


def _check_rank(checkpoint: Checkpoint, rank: int, layers: int) -> None:
    where = checkpoint.directory / f"rank{rank}.safetensors"
    caches: list[float] = []
    for layer in range(layers):
        prefix = f"transformer.layers.{layer}"
        for linear in _LINEARS:
            for scale in ("weights_scaling_factor", "activation_scaling_factor"):
                _scale(checkpoint, where, f"{prefix}.{linear}.{scale}")
        caches.append(_scale(checkpoint, where, f"{prefix}.attention.kv_cache_scaling_factor"))
    if caches and all(each == 1.0 for each in caches):
        raise FailedPreconditionError(
            f"{where}: every kv_cache_scaling_factor is exactly 1.0: the cache was never calibrated; quantise again "
            "with calibration texts"
        )


def _scale(checkpoint: Checkpoint, where: Path, name: str) -> float:
    if name not in checkpoint:
        raise FailedPreconditionError(f"{where} has no tensor {name}: quantise again, with calibration texts")
    values = checkpoint[name].astype(np.float64).reshape(-1)
    if values.size == 0 or not (np.isfinite(values).all() and (values > 0).all()):
        raise FailedPreconditionError(f"{where}: {name} is not positive and finite everywhere")
    return float(values.max())


def _config(path: Path) -> dict[str, Any]:
    try:
        with open_plain(path) as file:
            document = json.loads(file.read(1 << 20))
    except FileNotFoundError as error:
        raise FailedPreconditionError(f"no {path.name} in {path.parent}: no checkpoint of TensorRT-LLM") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FailedPreconditionError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise FailedPreconditionError(f"{path} is no JSON object")
    return document
