# SPDX-License-Identifier: Apache-2.0
"""JobService as clients see it: real processes, a simulated engine."""

from __future__ import annotations

import time
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2

from engines.simulated import SimulatedEngine, Simulation
from ifabric.broker.v1 import broker_service_pb2 as broker_pb2
from ifabric.broker.v1 import job_service_pb2 as wire
from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    from_status,
)
from tests.jobs.client import ENDED, JobClient, row, typed
from tests.jobs.running import ENGINE, Fabric
from tests.support.waiting import PATIENCE_S, block_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.protobuf import timestamp_pb2

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """One of everything, for tests that break nothing."""
    with Fabric(tmp_path_factory.mktemp("fabric"), broker={"tenant_jobs_max": 3, "tenant_rows_max": 3000}) as made:
        yield made.start()


@pytest.fixture
def job(fabric: Fabric, request: pytest.FixtureRequest) -> Iterator[JobClient]:
    """A client for a job and a tenant of the test's own."""
    with JobClient(fabric.brokers[0].address, tenant=request.node.name[:64]) as made:
        yield made


def request(prompt: str = "A prompt", **fields: Any) -> broker_pb2.GenerationRequest:
    return broker_pb2.GenerationRequest(prompt=broker_pb2.Prompt(text=prompt), **{"max_tokens": 4, **fields})


def requests(count: int, head: str = "Head", **fields: Any) -> list[wire.JobRow]:
    return [row(f"row-{n}", request(f"{head} {n % 5} " * 8 + f"row {n}", **fields)) for n in range(count)]


def ended(job: JobClient) -> Any:
    return block_until(lambda: (made := job.get()).state in ENDED and made, within_s=60, what="the end of the job")


def test_a_job_from_its_making_to_its_end(job: JobClient) -> None:
    made = job.create()
    assert (made.state, made.durable_rows) == (wire.JOB_STATE_UPLOADING, 0)
    rows = requests(300, "Heads of nobody else", return_token_ids=True)
    assert job.upload(rows, message_rows=70) == 300
    assert job.seal(300).state == wire.JOB_STATE_RUNNING
    results = job.results()
    assert [(each.row, each.row_id) for each in results] == [(n, f"row-{n}") for n in range(300)]
    simulation = Simulation(SimulatedEngine(**ENGINE))
    for each, sent in zip(results, rows, strict=True):
        assert each.finished.request_id == ""
        [sample] = each.finished.samples
        assert list(sample.token_ids) == simulation.tokens(list(sent.request.prompt.text.encode()), 4)
    end = ended(job)
    assert (end.state, end.finished_rows, end.failed_rows) == (wire.JOB_STATE_COMPLETED, 300, 0)
    assert end.engine_digest == results[0].finished.engine_digest
    assert end.report.prompt_tokens_logical == sum(len(sent.request.prompt.text) for sent in rows)
    assert end.report.prompt_tokens_computed < end.report.prompt_tokens_logical
    assert sum(share.requests for share in end.report.shares) == 300
    bound = block_until(lambda: job.get().report.prompt_tokens_bound, what="the bound")
    assert 0 < bound <= end.report.prompt_tokens_computed
    assert job.results(290) == results[290:]
    assert job.results(300) == []


def test_every_call_may_be_repeated(job: JobClient) -> None:
    first = job.create(any_digest=True)
    assert job.create(any_digest=True).spec == first.spec
    with pytest.raises(AlreadyExistsError):
        job.create()
    rows = requests(20)
    assert job.upload(rows) == 20
    again = job.stub.UploadRows(
        iter([wire.UploadRowsRequest(first_row=5, rows=rows[5:9], **job.name)]), timeout=PATIENCE_S
    )
    assert [answer.durable_rows for answer in again] == [20]
    other = [wire.UploadRowsRequest(first_row=5, rows=rows[6:7], **job.name)]
    with pytest.raises(grpc.RpcError) as caught:
        list(job.stub.UploadRows(iter(other), timeout=PATIENCE_S))
    assert isinstance(typed(caught.value), AlreadyExistsError)
    job.seal(20)
    job.seal(20)
    ended(job)
    assert job.cancel().state == wire.JOB_STATE_COMPLETED
    job.delete()
    job.delete()
    with pytest.raises(NotFoundError) as missing:
        job.get()
    assert missing.value.reason == "JOB_UNKNOWN"


