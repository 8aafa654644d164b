# SPDX-License-Identifier: Apache-2.0
"""From a mining tier and a checkpoint to an engine directory, resumable and published whole.

The checkpoint's figures are read and its tensors held to them; activations are calibrated where the tier is FP8;
TensorRT's builder compiles the plan; configuration, tokenizer and contract are written. An interrupted build keeps what
it has finished, and the same inputs again do nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import tokenizers

from engines import inspect, model_config, planner, sources
from engines.build import Built, Progress, ignore_progress
from engines.checkpoint import Checkpoint
from engines.graph import plugins
from engines.mining import builder, calibration
from engines.mining.directory import PLAN_FILE, TOKENIZER_FILE, MiningEngine, publish_steps
from engines.mining.layer import RECORDED, Fp8Scales, Fusion
from engines.mining.network import build_network
from engines.publish import workplace
from services.common.contract import engine_digest
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from engines.card_tier import CardTier
    from engines.model_config import ModelConfig, ModelShape

_RECIPE: Final = 3
"""Number of the way in which engines are made here; another number makes every engine anew."""
_SCALES_FILE: Final = "scales.json"
CALIBRATION_PROMPTS_MAX: Final = 512
_FP8: Final = "fp8"


@dataclass(frozen=True, slots=True)
class MiningBuild:
    """What a mining engine is made of."""

    target: Path
    tier: CardTier
    model: Path
    """Directory with `config.json`, safetensors files and `tokenizer.json`."""
    engine_name: str
    """Of the model, as the engine's id begins."""
    calibration: Path | None = None
    """Texts, one a line; needed where the tier is FP8."""
    layers: tuple[int, ...] = (-1,)
    progress: Callable[[Progress], None] = field(default=ignore_progress)


def build_mining_engine(wanted: MiningBuild, *, compiler: builder.Compiler | None = None) -> Built:
    """Makes a mining engine's directory, or finds that it is there.

    Args:
        wanted: What to make, and of what.
        compiler: The builder; found where absent.

    Raises:
        NotFoundError: Checkpoint, tokenizer, calibration texts or TensorRT are not there.
        FailedPreconditionError: The checkpoint is damaged, or of another family; the tier does not fit; the builder
            refused; or the place is taken.
        ResourceExhaustedError: The disk has no room.
        UnavailableError: Another build of the same directory did not end in time.
    """
    tier = wanted.tier
    limits = tier.mining
    config = model_config.read(wanted.model)
    planner.plan(tier, config)  # whatever kernels there are, a tier that does not fit is refused before they are found
    if bad := [layer for layer in wanted.layers if not -1 <= layer < config.shape.layers]:
        raise FailedPreconditionError(f"layers: {bad[0]} is not one of -1 to {config.shape.layers - 1}")
    tokenizer = wanted.model / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise NotFoundError(f"no {TOKENIZER_FILE} in {wanted.model}: the broker turns text into tokens with it")
    if limits.weights == _FP8 and wanted.calibration is None:
        raise FailedPreconditionError(
            f"tier {tier.name} is FP8, whose scales come from real activations: name a file of texts, one a line"
        )
    compiler = compiler or builder.find()
    with Checkpoint.open(wanted.model) as checkpoint:
        _hold(checkpoint, config.shape)
        wanted.progress(Progress("reading the checkpoint", 0, 1))
        texts = None if wanted.calibration is None or limits.weights != _FP8 else _read(wanted.calibration)
        fused, remarks = _fusion(config.shape, limits.row_tokens, compiler)
        planned = planner.plan(tier, config, own_kernels=fused.all_parts)
        inputs = _inputs(wanted, compiler, fused, checkpoint.digest(), sources.digest(tokenizer), texts)
        rows = limits.step_token_budget // limits.row_tokens
        engine = MiningEngine(
            engine_id=f"{wanted.engine_name}-{limits.weights}-{tier.name}",
            shape=config.shape,
            row_tokens=limits.row_tokens,
            rows=rows,
            slots=planned.slots,
            weights_dtype=limits.weights,
            activations_dtype="bfloat16",
            layers=wanted.layers,
            card_family=tier.card.family,
            compute_capability=tier.card.compute_capability,
            card_memory_bytes=planned.memory.total,
            longest_step_ms=limits.longest_step_ms,
            runtime_version=compiler.version,
            flags=(
                f"tier={tier.name}",
                "network=engines.mining",
                f"kernels={','.join(fused.parts) or 'recorded'}",
                f"{inspect.INPUTS_FLAG}={inputs}",
            ),
            plugins=(compiler.plugins,) if fused.parts and compiler.plugins is not None else (),
            calibration=None if texts is None else f"{len(texts.splitlines())} texts, sha256 {_sha256(texts)[:16]}",
        )
        with workplace(wanted.target) as place:
            if inspect.made_of(wanted.target, inputs) is not None:
                return Built(wanted.target, engine.engine_id, engine_digest(wanted.target), False, remarks)
            place.begin(inputs, planned.memory.weights + (256 << 20))

            def scales() -> Fp8Scales | None:
                if texts is None:
                    return None
                kept = place.step(
                    _SCALES_FILE,
                    lambda part: _write_scales(part, _calibrate(wanted, config, checkpoint, texts, limits.row_tokens)),
                )
                return Fp8Scales(json.loads(kept.read_text()))

            def compile_plan(part: Path) -> None:
                found = scales()
                wanted.progress(Progress("compiling the plan", 0, 1))
                graph = build_network(
                    config.shape,
                    checkpoint,
                    row_tokens=limits.row_tokens,
                    scales=found,
                    layers=wanted.layers,
                    fused=fused,
                )
                part.write_bytes(compiler.compile(graph, rows=rows, slots=planned.slots))

            place.step(PLAN_FILE, compile_plan)
            wanted.progress(Progress("publishing", 0, 1))
            publish_steps(place, engine, tokenizer.read_bytes())
    return Built(wanted.target, engine.engine_id, engine_digest(wanted.target), True, remarks)


