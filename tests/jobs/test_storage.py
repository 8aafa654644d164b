# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, copies that are restored, servers that crash: the journal's world, with real brokers."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import grpc
import pytest

from engines.simulated import SimulatedEngine, Simulation
from ifabric.broker.v1 import broker_service_pb2 as broker_pb2
from ifabric.broker.v1 import job_service_pb2 as wire
from services.common.errors import ResourceExhaustedError
from tests.jobs.client import ENDED, JobClient, row, typed
from tests.jobs.databases import PostgresServer
from tests.jobs.proof import QUICK, check_whole, lines, undisturbed, work
from tests.jobs.running import ENGINE, Fabric
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)

ROWS = work(300)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), ROWS)


def wordy(count: int) -> list[wire.JobRow]:
    """Rows whose results are much larger than they are."""
    return [
        row(
            f"row-{number}",
            broker_pb2.GenerationRequest(
                prompt=broker_pb2.Prompt(text=f"Wordy {number}"), max_tokens=200, logprobs=True, return_token_ids=True
            ),
        )
        for number in range(count)
    ]


def third(address: str, rows: list[wire.JobRow]) -> None:
    """Tries to begin one more job."""
    with JobClient(address, job_id="third") as job:
        job.create()
        upload = wire.UploadRowsRequest(first_row=0, rows=rows, **job.name)
        try:
            list(job.stub.UploadRows(iter([upload]), timeout=PATIENCE_S))
        except grpc.RpcError as error:
            raise typed(error) from error


def test_a_full_disk_stalls_a_job_which_goes_on_once_there_is_room(tmp_path: Path) -> None:
    with Fabric(tmp_path) as fabric:
        fabric.workers[0].start()
        [broker] = fabric.brokers
        broker.start()
        with JobClient(broker.address, job_id="old") as old, JobClient(broker.address, job_id="new") as new:
            old.create()
            old.upload(wordy(1000))
            old.seal(1000)
            block_until(lambda: old.get().state in ENDED, within_s=60, what="the end of the old job")
            new.create()
            new.upload(wordy(300))
            broker.kill()
            with closing(sqlite3.connect(fabric.journal)) as journal:
                journal.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                (pages,) = journal.execute("PRAGMA page_count").fetchone()
                (page,) = journal.execute("PRAGMA page_size").fetchone()
            broker.start(journal_bytes_max=(pages + 24) * page)
            new.seal(300)
            stalled = block_until(lambda: (made := new.get()).state == wire.JOB_STATE_STALLED and made, what="STALLED")
            assert stalled.state_reason == "the journal's disk is full"
            with pytest.raises(ResourceExhaustedError) as caught:
                third(broker.address, wordy(3000))
            assert caught.value.retry_after_s
            old.delete()
            check_whole(new, wordy(300))
            assert new.get().state == wire.JOB_STATE_COMPLETED


def fill(disk: Path) -> Path:
    """Takes all the room that there is, and returns the file that has it."""
    filler, room = disk / "filler", os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
    return filler


