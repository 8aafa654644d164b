# SPDX-License-Identifier: Apache-2.0
"""What goes in and what comes out, as plain values; nobody who uses the client sees protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ifabric_client.errors import CallError

    Prompt = str | Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; what is None takes the broker's value, which is greedy choice."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One row of bulk work, or one call."""

    prompt: Prompt
    """Text, or token ids, which are sent as they are."""
    max_tokens: int | None = None
    """Most tokens to generate; None, and only None, for engines that generate nothing."""
    id: str = ""
    """Unique among the rows of a job, and among what a tenant has in flight over streams; outcomes of rows where it is
    empty have their position, which no other run can meet."""
    engine_id: str = ""
    """Engine to run on; empty for any that can. Rows of a job leave it to the job."""
    stop: tuple[str, ...] = ()
    """Texts that end the output."""
    sampling: Sampling = field(default_factory=Sampling)
    return_token_ids: bool = False
    """Whether ids come beside text."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, what was in the engine's cache."""
    computed_tokens: int
    """Of the prompt, what the engine computed for this request."""
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class HiddenState:
    """The hidden state of a prompt's last token."""

    values: np.ndarray[Any, Any]
    """Shape as in the engine's contract; float32 or float16. bfloat16 comes as float32, which holds it exactly."""
    layers: tuple[int, ...]
    """Layers, in the order of the first axis where there are several; -1 is the state after the final norm."""
    position: int
    """Position of the token, from 0."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended well."""

    id: str
    text: str
    token_ids: tuple[int, ...]
    """Where asked for."""
    finish_reason: str
    """`stop`, `length`, `cancelled`, or `complete` on engines that generate nothing."""
    usage: Usage
    engine_digest: str
    hidden_state: HiddenState | None
    """None on engines that give none."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of a streamed answer."""

    text: str
    token_ids: tuple[int, ...]
    """Where asked for."""
    answer: Answer | None = None
    """On the last piece only: the whole answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one row ended: exactly one of the two is there."""

    id: str
    answer: Answer | None = None
    error: CallError | None = None

    def result(self) -> Answer:
        """Returns the answer.

        Raises:
            CallError: the row failed.
        """
        if self.error is not None:
            raise self.error
        assert self.answer is not None  # noqa: S101 -- an outcome has one of the two
        return self.answer


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the broker keeps it."""

    id: str
    state: str
    """`uploading`, `running`, `paused`, `stalled`, `completed` or `cancelled`."""
    state_reason: str
    durable_rows: int
    finished_rows: int
    failed_rows: int
    engine_digest: str
    prompt_tokens_sent: int
    prompt_tokens_computed: int
    prompt_tokens_bound: int
    """The least that a cache without limit would have computed."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that serves."""

    id: str
    digest: str
    node_ids: tuple[str, ...]
    max_input_tokens: int
    max_output_tokens: int
    """0 where it generates nothing."""
    hidden_shape: tuple[int, ...] | None
    """Shape of its hidden states; None where it gives none."""
