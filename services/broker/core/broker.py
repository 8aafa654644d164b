# SPDX-License-Identifier: Apache-2.0
"""The core on the event loop: decisions, links, nodes, time.

Everything happens on one loop. Whatever changes the state asks for a turn; the turn, at most one for each round of the
loop, gives out what can go, sends it, and tells sinks what has ended, so that many events make one batch.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2
from ifabric.provisioner.v1 import provisioner_service_pb2 as provisioner
from services.broker.core import wire
from services.broker.core.catalog import EngineCatalog
from services.broker.core.decision import Decision
from services.broker.core.explain import whereabouts
from services.broker.core.loss import Loss
from services.broker.core.metrics import CoreMetrics
from services.broker.core.node_watch import NodeWatch
from services.broker.core.tracing import record_dispatch
from services.broker.core.worker_link import WorkerLink
from services.broker.core.workers import EngineFacts, Worker
from services.broker.costs import JobCosts
from services.broker.operating import NodeWork
from services.common import logs
from services.common.errors import InternalError, UnavailableError
from services.common.security.needs import PROVISIONER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import grpc

    from ifabric.worker.v1 import worker_service_pb2
    from services.broker.core.attempts import Attempt
    from services.broker.core.row_traces import RowTraces
    from services.broker.core.settings import CoreSettings
    from services.broker.core.workers import Amount
    from services.broker.operating import EnginePace, Whereabouts
    from services.broker.work import Work
    from services.common.errors import FabricError
    from services.common.rpc import Dialer
    from services.common.tasks import Tasks
    from services.common.telemetry import Telemetry

TICK_S = 0.25
"""How often silence is looked for."""
QUIET_S = 3.0
"""A worker that has said nothing for so long gets nothing new until it speaks: it normally does twice a second."""
_STALLED_S = 1.0
"""A tick that comes so late means that this process stood still, not that the workers did."""

_DOUBLINGS_MAX = 16

_log = logs.get("broker.core")


class Broker:
    """The core; see work.Core.

    Args:
        settings: Figures to work by.
        provisioner_address: Where the provisioner listens.
        broker_id: What this broker calls itself towards workers.
        telemetry: Where its metrics go.
        tasks: Holds its background tasks.
        dialer: Opens channels to the provisioner and to workers.
        cordoned: Nodes that get no new work from the start.
        rows: Traces bulk rows; None where spans go nowhere.
    """

    def __init__(
        self,
        settings: CoreSettings,
        provisioner_address: str,
        *,
        broker_id: str,
        telemetry: Telemetry,
        tasks: Tasks,
        dialer: Dialer,
        cordoned: Iterable[str] = (),
        rows: RowTraces | None = None,
    ) -> None:
        self._settings = settings
        self._rows = rows
        self._tracer = telemetry.tracer
        self._broker_id = broker_id
        self._tasks = tasks
        self._dialer = dialer
        self._provisioner = dialer.channel(provisioner_address, role=PROVISIONER)
        self._watch = NodeWatch(self._provisioner, self._nodes_changed)
        self._links: dict[str, WorkerLink] = {}
        self._running: dict[WorkerLink, asyncio.Task[None]] = {}
        self._workers: dict[WorkerLink, Worker] = {}
        self._link_of: dict[Worker, WorkerLink] = {}
        self._cordoned = set(cordoned)
        self._turn_wanted = False
        self._wake: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.decision = Decision(settings)
        if rows is not None:
            self.decision.requests.on_end = rows.ended
        self.catalog = EngineCatalog(settings.nobody_limit_s, self._channels)
        self._metrics = CoreMetrics(telemetry, self.decision, self.catalog)

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begins to follow the provisioner and to serve."""
        self._tasks.start(self._watch.run(), name="node-watch")
        self._tasks.start(self._tick(), name="core-tick")

    def drain(self) -> None:
        """Takes nothing new; what was accepted goes on."""
        self.decision.draining = True

    async def stop(self) -> None:
        """Ends everything. What is still in flight hears UNAVAILABLE."""
        self.drain()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self.decision.fail_all(UnavailableError("the broker is going away"))
        self.decision.deliver()
        if self._wake is not None:
            self._wake.cancel()
        await self._provisioner.close()

    # -- Core ------------------------------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work]) -> list[FabricError | None]:
        """See work.Core."""
        taken_ns = time.time_ns()
        results = self.decision.submit(works, self._loop.time())
        if self._rows is not None:
            self._rows.begin(works, results, taken_ns)
        self._want_turn()
        return results

    def cancel(self, keys: Sequence[tuple[str, str]]) -> int:
        """See work.Core."""
        found = self.decision.cancel(keys)
        self._want_turn()
        return found

    def finish_early(self, work: Work) -> None:
        """See work.Core."""
        self.decision.finish_early(work)
        self._want_turn()

    def nodes_taking(self, engine_digest: str) -> int:
        """See work.Core."""
        return sum(each.serving and each.facts.digest == engine_digest for each in self._workers.values())

    def pause_job(self, job: str, paused: bool) -> None:
        """See work.Core."""
        self.decision.pause_job(job, paused, self._loop.time())
        self._want_turn()

    def job_costs(self, job: str) -> JobCosts:
        """See work.Core."""
        account = self.decision.job_account(job)
        return JobCosts() if account is None else account.costs()

    def end_job(self, job: str) -> broker_service_pb2.JobReport:
        """See work.Core."""
        account = self.decision.end_job(job)
        return broker_service_pb2.JobReport() if account is None else account.report()

    # -- Operable --------------------------------------------------------------------------------------------------

    def knows_node(self, node_id: str) -> bool:
        """See operating.Operable."""
        return node_id in self._links or node_id in self._watch.nodes or node_id in self._cordoned

    def cordon(self, node_id: str, cordoned: bool) -> None:
        """See operating.Operable."""
        (self._cordoned.add if cordoned else self._cordoned.discard)(node_id)
        link = self._links.get(node_id)
        worker = None if link is None else self._workers.get(link)
        if worker is not None:
            self.decision.worker_cordoned(worker, cordoned, self._loop.time())
        _log.info("node.cordoned" if cordoned else "node.uncordoned", node_id=node_id)
        self._want_turn()

    def node_work(self) -> list[NodeWork]:
        """See operating.Operable."""
        found = {node_id: NodeWork(node_id, cordoned=True) for node_id in self._cordoned}
        for worker in self._workers.values():
            # A node that came back under another process may still have work at the old one.
            before = found.get(worker.node_id)
            found[worker.node_id] = NodeWork(
                worker.node_id,
                cordoned=worker.node_id in self._cordoned,
                connected=True,
                running=len(worker.outstanding) + (before.running if before is not None else 0),
                engine_digest=worker.facts.digest,
                sequences=worker.ledger.sequences,
                sequences_granted=worker.ledger.limit.sequences,
            )
        return [found[node_id] for node_id in sorted(found)]

    def explain(self, key: tuple[str, str]) -> Whereabouts | None:
        """See operating.Operable."""
        entry = self.decision.requests.get(key)
        if entry is None:
            return None
        return whereabouts(
            entry, self.decision.scheduler, self._loop.time(), nobody_limit_s=self._settings.nobody_limit_s
        )

    def pace(self, engine_digest: str) -> EnginePace | None:
        """See operating.Operable."""
        return self.decision.speeds.pace(engine_digest)

    def output_share(self, engine_digest: str) -> float | None:
        """See operating.Operable."""
        return self.decision.speeds.output_share(engine_digest)

    # -- LinkOwner -------------------------------------------------------------------------------------------------

    def link_up(self, link: WorkerLink, credit: Amount) -> None:
        """See LinkOwner."""
        node = link.node
        facts = EngineFacts.of(node.description.engine_digest, node.description.contract)
        worker = Worker(
            link.node_id,
            facts,
            pool_tokens=node.report.kv_pool_blocks * facts.block_tokens,
            credit=credit,
            now=self._loop.time(),
        )
        if link.stood_at is not None:
            # The same process: until its engine moves, whatever is sent there would wait and be lost again.
            worker.progress_tick, worker.standing, worker.doubtful = link.stood_at, True, True
        self._workers[link], self._link_of[worker] = worker, link
        self.decision.worker_up(worker)
        self.decision.worker_cordoned(worker, link.node_id in self._cordoned, self._loop.time())
        self._want_turn()

    def link_heard(self, link: WorkerLink, message: worker_service_pb2.ExecuteResponse) -> None:
        """See LinkOwner."""
        worker, now = self._workers[link], self._loop.time()
        worker.heard, worker.quiet = now, False
        if message.finished:
            link.silences, link.stood_at, worker.doubtful = 0, None, False
        wire.apply(message, self.decision, worker, now)
        self._want_turn()

    def link_down(self, link: WorkerLink, loss: Loss) -> None:
        """See LinkOwner."""
        worker = self._workers.pop(link, None)
        if worker is None:
            return  # it never came up
        del self._link_of[worker]
        if self._links.get(link.node_id) is not link:
            self._end_link(link)
        self.decision.worker_lost(worker, self._loop.time(), loss)
        self._want_turn()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _want_turn(self) -> None:
        if not self._turn_wanted:
            self._turn_wanted = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Gives out, sends, tells."""
        self._turn_wanted = False
        decision, now = self.decision, self._loop.time()
        batches: dict[Worker, list[Attempt]] = {}
        for attempt in decision.give_out(now):
            batches.setdefault(attempt.worker, []).append(attempt)
            record_dispatch(self._tracer, attempt, now)
            if attempt.number == 1:
                self._metrics.waited(attempt, now)
        for worker, attempts in batches.items():
            self._send(self._link_of[worker], attempts)
        for worker, handles in decision.take_cancels():
            self._link_of[worker].send(wire.cancel_message(handles))
        decision.deliver()  # a sink that changes something asks for the next turn itself
        self._set_alarm()

    def _send(self, link: WorkerLink, attempts: Sequence[Attempt]) -> None:
        try:
            messages = list(wire.dispatch_messages(attempts))
        except Exception as error:
            # The worker will never hear of them, so they would wait for ever.
            _log.exception("dispatch.failed", node_id=link.node_id)
            link.give_up(InternalError(f"work could not be sent: {type(error).__name__}"), Loss.DIED)
            return
        for message in messages:
            link.send(message)

    def _set_alarm(self) -> None:
        at = self.decision.timers.next_at
        if self._wake is not None:
            if at is not None and self._wake.when() <= at and not self._wake.cancelled():
                return
            self._wake.cancel()
            self._wake = None
        if at is not None:
            self._wake = self._loop.call_at(at, self._alarm)

    def _alarm(self) -> None:
        self._wake = None
        self._want_turn()

    async def _tick(self) -> None:
        """Looks for silent workers, and for work that nobody serves."""
        last = self._loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            if now - last > TICK_S + _STALLED_S:
                _log.warning("loop.stalled", seconds=round(now - last, 3))
                for worker in self._workers.values():
                    worker.heard = worker.progressed = now
            last = now
            for link, worker in list(self._workers.items()):
                self._look_at(link, worker, now)
            if self._watch.stale:
                self._forget_silent_nodes()
            self.decision.check_waiting(now)
            self._want_turn()

    def _look_at(self, link: WorkerLink, worker: Worker, now: float) -> None:
        # Who has nothing to do may be silent: a worker of an earlier protocol is, then.
        silent = now - worker.heard if worker.outstanding else 0.0
        worker.quiet = silent > QUIET_S
        still = now - worker.progressed if worker.outstanding else 0.0
        limit = self._settings.silence_limit_s
        if silent > limit:
            self._doubt(link, worker, silent, f"the worker has been silent for {silent:.1f} s")
        elif still > worker.facts.longest_step_s + limit:
            spent = still - worker.facts.longest_step_s
            self._doubt(link, worker, spent, f"the engine has made no progress for {still:.1f} s", answers=True)
        elif not worker.serving and not worker.outstanding and self._links.get(link.node_id) is not link:
            self._end_link(link)

    def _doubt(self, link: WorkerLink, worker: Worker, waited: float, why: str, *, answers: bool = False) -> None:
        """Gives a worker up that stands still, unless that would only make its work start again at the same place.

        A slow machine looks like a dead engine. Where nobody else could take the work, a worker that still answers is
        left its time, as long as work may wait for a worker at all; one that is silent gets twice as long each time.
        Silence is nobody's fault, as far as is known; an engine that stands still behind a stream that answers may be,
        unless it did so before and nothing has ended there since: then the engine is.
        """
        loss = Loss.DIED if answers and link.stood_at is None else Loss.SILENT
        if not self.decision.could_go_elsewhere(worker):
            patience = self._settings.nobody_limit_s
            if not answers:
                loss = Loss.LEFT
                patience = min(patience, self._settings.silence_limit_s * 2.0 ** min(link.silences, _DOUBLINGS_MAX))
            if waited <= patience:
                return
            link.silences += 1
        if answers:
            link.stood_at = worker.progress_tick
        link.give_up(UnavailableError(why), loss)

    def _nodes_changed(self, nodes: Mapping[str, provisioner.Node]) -> None:
        """Opens links to accepted nodes and closes those of nodes that are no more."""
        accepted = {node_id: node for node_id, node in nodes.items() if node.state == provisioner.NODE_STATE_ACCEPTED}
        for newcomer in accepted.values():
            facts = EngineFacts.of(newcomer.description.engine_digest, newcomer.description.contract)
            self.decision.learn_engine(facts)
        self.catalog.update(list(accepted.values()))
        for node_id, link in list(self._links.items()):
            node = nodes.get(node_id)
            same = node is not None and node.description.incarnation == link.incarnation
            if not same or node_id not in accepted:
                self._retire(link)
        for node_id, newcomer in accepted.items():
            if node_id not in self._links:
                self._open_link(newcomer)
        self._want_turn()

    def _forget_silent_nodes(self) -> None:
        """Without a provisioner, only nodes that answer by themselves count."""
        silent = [link for link in self._links.values() if link not in self._workers]
        for link in silent:
            self._retire(link)
        if silent:
            self.catalog.update([link.node for link in self._links.values()])

    def _open_link(self, node: provisioner.Node) -> None:
        link = WorkerLink(node, broker_id=self._broker_id, dialer=self._dialer, owner=self)
        self._links[link.node_id] = link
        self._running[link] = self._tasks.start(link.run(), name=f"link-{link.node_id}")

    def _retire(self, link: WorkerLink) -> None:
        """The node takes nothing new here: what it has may end, then the link does."""
        del self._links[link.node_id]
        worker = self._workers.get(link)
        if worker is None:
            self._end_link(link)
        else:
            self.decision.worker_retired(worker, self._loop.time())

    def _end_link(self, link: WorkerLink) -> None:
        task = self._running.pop(link, None)
        if task is not None:
            task.cancel()

    def _channels(self, digest: str) -> list[grpc.aio.Channel]:
        return [link.channel for link in self._links.values() if link.node.description.engine_digest == digest]
