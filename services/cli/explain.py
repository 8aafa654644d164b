# SPDX-License-Identifier: Apache-2.0
"""`ifab explain`: where a request is, and why it waits, in sentences."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from ifabric.broker.v1 import operator_service_pb2, operator_service_pb2_grpc
from services.cli import options
from services.cli.connection import channel
from services.cli.running import run, write_json
from services.common.rpc import translated

_CALL_S = 10.0


def explain(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="Id of a request in flight; with --job, id of a row.")
    ],
    job: Annotated[str, typer.Option("--job", metavar="JOB", help="Job whose row it is.")] = "",
    tenant: Annotated[str, typer.Option(help="Owner of the request.")] = "",
    broker: options.Broker = options.BROKER_ADDRESS,
    as_json: options.AsJson = False,
) -> None:
    """Say where a request is and why it waits; nothing is changed.

    Example: ifab explain ticket-17 --job prompts-0123456789abcdef
    """
    run(_explain(request, job, tenant, broker, as_json), as_json=as_json)


async def _explain(request: str, job: str, tenant: str, broker: str, as_json: bool) -> None:
    asked = operator_service_pb2.ExplainRequestRequest(request_id=request, job_id=job, tenant=tenant)
    async with channel(broker) as to_broker:
        stub = operator_service_pb2_grpc.OperatorServiceStub(to_broker)
        with translated():
            found = await stub.ExplainRequest(asked, timeout=_CALL_S)
    if not as_json:
        sys.stdout.write("".join(f"{sentence}\n" for sentence in found.sentences))
        return
    document = MessageToDict(found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    document["place"] = document["place"].removeprefix("REQUEST_PLACE_").lower()
    for name in ("age_ms", "prompt_tokens", "held_tokens", "waiting_beside"):
        document[name] = getattr(found, name) if found.HasField(name) else None
    write_json({"request": request, "job": job, **document})
