# SPDX-License-Identifier: Apache-2.0
"""The figures of a model, from the `config.json` of its checkpoint.

Only the Llama family as this suite's own network knows it is read: rotary positions without scaling, no biases, SiLU,
RMS norms. What a model has beyond that is refused by name, since a network that leaves it out gives wrong answers
without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engines.plain_file import open_plain
from services.common import schema
from services.common.errors import FailedPreconditionError, NotFoundError
from services.common.schema.document import MAX_BYTES, Real, render

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_FILE: Final = "config.json"
_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM")
_COUNT_MAX: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Figures of a Llama-family model."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    norm_epsilon: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint as its `config.json` describes it."""

    shape: ModelShape
    tied_embeddings: bool
    """Whether the output head is the embedding."""
    trained_tokens: int
    """The longest sequence that the model was trained on."""
    end_token_ids: tuple[int, ...]


def read(directory: Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint's directory.

    Raises:
        NotFoundError: There is no such file.
        FailedPreconditionError: It cannot be read, or describes a model that is not of the family: all is named.
    """
    path = directory / CONFIG_FILE
    try:
        with open_plain(path) as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"no {CONFIG_FILE} in {directory}: name the directory of a checkpoint") from error
    except OSError as error:
        raise FailedPreconditionError(f"{path} cannot be read: {error.strerror}") from error
    return parse(str(path), text)


def parse(what: str, text: bytes) -> ModelConfig:
    """Reads the text of a `config.json`.

    Args:
        what: Its name, for messages.
        text: The document, at most 1 MiB.

    Raises:
        FailedPreconditionError: See `read`.
    """
    findings = schema.Findings()
    document = schema.read_document(text, findings)
    if not isinstance(document, dict):
        findings.add("", "no JSON object", "the config.json of a checkpoint") if not findings.all else None
        raise FailedPreconditionError(f"{what}: " + "; ".join(map(str, findings.all)))
    said = _Said(document, findings)
    heads = said.count("num_attention_heads")
    hidden = said.count("hidden_size")
    shape = ModelShape(
        layers=said.count("num_hidden_layers", 4096),
        hidden_size=hidden,
        intermediate_size=said.count("intermediate_size"),
        heads=heads,
        kv_heads=said.count("num_key_value_heads", default=heads),
        head_size=said.count("head_dim", default=hidden // heads),
        vocab_size=said.count("vocab_size"),
        norm_epsilon=said.real("rms_norm_eps", 0.0, 1.0),
        rope_theta=said.theta(),
    )
    config = ModelConfig(
        shape,
        tied_embeddings=said.flag("tie_word_embeddings", default=False),
        trained_tokens=said.count("max_position_embeddings"),
        end_token_ids=said.ends(shape.vocab_size),
    )
    said.refuse_strange()
    if shape.heads % shape.kv_heads:
        findings.add("num_key_value_heads", str(shape.kv_heads), f"a divisor of num_attention_heads, {shape.heads}")
    if shape.head_size < 2 or shape.head_size % 2:
        findings.add("head_dim", str(shape.head_size), "an even number, since rotary positions turn pairs")
    if findings.all:
        raise FailedPreconditionError(f"{what}: " + "; ".join(map(str, findings.all)))
    return config


class _Said:
    """What a document says; what is wrong with it goes into the findings, and 1 stands in for it."""

    def __init__(self, document: dict[str, Any], findings: schema.Findings) -> None:
        self._document = document
        self._findings = findings

    def count(self, name: str, most: int = _COUNT_MAX, *, default: int | None = None) -> int:
        value = self._document.get(name)
        if value is None and default is not None:
            return default
        if type(value) is int and 1 <= value <= most:
            return value
        self._add(name, f"integer from 1 to {most}")
        return 1

    def real(self, name: str, above: float, most: float, *, default: float | None = None) -> float:
        value = self._document.get(name)
        if value is None and default is not None:
            return default
        number = value.value if isinstance(value, Real) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and above < number <= most:
            return float(number)
        self._add(name, f"number above {above:g} and at most {most:g}")
        return 1.0

    def theta(self) -> float:
        """The base of rotary positions; newer documents keep it in `rope_parameters`."""
        parameters = self._document.get("rope_parameters")
        if isinstance(parameters, dict) and "rope_theta" in parameters:
            return _Said(parameters, self._findings).real("rope_theta", 0.0, 1e12)
        return self.real("rope_theta", 0.0, 1e12, default=10_000.0)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._document.get(name, default)
        if type(value) is bool:
            return value
        self._add(name, "true or false")
        return default

    def ends(self, vocab_size: int) -> tuple[int, ...]:
        value = self._document.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(type(each) is int and 0 <= each < vocab_size for each in ids):
            return tuple(sorted(set(ids)))
        self._add("eos_token_id", f"ids below vocab_size, {vocab_size}")
        return ()

    def refuse_strange(self) -> None:
        """Names what the network does not have."""
        document = self._document
        names = document.get("architectures")
        if not (isinstance(names, list) and len(names) == 1 and names[0] in _ARCHITECTURES):
            self._add("architectures", f"one of {', '.join(_ARCHITECTURES)}")
        if document.get("hidden_act", "silu") != "silu":
            self._add("hidden_act", '"silu"')
        for name in ("attention_bias", "mlp_bias"):
            if document.get(name, False) is not False:
                self._add(name, "false: the network has no biases")
        scaling = document.get("rope_scaling") or document.get("rope_parameters")
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type", "default")) != "default":
            self._add("rope_scaling", "none: the network turns positions without scaling")
        if document.get("sliding_window") is not None:
            self._add("sliding_window", "none: every token sees all before it")
        if document.get("quantization_config") is not None:
            self._add("quantization_config", "none: engines are made from weights that nobody has quantised yet")

    def _add(self, name: str, expected: str) -> None:
        value = self._document.get(name, schema.ABSENT)
        self._findings.add(name, "absent" if value is schema.ABSENT else render(value), expected)
