# SPDX-License-Identifier: Apache-2.0
"""`ifab nodes`: what the provisioner knows of the nodes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict

from ifabric.provisioner.v1 import provisioner_service_pb2, provisioner_service_pb2_grpc
from services.cli import options
from services.cli.connection import channel
from services.cli.running import run, write_columns, write_json
from services.common.rpc import translated
from services.common.security.needs import PROVISIONER

if TYPE_CHECKING:
    from collections.abc import Iterable

_CALL_S = 5.0


def nodes(provisioner: options.Provisioner = options.PROVISIONER_ADDRESS, as_json: options.AsJson = False) -> None:
    """List all nodes, refused ones with what is wrong with them.

    Example: ifab nodes --json
    """
    run(_list(provisioner, as_json), as_json=as_json)


async def _list(provisioner: str, as_json: bool) -> None:
    async with channel(provisioner, role=PROVISIONER) as to_provisioner:
        stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(to_provisioner)
        with translated():
            reply = await stub.ListNodes(provisioner_service_pb2.ListNodesRequest(), timeout=_CALL_S)
    if as_json:
        write_json(MessageToDict(reply, preserving_proto_field_name=True))
    elif not reply.nodes:
        sys.stdout.write("no node has registered\n")
    else:
        write_columns(_table(reply.nodes))


def _table(listed: Iterable[provisioner_service_pb2.Node]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("node", "state", "engine", "budget", "slots", "address", "in the batcher", "what is wrong")
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
                first,
            )
        )
        rows += [("",) * (len(rows[0]) - 1) + (other,) for other in others]
    return rows
