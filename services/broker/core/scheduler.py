# SPDX-License-Identifier: Apache-2.0
"""What runs next and where: flows, workers, and the giving out of work.

Work is given out one request at a time to whichever worker has the least of its credit outstanding, so that a short job
spreads over all of them and a long one fills each to what it can take. Which request that is, is the flows' business;
in what order flows are asked, that of `fair`. Credit is never exceeded; bulk work also stays within the plan of the
worker's KV pool.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict
from typing import TYPE_CHECKING

from services.broker.core import ids
from services.broker.core.attempts import Attempt
from services.broker.core.entry import Entry, State
from services.broker.core.fair import FairOrder
from services.broker.core.flow import Flow, FlowKey
from services.broker.core.heads import HeadState
from services.broker.core.holdings import Holdings
from services.broker.core.loss import Apart, RetryBudget, Suspects, Turn
from services.broker.core.ownership import FlowRules
from services.broker.core.workers import cost_of
from services.broker.work import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from services.broker.core.heads import Head, Run
    from services.broker.core.settings import CoreSettings
    from services.broker.core.timers import Timers
    from services.broker.core.tree import Placed
    from services.broker.core.workers import Amount, EngineFacts, Worker

_TRICKLE = 256
"""With fewer waiting in a flow, later siblings are expected of every request: each attempt reports when its prompt is
computed, and what workers hold is remembered prompt by prompt."""


class Scheduler:
    """Flows, workers, and who gets what.

    Args:
        settings: Figures to work by.
        timers: Where limits on waiting are kept.
        engines: Facts of every engine heard of, by digest; the caller keeps it up to date.
        too_large: Told of an entry whose cost exceeds the whole credit of every worker that may run it.
    """

    def __init__(
        self,
        settings: CoreSettings,
        timers: Timers,
        engines: Mapping[str, EngineFacts],
        too_large: Callable[[Entry, Amount], None],
    ) -> None:
        self._settings = settings
        self._timers = timers
        self._engines = engines
        self._too_large = too_large
        self._rules = FlowRules(settings.ageing_s, settings.overdue_s, settings.decode_weight, settings.join_factor)
        self._lanes = {
            lane: FairOrder(settings.tenant_weights, settings.ageing_s) for lane in (Lane.INTERACTIVE, Lane.BULK)
        }
        self._budget = RetryBudget(settings.retry_share, settings.retry_burst)
        self._turns_apart: defaultdict[str, Turn] = defaultdict(Turn)
        self._interactive_at = float("-inf")
        self.flows: dict[FlowKey, Flow] = {}
        self.workers: dict[str, Worker] = {}
        self.holdings = Holdings(settings.holdings_bytes_max)
        self.suspects = Suspects(settings)

    # -- workers and flows -----------------------------------------------------------------------------------------

    def add_worker(self, worker: Worker) -> None:
        """Lets a worker take part in every flow that its engine may serve."""
        self.workers[worker.id] = worker
        for flow in self.flows.values():
            if worker.facts.digest in flow.key.digests:
                flow.owners.add_worker(worker)

    def retire_worker(self, worker: Worker, now: float) -> None:
        """Gives a worker nothing more; what it has goes on."""
        self._stop_giving(worker, now)
        self.holdings.forget(worker)

    def cordon_worker(self, worker: Worker, now: float) -> None:
        """Gives a worker nothing more until `uncordon_worker`; what it has goes on, and what it holds is remembered."""
        worker.cordoned = True
        for flow in self.flows.values():
            flow.remember(worker)
        self._stop_giving(worker, now)

    def uncordon_worker(self, worker: Worker) -> None:
        """Gives a cordoned worker work again."""
        worker.cordoned = False
        worker.serving = True
        self.add_worker(worker)

    def remove_worker(self, worker: Worker, now: float) -> None:
        """Forgets a worker. Its attempts are the caller's to settle."""
        if self.workers.get(worker.id) is worker:
            del self.workers[worker.id]
        self.retire_worker(worker, now)

    def flow(self, key: FlowKey) -> Flow:
        """Returns the flow of a key; makes it where there is none."""
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = self._make_flow(key)
        return flow

    def release(self, flow: Flow) -> None:
        """Forgets a flow in which nothing is left."""
        self._lanes[flow.key.lane].sleep(flow)
        self.flows.pop(flow.key, None)

    # -- entries ---------------------------------------------------------------------------------------------------

    def admit(self, entry: Entry, raw: bytes, *, now: float, chains: bool) -> Placed:
        """Takes an entry in; `raw` is its prompt, int32 bytes."""
        flow = entry.flow
        key = flow.key
        if self.holdings.bytes:
            hints = self.holdings.find(key.digests, key.salt, raw, self._blocks(key.digests))
            entry.hint = max(hints, key=lambda hint: hint.tokens, default=None)
        if not flow.waiting:
            linger = self._settings.bulk_linger_s
            if flow.interactive:
                linger = self._settings.interactive_linger_s
                linger *= now - self._interactive_at <= linger
            flow.ready_at = now + linger
            if linger:
                self._timers.at(flow.ready_at, _nothing)
        if flow.interactive:
            self._interactive_at = now
        placed = flow.add(entry, raw, now=now, chains=chains)
        self._lanes[key.lane].wake(flow, now)
        return placed

    def readmit(self, entry: Entry, now: float) -> None:
        """Lets an entry that was set apart wait among the others again."""
        raw = entry.flow.prompt(entry)
        entry.state = State.WAITING
        self.admit(entry, raw, now=now, chains=False)

    def id_bytes(self) -> int:
        """Bytes of ids of everything in flight."""
        return sum(flow.tree.bytes for flow in self.flows.values())

    def withdraw(self, entry: Entry) -> None:
        """Takes out an entry whose request has ended."""
        flow = entry.flow
        flow.end(entry)
        if not flow.waiting:
            self._lanes[flow.key.lane].sleep(flow)

    def set_apart(self, entries: list[Entry], now: float) -> None:
        """Lets suspects of one loss wait to run apart."""
        if not entries:
            return
        for entry in entries:
            entry.flow.set_apart(entry)
        self.suspects.add(entries, now)
        if self.suspects.next_at is not None:
            self._timers.at(self.suspects.next_at, _nothing)

    def computed(self, attempt: Attempt, cached_tokens: int) -> None:
        """A worker has computed an attempt's prompt, and had so much of it in its cache."""
        if attempt.context_done:
            return
        attempt.context_done = True
        entry, worker = attempt.entry, attempt.worker
        entry.flow.computed(attempt)
        block = worker.facts.block_tokens
        if not block or not attempt.head_tokens:
            return
        expected = min(attempt.head_tokens, entry.prompt_tokens - 1) // block * block
        if cached_tokens >= expected:
            worker.plan.hit()
        elif entry.node is not None:
            worker.plan.missed()
            raw = entry.flow.prompt(entry)
            self.holdings.lost(worker, entry.flow.key.salt, raw, cached_tokens)
            entry.flow.missed(entry, worker, cached_tokens)

    def keep(self, attempt: Attempt) -> None:
        """An attempt ended well: what its worker holds of its prompt now may serve what comes later.

        While much waits, later siblings meet the heads in the tree, and this would only cost time.
        """
        entry, flow = attempt.entry, attempt.entry.flow
        if flow.interactive or flow.waiting < _TRICKLE:
            self.holdings.note(attempt.worker, flow.key.salt, flow.prompt(entry))

    def close(self, attempt: Attempt) -> None:
        """An attempt has ended, however; before its entry is withdrawn, set apart or admitted again."""
        if attempt.closed is not None:
            attempt.closed()
        worker, flow = attempt.worker, attempt.entry.flow
        del worker.outstanding[attempt.handle]
        worker.ledger.give_back(attempt.cost)
        worker.plan.own -= attempt.planned
        worker.has_room()
        attempt.entry.attempt = None
        head = flow.head_over(attempt.entry, worker)
        if head is not None and not attempt.apart:
            head.leave()
        if attempt.leads:
            flow.unled(attempt)
        if attempt.apart:
            apart = worker.apart
            assert apart is not None  # noqa: S101 -- it stays until its last entry has ended
            apart.running -= 1
            if not apart.running and not apart.waiting:
                self._end_apart(worker, apart, self._timers.now)

    def _end_apart(self, worker: Worker, apart: Apart, now: float) -> None:
        self._turns_apart[worker.facts.digest].spent(apart, now, lost=worker.id not in self.workers)
        worker.apart = None

    def _stop_giving(self, worker: Worker, now: float) -> None:
        worker.serving = False
        for flow in self.flows.values():
            flow.owners.remove_worker(worker.id)
        apart = worker.apart
        if apart is not None:
            left = [entry for entry in apart.waiting if entry.state is State.APART]
            apart.waiting.clear()
            if not apart.running:
                self._end_apart(worker, apart, now)
            self.set_apart(left, now)

    # -- giving out ------------------------------------------------------------------------------------------------

    def give_out(self, now: float) -> list[Attempt]:
        """Gives out what can go now; the attempts are to be sent in this order."""
        self._start_cohorts(now)
        given: list[Attempt] = []
        turns = self._turns(now)
        if not turns and all(worker.apart is None for worker in self.workers.values()):
            return given
        heap = [(worker.ledger.fill(), at, worker) for at, worker in enumerate(self.workers.values())]
        tickets = len(heap)
        heapq.heapify(heap)
        while heap:
            _, _, worker = heapq.heappop(heap)
            attempt = self._next(worker, turns, now)
            if attempt is not None:
                given.append(attempt)
                heapq.heappush(heap, (worker.ledger.fill(), tickets, worker))
                tickets += 1
                if len(turns) > 1 and len(given) % self._settings.quantum == 0:
                    turns = self._turns(now)
            if not heap:
                for other in self.workers.values():
                    if other.nudged:
                        other.nudged = False
                        heapq.heappush(heap, (other.ledger.fill(), tickets, other))
                        tickets += 1
        return given

    def _turns(self, now: float) -> list[Flow]:
        return self._lanes[Lane.INTERACTIVE].order(now) + self._lanes[Lane.BULK].order(now)

    def _next(self, worker: Worker, turns: list[Flow], now: float) -> Attempt | None:
        if not worker.able or worker.full:
            return None
        if worker.apart is not None:
            return self._next_apart(worker, worker.apart, now)
        for flow in turns:
            if worker.full_for_bulk and not flow.interactive:
                return None
            run = flow.owners.runs.get(worker.id)
            if run is None:
                continue
            attempt = self._from_flow(worker, flow, run, now)
            if attempt is not None or worker.full:
                return attempt
        return None

    def _from_flow(self, worker: Worker, flow: Flow, run: Run, now: float) -> Attempt | None:
        """Takes the next thing of a flow that fits: a leader as long as one may go, else a follower."""
        may_lead = worker.may_lead(0)
        while (entry := flow.owners.next(run, now, may_lead=may_lead)) is not None:
            cost = cost_of(entry)
            head = flow.head_over(entry, worker)
            leads = head is not None and head.state is not HeadState.HELD
            if leads and not flow.interactive and not self._fits_head(worker, flow, entry):
                may_lead = False
            elif self._fits(worker, flow, entry, head, cost, now):
                return self._dispatch(worker, flow, run, entry, cost, now)
            elif worker.ledger.could_fit(cost) or not worker.ledger.limit.sequences:
                worker.full_for_bulk = True
                worker.full = flow.interactive
                flow.owners.overflows(run)
                return None
            else:
                self._pass_on(flow, run, entry, cost)
        return None

    def _fits_head(self, worker: Worker, flow: Flow, entry: Entry) -> bool:
        if not worker.outstanding:
            return True
        to_compute = entry.prompt_tokens - flow.held_tokens(entry, worker)
        return worker.may_lead(to_compute) and worker.plan.fits_head(_private(worker, entry))

    def _fits(self, worker: Worker, flow: Flow, entry: Entry, head: Head | None, cost: Amount, now: float) -> bool:
        if flow.interactive:
            return worker.ledger.fits(cost)
        if not worker.outstanding:
            return worker.ledger.fits(cost)  # whatever is kept back or planned, an idle worker gets work
        lately = now - self._interactive_at <= self._settings.interactive_lately_s
        reserve = self._settings.interactive_reserve if lately else 0.0
        if not worker.ledger.fits(cost, reserve):
            return False
        # What generates keeps its slot for long: whoever calls would wait for one behind what is queued at the engine.
        if lately and entry.work.max_tokens > 1 and not worker.leaves_slots(cost.sequences, reserve):
            return False
        return worker.plan.fits(_private(worker, entry) + (head.idle_tokens() if head is not None else 0))

    def _dispatch(self, worker: Worker, flow: Flow, run: Run, entry: Entry, cost: Amount, now: float) -> Attempt:
        attempt = self._attempt(worker, entry, cost)
        attempt.head_tokens = flow.held_tokens(entry, worker)
        flow.take(run, entry, attempt)
        attempt.reports_context = bool(worker.facts.block_tokens) and (bool(attempt.leads) or flow.waiting < _TRICKLE)
        if attempt.leads:
            attempt.leading = entry.prompt_tokens - attempt.head_tokens
            worker.leading += attempt.leading
            self._limit_lead(attempt)
        lane = self._lanes[flow.key.lane]
        lane.charge(flow, entry.tail_tokens + entry.decode, now)
        if not flow.waiting:
            lane.sleep(flow)
        return attempt

    def _next_apart(self, worker: Worker, apart: Apart, now: float) -> Attempt | None:
        if len(worker.outstanding) > apart.running:
            return None  # innocent work ends first
        while apart.waiting:
            entry = apart.waiting[0]
            if entry.state is not State.APART:
                apart.waiting.popleft()
                continue
            cost = cost_of(entry)
            if not worker.ledger.fits(cost):
                worker.full = True
                return None
            if not self._budget.spend(now):
                self._timers.at(now + 0.1, worker.has_room)
                return None
            apart.waiting.popleft()
            apart.running += 1
            attempt = self._attempt(worker, entry, cost)
            attempt.apart = True
            entry.state = State.DISPATCHED
            return attempt
        if not apart.running:
            self._end_apart(worker, apart, now)
            worker.nudged = True
        return None

    def _attempt(self, worker: Worker, entry: Entry, cost: Amount) -> Attempt:
        entry.attempts += 1
        if entry.attempts == 1:
            self._budget.earn()
        attempt = Attempt(entry, worker, cost)
        attempt.planned = _private(worker, entry)
        if worker.outstanding:
            attempt.had_company = True
            if len(worker.outstanding) == 1:
                next(iter(worker.outstanding.values())).had_company = True
        worker.plan.own += attempt.planned
        worker.ledger.take(cost)
        worker.outstanding[attempt.handle] = attempt
        entry.attempt = attempt
        return attempt

    def _start_cohorts(self, now: float) -> None:
        """Gives workers to suspects that are due: half of those that may run them at most, or the only one in turn."""
        for cohort in self.suspects.due(now):
            able = [worker for worker in self.workers.values() if worker.able and worker.facts.digest in cohort.digests]
            free = [worker for worker in able if worker.apart is None]
            if len(able) - len(free) >= max(1, len(able) // 2) or not free:
                continue
            worker = min(free, key=lambda worker: (worker.doubtful, len(worker.outstanding)))
            only = len(able) == 1
            if only and self._others_turn(worker, now, live=cohort.live):
                continue
            self.suspects.take(cohort)
            worker.apart = Apart(cohort.entries, now, only=only)

    def _others_turn(self, worker: Worker, now: float, *, live: bool) -> bool:
        """Whether innocent work has its turn at an engine's only worker. Live suspects wait for live work alone."""
        turn = self._turns_apart[worker.facts.digest]
        until = turn.rests_until(now, worker.since)
        if until <= now or not any(
            flow.waiting and not flow.paused and worker.id in flow.owners.runs and (flow.interactive or not live)
            for flow in self.flows.values()
        ):
            return False
        if turn.announced < until:
            turn.announced = until
            self._timers.at(until, _nothing)
        return True

    def _pass_on(self, flow: Flow, run: Run, entry: Entry, cost: Amount) -> None:
        """This worker could never take the entry: another one does, or nobody can."""
        for other in flow.owners.runs.values():
            if other is not run and other.worker.ledger.could_fit(cost):
                flow.owners.hand_on(run, entry, other)
                return
        self._too_large(entry, cost)

    def _limit_lead(self, attempt: Attempt) -> None:
        """Sets a limit to how long siblings wait for their leader."""
        # By handle: the timer outlasts nearly every leader, and would keep what a request took in memory until then.
        ended_by = functools.partial(self._waited_enough, attempt.worker, attempt.handle)
        self._timers.after(self._settings.lead_limit_s, ended_by)

    def _waited_enough(self, worker: Worker, handle: int) -> None:
        attempt = worker.outstanding.get(handle)
        if attempt is not None and attempt.leads and not attempt.context_done:
            attempt.entry.flow.computed(attempt)

    def _make_flow(self, key: FlowKey) -> Flow:
        engines = [self._engines[digest] for digest in key.digests]
        blocks = [engine.block_tokens for engine in engines if engine.block_tokens]
        flow = Flow(
            key,
            # The finest blocks of all: whatever engine runs it, no shared block is overlooked.
            block_tokens=min(blocks, default=0),
            planes=max(ids.planes_for(engine.vocab_size) for engine in engines),
            rules=self._rules,
            find=lambda raw: self.holdings.find(key.digests, key.salt, raw, self._blocks(key.digests)),
            held=lambda worker, raw: self.holdings.note(worker, key.salt, raw),
            led=self._limit_lead,
        )
        for worker in self.workers.values():
            if worker.serving and worker.facts.digest in key.digests:
                flow.owners.add_worker(worker)
        return flow

    def _blocks(self, digests: frozenset[str]) -> dict[str, int]:
        return {digest: self._engines[digest].block_tokens for digest in digests}


def _private(worker: Worker, entry: Entry) -> int:
    work = entry.work
    return worker.private_tokens(entry.tail_tokens + work.samples * work.max_tokens)


def _nothing() -> None:
    """A timer whose only effect is that work is given out again."""