def test_rows_at_fault_fail_in_their_place(job: JobClient) -> None:
    job.create()
    unreadable = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="line 2 is no JSON")
    rows = [
        row("good", request()),
        wire.JobRow(row_id="unreadable", unreadable=unreadable),
        row("", request()),
        row("x" * 10_000, request()),
        wire.JobRow(row_id="nothing"),
        row("tenant", request(tenant="somebody")),
        row("good", request("Another prompt")),
        row("too many", request(max_tokens=100_000)),
        row("no prompt", broker_pb2.GenerationRequest(max_tokens=1)),
        row("also good", request("The last")),
    ]
    job.upload(rows)
    job.seal(len(rows))
    results = job.results()
    assert [each.row for each in results] == list(range(len(rows)))
    assert [each.WhichOneof("outcome") for each in results] == ["finished", *["failed"] * 8, "finished"]
    errors = {each.row: from_status(each.failed) for each in results if each.HasField("failed")}
    assert errors[1].message == "line 2 is no JSON"
    assert [violation.field for violation in errors[2].violations] == ["row_id"]
    assert "has 10000 bytes" in errors[3].message
    assert results[3].row_id == "x" * 512
    assert [violation.field for violation in errors[4].violations] == ["request"]
    assert [violation.field for violation in errors[5].violations] == ["request.tenant"]
    assert isinstance(errors[6], AlreadyExistsError)
    assert [violation.field for violation in errors[7].violations] == ["max_tokens"]
    assert isinstance(errors[8], InvalidArgumentError)
    end = ended(job)
    assert (end.finished_rows, end.failed_rows) == (2, 8)


def test_defaults_hold_where_a_row_says_nothing(job: JobClient) -> None:
    defaults = broker_pb2.GenerationRequest(max_tokens=3, return_token_ids=True, ignore_end=True)
    job.create(defaults=defaults)
    plain = broker_pb2.GenerationRequest(prompt=broker_pb2.Prompt(text="Plain"))
    job.upload([row("plain", plain), row("own", request("Own", max_tokens=5))])
    job.seal(2)
    assert [len(each.finished.samples[0].token_ids) for each in job.results()] == [3, 5]


def test_a_spec_is_told_everything_that_is_wrong_with_it(job: JobClient) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        job.create(priority=1000, defaults=broker_pb2.GenerationRequest(request_id="x", samples=0))
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"spec.priority", "spec.defaults.request_id", "spec.defaults.samples"}
    job.name["job_id"] = "with a blank"
    with pytest.raises(InvalidArgumentError, match="job_id"):
        job.get()


def test_uploads_must_continue_and_seals_must_agree(job: JobClient) -> None:
    job.create()
    job.upload(requests(4))
    gap = [wire.UploadRowsRequest(first_row=4, rows=requests(1), **job.name), wire.UploadRowsRequest(first_row=7)]
    with pytest.raises(grpc.RpcError) as caught:
        list(job.stub.UploadRows(iter(gap), timeout=PATIENCE_S))
    assert "the message before ended at row 5" in typed(caught.value).message
    endless = wire.UploadRowsRequest(first_row=2**63 - 1, rows=requests(2), **job.name)
    endless.rows[1].row_id = ""
    with pytest.raises(grpc.RpcError) as caught:
        list(job.stub.UploadRows(iter([endless]), timeout=PATIENCE_S))
    error = typed(caught.value)
    assert isinstance(error, InvalidArgumentError)
    assert [violation.field for violation in error.violations] == ["first_row"]
    with pytest.raises(FailedPreconditionError, match="has 5 durable rows"):
        job.seal(4)
    with pytest.raises(FailedPreconditionError, match="cancel it first"):
        job.delete()
    job.cancel()


def test_pause_stops_and_resume_goes_on(job: JobClient) -> None:
    job.create()
    job.upload(requests(50))
    with pytest.raises(FailedPreconditionError):
        job.pause()
    job.seal(50)
    if job.pause().state == wire.JOB_STATE_PAUSED:
        before = job.get()
        assert before.state == wire.JOB_STATE_PAUSED
    assert job.resume().state in (wire.JOB_STATE_RUNNING, wire.JOB_STATE_COMPLETED)
    assert len(job.results()) == 50


def test_a_cancelled_job_has_a_result_for_every_row(job: JobClient) -> None:
    job.create(engine=broker_pb2.EngineSelector(engine_id="none such"))
    job.upload([*requests(4), wire.JobRow(row_id="bad")])
    job.seal(5)
    block_until(lambda: job.get().state == wire.JOB_STATE_STALLED, what="STALLED")
    assert "none such" in job.get().state_reason
    end = job.cancel()
    assert (end.state, end.failed_rows) == (wire.JOB_STATE_CANCELLED, 5)
    results = job.results()
    assert [each.row_id for each in results] == ["row-0", "row-1", "row-2", "row-3", "bad"]
    assert [each.failed.code for each in results] == [code_pb2.CANCELLED] * 4 + [code_pb2.INVALID_ARGUMENT]


def test_a_deadline_ends_a_job(job: JobClient) -> None:
    deadline: timestamp_pb2.Timestamp = wire.JobSpec().deadline_time
    deadline.FromNanoseconds(int((time.time() + 1.5) * 1e9))  # its rows have to be there by then
    job.create(deadline_time=deadline, engine=broker_pb2.EngineSelector(engine_id="none such"))
    job.upload(requests(2))
    job.seal(2)
    end = ended(job)
    assert (end.state, end.state_reason) == (wire.JOB_STATE_CANCELLED, "its deadline has passed")
    assert [each.failed.code for each in job.results()] == [code_pb2.DEADLINE_EXCEEDED] * 2


