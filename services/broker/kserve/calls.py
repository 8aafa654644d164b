# SPDX-License-Identifier: Apache-2.0
"""From a KServe call to a request of the front door, and from what the front door refuses back to the call's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import broker_service_pb2
from services.broker.kserve.tensors import (
    HIDDEN_STATES,
    INPUT_IDS,
    LOGPROBS,
    OUTPUT_IDS,
    TEXT_INPUT,
    TEXT_OUTPUT,
    read_ids,
    read_text,
)
from services.common.errors import FabricError, InvalidArgumentError, UnimplementedError, Violation

if TYPE_CHECKING:
    from ifabric.kserve.v2 import inference_pb2

OUTPUTS = frozenset({TEXT_OUTPUT, OUTPUT_IDS, LOGPROBS, HIDDEN_STATES})
"""Every output that there is."""
_USUAL = frozenset({TEXT_OUTPUT, OUTPUT_IDS, HIDDEN_STATES})
"""Outputs where a call names none; those that the engine does not make are left out."""
FINAL_WANTED = "triton_enable_empty_final_response"
"""Set by clients of streams that want a last response without output; ours always comes, so it changes nothing."""

_UNSERVED_NAMED = 16
"""Of what is not served, so many are named: an error travels in metadata, of which these clients take 8 KiB."""
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1
_COUNTS = ("max_tokens",)
_SAMPLING_COUNTS = {"top_k": (_INT32_MIN, _INT32_MAX), "seed": (0, 2**64 - 1)}
_SAMPLING_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_TRUTHS = ("ignore_end",)
_STOP = "stop"
_SALT = "cache_salt"
KNOWN = frozenset({*_COUNTS, *_SAMPLING_COUNTS, *_SAMPLING_NUMBERS, *_TRUTHS, _STOP, _SALT, FINAL_WANTED})
"""Every parameter of a call that is served."""
_THEIRS = {
    "prompt": "inputs",
    "prompt.text": f"inputs.{TEXT_INPUT}",
    "prompt.packed_token_ids": f"inputs.{INPUT_IDS}",
    "request_id": "id",
    "sampling": "parameters",
    "logprobs": f"outputs.{LOGPROBS}",
    "stop": f"parameters.{_STOP}",
    "stop[0]": f"parameters.{_STOP}",
    _SALT: f"parameters.{_SALT}",
    **{name: f"parameters.{name}" for name in (*_COUNTS, *_TRUTHS)},
    **{f"sampling.{name}": f"parameters.{name}" for name in (*_SAMPLING_COUNTS, *_SAMPLING_NUMBERS)},
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call that can be handed on."""

    request: broker_service_pb2.GenerationRequest
    outputs: frozenset[str]
    """Outputs that are wanted."""
    asked: tuple[str, ...]
    """Outputs that the call names; empty where it takes what there is."""


def read(call: inference_pb2.ModelInferRequest, tenant: str) -> Call:
    """Turns a call into a request.

    Args:
        call: What came.
        tenant: Whom the caller speaks for.

    Raises:
        InvalidArgumentError: inputs, outputs or parameters are wrong; all of them are named.
        UnimplementedError: a parameter, input or output is not served.
    """
    _refuse_unserved(call)
    violations: list[Violation] = []
    if not call.model_name:
        violations.append(Violation("model_name", "is empty; it is an engine id"))
    request = broker_service_pb2.GenerationRequest(request_id=call.id, tenant=tenant)
    request.engine.engine_id = call.model_name
    request.engine.engine_digest = call.model_version
    _read_prompt(call, request, violations)
    _read_parameters(call, request, violations)
    asked = tuple(dict.fromkeys(output.name for output in call.outputs))
    outputs = frozenset(asked) or _USUAL
    request.return_token_ids = OUTPUT_IDS in outputs
    request.logprobs = LOGPROBS in outputs
    request.omit_payload = HIDDEN_STATES not in outputs
    if violations:
        raise InvalidArgumentError.of(violations)
    return Call(request, outputs, asked)


def in_their_words(error: FabricError) -> FabricError:
    """Names fields of a call where the front door named fields of the request that was made of it."""
    if not isinstance(error, InvalidArgumentError) or not error.violations:
        return error
    renamed = [Violation(_in_their_words(each.field), each.description) for each in error.violations]
    told = InvalidArgumentError.of(renamed)
    told.reason, told.metadata = error.reason, error.metadata
    return told


