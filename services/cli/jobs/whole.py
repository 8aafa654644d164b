# SPDX-License-Identifier: Apache-2.0
"""A job from file to results, for `ifab bulk run` and `ifab bulk submit`.

Whatever ends the command, the same command goes on: the job's name is made of what the file holds, the broker knows
which rows it has, and the output says how many results there are.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ifabric.broker.v1 import broker_service_pb2, broker_service_pb2_grpc
from ifabric.broker.v1 import job_service_pb2 as pb
from services.cli.files.chat import ChatEngine, fetch_chat_engine
from services.cli.files.formats import Format, Layout, layout, rows_of
from services.cli.files.openai import EMBEDDINGS
from services.cli.files.opening import Source, Survey, look, survey
from services.cli.jobs.calls import ENDED, Jobs, Patience, outlasted
from services.cli.jobs.collect import check_continues, collect
from services.cli.jobs.output import Output
from services.cli.jobs.spec import Wishes, spec_of
from services.cli.jobs.upload import upload
from services.cli.progress import Reading, Told, reading_of
from services.cli.running import CommandError
from services.common.errors import FabricError
from services.common.rpc import translated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    import grpc

    Tell = Callable[[Reading], None]

_CALL_S = 5.0
_WITHOUT_ROWS = frozenset({pb.JOB_STATE_UPLOADING, pb.JOB_STATE_PAUSED, pb.JOB_STATE_STALLED})
"""States in which a job may not have all its rows yet."""
_OTHERWISE = "name another file, or give --fresh to run everything again"


@dataclass(frozen=True, slots=True)
class Input:
    """A file of rows, and how it is read."""

    source: Source
    survey: Survey
    layout: Layout
    chat: ChatEngine | None
    wishes: Wishes
    """What is asked of its job; where the file says the engine, that is in it."""

    @property
    def spec(self) -> pb.JobSpec:
        """Of the job that runs the file."""
        return spec_of(self.wishes, self.source, self.survey, self.layout)


async def open_input(
    name: str, wanted: Format, wishes: Wishes, to_broker: grpc.aio.Channel, provisioner: str, patience: Patience
) -> Input:
    """Looks at a file and gets what reading it takes; the broker is asked with `patience`.

    Raises:
        CommandError: The file cannot be read, or asks for an engine that does not serve, or for a template or
            embeddings that it lacks.
        FabricError: A call failed.
    """
    source = look(name)
    form = layout(source, wanted)
    chat = None
    if form.batch is not None and not (wishes.engine_id or wishes.engine_digest):
        wishes = _with_engine(wishes, form.batch.model)
        _check_engine(await outlasted(patience, partial(_engines, to_broker)), form.batch.model)
    if form.batch is not None and form.batch.endpoint == EMBEDDINGS:
        _check_embeds(await outlasted(patience, partial(_engines, to_broker)), wishes)
    if form.needs_chat:
        chat = await fetch_chat_engine(provisioner, wishes.engine_id)
        wishes = _with_engine(wishes, chat.engine_id, chat.engine_digest)  # ids are of that engine's tokenizer
    return Input(source, await asyncio.to_thread(survey, source), form, chat, wishes)


async def submit(jobs: Jobs, given: Input, tell: Tell, silence_s: float, patience: Patience) -> pb.Job:
    """Makes the job of a file, or finds it, with `patience`, and gives it all its rows.

    Raises:
        CommandError: The file is not what it should be.
        FabricError: The broker refuses, or did not answer for too long.
    """
    spec = given.spec
    job = await outlasted(patience, lambda: _found(jobs, spec))
    return await _fill(jobs, job, given, tell, silence_s) if job.state in _WITHOUT_ROWS else job


async def run_whole(
    jobs: Jobs, given: Input, files: tuple[Path, Path], tell: Tell, silence_s: float, patience: Patience, *, fresh: bool
) -> pb.Job:
    """Runs a file to its end, from wherever an earlier command left it.

    Args:
        jobs: Where the job is, or will be.
        given: The file.
        files: Where results and errors go.
        tell: Told how far the job is.
        silence_s: Time without any answer of the broker after which the command gives up, in seconds.
        patience: For the calls before anything is sent.
        fresh: Whether what is there is thrown away, the job and its results.

    Raises:
        CommandError: A file is not what it should be.
        FabricError: The broker refuses, or did not answer for too long.
        OSError: A file cannot be written.
    """
    spec = given.spec
    job_id = spec.job_id
    found = await outlasted(patience, lambda: jobs.find(job_id))
    if found is not None and fresh:
        await outlasted(patience, lambda: _thrown_away(jobs, job_id))
        found = None
    made = found is None
    job = await outlasted(patience, lambda: jobs.create(spec)) if found is None else found
    with Output(*files, given.layout.shape(job.create_time.seconds), fresh=made) as output:
        if not made:
            await outlasted(patience, partial(check_continues, jobs, job, output, otherwise=_OTHERWISE))
        if job.state in _WITHOUT_ROWS:
            job = await _fill(jobs, job, given, tell, silence_s)
        total = job.durable_rows
        told = Told(tell, reading_of(job, total))
        watcher = asyncio.create_task(_tell_of(jobs, job_id, told, total, silence_s))
        try:
            patience = Patience(silence_s, told.hindered)
            while output.rows < total:
                await collect(jobs, job_id, output, patience, follow=True)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        output.flush()
        job = await _ended(jobs, job_id, silence_s)
        tell(reading_of(job, total))
    return job


async def watch(
    jobs: Jobs, job_id: str, silence_s: float, hindered: Callable[[str], None] = lambda _why: None
) -> AsyncIterator[pb.Job]:
    """Yields a job now and whenever it changes, until it has ended; `hindered` is told why nothing comes.

    Raises:
        FabricError: There is no such job, or the broker did not answer for too long.
    """
    patience = Patience(silence_s, hindered)
    while True:
        call = jobs.stub.WatchJob(pb.WatchJobRequest(job_id=job_id, tenant=jobs.tenant))
        try:
            with translated():
                async for message in call:
                    patience.progress()
                    yield message.job
            return
        except FabricError as error:
            await patience.wait(error)
        finally:
            call.cancel()


async def _found(jobs: Jobs, spec: pb.JobSpec) -> pb.Job:
    """The job of a spec, made where there is none."""
    return await jobs.find(spec.job_id) or await jobs.create(spec)


async def _thrown_away(jobs: Jobs, job_id: str) -> None:
    """Ends a job and removes it; one that is gone already is no error."""
    if await jobs.find(job_id) is not None:
        await jobs.cancel(job_id)
        await jobs.delete(job_id)


async def _fill(jobs: Jobs, job: pb.Job, given: Input, tell: Tell, silence_s: float) -> pb.Job:
    """Gives a job the rows that it lacks, and lets it run."""
    total = given.survey.lines
    told = Told(tell, Reading("uploading", job.durable_rows, total))
    patience = Patience(silence_s, told.hindered)
    open_rows = partial(rows_of, given.source, given.layout, given.chat)

    def durable(rows: int) -> None:
        told(Reading("uploading", rows, max(total, rows)))

    try:
        rows = await upload(jobs, job, open_rows, durable, patience)
    except CommandError:
        # What the file was is not what it is: nobody will ever send the rest of this job.
        await jobs.cancel(job.spec.job_id)
        await jobs.delete(job.spec.job_id)
        raise
    while True:
        try:
            return await jobs.seal(job.spec.job_id, rows)
        except FabricError as error:
            await patience.wait(error)


async def _ended(jobs: Jobs, job_id: str, silence_s: float) -> pb.Job:
    """The job, once it says that it has ended; its last result may be there a moment before."""
    last = pb.Job()
    async for job in watch(jobs, job_id, silence_s):
        last = job
    return last


async def _tell_of(jobs: Jobs, job_id: str, tell: Tell, total: int, silence_s: float) -> None:
    async for job in watch(jobs, job_id, silence_s):
        if job.state not in ENDED:
            tell(reading_of(job, total))


def _with_engine(wishes: Wishes, engine_id: str, engine_digest: str = "") -> Wishes:
    return replace(wishes, engine_id=engine_id, engine_digest=engine_digest)


def _check_engine(engines: Sequence[broker_service_pb2.Engine], engine_id: str) -> None:
    names = sorted(engine.contract.engine_id for engine in engines)
    if engine_id not in names:
        raise CommandError(
            f"the file's model {engine_id!r} is no engine that serves; say which one is to answer with --engine-id "
            f"({', '.join(names) or 'none serves now'})"
        )


def _check_embeds(engines: Sequence[broker_service_pb2.Engine], wishes: Wishes) -> None:
    """One that does not serve now may when the job runs; of one that does, what it makes is known."""
    for engine in engines:
        contract = engine.contract
        meant = contract.engine_id == wishes.engine_id or engine.engine_digest == wishes.engine_digest
        if meant and not contract.capabilities.payload.HasField("value"):
            raise CommandError(f"{contract.engine_id} makes no hidden states, and so no embeddings; name one that does")


async def _engines(to_broker: grpc.aio.Channel) -> Sequence[broker_service_pb2.Engine]:
    stub = broker_service_pb2_grpc.BrokerServiceStub(to_broker)
    with translated():
        listed = await stub.ListEngines(broker_service_pb2.ListEnginesRequest(), timeout=_CALL_S)
    return listed.engines
