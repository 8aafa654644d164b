# SPDX-License-Identifier: Apache-2.0
"""`ifab nodes`: what provisioner and broker know of the nodes; `cordon`, `drain` and `uncordon` at one broker."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict

from ifabric.broker.v1 import operator_service_pb2, operator_service_pb2_grpc
from ifabric.provisioner.v1 import provisioner_service_pb2, provisioner_service_pb2_grpc
from services.cli import options
from services.cli.connection import channel
from services.cli.running import CommandError, error_document, run, sentence, write_columns, write_json
from services.common import reasons
from services.common.errors import FabricError
from services.common.rpc import translated
from services.common.security.needs import PROVISIONER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Work = operator_service_pb2.NodeWork

_CALL_S = 5.0
app = typer.Typer(invoke_without_command=True)

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")]


@app.callback()
def nodes(
    context: typer.Context,
    provisioner: options.Provisioner = options.PROVISIONER_ADDRESS,
    broker: options.Broker = options.BROKER_ADDRESS,
    as_json: options.AsJson = False,
) -> None:
    """List all nodes, refused ones with what is wrong with them; or take one out of service, and back in.

    Where the broker does not say what runs at each node, the list is without that, a sentence says why, and the exit
    status is 1; it is 0 still where no broker was named and none is there.

    Example: ifab nodes --json
    """
    if context.invoked_subcommand is None:
        source = context.get_parameter_source("broker")
        named = source is not None and source.name != "DEFAULT"
        run(_list(provisioner, broker, as_json, broker_named=named), as_json=as_json)


@app.command()
def cordon(node: NodeName, broker: options.Broker = options.BROKER_ADDRESS, as_json: options.AsJson = False) -> None:
    """Send a node no new work; what runs there goes on. Holds until uncordon, over restarts of node and broker.

    Example: ifab nodes cordon local-1
    """
    run(_cordon(node, broker, as_json, cordoned=True), as_json=as_json)


@app.command()
def uncordon(node: NodeName, broker: options.Broker = options.BROKER_ADDRESS, as_json: options.AsJson = False) -> None:
    """Send a cordoned node work again.

    Example: ifab nodes uncordon local-1
    """
    run(_cordon(node, broker, as_json, cordoned=False), as_json=as_json)


@app.command()
def drain(
    node: NodeName,
    broker: options.Broker = options.BROKER_ADDRESS,
    limit: Annotated[
        float, typer.Option("--limit", min=0.1, max=86_400, help="Seconds after which the command gives up waiting.")
    ] = 3600.0,
    as_json: options.AsJson = False,
) -> None:
    """Send a node no new work, and wait until nothing runs there; it stays cordoned.

    Example: ifab nodes drain local-1 --limit 600
    """
    run(_drain(node, broker, limit, as_json), as_json=as_json)


async def _list(provisioner: str, broker: str, as_json: bool, *, broker_named: bool) -> None:
    async with channel(provisioner, role=PROVISIONER) as to_provisioner:
        stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(to_provisioner)
        with translated():
            reply = await stub.ListNodes(provisioner_service_pb2.ListNodesRequest(), timeout=_CALL_S)
    works: Mapping[str, Work] = {}
    silence: FabricError | None = None
    try:
        works = await _works(broker)
    except FabricError as error:
        silence = error
    if as_json:
        document = MessageToDict(reply, preserving_proto_field_name=True)
        if silence is not None:
            document["broker_error"] = {**error_document(silence), "message": sentence(silence)}
        for node in document.get("nodes", ()):
            work = works.get(node["description"]["node_id"])
            if work is not None:
                node["at_the_broker"] = _document(work)
        write_json(document)
    elif not reply.nodes:
        sys.stdout.write("no node has registered\n")
    else:
        write_columns(_table(reply.nodes, works))
    if silence is None:
        return
    said = f"what runs at the nodes is left out: {sentence(silence)}"
    if broker_named or silence.reason != reasons.PEER_UNREACHABLE:
        raise CommandError(said, reported=True)
    sys.stderr.write(f"ifab: {said}\n")


async def _works(broker: str) -> dict[str, Work]:
    """What the broker has at each node.

    Raises:
        FabricError: It does not say.
    """
    async with channel(broker) as to_broker:
        stub = operator_service_pb2_grpc.OperatorServiceStub(to_broker)
        with translated():
            listed = await stub.ListNodeWork(operator_service_pb2.ListNodeWorkRequest(), timeout=_CALL_S)
    return {work.node_id: work for work in listed.nodes}


async def _cordon(node: str, broker: str, as_json: bool, *, cordoned: bool) -> None:
    async with channel(broker) as to_broker:
        stub = operator_service_pb2_grpc.OperatorServiceStub(to_broker)
        reply: operator_service_pb2.CordonNodeResponse | operator_service_pb2.UncordonNodeResponse
        with translated():
            if cordoned:
                reply = await stub.CordonNode(operator_service_pb2.CordonNodeRequest(node_id=node), timeout=_CALL_S)
            else:
                reply = await stub.UncordonNode(operator_service_pb2.UncordonNodeRequest(node_id=node), timeout=_CALL_S)
    if as_json:
        write_json(_document(reply.node))
        return
    runs = f"{reply.node.running_requests:,} requests run there"
    said = f"gets no new work; {runs}" if cordoned else "gets work again"
    sys.stdout.write(f"{node} {said}\n")


async def _drain(node: str, broker: str, limit_s: float, as_json: bool) -> None:
    last = operator_service_pb2.NodeWork(node_id=node)
    async with channel(broker) as to_broker:
        stub = operator_service_pb2_grpc.OperatorServiceStub(to_broker)
        call = stub.DrainNode(operator_service_pb2.DrainNodeRequest(node_id=node))
        try:
            async with asyncio.timeout(limit_s):
                with translated():
                    async for message in call:
                        last = message.node
                        if last.running_requests and not as_json:
                            sys.stderr.write(f"{last.running_requests:,} requests run on {node}\n")
        except TimeoutError:
            raise CommandError(
                f"{last.running_requests:,} requests still run on {node} after {limit_s:g} s; it stays cordoned, and "
                "the same command goes on waiting"
            ) from None
        finally:
            call.cancel()
    if as_json:
        write_json(_document(last))
    else:
        sys.stdout.write(f"{node} is cordoned, and nothing runs there\n")


def _document(work: Work) -> dict[str, Any]:
    return {
        "node_id": work.node_id,
        "cordoned": work.cordoned,
        "connected": work.connected,
        "running_requests": work.running_requests,
        "sequences": work.sequences,
        "sequences_granted": work.sequences_granted,
    }


def _table(listed: Iterable[provisioner_service_pb2.Node], works: Mapping[str, Work]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("node", "state", "engine", "budget", "slots", "address", "in the batcher", "work", "what is wrong")
    ]
    for node in listed:
        contract = node.description.contract
        limits = contract.limits
        first, *others = [f"{each.path} is {each.found}, expected {each.expected}" for each in node.violations] or [""]
        rows.append(
            (
                node.description.node_id,
                provisioner_service_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower(),
                contract.engine_id or "-",
                str(limits.step_token_budget) if limits.HasField("step_token_budget") else "absent",
                str(limits.slots) if limits.HasField("slots") else "absent",
                node.description.address,
                str(node.stats.active) if node.HasField("stats") else "-",
                _work(works.get(node.description.node_id)),
                first,
            )
        )
        rows += [("",) * (len(rows[0]) - 1) + (other,) for other in others]
    return rows


def _work(work: Work | None) -> str:
    """What a node gets of the broker, in a word or two."""
    if work is None:
        return "-"
    running = f"{work.running_requests:,} running"
    return f"cordoned, {running}" if work.cordoned else running
