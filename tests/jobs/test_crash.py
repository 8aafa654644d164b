# SPDX-License-Identifier: Apache-2.0
"""Exactly once, whoever dies: at every named point, and at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.broker.jobs.crash import POINTS, CrashPoint
from tests.jobs.client import JobClient
from tests.jobs.proof import QUICK, Client, check_whole, kill_at_random, undisturbed, work
from tests.jobs.running import Fabric
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ifabric.broker.v1 import job_service_pb2 as wire
    from tests.jobs.databases import PostgresServer
    from tests.jobs.running import Service

pytestmark = pytest.mark.timeout(300)

FEW = work(400)
SOME = work(800)


@pytest.fixture(scope="module")
def of_few(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), FEW)


@pytest.fixture(scope="module")
def of_some(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), SOME)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """Provisioner and worker for all points; the broker's end is what each test is about."""
    with Fabric(tmp_path_factory.mktemp("points"), engine=QUICK) as made:
        made.workers[0].start()
        yield made


@pytest.mark.parametrize("point", POINTS)
def test_death_at(point: str, fabric: Fabric, of_few: bytes) -> None:
    [broker] = fabric.brokers
    broker.settings["journal"] = str(fabric.folder / f"{point}.db")
    # Where a job comes by several times, the second: something came before, and something is under way.
    often = point not in ("seal.middle", "claim.after_commit", "export.middle")
    doomed = broker.start(job_crash_at=f"{point}:2" if often else point)
    try:
        with JobClient(broker.address) as job:
            client = Client(job, FEW)
            client.start()
            assert block_until(lambda: doomed.process.poll(), within_s=60, what=f"death at {point}") == -9
            broker.kill()
            broker.start()
            assert client.outcome(120) == of_few
            assert job.repeats > 0
            check_whole(job, FEW)
    finally:
        broker.kill()


def disturb(fabric: Fabric, victims: Sequence[Service], kills: int, sent: list[wire.JobRow], expected: bytes) -> None:
    """Runs jobs of the same rows until so many deaths were lived through; one is enough unless the machine is slow."""
    # The last broker is asked first: where one of two dies, it is the first.
    addresses = [broker.address for broker in reversed(fabric.brokers)]
    for number in range(5):
        name = {"job_id": f"job-{number}", "patience_s": 120.0}
        with JobClient(*addresses, **name) as job, JobClient(*addresses, **name) as watcher:  # type: ignore[arg-type]
            client = Client(job, sent)
            client.start()
            watcher.create()
            kills -= kill_at_random(victims, watcher, len(sent), kills, seed=kills)
            assert client.outcome(600) == expected
            check_whole(watcher, sent)
        if not kills:
            return
    raise AssertionError(f"{kills} deaths are left: the jobs are too short for this machine")


def test_random_deaths(tmp_path: Path, of_some: bytes) -> None:
    with Fabric(tmp_path, engine={"step_us": 15_000, "slots": 8}, workers=2) as fabric:
        fabric.start()
        victims = [*fabric.brokers * 2, *fabric.workers, fabric.provisioner]
        disturb(fabric, victims, 10, SOME, of_some)


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_two_hundred_random_deaths(tmp_path: Path) -> None:
    sent = work(10_000)
    expected = undisturbed(tmp_path / "undisturbed", sent)
    with Fabric(tmp_path, engine={"step_us": 40_000, "slots": 8}, workers=2) as fabric:
        fabric.start()
        disturb(fabric, [*fabric.brokers * 2, *fabric.workers, fabric.provisioner], 200, sent, expected)


@pytest.mark.slow
def test_one_of_two_brokers_on_one_postgresql_dies_again_and_again(
    postgres: PostgresServer, tmp_path: Path, of_some: bytes
) -> None:
    engine = {"step_us": 15_000, "slots": 8}
    shared = {"job_lease_s": 1.5, "job_frontier_rows": 200}
    with Fabric(tmp_path, engine=engine, brokers=2, journal=postgres.new_database(), broker=shared) as fabric:
        fabric.start()
        disturb(fabric, fabric.brokers[:1], 6, SOME, of_some)


def test_a_point_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"results\.before_commit"):
        CrashPoint("somewhere")
    CrashPoint("").reach("upload.middle")
