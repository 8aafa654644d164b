# SPDX-License-Identifier: Apache-2.0
"""A core and a catalog in memory, behind the seam that the real ones stand behind.

The core runs each work as a task that makes deterministic tokens: it echoes the prompt, from its start again once it
is used up, until `max_tokens` or a stop token. Sample i starts i tokens further on. Tests hold it back or end things
by hand.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ifabric.broker.v1 import broker_service_pb2
from ifabric.engine.v1 import contract_pb2, generation_pb2
from services.broker.costs import JobCosts
from services.broker.work import CatalogEngine, SampleEnd, WorkEnd
from services.common.errors import AlreadyExistsError, FabricError, NotFoundError, ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.broker.work import TokenArray, Work

Key = tuple[str, str]


def echo(prompt: TokenArray, sample: int, count: int) -> TokenArray:
    """What the core generates unless a test says otherwise."""
    return np.resize(np.roll(prompt, -sample), count).astype(np.int32)


class Gate:
    """Lets tests say how many may pass."""

    def __init__(self) -> None:
        self._left: float = float("inf")
        self.waiting = 0
        """How many wait to pass."""
        self._turned = asyncio.Event()

    def close(self) -> None:
        """Nobody passes."""
        self._left = 0

    def admit(self, count: float = float("inf")) -> None:
        """So many more may pass; all of them unless told."""
        self._left += count
        self._turned.set()

    async def passed(self) -> None:
        """Returns once the caller may pass."""
        await asyncio.sleep(0)
        self.waiting += 1
        try:
            while self._left < 1:
                self._turned.clear()
                await self._turned.wait()
        finally:
            self.waiting -= 1
        self._left -= 1


class EchoCore:
    """See the module."""

    def __init__(self) -> None:
        self.generate: Callable[[TokenArray, int, int], TokenArray] = echo
        self.tokens_a_step = 4
        self.waiting_max = 1_000_000
        self.retry_after_s = 0.01
        self.end_tokens: frozenset[int] = frozenset()
        self.payload: Callable[[TokenArray], generation_pb2.Payload] | None = None
        self.open = asyncio.Event()
        """Nothing is dispatched while it is clear."""
        self.open.set()
        self.steps = Gate()
        """Every step of every work passes it."""
        self.works: dict[Key, Work] = {}
        self.accepted: list[Key] = []
        self.cancelled: list[Key] = []
        self.early: list[Key] = []
        self.paused: set[str] = set()
        self.pauses = 0
        self.ended_jobs: list[str] = []
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._prompts: dict[Key, TokenArray] = {}
        self._partial: dict[Key, list[TokenArray]] = {}
        self._reports: dict[str, broker_service_pb2.JobReport] = defaultdict(broker_service_pb2.JobReport)

    def submit(self, works: Sequence[Work]) -> list[FabricError | None]:
        return [self._accept(work) for work in works]

    def _accept(self, work: Work) -> FabricError | None:
        if work.key in self.works:
            return AlreadyExistsError(f"request_id {work.key[1]!r} is in flight")
        if len(self.works) >= self.waiting_max:
            return ResourceExhaustedError("no room", retry_after_s=self.retry_after_s)
        self.works[work.key] = work
        self.accepted.append(work.key)
        self._prompts[work.key] = work.tokens
        work.tokens = np.empty(0, np.int32)
        if work.job:
            self._reports[work.job].prompt_tokens_logical += len(self._prompts[work.key])
        self._tasks[work.key] = asyncio.get_running_loop().create_task(self._run(work))
        return None

    def cancel(self, keys: Sequence[Key]) -> int:
        known = [key for key in keys if key in self.works]
        for key in known:
            self.cancelled.append(key)
            self._stop(key)
        return len(known)

    def finish_early(self, work: Work) -> None:
        self.early.append(work.key)
        self._stop(work.key)

    def nodes_taking(self, engine_digest: str) -> int:
        return 1

    def pause_job(self, job: str, paused: bool) -> None:
        self.pauses += paused
        (self.paused.add if paused else self.paused.discard)(job)

    def job_costs(self, job: str) -> JobCosts:
        return JobCosts(ended=self._reports[job].requests)

    def end_job(self, job: str) -> broker_service_pb2.JobReport:
        assert not [work for work in self.works.values() if work.job == job], "a job ends after its work"
        assert job not in self.ended_jobs, "a job ends once"
        self.ended_jobs.append(job)
        return self._reports.pop(job, broker_service_pb2.JobReport())

    def fail(self, key: Key, error: FabricError) -> None:
        """Ends work with an error, as the loss of its worker would."""
        work = self._forget(key)
        work.sink.failed(work, error)

    def lose_attempt(self, key: Key, error: FabricError) -> bool:
        """Loses the attempt of a work with its worker; returns whether it starts anew."""
        work = self.works[key]
        if work.sink.restarted(work):
            self._tasks.pop(key).cancel()
            self._tasks[key] = asyncio.get_running_loop().create_task(self._run(work, again=True))
            return True
        self.fail(key, error)
        return False

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, work: Work, *, again: bool = False) -> None:
        await self.open.wait()
        while work.job in self.paused:
            await asyncio.sleep(0.001)
        if not again:
            work.sink.started(work, min(work.engine_digests))
        prompt = self._prompts[work.key]
        outputs, reasons = self._outputs(work, prompt)
        sent = [0] * work.samples
        self._partial[work.key] = []
        longest = max((len(output) for output in outputs), default=0)
        for begin in range(0, longest, self.tokens_a_step):
            await self.steps.passed()
            for sample, output in enumerate(outputs):
                piece = output[begin : begin + self.tokens_a_step]
                if work.stream_tokens and len(piece):
                    sent[sample] += len(piece)
                    work.sink.tokens(work, sample, piece, _logprobs(work, piece))
                self._partial[work.key] = [output[: begin + self.tokens_a_step] for output in outputs]
        ends = [
            SampleEnd(output[sent[i] :], _logprobs(work, output[sent[i] :]), *reasons[i])
            for i, output in enumerate(outputs)
        ]
        self._finish(work, ends)

    def _outputs(self, work: Work, prompt: TokenArray) -> tuple[list[TokenArray], list[tuple[int, int]]]:
        if work.max_tokens == 0:
            return [np.empty(0, np.int32)], [(generation_pb2.FINISH_REASON_COMPLETE, -1)]
        outputs: list[TokenArray] = []
        reasons: list[tuple[int, int]] = []
        stops = set(work.stop_token_ids) | (set() if work.ignore_end else self.end_tokens)
        for sample in range(work.samples):
            output = self.generate(prompt, sample, work.max_tokens)[: work.max_tokens]
            at = next((i for i, token in enumerate(output.tolist()) if token in stops), None)
            outputs.append(output if at is None else output[:at])
            reasons.append(
                (generation_pb2.FINISH_REASON_LENGTH, -1)
                if at is None
                else (generation_pb2.FINISH_REASON_STOP, int(output[at]))
            )
        return outputs, reasons

    def _finish(self, work: Work, ends: list[SampleEnd]) -> None:
        prompt = self._prompts[work.key]
        generated = sum(len(end.tokens) for end in ends)
        if work.job:
            report = self._reports[work.job]
            report.prompt_tokens_computed += len(prompt)
            report.generated_tokens += generated
        self._forget(work.key)
        usage = generation_pb2.Usage(prompt_tokens=len(prompt), computed_tokens=len(prompt), generated_tokens=generated)
        scores = np.full(len(prompt), -1.0, np.float32) if work.prompt_logprobs else None
        payload = self.payload(prompt) if self.payload is not None and work.payload_bytes else None
        work.sink.finished(work, WorkEnd(ends, usage, min(work.engine_digests), "node-1", payload, scores, 1))

    def _stop(self, key: Key) -> None:
        work = self.works[key]
        # Tokens that were delivered are not repeated; the others come with the end.
        partial = self._partial.get(key, []) if not work.stream_tokens else []
        empty = np.empty(0, np.int32)
        ends = [
            SampleEnd(partial[i] if i < len(partial) else empty, None, generation_pb2.FINISH_REASON_CANCELLED, -1)
            for i in range(work.samples)
        ]
        asyncio.get_running_loop().call_soon(self._stopped, work, ends)

    def _stopped(self, work: Work, ends: list[SampleEnd]) -> None:
        if self.works.get(work.key) is work:
            self._tasks[work.key].cancel()
            self._finish(work, ends)

    def _forget(self, key: Key) -> Work:
        task = self._tasks.pop(key)
        if task is not asyncio.current_task():
            task.cancel()
        self._partial.pop(key, None)
        self._prompts.pop(key)
        return self.works.pop(key)


class ShelfCatalog:
    """Engines and their files, as a test puts them there."""

    def __init__(self) -> None:
        self.revision = 0
        self.synced = True
        self.fetches: list[tuple[str, str]] = []
        self.reachable = asyncio.Event()
        """Files arrive only while it is set."""
        self.reachable.set()
        self._engines: dict[str, CatalogEngine] = {}
        self._files: dict[tuple[str, str], bytes] = {}

    def put(
        self, contract: contract_pb2.EngineContract, tokenizer: bytes, *, nodes: tuple[str, ...] = ("node-1",)
    ) -> str:
        """Adds an engine and returns its digest."""
        digest = hashlib.sha256(contract.SerializeToString(deterministic=True)).hexdigest()
        self._engines[digest] = CatalogEngine(digest, contract, nodes)
        self._files[digest, contract.tokenizer.file] = tokenizer
        self.revision += 1
        return digest

    def remove(self, digest: str) -> None:
        """Takes an engine out."""
        del self._engines[digest]
        self.revision += 1

    def engines(self) -> Sequence[CatalogEngine]:
        return sorted(self._engines.values(), key=lambda engine: (engine.contract.engine_id, engine.digest))

    async def fetch_file(self, engine_digest: str, path: str) -> bytes:
        self.fetches.append((engine_digest, path))
        await self.reachable.wait()
        try:
            return self._files[engine_digest, path]
        except KeyError:
            raise NotFoundError(f"no file {path}") from None


def _logprobs(work: Work, tokens: TokenArray) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    return np.full(len(tokens), -0.5, np.float32) if work.logprobs else None
