# SPDX-License-Identifier: Apache-2.0
"""From a tier that generates and a published model to an engine directory, by TensorRT-LLM's own tools.

The quantised checkpoint lies beside the engines, under a name that says what it was made of, and serves every tier of
as many cards: it is made once. What an interrupted build has finished is kept, and the same inputs again do nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from engines import inspect, model_config, planner, sources
from engines.build import Built, Progress, ignore_progress
from engines.checkpoint import Checkpoint
from engines.contract_text import BuiltFrom
from engines.cpu import FileFacts
from engines.plain_file import open_plain
from engines.publish import Workplace, workplace
from engines.vendor import checkpoint as gate
from engines.vendor import commands, documents
from engines.vendor.tools import RELEASE, VendorTools
from services.common.contract import CONTRACT_FILE, engine_digest
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engines.card_tier import CardTier
    from engines.planner import EnginePlan

_RECIPE: Final = 1
_ENGINE_CONFIG: Final = "config.json"
_OUTPUT: Final = ".engine"


@dataclass(frozen=True, slots=True)
class VendorBuild:
    """What an engine that generates is made of."""

    target: Path
    tier: CardTier
    model: Path
    """Directory with `config.json`, safetensors files and `tokenizer.json`."""
    engine_name: str
    """Of the model, as the engine's id begins."""
    calibration: Path
    """Folder or file with the texts that quantisation is calibrated on."""
    progress: Callable[[Progress], None] = field(default=ignore_progress)


def build_vendor_engine(wanted: VendorBuild, tools: VendorTools) -> Built:
    """Makes the directory of an engine that generates, or finds that it is there.

    Raises:
        NotFoundError: Checkpoint, tokenizer or calibration texts are not there.
        FailedPreconditionError: The tier does not fit; the model is of another family or has no end token; a tool is of
            another release, failed, or made something else than it was told; or the place is taken.
        ResourceExhaustedError: The disk has no room.
        UnavailableError: Another build of the same directory did not end in time.
    """
    return _Build(wanted, tools).run()


