# SPDX-License-Identifier: Apache-2.0
"""A bulk job against a scripted broker on a real socket: every row has one result, whatever the broker does."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric.engine.v1 import generation_pb2
from services.cli.files.rows import read_rows
from services.cli.job import JobOutcome, run_job
from services.cli.results import report_document
from services.common.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError, Violation, to_status
from services.common.rpc import channel
from tests.support.servers import serving
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAME = "ifabric.broker.v1.BrokerService"


class ScriptedBroker(broker_service_pb2_grpc.BrokerServiceServicer):
    """Answers rows with their prompt, refuses that of `bad`; breaks off, falls silent or refuses all when told to."""

    def __init__(self, *, lost_after: int | None = None, silent: bool = False, refuses_at: int | None = None) -> None:
        self.most_open = 0
        self.messages = 0
        self.ids: list[str] = []
        self._lost_after = lost_after
        self._silent = silent
        self._refuses_at = refuses_at

    async def Exchange(
        self, request_iterator: AsyncIterator[broker_service_pb2.ExchangeRequest], context: Any
    ) -> AsyncIterator[broker_service_pb2.ExchangeResponse]:
        answered = failed = 0
        job_id = ""
        number = 0
        async for message in request_iterator:
            if number == self._refuses_at:
                raise PermissionDeniedError("not for you")
            number += 1
            job_id = job_id or message.open.job_id
            self.most_open = max(self.most_open, len(message.requests))
            self.messages += bool(message.requests)
            for request in message.requests:
                self.ids.append(request.request_id)
                if self._silent:
                    continue
                if answered == self._lost_after:
                    raise UnavailableError("the broker is going away")
                answered += 1
                outcome = broker_service_pb2.RequestOutcome(request_id=request.request_id)
                if request.prompt.text == "prompt of bad":
                    failed += 1
                    outcome.failed.CopyFrom(to_status(InvalidArgumentError.of([Violation("max_tokens", "is 0")])))
                else:
                    outcome.finished.request_id = request.request_id
                    outcome.finished.samples.add(
                        text=request.prompt.text, finish_reason=generation_pb2.FINISH_REASON_LENGTH
                    )
                    outcome.finished.usage.prompt_tokens = 3
                yield broker_service_pb2.ExchangeResponse(outcomes=[outcome])
        if not self._silent:
            report = broker_service_pb2.JobReport(
                job_id=job_id, requests=answered, failed=failed, generated_tokens=10, prompt_tokens_logical=3 * answered
            )
            yield broker_service_pb2.ExchangeResponse(report=report)


def scripted(**script: Any) -> ScriptedBroker:
    return ScriptedBroker(**script)  # type: ignore[abstract]  # jobs call nothing else


async def run(
    broker: ScriptedBroker, lines: list[str], *, window: int = 100, silence_s: float = PATIENCE_S
) -> tuple[JobOutcome, dict[str, dict[str, Any]]]:
    results: list[dict[str, Any]] = []
    register = broker_service_pb2_grpc.add_BrokerServiceServicer_to_server
    async with serving(register, broker, NAME) as server, channel(server.address) as to_broker:
        rows = read_rows(io.BytesIO("\n".join(lines).encode()))
        outcome = await run_job(to_broker, rows, results.append, job_id="job", window=window, silence_s=silence_s)
    assert len({result["id"] for result in results}) == len(results), "a row has two results"
    return outcome, {result["id"]: result for result in results}


def row(name: str, **fields: Any) -> str:
    return json.dumps({"id": name, "prompt": f"prompt of {name}", "max_tokens": 4, **fields})


async def test_bad_rows_become_typed_errors_and_stop_nothing() -> None:
    lines = [row(f"r{number}") for number in range(300)]
    lines[7], lines[70] = "{not json", row("bad")
    outcome, results = await run(scripted(), lines)
    assert outcome.broken_by is None
    assert (outcome.rows, outcome.failed, len(results)) == (300, 2, 300)
    assert results["r299"]["text"] == "prompt of r299"
    assert results["r299"]["finish_reason"] == "length"
    assert results["r299"]["usage"]["prompt_tokens"] == 3
    assert results["line-8"]["error"]["code"] == "INVALID_ARGUMENT"
    assert results["bad"]["error"]["fields"] == [{"field": "max_tokens", "description": "is 0"}]


async def test_the_report_has_its_eight_keys_first_and_counts_rows_that_were_never_sent() -> None:
    outcome, _ = await run(scripted(), [row("a"), "7", row("bad")])
    report = report_document("job", outcome)
    assert list(report)[:8] == [
        "requests", "failed", "prompt_tokens_logical", "prompt_tokens_computed", "prompt_tokens_bound",
        "generated_tokens", "wall_s", "tokens_per_s",
    ]  # fmt: skip
    assert (report["requests"], report["failed"], report["rows_refused_unsent"]) == (3, 2, 1)


async def test_no_more_rows_are_open_than_the_window_allows() -> None:
    broker = scripted()
    outcome, _ = await run(broker, [row(f"r{number}") for number in range(50)], window=5)
    assert outcome.broken_by is None
    assert 1 <= broker.most_open <= 5


async def test_a_broker_that_breaks_off_leaves_no_row_without_a_result() -> None:
    outcome, results = await run(scripted(lost_after=10), [row(f"r{number}") for number in range(200)], window=64)
    assert isinstance(outcome.broken_by, UnavailableError)
    assert len(results) == 200
    done = [result for result in results.values() if "error" not in result]
    assert len(done) <= 10
    assert outcome.failed == 200 - len(done)
    assert results["r199"]["error"]["code"] == "UNAVAILABLE"


@pytest.mark.parametrize("message", [0, 1, 4])
async def test_a_broker_that_refuses_while_rows_are_sent_is_heard(message: int) -> None:
    """A write that meets the end of a stream did hide the broker's reason, nearly always."""
    lines = [row(f"r{number}", tenant="x" * 3000) for number in range(1000)]
    for _ in range(5):
        outcome, results = await run(scripted(refuses_at=message), lines, window=500)
        assert isinstance(outcome.broken_by, PermissionDeniedError), outcome.broken_by
        assert len(results) == 1000


