# SPDX-License-Identifier: Apache-2.0
"""The RPCs of `ifabric.broker.v1.OperatorService`. Errors are raised; the interceptor gives them their form."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ifabric.broker.v1 import operator_service_pb2 as pb
from ifabric.broker.v1 import operator_service_pb2_grpc
from services.broker.frontdoor.exchange import draining
from services.broker.operating import NodeWork
from services.broker.operators import lookup
from services.common import reasons
from services.common.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError, Violation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from services.broker.jobs import Jobs
    from services.broker.operating import Operable, Whereabouts
    from services.broker.operators.cordons import Cordons
    from services.broker.operators.estimate import Estimator

    Context = grpc.aio.ServicerContext[Any, Any]

FULL_NAME = "ifabric.broker.v1.OperatorService"
NODE_ID_CHARACTERS = 256
_LOOK_S = 0.25
"""How often a node that is being drained is looked at."""
_RETRY_S = 5.0


class OperatorServicer(operator_service_pb2_grpc.OperatorServiceServicer):
    """See the proto.

    Args:
        core: Does what operators say.
        cordons: Keeps which nodes get no work.
        jobs: The job service; None where this broker keeps no jobs.
        estimator: Looks at rows before they run.
    """

    def __init__(self, core: Operable, cordons: Cordons, jobs: Jobs | None, estimator: Estimator) -> None:
        self._core = core
        self._cordons = cordons
        self._jobs = jobs
        self._estimator = estimator
        self._changing = asyncio.Lock()
        self._analyzing = False
        self._draining = asyncio.Event()

    async def drain(self) -> None:
        """Ends what would wait for ever."""
        self._draining.set()

    async def CordonNode(self, request: pb.CordonNodeRequest, context: Context) -> pb.CordonNodeResponse:
        """See the proto."""
        await self._cordon(request.node_id, cordoned=True)
        return pb.CordonNodeResponse(node=_node(self._work(request.node_id)))

    async def UncordonNode(self, request: pb.UncordonNodeRequest, context: Context) -> pb.UncordonNodeResponse:
        """See the proto."""
        await self._cordon(request.node_id, cordoned=False)
        return pb.UncordonNodeResponse(node=_node(self._work(request.node_id)))

    async def DrainNode(self, request: pb.DrainNodeRequest, context: Context) -> AsyncIterator[pb.DrainNodeResponse]:
        """See the proto."""
        await self._cordon(request.node_id, cordoned=True)
        told: NodeWork | None = None
        while True:
            now = self._work(request.node_id)
            if now != told:
                told = now
                yield pb.DrainNodeResponse(node=_node(now))
            if not now.running:
                return
            await self._pause(_LOOK_S)

    async def ListNodeWork(self, request: pb.ListNodeWorkRequest, context: Context) -> pb.ListNodeWorkResponse:
        """See the proto."""
        return pb.ListNodeWorkResponse(nodes=map(_node, self._core.node_work()))

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Context) -> pb.ExplainRequestResponse:
        """See the proto."""
        if not request.request_id:
            raise InvalidArgumentError.of([Violation("request_id", "is empty; it names the request, or the job's row")])
        if request.job_id:
            return _explained(await lookup.row(self._core, self._jobs, request))
        found = self._core.explain((request.tenant, request.request_id))
        if found is None:
            raise NotFoundError(
                f"request {request.request_id!r} is not in flight here: it has ended, or another broker has it, or it "
                "belongs to another tenant, or is a row and its job was not named",
                reason=reasons.REQUEST_UNKNOWN,
            )
        return _explained(found)

    async def AnalyzeRows(
        self, request_iterator: AsyncIterator[pb.AnalyzeRowsRequest], context: Context
    ) -> pb.AnalyzeRowsResponse:
        """See the proto."""
        if self._analyzing:
            raise ResourceExhaustedError("another analysis runs on this broker", retry_after_s=_RETRY_S)
        self._analyzing = True
        try:
            return await self._estimator.estimate(request_iterator)
        finally:
            self._analyzing = False

    async def _cordon(self, node_id: str, *, cordoned: bool) -> None:
        if not 1 <= len(node_id) <= NODE_ID_CHARACTERS:
            raise InvalidArgumentError.of(
                [Violation("node_id", f"has {len(node_id)} characters; allowed are 1 to {NODE_ID_CHARACTERS}")]
            )
        if not self._core.knows_node(node_id):
            known = ", ".join(node.node_id for node in self._core.node_work()[:16]) or "none"
            raise NotFoundError(f"no node is called {node_id!r}; connected are: {known}", reason=reasons.NODE_UNKNOWN)
        async with self._changing:
            await asyncio.to_thread(self._cordons.put, node_id, cordoned)
            self._core.cordon(node_id, cordoned)

    def _work(self, node_id: str) -> NodeWork:
        listed = (node for node in self._core.node_work() if node.node_id == node_id)
        return next(listed, NodeWork(node_id, cordoned=False))

    async def _pause(self, seconds: float) -> None:
        """Waits before a node is looked at again.

        Raises:
            UnavailableError: the broker is going away; the node stays cordoned.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._draining.wait()
        except TimeoutError:
            return
        raise draining()


def _node(node: NodeWork) -> pb.NodeWork:
    return pb.NodeWork(
        node_id=node.node_id,
        cordoned=node.cordoned,
        connected=node.connected,
        running_requests=node.running,
        engine_digest=node.engine_digest,
        sequences=node.sequences,
        sequences_granted=node.sequences_granted,
    )


def _explained(found: Whereabouts) -> pb.ExplainRequestResponse:
    return pb.ExplainRequestResponse(
        place=pb.RequestPlace.ValueType(found.place),
        sentences=found.sentences,
        node_id=found.node_id,
        attempt=found.attempt,
        age_ms=None if found.age_s is None else round(1000 * found.age_s),
        prompt_tokens=found.prompt_tokens,
        held_tokens=found.held_tokens,
        waiting_beside=found.waiting_beside,
    )
