# SPDX-License-Identifier: Apache-2.0
"""What a link hears where its worker ends the stream while work is being sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ifabric.provisioner.v1 import provisioner_service_pb2
from ifabric.worker.v1 import worker_service_pb2 as wire
from ifabric.worker.v1 import worker_service_pb2_grpc
from services.broker.core.loss import Loss
from services.broker.core.worker_link import WorkerLink
from services.common import reasons
from services.common.errors import UnavailableError
from services.common.rpc import Dialer
from tests.support.servers import Unserved, serving
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.broker.core.workers import Amount

NAME = "ifabric.worker.v1.WorkerService"
ANSWERS = 40


class Draining(Unserved):
    """A worker that answers `ANSWERS` times as soon as it is given work, and goes away."""

    async def Execute(
        self, request_iterator: AsyncIterator[wire.ExecuteRequest], context: Any
    ) -> AsyncIterator[wire.ExecuteResponse]:
        async for message in request_iterator:
            if message.HasField("hello"):
                yield wire.ExecuteResponse(hello=wire.WorkerHello(node_id="n", incarnation="first"))
                continue
            for _ in range(ANSWERS):
                yield wire.ExecuteResponse(finished=[wire.ItemFinished(handle=1)])
            raise UnavailableError("this worker is going away", reason=reasons.DRAINING, retry_after_s=0.0)


class Owner:
    """Sends much as soon as a link is up, and notes what comes of it."""

    def __init__(self) -> None:
        self.heard = 0
        self.losses: asyncio.Queue[Loss] = asyncio.Queue()

    def link_up(self, link: WorkerLink, credit: Amount) -> None:
        """See LinkOwner."""
        for number in range(500):
            item = wire.WorkItem(handle=number + 1, request_id="x" * 3000)
            link.send(wire.ExecuteRequest(dispatch=wire.Dispatch(items=[item])))

    def link_heard(self, link: WorkerLink, message: wire.ExecuteResponse) -> None:
        """See LinkOwner."""
        self.heard += 1

    def link_down(self, link: WorkerLink, loss: Loss) -> None:
        """See LinkOwner."""
        self.losses.put_nowait(loss)


async def test_a_worker_that_drains_while_work_is_sent_is_heard_and_so_is_all_that_it_said() -> None:
    register, worker = worker_service_pb2_grpc.add_WorkerServiceServicer_to_server, Draining()
    async with serving(register, worker, NAME) as server:
        node = provisioner_service_pb2.Node()
        node.description.node_id, node.description.incarnation = "n", "first"
        node.description.address = server.address
        for _ in range(10):
            owner = Owner()
            link = WorkerLink(node, broker_id="b", dialer=Dialer(), owner=owner)
            running = asyncio.create_task(link.run())
            try:
                loss = await asyncio.wait_for(owner.losses.get(), PATIENCE_S)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            assert (loss, owner.heard) == (Loss.LEFT, ANSWERS)