async def test_a_silent_broker_is_given_up_after_the_limit() -> None:
    outcome, results = await run(scripted(silent=True), [row("a"), row("b")], silence_s=0.3)
    assert outcome.broken_by is not None
    assert {result["error"]["code"] for result in results.values()} <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}


async def test_an_empty_file_is_an_empty_job() -> None:
    outcome, results = await run(scripted(), [""])
    assert outcome.broken_by is None
    assert (outcome.rows, results) == (0, {})


@pytest.mark.parametrize("window", [1, 64, 65])
async def test_all_windows_deliver_all_rows(window: int) -> None:
    outcome, results = await run(scripted(), [row(f"r{number}") for number in range(130)], window=window)
    assert outcome.broken_by is None
    assert len(results) == 130


async def test_rows_go_in_whole_messages_also_where_results_come_one_by_one() -> None:
    broker = scripted()
    lines = [json.dumps({"id": f"r{number}", "prompt": "x", "max_tokens": 1}) for number in range(640)]
    outcome, results = await run(broker, lines, window=128)
    assert (outcome.rows, outcome.failed, len(results)) == (640, 0, 640)
    assert broker.messages == 10
    one_by_one = scripted()
    assert len((await run(one_by_one, lines[:20], window=1))[1]) == 20
    assert one_by_one.messages == 20


async def test_runs_beside_each_other_share_no_request_id_and_keep_the_ids_of_their_rows() -> None:
    broker, lines = scripted(lost_after=150), [row(f"r{number}") for number in range(200)]
    for _ in range(2):
        outcome, results = await run(broker, lines, window=64)
        assert isinstance(outcome.broken_by, UnavailableError)
        assert set(results) == {f"r{number}" for number in range(200)}
        assert results["r7"]["text"] == "prompt of r7"
    assert len(set(broker.ids)) == len(broker.ids) >= 300
