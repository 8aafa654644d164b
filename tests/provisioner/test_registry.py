# SPDX-License-Identifier: Apache-2.0
"""The registry: its rules one by one, then against a model under any order of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ifabric.engine.v1 import node_pb2
from services.common import reasons
from services.common.contract import Finding
from services.common.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError
from services.provisioner.registry import ACCEPTED, DRAINING, LOADED, MAY_LOAD, REFUSED, End, Node, Registry
from tests.provisioner import made

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE_S = 3.0
FINDINGS = (Finding("contract.limits.step_token_budget", "absent", "integer"),)


class HandClock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1_700_000_000


class Heard:
    """A registry and what it told."""

    def __init__(self, *, nodes_max: int = 100) -> None:
        self.clock = HandClock()
        self.changes: list[tuple[str, Node | None]] = []
        self.ends: list[tuple[str, End]] = []
        self.registry = Registry(
            self.clock,
            lease_s=LEASE_S,
            nodes_max=nodes_max,
            on_change=lambda node_id, node: self.changes.append((node_id, node)),
            on_end=lambda node, end: self.ends.append((node.description.incarnation, end)),
        )

    def tick(self, seconds: float) -> None:
        """Lets time pass, with sweeps as often as the service makes them."""
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            self.registry.sweep()


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_the_way_of_a_node(heard: Heard) -> None:
    registry, node = heard.registry, made.description()
    assert registry.register(node, None, ()).state == MAY_LOAD
    loaded = registry.register(node, made.report(node), ())
    assert loaded.state == LOADED
    accepted = registry.conclude(loaded, ())
    assert accepted is not None
    assert accepted.state == ACCEPTED
    assert registry.heartbeat("node-1", "i-1", None, draining=True).state == DRAINING
    assert registry.withdraw("node-1", "i-1")
    assert registry.nodes() == []
    assert [None if n is None else n.state for _, n in heard.changes] == [MAY_LOAD, LOADED, ACCEPTED, DRAINING, None]
    assert heard.ends == [("i-1", End.WITHDRAWN)]


def test_a_refused_node_is_listed_until_its_lease_ends(heard: Heard) -> None:
    heard.registry.register(made.description(), None, FINDINGS)
    heard.tick(LEASE_S - 0.25)
    (node,) = heard.registry.nodes()
    assert (node.state, node.violations) == (REFUSED, FINDINGS)
    heard.tick(0.25)
    assert heard.registry.nodes() == []
    assert heard.ends == [("i-1", End.EXPIRED)]


def test_a_mended_node_is_taken_without_anything_in_between(heard: Heard) -> None:
    registry, node = heard.registry, made.description()
    registry.register(node, None, FINDINGS)
    assert registry.register(node, None, ()).state == MAY_LOAD
    loaded = registry.register(node, made.report(node), ())
    registry.conclude(loaded, FINDINGS)
    again = registry.register(node, made.report(node), ())
    assert (again.state, again.violations) == (LOADED, ())


def test_saying_the_same_again_changes_nothing_but_the_lease(heard: Heard) -> None:
    registry, node = heard.registry, made.description()
    accepted = registry.conclude(registry.register(node, made.report(node), ()), ())
    assert accepted is not None
    told = len(heard.changes)
    heard.tick(2)
    again = registry.register(node, made.report(node), ())
    assert (again.state, again.version) == (ACCEPTED, accepted.version)
    assert again.expires_at == heard.clock.now + LEASE_S
    registry.heartbeat("node-1", "i-1", node_pb2.EngineStats(steps=3), draining=False)
    assert len(heard.changes) == told


def test_a_verdict_on_an_earlier_registration_is_dropped(heard: Heard) -> None:
    registry, node = heard.registry, made.description()
    first = registry.register(node, made.report(node), ())
    changed = made.description(address="127.0.0.1:50052")
    registry.register(changed, None, ())
    assert registry.conclude(first, ()) is None
    current = registry.find("node-1")
    assert current is not None
    assert current.state == MAY_LOAD


def test_a_restarted_worker_takes_its_node_over_and_its_predecessor_is_over(heard: Heard) -> None:
    registry, old, new = heard.registry, made.description(), made.description(incarnation="i-2")
    registry.conclude(registry.register(old, made.report(old), ()), ())
    registry.heartbeat("node-1", "i-1", node_pb2.EngineStats(steps=9), draining=False)
    taken = registry.register(new, None, ())
    assert (taken.state, taken.stats) == (MAY_LOAD, None)
    assert heard.ends == [("i-1", End.SUPERSEDED)]
    attempts: list[Callable[[], Node]] = [
        lambda: registry.heartbeat("node-1", "i-1", None, draining=False),
        lambda: registry.register(old, None, ()),
    ]
    for attempt in attempts:
        with pytest.raises(FailedPreconditionError) as caught:
            attempt()
        assert caught.value.reason == reasons.NODE_SUPERSEDED
    assert not registry.withdraw("node-1", "i-1")
    assert registry.find("node-1") == taken


def test_an_unknown_heartbeat_asks_for_a_registration(heard: Heard) -> None:
    with pytest.raises(NotFoundError) as caught:
        heard.registry.heartbeat("node-1", "i-1", None, draining=False)
    assert caught.value.reason == reasons.NODE_UNKNOWN
    heard.registry.register(made.description(), None, ())
    with pytest.raises(NotFoundError):
        heard.registry.heartbeat("node-1", "never seen", None, draining=False)


def test_a_drain_is_one_way_for_a_process(heard: Heard) -> None:
    registry, node = heard.registry, made.description()
    registry.conclude(registry.register(node, made.report(node), ()), ())
    registry.heartbeat("node-1", "i-1", None, draining=True)
    assert registry.heartbeat("node-1", "i-1", None, draining=False).state == DRAINING
    assert registry.register(node, None, ()).state == DRAINING
    assert registry.register(made.description(incarnation="i-2"), None, ()).state == MAY_LOAD


def test_nodes_over_the_bound_are_told_when_to_come_back() -> None:
    heard = Heard(nodes_max=1)
    heard.registry.register(made.description("a"), None, ())
    with pytest.raises(ResourceExhaustedError) as caught:
        heard.registry.register(made.description("b"), None, ())
    assert caught.value.reason == reasons.NODES_FULL
    assert caught.value.retry_after_s == LEASE_S
    heard.registry.register(made.description("a", incarnation="i-2"), None, ())


def test_the_provisioners_own_silence_ends_no_lease(heard: Heard) -> None:
    heard.registry.register(made.description(), None, ())
    heard.tick(1)
    heard.clock.now += 60  # the process was stopped: heartbeats came and wait to be read
    assert heard.registry.sweep() == []
    heard.tick(LEASE_S)
    assert heard.ends == [("i-1", End.EXPIRED)]


def test_a_lease_does_not_end_while_the_node_waits_for_its_probe(heard: Heard) -> None:
    node = made.description()
    loaded = heard.registry.register(node, made.report(node), ())
    heard.tick(5 * LEASE_S)
    accepted = heard.registry.conclude(loaded, ())
    assert accepted is not None
    assert accepted.state == ACCEPTED
    heard.tick(LEASE_S - 0.25)
    assert heard.ends == []
    heard.tick(0.25)
    assert heard.ends == [("i-1", End.EXPIRED)]


def test_nodes_are_in_order_and_chosen_by_state(heard: Heard) -> None:
    for name in ("b", "a", "c"):
        heard.registry.register(made.description(name), None, FINDINGS if name == "a" else ())
    assert [node.node_id for node in heard.registry.nodes()] == ["a", "b", "c"]
    assert [node.node_id for node in heard.registry.nodes([REFUSED])] == ["a"]


class RegistryMachine(RuleBasedStateMachine):
    """Any order of registrations, verdicts, heartbeats, withdrawals and time, against a model.

    The model knows which process holds a name, when its lease ends, and which processes are over. Beyond it every
    change must be told exactly once, and what listeners know must be what the registry holds.
    """

    names = st.sampled_from(["a", "b"])
    processes = st.sampled_from(["i-1", "i-2", "i-3"])

    def __init__(self) -> None:
        super().__init__()
        self.heard = Heard(nodes_max=2)
        self.holder: dict[str, str] = {}
        self.expires: dict[str, float] = {}
        self.over: dict[str, set[str]] = {}
        self.probing: list[Node] = []

    @rule(name=names, process=processes, loaded=st.booleans(), broken=st.booleans())
    def register(self, name: str, process: str, loaded: bool, broken: bool) -> None:
        node = made.description(name, process)
        report, findings = made.report(node) if loaded else None, FINDINGS if broken else ()
        before = self.heard.registry.find(name)
        if process in self.over.get(name, set()):
            with pytest.raises(FailedPreconditionError):
                self.heard.registry.register(node, report, findings)
            return
        now = self.heard.registry.register(node, report, findings)
        if name in self.holder and self.holder[name] != process:
            self.over.setdefault(name, set()).add(self.holder[name])
        renewed = before is not None and before.version == now.version
        if renewed:
            assert before is not None
            assert now.state == before.state
        elif broken:
            assert (now.state, now.violations) == (REFUSED, FINDINGS)
        else:
            assert now.state in ((LOADED if loaded else MAY_LOAD), DRAINING)
        if now.state == LOADED:
            self.probing.append(now)
        self.holder[name], self.expires[name] = process, self.heard.clock.now + LEASE_S

    @rule(which=st.integers(0, 9), broken=st.booleans())
    def conclude(self, which: int, broken: bool) -> None:
        if not self.probing:
            return
        judged = self.probing.pop(which % len(self.probing))
        before = self.heard.registry.find(judged.node_id)
        after = self.heard.registry.conclude(judged, FINDINGS if broken else ())
        if before is None or before.version != judged.version:
            assert after is None
            assert self.heard.registry.find(judged.node_id) == before
        elif before.state == LOADED:
            assert after is not None
            assert after.state == (REFUSED if broken else ACCEPTED)
            self.expires[judged.node_id] = self.heard.clock.now + LEASE_S

    @rule(name=names, process=processes, draining=st.booleans())
    def heartbeat(self, name: str, process: str, draining: bool) -> None:
        if self.holder.get(name) == process:
            before = self.heard.registry.find(name)
            assert before is not None
            after = self.heard.registry.heartbeat(name, process, None, draining=draining)
            assert after.state == (DRAINING if draining and before.state != REFUSED else before.state)
            self.expires[name] = self.heard.clock.now + LEASE_S
        else:
            expected = FailedPreconditionError if process in self.over.get(name, set()) else NotFoundError
            with pytest.raises(expected):
                self.heard.registry.heartbeat(name, process, None, draining=draining)

    @rule(name=names, process=processes)
    def withdraw(self, name: str, process: str) -> None:
        holds = self.holder.get(name) == process
        assert self.heard.registry.withdraw(name, process) == holds
        if holds:
            self._gone(name)

    @rule(quarters=st.integers(1, 8))
    def wait(self, quarters: int) -> None:
        probed = {node.node_id for node in self.heard.registry.nodes([LOADED])}
        for _ in range(quarters):
            self.heard.tick(0.25)
            for name, expires in list(self.expires.items()):
                if expires <= self.heard.clock.now and name in probed:
                    self.expires[name] = self.heard.clock.now + LEASE_S
                elif expires <= self.heard.clock.now:
                    self._gone(name)

    def _gone(self, name: str) -> None:
        for kept in (self.holder, self.expires, self.over):
            kept.pop(name, None)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        nodes = self.heard.registry.nodes()
        assert {node.node_id: node.description.incarnation for node in nodes} == self.holder
        assert {node.node_id: node.expires_at for node in nodes} == self.expires

    @invariant()
    def listeners_know_it_all(self) -> None:
        known: dict[str, Node] = {}
        for name, node in self.heard.changes:
            if node is None:
                del known[name]
            else:
                previous = known.get(name)
                assert previous is None or (previous.version, previous.state) != (node.version, node.state)
                known[name] = node
        held = {node.node_id: (node.version, node.state, node.violations) for node in self.heard.registry.nodes()}
        assert {name: (node.version, node.state, node.violations) for name, node in known.items()} == held

    @invariant()
    def only_refused_nodes_have_violations(self) -> None:
        for node in self.heard.registry.nodes():
            assert bool(node.violations) == (node.state == REFUSED)


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