class _Build:
    def __init__(self, wanted: VendorBuild, tools: VendorTools) -> None:
        self._wanted = wanted
        self._tools = tools
        self._plan: EnginePlan = planner.plan(wanted.tier, model_config.read(wanted.model))
        self._log = wanted.target.with_name(f"{wanted.target.name}.build.log")
        self._tokenizer = wanted.model / documents.TOKENIZER_FILE
        if not self._plan.model.end_token_ids:
            raise FailedPreconditionError(
                f"{wanted.model / 'config.json'} names no eos_token_id: without one nothing ends a generation"
            )
        if not self._tokenizer.is_file():
            raise NotFoundError(f"no {documents.TOKENIZER_FILE} in {wanted.model}: the broker turns text into tokens")
        if not wanted.calibration.exists():
            raise NotFoundError(f"no such calibration texts: {wanted.calibration}")

    def run(self) -> Built:
        wanted, plan = self._wanted, self._plan
        limits = wanted.tier.generation
        engine_id = f"{wanted.engine_name}-{limits.weights}-{wanted.tier.name}"
        self._tell("reading the model")
        with Checkpoint.open(wanted.model) as source:
            weights = source.digest()
        made_of = (_RECIPE, RELEASE, weights, _digest_of(wanted.calibration), commands.CALIBRATION_SEED)
        quantised = self._checkpoint_place(made_of)
        command = commands.build(plan, quantised, wanted.target)
        parts = (made_of, repr(plan), engine_id, sources.digest(self._tokenizer), repr(command.flags[2:]))
        inputs = hashlib.sha256(repr(parts).encode()).hexdigest()
        with workplace(wanted.target) as place:
            if inspect.made_of(wanted.target, inputs) is not None:
                return Built(wanted.target, engine_id, engine_digest(wanted.target), fresh=False)
            place.begin(inputs, 3 * plan.memory.weights * plan.cards.count)
            self._quantise(quantised)
            self._compile(place, quantised)
            self._tell("publishing")
            self._document(place, engine_id, inputs)
        return Built(wanted.target, engine_id, engine_digest(wanted.target), fresh=True)

    def _tell(self, step: str) -> None:
        self._wanted.progress(Progress(step, 0, 1))

    def _checkpoint_place(self, made_of: tuple[Any, ...]) -> Path:
        cards = self._plan.cards
        name = f"{self._wanted.engine_name}-fp8-tp{cards.tensor_parallel}-pp{cards.pipeline_parallel}"
        digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]
        return self._wanted.target.parent / f"{name}-{digest}.checkpoint"

    def _quantise(self, target: Path) -> None:
        """Makes the checkpoint, unless an earlier build of any tier has."""
        if not target.is_dir():
            part = target.with_name(f".{target.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            command = commands.quantize(self._plan, self._wanted.model, self._wanted.calibration, part)
            self._tell("asking quantize.py for its flags")
            self._tools.check(command)
            self._tell("calibrating and quantising")
            self._tools.run(command, self._log)
            gate.check(part, self._plan.cards, self._plan.model.shape.layers)
            part.rename(target)
        gate.check(target, self._plan.cards, self._plan.model.shape.layers)

    def _compile(self, place: Workplace, quantised: Path) -> None:
        if place.path(_ENGINE_CONFIG).exists():
            return
        output = place.path(_OUTPUT)
        shutil.rmtree(output, ignore_errors=True)
        command = commands.build(self._plan, quantised, output)
        self._tell("asking trtllm-build for its flags")
        self._tools.check(command)
        self._tell("compiling the engine")
        self._tools.run(command, self._log)
        self._hold(output)
        for name in self._engine_files():
            os.replace(output / name, place.path(name))

    def _engine_files(self) -> list[str]:
        """The configuration last: where it is, all is there."""
        return [*(f"rank{rank}.engine" for rank in range(self._plan.cards.count)), _ENGINE_CONFIG]

    def _hold(self, output: Path) -> None:
        """Holds what the tool made to what it was told: it clamps and replaces values with a warning at most."""
        missing = [name for name in self._engine_files() if not (output / name).is_file()]
        if missing:
            raise FailedPreconditionError(f"trtllm-build ended well and wrote no {', '.join(missing)}")
        said = _config(output / _ENGINE_CONFIG)
        limits = self._plan.tier.generation
        wanted = {
            "build_config.max_batch_size": self._plan.slots,
            "build_config.max_num_tokens": limits.step_token_budget,
            "build_config.max_seq_len": self._plan.max_sequence_tokens,
            "build_config.plugin_config.tokens_per_block": limits.kv_block_tokens,
            "build_config.plugin_config.use_paged_context_fmha": True,
            "build_config.plugin_config.use_fp8_context_fmha": True,
            "build_config.plugin_config.paged_kv_cache": True,
            "pretrained_config.quantization.kv_cache_quant_algo": "FP8",
        }
        wrong = [f"{path} is {_at(said, path)!r}, expected {right!r}" for path, right in wanted.items()
                 if _at(said, path) != right]  # fmt: skip
        if wrong:
            raise FailedPreconditionError("trtllm-build made another engine than it was told: " + "; ".join(wrong))

    def _document(self, place: Workplace, engine_id: str, inputs: str) -> None:
        plan, limits = self._plan, self._plan.tier.generation
        place.step(documents.TOKENIZER_FILE, lambda part: _copy(self._tokenizer, part))
        settings = documents.executor_settings(plan)
        place.step(documents.SETTINGS_FILE, lambda part: _write(part, settings))
        names = [*self._engine_files(), documents.TOKENIZER_FILE, documents.SETTINGS_FILE]
        files = {n: FileFacts(place.path(n).stat().st_size, sources.digest(place.path(n))) for n in names}
        version = str(_config(place.path(_ENGINE_CONFIG)).get("version", "")) or "unknown"
        built = BuiltFrom(
            (
                f"tier={plan.tier.name}",
                f"quantization={limits.weights}",
                *(f"{flag.name.removeprefix('--')}={flag.value}" for flag in self._build_flags()),
                f"{inspect.INPUTS_FLAG}={inputs}",
            ),
            f"{commands.CALIBRATION_PROMPTS} texts, sha256 {_digest_of(self._wanted.calibration)[:16]}",
        )
        text = documents.contract(plan, files, engine_id=engine_id, runtime_version=version, built=built)
        place.step(CONTRACT_FILE, lambda part: _write(part, text))
        place.publish([*names, CONTRACT_FILE])

    def _build_flags(self) -> list[commands.Flag]:
        flags = commands.build(self._plan, self._wanted.model, self._wanted.target).flags
        return [flag for flag in flags if not flag.name.endswith("_dir")]


def _digest_of(path: Path) -> str:
    """SHA-256 of a file, or over names and digests of all files below a folder."""
    if path.is_file():
        return sources.digest(path)
    whole = hashlib.sha256()
    for each in sorted(each for each in path.rglob("*") if each.is_file()):
        whole.update(f"{each.relative_to(path).as_posix()} {sources.digest(each)}\n".encode())
    return whole.hexdigest()


def _config(path: Path) -> dict[str, Any]:
    try:
        with open_plain(path) as file:
            document = json.loads(file.read(4 << 20))
    except (OSError, ValueError, RecursionError) as error:
        raise FailedPreconditionError(f"{path} of trtllm-build cannot be read: {error}") from error
    return document if isinstance(document, dict) else {}


def _at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document.get(part) if isinstance(document, dict) else None
    return document


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)