def test_a_full_disk_of_postgresql_stalls_a_job_which_goes_on_once_there_is_room(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        try:
            where, disk = stack.enter_context(postgres.small_disk(48))
        except OSError as error:
            pytest.skip(str(error))
        fabric = stack.enter_context(Fabric(tmp_path, journal=where, broker={"job_lease_s": 1.0}))
        [broker] = fabric.brokers
        broker.start()
        job = stack.enter_context(JobClient(broker.address))
        job.create()
        job.upload(wordy(300))
        job.seal(300)
        filler = fill(disk)
        with pytest.raises(ResourceExhaustedError) as caught:
            third(broker.address, wordy(3000))
        assert caught.value.retry_after_s
        fabric.workers[0].start()
        block_until(
            lambda: (
                (now := job.get()).state == wire.JOB_STATE_STALLED and now.state_reason == "the journal's disk is full"
            ),
            within_s=60,
            what="STALLED for want of room",
        )
        assert job.get().finished_rows < 300
        filler.unlink()
        check_whole(job, wordy(300))
        assert job.get().state == wire.JOB_STATE_COMPLETED


def test_a_copy_that_was_taken_while_a_job_ran_is_a_journal(tmp_path: Path, expected: bytes) -> None:
    with Fabric(tmp_path, engine={**QUICK, "step_us": 5000}) as fabric:
        fabric.workers[0].start()
        [broker] = fabric.brokers
        broker.start()
        with JobClient(broker.address) as job:
            job.create()
            job.upload(ROWS)
            job.seal(len(ROWS))
            block_until(lambda: job.get().finished_rows > 50, what="some results")
            copy = tmp_path / "copy.db"
            with closing(sqlite3.connect(fabric.journal)) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
            broker.kill()
            broker.start(journal=str(copy))
            assert job.get().finished_rows > 50
            assert lines(job.results()) == expected
            check_whole(job, ROWS)


def test_payloads_that_were_copied_after_the_journal_are_all_that_it_names(tmp_path: Path) -> None:
    engine = {
        **QUICK, "step_us": 4000, "max_output_tokens": 0, "samples_max": 1,
        "payload_dtype": "float32", "hidden_size": 64,
    }  # fmt: skip
    texts = [f"Row {number}" for number in range(400)]
    sent = [row(text, broker_pb2.GenerationRequest(prompt=broker_pb2.Prompt(text=text))) for text in texts]
    with Fabric(tmp_path, engine=engine) as fabric:
        fabric.workers[0].start()
        [broker] = fabric.brokers
        broker.start()
        with JobClient(broker.address) as job:
            job.create()
            job.upload(sent)
            job.seal(len(sent))
            block_until(lambda: job.get().finished_rows > 50, what="some results")
            copy = tmp_path / "copy.db"
            with closing(sqlite3.connect(fabric.journal)) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
            shutil.copytree(tmp_path / "payloads", tmp_path / "copied")
            broker.kill()
            shutil.rmtree(tmp_path / "payloads")
            broker.start(journal=str(copy), payload_dir=str(tmp_path / "copied"))
            simulation = Simulation(SimulatedEngine(**{**ENGINE, **engine}))
            results = job.results()
            assert [each.row_id for each in results] == texts
            for text, each in zip(texts, results, strict=True):
                assert each.finished.payload.data == simulation.payload(list(text.encode())).tobytes()


def test_a_dump_that_was_taken_while_a_job_ran_is_a_journal(
    postgres: PostgresServer, tmp_path: Path, expected: bytes
) -> None:
    engine = {**QUICK, "step_us": 5000}
    with Fabric(tmp_path, engine=engine, journal=postgres.new_database(), broker={"job_lease_s": 1.0}) as fabric:
        fabric.start()
        [broker] = fabric.brokers
        with JobClient(broker.address) as job:
            job.create()
            job.upload(ROWS)
            job.seal(len(ROWS))
            block_until(lambda: job.get().finished_rows > 50, what="some results")
            dump = postgres.folder / "dump"
            postgres.tool("pg_dump", "-Fc", "-f", str(dump), fabric.journal)
            restored = postgres.new_database()
            postgres.tool("pg_restore", "--exit-on-error", "-d", restored, str(dump))
            broker.kill()
            broker.start(journal=restored)
            assert lines(job.results()) == expected
            check_whole(job, ROWS)


def test_a_postgresql_that_crashes_loses_nothing_that_was_acknowledged(tmp_path: Path, expected: bytes) -> None:
    with PostgresServer() as own, Fabric(tmp_path, engine=QUICK, journal=own.new_database()) as fabric:
        fabric.start()
        with JobClient(fabric.brokers[0].address) as job:
            job.create()
            half = len(ROWS) // 2
            job.upload(ROWS[:half])
            own.stop("immediate")
            own.start()
            assert job.get().durable_rows == half
            job.upload(ROWS)
            job.seal(len(ROWS))
            block_until(lambda: job.get().finished_rows > 20, within_s=60, what="some results")
            own.stop("immediate")
            own.start()
            assert lines(job.results()) == expected
            check_whole(job, ROWS)


def test_old_jobs_go_by_age(tmp_path: Path) -> None:
    with Fabric(tmp_path, broker={"job_retention_s": 0.001}) as fabric, ExitStack() as stack:
        [broker] = fabric.brokers
        address = broker.start().address
        old, kept, gone = (stack.enter_context(JobClient(address, job_id=name)) for name in ("old", "kept", "gone"))
        for job in (old, kept, gone):
            job.create()
        old.seal(0)
        gone.cancel()
        gone.delete()  # the house is kept at once where something was deleted
        page = wire.ListJobsRequest(tenant="t")
        block_until(
            lambda: [each.spec.job_id for each in kept.call("ListJobs", page).jobs] == ["kept"],
            what="the old job's end",
        )


def test_the_oldest_jobs_go_by_size_and_no_more_than_it_takes(tmp_path: Path) -> None:
    rows = work(50)
    with Fabric(tmp_path) as fabric:
        [broker] = fabric.start().brokers
        for name in ("first", "second", "third"):
            with JobClient(broker.address, job_id=name) as job:
                job.create()
                job.upload(rows)
                job.seal(len(rows))
                check_whole(job, rows)
        broker.kill()
        with closing(sqlite3.connect(fabric.journal)) as journal:
            sizes = [size for (size,) in journal.execute("SELECT size FROM jobs ORDER BY number")]
        sent = sum(len(each.row_id) + len(each.request.SerializeToString()) for each in rows)
        assert all(size > sent for size in sizes)
        broker.start(job_kept_bytes=sizes[1] + sizes[2])
        with JobClient(broker.address) as job:
            page = wire.ListJobsRequest(tenant="t")
            block_until(
                lambda: [each.spec.job_id for each in job.call("ListJobs", page).jobs] == ["third", "second"],
                what="the end of the first job alone",
            )

        def kept(table: str) -> int:
            with closing(sqlite3.connect(fabric.journal)) as journal:
                return int(journal.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])

        block_until(lambda: kept("rows_in") == kept("results") == 100, what="room")
