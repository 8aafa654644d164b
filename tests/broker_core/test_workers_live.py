# SPDX-License-Identifier: Apache-2.0
"""The core over real sockets, with real worker processes on the simulated engine."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from services.broker.work import Lane, WorkEnd
from services.common.errors import NotFoundError, UnavailableError
from tests.broker_core.conftest import SLOW
from tests.broker_core.made import RecordingSink, work
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.e2e


async def test_a_job_brings_every_row_what_its_engine_says(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        await made.start_worker("w1")
        await made.start_worker("w2")
        await made.up("w1", "w2")
        digests = frozenset({made.digest()})
        head = [list(range(group, group + 64)) for group in range(4)]
        prompts = [[*head[at % 4], at % 250, at // 250, 9] for at in range(400)]
        works = made.submit([work(prompt, max_tokens=6, digests=digests) for prompt in prompts])
        ends = await made.ended(works)
        simulation = made.simulation()
        for prompt, end in zip(prompts, ends, strict=True):
            assert isinstance(end, WorkEnd)
            assert end.samples[0].tokens.tolist() == simulation.tokens(prompt, 6)
        report = made.broker.end_job("j")
        assert report.prompt_tokens_bound == 4 * 64 + 3 * 400
        # One prefill of each head; with two workers it may have been worth a second one.
        assert report.prompt_tokens_computed in range(report.prompt_tokens_bound, report.prompt_tokens_bound + 5 * 64)
        assert sum(share.requests for share in report.shares) == 400
        assert {share.node_id for share in report.shares} == {"w1", "w2"}


async def test_samples_are_forks_of_one_prompt_that_is_computed_once(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        await made.start_worker("w1")
        await made.up("w1")
        digests = frozenset({made.digest()})
        prompts = [[*range(48), at, 9] for at in range(6)]
        ends = await made.ended(made.submit([work(it, max_tokens=5, samples=4, digests=digests) for it in prompts]))
        simulation = made.simulation()
        for prompt, end in zip(prompts, ends, strict=True):
            assert isinstance(end, WorkEnd)
            assert [sample.tokens.tolist() for sample in end.samples] == [
                simulation.tokens(prompt, 5, sample=sample) for sample in range(4)
            ]
        report = made.broker.end_job("j")
        assert report.prompt_tokens_computed == report.prompt_tokens_bound == 48 + 6 * 2
        assert report.generated_tokens == 6 * 4 * 5
        assert (report.head_prefills, report.heads_held) == (1, 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_acknowledged_work_of_a_worker_that_falls_silent_runs_elsewhere(
    fleet: Callable[..., Any], number: signal.Signals
) -> None:
    async with fleet(silence_limit_s=4.0) as made:
        doomed = await made.start_worker("doomed", **SLOW)
        await made.start_worker("heir", **SLOW)
        await made.up("doomed", "heir")
        made.broker.cordon("heir", True)
        works = made.works(8, max_tokens=200)
        await wait_until(lambda: made.outstanding("doomed") == 8)
        made.broker.cordon("heir", False)
        doomed.signal(number)
        await wait_until(lambda: made.outstanding("heir") == 8, within_s=30, what="all attempts elsewhere")
        assert made.broker.decision.requests.counters.lost_attempts == 8
        if number == signal.SIGSTOP:
            doomed.signal(signal.SIGCONT)  # what it says now of its old attempts is not heard
        ends = await made.ended(works)
        assert all(isinstance(end, WorkEnd) and end.node_id == "heir" and end.attempts == 2 for end in ends)


async def test_a_started_stream_ends_unavailable_and_is_not_restarted(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        doomed = await made.start_worker("doomed", **SLOW)
        await made.up("doomed")
        sink = RecordingSink()
        works = made.works(1, max_tokens=200, lane=Lane.INTERACTIVE, stream=True, sink=sink, job="")
        await wait_until(lambda: len(sink.heard) > 2)
        doomed.kill()
        (end,) = await made.ended(works)
        assert isinstance(end, UnavailableError)
        assert len(sink.started_with) == 1


async def test_a_worker_that_drains_hands_its_work_over(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        leaving = await made.start_worker("leaving", **SLOW)
        await made.start_worker("staying", **SLOW)
        await made.up("leaving", "staying")
        made.broker.cordon("staying", True)
        works = made.works(6, max_tokens=240)
        await wait_until(lambda: made.outstanding("leaving") == 6)
        made.broker.cordon("staying", False)
        leaving.signal(signal.SIGTERM)
        await made.up("staying")
        late = made.works(2, max_tokens=5)
        ends = await made.ended([*works, *late])
        assert all(isinstance(end, WorkEnd) and end.node_id == "staying" for end in ends)
        assert made.broker.decision.requests.counters.quarantined == 0
        assert leaving.wait() == 0


async def test_a_cancelled_request_frees_its_slot(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        await made.start_worker("w1", slots=1, max_output_tokens=4000, max_sequence_tokens=5024, **SLOW)
        await made.up("w1")
        sink = RecordingSink()
        (long,) = made.works(1, max_tokens=4000, stream=True, sink=sink, lane=Lane.INTERACTIVE, job="")
        await wait_until(lambda: sink.heard)
        assert made.broker.cancel([long.key]) == 1
        short = made.works(1, max_tokens=1, lane=Lane.INTERACTIVE, job="")
        await made.ended(short, within_s=40)  # the long one would take twice as long
        (end,) = await made.ended([long])
        assert isinstance(end, WorkEnd)
        assert end.samples[0].finish_reason == 3


async def test_one_job_runs_over_two_engines_with_different_limits(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        timing = {"time_mode": "real", "step_us": 8_000, "kv_pool_blocks": 512}
        await made.start_worker("whole", "whole", slots=16, step_token_budget=256, **timing)
        await made.start_worker(
            "half", "half", slots=8, step_token_budget=128, max_input_tokens=128, max_sequence_tokens=256, **timing
        )
        await made.up("whole", "half")
        both = frozenset({made.digest("whole"), made.digest("half")})
        only = frozenset({made.digest("whole")})
        short = [work([*range(48), at % 250, at // 250], max_tokens=16, digests=both) for at in range(240)]
        long = [work([5] * 400 + [at], max_tokens=4, digests=only) for at in range(6)]
        ends = await made.ended(made.submit([*short, *long]))
        assert all(isinstance(end, WorkEnd) for end in ends)
        assert {end.node_id for end in ends[240:]} == {"whole"}
        shares = Counter(end.node_id for end in ends[:240])
        assert shares["half"] >= 30, "the smaller one takes part"
        assert shares["whole"] > shares["half"], "and gets less"


async def test_a_provisioner_that_is_away_takes_nobody_out(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        await made.start_worker("w1")
        await made.up("w1")
        made.provisioner.kill()
        ends = await made.ended(made.works(20))
        assert all(isinstance(end, WorkEnd) for end in ends)
        assert made.nodes() == {"w1"}


async def test_work_waits_for_a_worker_and_not_for_ever(fleet: Callable[..., Any]) -> None:
    async with fleet(nobody_limit_s=1.0) as made:
        only = await made.start_worker("w1", **SLOW)
        await made.up("w1")
        digest = frozenset({made.digest()})
        only.kill()
        await made.up()
        works = made.works(2, digests=digest)
        ends = await made.ended(works)
        assert all(isinstance(end, UnavailableError) for end in ends)


async def test_files_come_from_workers_verified(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        await made.start_worker("w1")
        await made.up("w1")
        catalog = made.broker.catalog
        assert catalog.synced
        (engine,) = catalog.engines()
        assert engine.node_ids == ("w1",)
        data = await catalog.fetch_file(engine.digest, "tokenizer.json")
        assert data == (made.folder / "engine" / "tokenizer.json").read_bytes()
        with pytest.raises(NotFoundError):
            await catalog.fetch_file(engine.digest, "../secrets")
        with pytest.raises(NotFoundError):
            await catalog.fetch_file("0" * 64, "tokenizer.json")
        # On the disk it is another file now: what comes does not match the contract.
        (made.folder / "engine" / "tokenizer.json").write_text("{}")
        with pytest.raises(UnavailableError):
            await catalog.fetch_file(engine.digest, "tokenizer.json")


async def test_kills_through_a_job_lose_and_double_nothing(fleet: Callable[..., Any]) -> None:
    async with fleet() as made:
        engine = {"time_mode": "real", "step_us": 10_000}
        for at in range(2):
            await made.start_worker(f"w{at}", **engine)
        await made.up("w0", "w1")
        digests = frozenset({made.digest()})
        prompts = [[*range(32), at % 250, at // 250] for at in range(1500)]
        works = made.submit([work(prompt, max_tokens=8, digests=digests) for prompt in prompts])
        for at, share in enumerate((100, 500, 900)):
            await made.ended_at_least(share, works)
            made.workers[f"w{at}"].kill()
            await made.start_worker(f"w{at + 2}", **engine)
        ends = await made.ended(works)
        simulation = made.simulation()
        for prompt, end in zip(prompts, ends, strict=True):
            assert isinstance(end, WorkEnd)
            assert end.samples[0].tokens.tolist() == simulation.tokens(prompt, 8)
        counters = made.broker.decision.requests.counters
        assert counters.lost_attempts > 0
        assert counters.quarantined == 0
