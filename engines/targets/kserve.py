# SPDX-License-Identifier: Apache-2.0
"""Servers that speak KServe's v2 inference protocol over gRPC, such as Triton with the vendor's backend.

The tensors are those of the vendor's text models: `text_input`, `max_tokens` and `stream` go in, `text_output` comes
out, one response a piece of text where the model streams.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from engines.targets.kserve_messages import SERVICE, ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from services.common.errors import InternalError
from services.common.rpc import translated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc

    from engines.targets.target import OnTokens

_OUTPUT: Final = "text_output"


class KServeTarget:
    """One model of a server.

    Args:
        channels: To the server; streams are spread over them.
        model: Its name.
        streams: Whether answers are streamed (`ModelStreamInfer`); otherwise they come whole (`ModelInfer`).
        limit_s: Deadline of a request, in seconds.
    """

    def __init__(
        self, channels: Sequence[grpc.aio.Channel], *, model: str, streams: bool = True, limit_s: float = 120.0
    ) -> None:
        self._calls = [(_streaming if streams else _unary)(each) for each in channels]
        self._model = model
        self._streams = streams
        self._limit_s = limit_s
        self._asked = 0

    @property
    def name(self) -> str:
        """See Target."""
        return f"KServe v2 server, model {self._model}"

    async def ask(self, prompt: str, max_tokens: int, on_tokens: OnTokens) -> None:
        """See Target. A response that carries text counts as one token; a whole answer as `max_tokens`."""
        self._asked += 1
        request = self._request(prompt, max_tokens)
        call = self._calls[self._asked % len(self._calls)]
        with translated():
            if self._streams:
                await self._streamed(call, request, on_tokens)
            elif _carries_text(await call(request, timeout=self._limit_s)):
                on_tokens(max_tokens)

    async def _streamed(self, call: Any, request: Any, on_tokens: OnTokens) -> None:
        async def one() -> AsyncIterator[Any]:
            yield request

        answers = call(one(), timeout=self._limit_s)
        try:
            async for answer in answers:
                if answer.error_message:
                    raise InternalError(f"the server answered: {answer.error_message[:300]}")
                if _carries_text(answer.infer_response):
                    on_tokens(1)
        finally:
            answers.cancel()

    def _request(self, prompt: str, max_tokens: int) -> Any:
        text = prompt.encode()
        request = ModelInferRequest(model_name=self._model, id=str(self._asked))
        for name, datatype, content in (
            ("text_input", "BYTES", struct.pack("<I", len(text)) + text),
            ("max_tokens", "INT32", struct.pack("<i", max_tokens)),
            ("stream", "BOOL", struct.pack("<?", self._streams)),
        ):
            request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
            request.raw_input_contents.append(content)
        request.outputs.add(name=_OUTPUT)
        return request


def _carries_text(response: Any) -> bool:
    """Whether an answer has output text: a length of 4 bytes, little-endian, and at least one byte."""
    return any(
        tensor.name == _OUTPUT and len(content) > 4
        for tensor, content in zip(response.outputs, response.raw_output_contents, strict=False)
    )


def _streaming(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        request_serializer=ModelInferRequest.SerializeToString,
        response_deserializer=ModelStreamInferResponse.FromString,
    )


def _unary(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(
        f"/{SERVICE}/ModelInfer",
        request_serializer=ModelInferRequest.SerializeToString,
        response_deserializer=ModelInferResponse.FromString,
    )
