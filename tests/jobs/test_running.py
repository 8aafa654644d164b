# SPDX-License-Identifier: Apache-2.0
"""How jobs are worked on: in order and bounded, each with its share, on one engine, and to an orderly end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines.simulated import write_simulated_engine
from ifabric.broker.v1 import job_service_pb2 as wire
from tests.jobs.client import ENDED, JobClient
from tests.jobs.proof import QUICK, check_whole, work
from tests.jobs.running import ENGINE, Fabric, Service
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(240)

ROWS = work(200)


def test_a_job_stays_on_the_engine_that_it_began_with(tmp_path: Path) -> None:
    with Fabric(tmp_path, engine={**QUICK, "step_us": 8000}) as fabric:
        fabric.start()
        with JobClient(fabric.brokers[0].address) as job:
            job.create()
            job.upload(ROWS)
            job.seal(len(ROWS))
            pinned = block_until(lambda: (now := job.get()).finished_rows > 10 and now.engine_digest)
            job.pause()  # it does not end while the other worker starts
            write_simulated_engine(tmp_path / "other", **{**ENGINE, **QUICK, "seed": 2})
            settings = {"engine_dir": tmp_path / "other", "provisioner": fabric.provisioner.address, "node_id": "other"}
            other = Service("services.worker", settings)
            try:
                other.start()
                fabric.workers[0].kill()
                job.resume()
                stalled = block_until(
                    lambda: (now := job.get()).state == wire.JOB_STATE_STALLED and now, what="STALLED"
                )
                assert "no accepted node serves" in stalled.state_reason
                assert stalled.engine_digest == pinned
                broker = fabric.brokers[0].process
                assert broker is not None
                # Whoever is paged learns from the log whose job it is.
                [told] = block_until(lambda: broker.logs("job.stalled"), what="a line that names the job")
                assert (told["job_id"], told["tenant"]) == (job.name["job_id"], job.name["tenant"])
                assert told["why"] == stalled.state_reason
                fabric.workers[0].start()
                check_whole(job, ROWS)
                assert len(broker.logs("job.stalled")) == 1, "found out with every turn, and said once"
                assert {each.finished.engine_digest for each in job.results()} == {pinned}
            finally:
                other.close()


def test_a_large_job_does_not_hold_up_a_small_one(tmp_path: Path) -> None:
    with Fabric(tmp_path, engine={**QUICK, "step_us": 4000}, broker={"job_frontier_rows": 512}) as fabric:
        address = fabric.start().brokers[0].address
        large, small = JobClient(address, job_id="large", tenant="a"), JobClient(address, job_id="small", tenant="b")
        try:
            large.create()
            large.upload(work(4000))
            large.seal(4000)
            block_until(lambda: large.get().finished_rows > 20, within_s=60, what="the large job's start")
            small.create()
            small.upload(work(20))
            small.seal(20)
            block_until(lambda: small.get().state in ENDED, within_s=60, what="the small job's end")
            assert large.get().state == wire.JOB_STATE_RUNNING
            assert large.get().finished_rows < 3000
            check_whole(small, work(20))
        finally:
            large.close()
            small.close()


def test_a_paused_job_stands_still(tmp_path: Path) -> None:
    with Fabric(tmp_path, engine={**QUICK, "step_us": 8000}) as fabric:
        address = fabric.start().brokers[0].address
        with JobClient(address) as job, JobClient(address, job_id="beside") as beside:
            job.create()
            job.upload(ROWS)
            job.seal(len(ROWS))
            block_until(lambda: job.get().finished_rows > 10, within_s=60, what="a start")
            job.pause()
            beside.create()
            beside.upload(work(60))
            beside.seal(60)
            check_whole(beside, work(60))
            still = job.get()
            assert (still.state, still.finished_rows < len(ROWS)) == (wire.JOB_STATE_PAUSED, True)
            job.resume()
            check_whole(job, ROWS)
            report = job.get().report
            assert report.head_prefills >= report.heads_held
            assert report.waiting_ms > 0
            assert report.running_ms > 0
            assert all(share.engine_steps > 0 and share.step_fill > 0 for share in report.shares)


def test_a_broker_that_is_told_to_end_keeps_what_it_has(tmp_path: Path) -> None:
    with Fabric(tmp_path, engine={**QUICK, "step_us": 8000}) as fabric:
        fabric.start()
        [broker] = fabric.brokers
        with JobClient(broker.address) as job:
            job.create()
            job.upload(ROWS)
            job.seal(len(ROWS))
            block_until(lambda: job.get().finished_rows > 10, within_s=60, what="a start")
            assert broker.process is not None
            assert broker.process.stop(60) == 0
            assert broker.process.logs("drain.hook_failed") == []
            assert broker.process.logs("drain.hook_timed_out") == []
            broker.kill()
            broker.start()
            check_whole(job, ROWS)
            # What ran when the broker was told to end had its time to: nothing was computed twice.
            report = job.get().report
            assert report.reattempts == 0
            # And the first broker's part of the costs is in the journal.
            assert report.running_ms > 0
            assert report.head_prefills >= report.heads_held > 0
            assert all(share.engine_steps > 0 for share in report.shares)