def test_a_watch_ends_with_the_job_and_lists_go_by_pages(job: JobClient) -> None:
    for name in ("one", "two", "three"):
        job.name["job_id"] = name
        job.create()
    job.name["job_id"] = "four"
    with pytest.raises(ResourceExhaustedError) as caught:
        job.create()
    assert caught.value.retry_after_s
    tenant = job.name["tenant"]
    page = job.call("ListJobs", wire.ListJobsRequest(tenant=tenant, page_size=2))
    assert [each.spec.job_id for each in page.jobs] == ["three", "two"]
    rest = job.call("ListJobs", wire.ListJobsRequest(tenant=tenant, page_size=2, page_token=page.next_page_token))
    assert [each.spec.job_id for each in rest.jobs] == ["one"]
    assert not rest.next_page_token
    job.name["job_id"] = "one"
    job.upload(requests(30))
    watch = job.stub.WatchJob(wire.WatchJobRequest(**job.name), timeout=PATIENCE_S)
    assert next(watch).job.state == wire.JOB_STATE_UPLOADING
    job.seal(30)
    assert [each.job.state for each in watch][-1] == wire.JOB_STATE_COMPLETED


def test_payloads_lie_beside_the_journal_and_come_back_whole(tmp_path: Path) -> None:
    engine = {"max_output_tokens": 0, "payload_dtype": "float32", "hidden_size": 256, "samples_max": 1}
    with Fabric(tmp_path, engine=engine) as fabric, JobClient(fabric.start().brokers[0].address) as job:
        job.create()
        prompts = [broker_pb2.Prompt(text=f"Row {n}") for n in range(200)]
        rows = [row(f"r{n}", broker_pb2.GenerationRequest(prompt=prompt)) for n, prompt in enumerate(prompts)]
        job.upload(rows)
        job.seal(200)
        results = job.results()
        simulation = Simulation(SimulatedEngine(**{**ENGINE, **engine}))
        for each, sent in zip(results, rows, strict=True):
            expected = simulation.payload(list(sent.request.prompt.text.encode())).tobytes()
            assert each.finished.payload.data == expected
        shards = list((tmp_path / "payloads").rglob("*.shard"))
        assert sum(shard.stat().st_size for shard in shards) >= 200 * 1024
        fabric.brokers[0].kill()
        fabric.brokers[0].start()
        assert job.results() == results
        ended(job)
        job.delete()
        block_until(lambda: not list((tmp_path / "payloads").rglob("*.shard")), what="the shards' end")


def test_a_tenant_that_has_enough_rows_sends_no_more_and_others_go_on(job: JobClient, fabric: Fabric) -> None:
    job.create()
    assert job.upload(requests(3000)) == 3000
    with pytest.raises(ResourceExhaustedError) as caught:
        job.upload(requests(3001))
    assert "the tenant has 3000 rows; at most 3000 are kept" in caught.value.message
    assert caught.value.retry_after_s
    assert job.get().durable_rows == 3000
    with JobClient(fabric.brokers[0].address, tenant="another tenant") as other:
        other.create()
        assert other.upload(requests(10)) == 10
        other.cancel()
        other.delete()
    job.cancel()
    job.delete()
    job.create()
    assert job.upload(requests(10)) == 10, "what was deleted counts no more"


def figures(fabric: Fabric) -> dict[str, float]:
    """What the broker tells Prometheus, by name and labels."""
    process = fabric.brokers[0].process
    assert process is not None
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=PATIENCE_S) as page:
        lines = page.read().decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("ifabric_broker_jo")]
    return {name: float(value) for name, value in pairs}


def test_metrics_tell_what_became_of_rows_and_of_the_journal(job: JobClient, fabric: Fabric) -> None:
    rows = 'ifabric_broker_job_rows_total{outcome="%s"}'
    before = figures(fabric)
    job.create()
    sent = [*requests(40), row("", request()), row("row-1", request("Again"))]
    job.upload(sent)
    job.upload(sent)
    between = figures(fabric)
    job.seal(len(sent))
    ended(job)
    after = figures(fabric)
    assert between[rows % "accepted"] - before[rows % "accepted"] == 42
    assert between[rows % "failed"] - before[rows % "failed"] == 1
    assert after[rows % "accepted"] == between[rows % "accepted"]
    assert after[rows % "finished"] - before[rows % "finished"] == 40
    assert after[rows % "failed"] - before[rows % "failed"] == 2
    commits = 'ifabric_broker_journal_commit_duration_seconds_count{outcome="committed"}'
    assert after[commits] > between[commits] > before.get(commits, 0)
    assert after['ifabric_broker_journal_full_total{where="journal"}'] == 0
    assert after["ifabric_broker_job_leases_lost_total"] == 0
    job.name["job_id"] = "stalled"
    job.create(engine=broker_pb2.EngineSelector(engine_id="none such"))
    job.upload(requests(7))
    job.seal(7)
    stalled = 'ifabric_broker_jobs{state="stalled"}'
    block_until(lambda: figures(fabric)[stalled] == 1, what="a stalled job")
    held = ("ifabric_broker_job_rows_waiting", "ifabric_broker_job_rows_held")
    block_until(lambda: [figures(fabric)[name] for name in held] == [7, 0], what="its rows wait")
    job.cancel()
    block_until(lambda: figures(fabric)[stalled] == 0, what="its end")
