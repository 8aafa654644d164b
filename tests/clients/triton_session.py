# SPDX-License-Identifier: Apache-2.0
"""What a user of tritonclient does, in an environment of its own: run by test_kserve.py, which judges what it prints.

    python triton_session.py BROKER

Prints one JSON object. Imports nothing of the suite: the client is the public one, unmodified.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

CALL_S = 60
IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def text_input(text: str) -> triton.InferInput:
    made = triton.InferInput("text_input", [1], "BYTES")
    made.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return made


def id_input(ids: list[int], dtype: type = np.int32, shape: list[int] | None = None) -> triton.InferInput:
    values: Any = np.array(ids, dtype=dtype).reshape(shape or [len(ids)])
    made = triton.InferInput("input_ids", list(values.shape), "INT64" if dtype is np.int64 else "INT32")
    made.set_data_from_numpy(values)
    return made


def facts(result: triton.InferResult) -> dict[str, Any]:
    response = result.get_response()
    text = result.as_numpy("text_output")
    ids = result.as_numpy("output_ids")
    return {
        "id": response.id,
        "model": response.model_name,
        "version": response.model_version,
        "outputs": sorted(output.name for output in response.outputs),
        "text": None if text is None else text[0].decode(),
        "ids": None if ids is None else ids.tolist(),
        "parameters": {
            name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in response.parameters.items()
        },
    }


def refused(client: triton.InferenceServerClient, **call: Any) -> dict[str, str]:
    try:
        client.infer(client_timeout=CALL_S, **call)
    except InferenceServerException as error:
        return {"status": str(error.status()), "message": str(error.message())}
    raise AssertionError(f"not refused: {call}")


def stream(client: triton.InferenceServerClient) -> dict[str, list[dict[str, Any]]]:
    """Three requests side by side, one of which cannot be served."""
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: heard.put((result, error)), stream_timeout=CALL_S)
    for name in ("a", "b"):
        client.async_stream_infer(
            "texts", [text_input("One head, two tails")], request_id=name, parameters={"max_tokens": 12},
            enable_empty_final_response=True,
        )  # fmt: skip
    client.async_stream_infer("nobody", [text_input("lost")], request_id="c", parameters={"max_tokens": 1})
    client.stop_stream()  # waits for all answers
    said: dict[str, list[dict[str, Any]]] = {"a": [], "b": [], "errors": []}
    while not heard.empty():
        result, error = heard.get()
        if error is not None:
            said["errors"].append({"message": error.message()})
        else:
            made = facts(result)
            said[made["id"]].append(made)
    return said


async def asynchronous(broker: str) -> dict[str, Any]:
    """The client for event loops: one answer, a stream that is left, a call that is cancelled, one out of time."""
    long = {"model_name": "texts", "inputs": [text_input("On and on")], "parameters": {"max_tokens": 4096}}
    async with aio.InferenceServerClient(broker) as client:

        async def requests() -> Any:
            for name in ("a", "b"):
                yield {**long, "request_id": name}

        answers = client.stream_infer(requests(), stream_timeout=CALL_S)
        async for result, error in answers:
            first = (result and result.get_response().id, error)
            break
        answers.cancel()
        call = asyncio.ensure_future(client.infer(**long))
        await client.is_server_live()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        try:
            await client.infer(**long, client_timeout=0.05)
            late = "answered"
        except InferenceServerException as error:
            late = str(error.status())
        again = await client.infer(**{**long, "parameters": {"max_tokens": 2}})
        return {"first": first, "late": late, "again": facts(again)}


def messages(found: Any, prefix: str = "") -> dict[str, dict[str, list[int]]]:
    """Number and type of each field, by message."""
    said: dict[str, dict[str, list[int]]] = {}
    for message in found:
        said[prefix + message.name] = {field.name: [field.number, field.type] for field in message.fields}
        said |= messages(message.nested_types, f"{prefix}{message.name}.")
    return said


def main(broker: str) -> None:
    with triton.InferenceServerClient(broker) as client:
        metadata = client.get_model_metadata("states", as_json=True)
        wanted = [triton.InferRequestedOutput("hidden_states")]
        states = client.infer("states", [id_input(IDS)], outputs=wanted, client_timeout=CALL_S)
        hidden = states.as_numpy("hidden_states")
        text = {"model_name": "texts", "inputs": [text_input("The capital of")]}
        said = {
            "messages": messages(service_pb2.DESCRIPTOR.message_types_by_name.values()),
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "models": [client.is_model_ready(name) for name in ("texts", "states", "nobody")],
            "server": client.get_server_metadata(as_json=True)["name"],
            "metadata": metadata,
            "whole": facts(client.infer(**text, request_id="w1", parameters={"max_tokens": 12}, client_timeout=CALL_S)),
            "by_ids": [
                facts(client.infer("texts", [made], parameters={"max_tokens": 6}, client_timeout=CALL_S))
                for made in (id_input(IDS), id_input(IDS, np.int64), id_input(IDS, np.int32, [1, len(IDS)]))
            ],
            "hidden": {"dtype": str(hidden.dtype), "shape": list(hidden.shape), "hex": hidden.tobytes().hex()},
            "no_limit": refused(client, **text),
            "unknown_model": refused(client, model_name="nobody", inputs=text["inputs"], parameters={"max_tokens": 1}),
            "unknown_parameter": refused(client, **text, parameters={"max_tokens": 1, "beam_width": 4}),
            "not_a_number": refused(client, **text, parameters={"max_tokens": "many", "temperature": True}),
            "other_outputs": refused(
                client,
                **text,
                outputs=[triton.InferRequestedOutput(name) for name in ("text_output", "hidden_states")],
                parameters={"max_tokens": 1},
            ),
            "unknown_version": refused(client, **text, model_version="7", parameters={"max_tokens": 1}),
            "unknown_id": refused(client, model_name="texts", inputs=[id_input([3, -1])], parameters={"max_tokens": 1}),
            "too_many_parameters": refused(client, **text, parameters={f"{n:03}" * 20: n for n in range(500)}),
            "batch": refused(client, model_name="texts", inputs=[id_input(IDS, np.int32, [2, 4])]),
            "stream": stream(client),
            "async": asyncio.run(asynchronous(broker)),
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
