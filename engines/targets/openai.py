# SPDX-License-Identifier: Apache-2.0
"""Servers that speak the OpenAI completions interface over HTTP, such as llama-server or vLLM's."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Final

from engines.targets.http import Address, post_lines
from services.common.errors import InternalError

if TYPE_CHECKING:
    from engines.targets.target import OnTokens

_DATA: Final = b"data:"
_END: Final = b"[DONE]"


class OpenAiTarget:
    """`POST /v1/completions` with a streamed answer.

    Args:
        url: `http://host:port`, without `/v1`.
        model: Name of the model, as the server calls it.
        limit_s: Time for a request, in seconds.
    """

    def __init__(self, url: str, *, model: str = "default", limit_s: float = 120.0) -> None:
        self._address = Address.of(url)
        self._model = model
        self._limit_s = limit_s

    @property
    def name(self) -> str:
        """See Target."""
        return f"OpenAI-compatible server at {self._address.host}:{self._address.port}"

    async def ask(self, prompt: str, max_tokens: int, on_tokens: OnTokens) -> None:
        """See Target. A streamed piece of text counts as one token, unless the server counts them itself."""
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            }
        ).encode()
        counted, told = 0, 0
        lines = post_lines(self._address, "/v1/completions", body, limit_s=self._limit_s)
        async with contextlib.aclosing(lines):
            async for line in lines:
                if not line.startswith(_DATA) or (text := line[len(_DATA) :].strip()) == _END:
                    continue
                pieces, usage = _read(text)
                if pieces:
                    counted += pieces
                    on_tokens(pieces)
                told = usage or told
        if told > counted:
            on_tokens(told - counted)


def _read(text: bytes) -> tuple[int, int]:
    """How many pieces of text one event carries, and the tokens generated where it says so."""
    try:
        event = json.loads(text)
    except ValueError:
        raise InternalError("the server sent an event that is no JSON") from None
    if not isinstance(event, dict):
        raise InternalError("the server sent an event that is no JSON object")
    if "error" in event:
        raise InternalError(f"the server sent an error: {str(event['error'])[:200]}")
    choices = event.get("choices")
    pieces = sum(bool(isinstance(each, dict) and each.get("text")) for each in choices) if choices else 0
    usage = event.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
    return pieces, tokens if isinstance(tokens, int) else 0