def _in_their_words(field: str) -> str:
    if field in _THEIRS:
        return _THEIRS[field]
    path, bracket, place = field.partition("[")
    return _THEIRS[path] + bracket + place if path in _THEIRS else field


def _refuse_unserved(call: inference_pb2.ModelInferRequest) -> None:
    """Refuses what the protocol can say and the suite cannot do.

    Raises:
        UnimplementedError: names it.
    """
    unserved = [f"parameters.{name[:64]}" for name in sorted(call.parameters) if name not in KNOWN]
    unserved += [f"outputs.{each.name[:64]}" for each in call.outputs if each.name not in OUTPUTS]
    for kind, tensors in (("inputs", call.inputs), ("outputs", call.outputs)):
        unserved += [f"{kind}.{each.name[:64]}.parameters" for each in tensors if each.parameters]
    if unserved:
        named, more = unserved[:_UNSERVED_NAMED], len(unserved) - _UNSERVED_NAMED
        others = f" and {more} more" if more > 0 else ""
        raise UnimplementedError(
            f"{', '.join(named)}{others}: not served; parameters are {', '.join(sorted(KNOWN - {FINAL_WANTED}))}, "
            f"outputs are {', '.join(sorted(OUTPUTS))}",
            violations=tuple(Violation(field, "is not served") for field in named),
        )


def _read_prompt(
    call: inference_pb2.ModelInferRequest,
    request: broker_service_pb2.GenerationRequest,
    violations: list[Violation],
) -> None:
    raws = call.raw_input_contents
    if raws and len(raws) != len(call.inputs):
        violations.append(Violation("raw_input_contents", f"has {len(raws)} entries for {len(call.inputs)} inputs"))
        return
    if len(call.inputs) != 1 or call.inputs[0].name not in (TEXT_INPUT, INPUT_IDS):
        names = ", ".join(tensor.name[:64] for tensor in call.inputs[:8]) or "nothing"
        violations.append(Violation("inputs", f"are {names}; exactly one of {TEXT_INPUT} and {INPUT_IDS} is wanted"))
        return
    tensor, raw = call.inputs[0], raws[0] if raws else None
    if raw is not None and tensor.HasField("contents"):
        violations.append(Violation(f"inputs.{tensor.name}.contents", "is set beside raw_input_contents"))
    elif tensor.name == TEXT_INPUT:
        request.prompt.text = read_text(tensor, raw, violations)
    else:
        request.prompt.packed_token_ids = read_ids(tensor, raw, violations)


def _read_parameters(
    call: inference_pb2.ModelInferRequest,
    request: broker_service_pb2.GenerationRequest,
    violations: list[Violation],
) -> None:
    for name, parameter in sorted(call.parameters.items()):
        kind = parameter.WhichOneof("parameter_choice")
        value: Any = getattr(parameter, kind) if kind else None
        wrong = ""
        if name in _COUNTS:
            wrong = _not_whole(value, _INT32_MIN, _INT32_MAX)
            if not wrong:
                setattr(request, name, value)
        elif name in _SAMPLING_COUNTS:
            wrong = _not_whole(value, *_SAMPLING_COUNTS[name])
            if not wrong:
                setattr(request.sampling, name, value)
        elif name in _SAMPLING_NUMBERS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                wrong = "is no number"
            else:
                setattr(request.sampling, name, float(value))
        elif name in (*_TRUTHS, FINAL_WANTED):
            if not isinstance(value, bool):
                wrong = "is neither true nor false"
            elif name in _TRUTHS:
                setattr(request, name, value)
        elif not isinstance(value, str):
            wrong = "is no text"
        elif name == _STOP:
            request.stop.append(value)
        else:
            request.cache_salt = value
        if wrong:
            violations.append(Violation(f"parameters.{name}", wrong))


def _not_whole(value: object, least: int, most: int) -> str:
    """What is wrong with a value that has to be a whole number; empty where nothing is."""
    if isinstance(value, bool) or not isinstance(value, int):
        return "is no whole number"
    return "" if least <= value <= most else f"is {value}; it is {least} to {most}"