def weight_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and extents of all tensors that the network reads from a checkpoint."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    width, kv_width = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(shape.layers):
        prefix = f"model.layers.{index}"
        found |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (width, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_width, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, width),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return found


def _hold(checkpoint: Checkpoint, shape: ModelShape) -> None:
    """Holds the checkpoint's tensors to what `config.json` says, before hours are spent on them."""
    for name, extents in weight_shapes(shape).items():
        checkpoint.require(name, extents)
    biases = sorted(name for name in checkpoint if name.endswith("_proj.bias"))
    if biases:
        raise FailedPreconditionError(f"{checkpoint.directory}: tensor {biases[0]} is a bias, and the network has none")


def _fusion(shape: ModelShape, row_tokens: int, compiler: builder.Compiler) -> tuple[Fusion, tuple[str, ...]]:
    """Which parts are kernels of our own, and of each that is not why; which are faster, a card said (gpu-truth)."""
    if compiler.plugins is None:
        return RECORDED, (_left("all", f"{plugins.LIBRARY} is not in `plugins` beside the native library"),)
    refusals = {
        "attention": plugins.limits(
            heads=shape.heads, kv_heads=shape.kv_heads, head_size=shape.head_size, row_tokens=row_tokens
        ),
        "norm": plugins.row_limits(shape.hidden_size),
        "gated_unit": plugins.row_limits(shape.intermediate_size),
    }
    fused = Fusion(**{part: why is None for part, why in refusals.items()})
    return fused, tuple(_left(part, why) for part, why in refusals.items() if why is not None)


def _left(part: str, why: str) -> str:
    return f"{part.replace('_', ' ')} is left to TensorRT's own kernels: {why}"


def _inputs(
    wanted: MiningBuild,
    compiler: builder.Compiler,
    fused: Fusion,
    weights: str,
    tokenizer: str,
    texts: bytes | None,
) -> str:
    kernels = sources.digest(compiler.plugins) if fused.attention and compiler.plugins is not None else None
    what = (asdict(wanted.tier), wanted.engine_name, wanted.layers, kernels)
    parts: tuple[Any, ...] = (_RECIPE, what, compiler.version, weights, tokenizer, _sha256(texts or b""))
    return _sha256(repr(parts).encode())


def _calibrate(
    wanted: MiningBuild, config: ModelConfig, checkpoint: Checkpoint, texts: bytes, row_tokens: int
) -> Fp8Scales:
    def tell(done: int, total: int) -> None:
        wanted.progress(Progress("calibrating activations", done, total))

    prompts = _prompts(wanted.model / TOKENIZER_FILE, texts, config.shape.vocab_size, row_tokens)
    tell(0, len(prompts))
    return calibration.calibrate(config.shape, checkpoint, prompts, row_tokens=row_tokens, progress=tell)


def _prompts(tokenizer: Path, texts: bytes, vocab_size: int, row_tokens: int) -> Sequence[npt.NDArray[np.int32]]:
    try:
        made = tokenizers.Tokenizer.from_file(str(tokenizer))
        lines = [line for line in texts.decode("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise FailedPreconditionError(f"the calibration texts are no UTF-8 at byte {error.start + 1}") from error
    except Exception as error:  # the package raises the base class for a file that it cannot read
        raise FailedPreconditionError(f"{tokenizer} is no tokenizer that can be read: {error}") from error
    if len(lines) > CALIBRATION_PROMPTS_MAX:
        raise FailedPreconditionError(f"{len(lines)} calibration texts, at most {CALIBRATION_PROMPTS_MAX} are taken")
    prompts = [np.array(made.encode(line, add_special_tokens=False).ids[:row_tokens], np.int32) for line in lines]
    prompts = [prompt for prompt in prompts if prompt.size]
    if any(int(prompt.max()) >= vocab_size for prompt in prompts):
        raise FailedPreconditionError(f"{tokenizer} gives ids beyond the model's vocabulary of {vocab_size}")
    return prompts


def _write_scales(part: Path, scales: Fp8Scales) -> None:
    part.write_text(json.dumps(scales.activations))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file of calibration texts: {path}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
