# SPDX-License-Identifier: Apache-2.0
"""Puts the parts of the job service together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ifabric.broker.v1 import job_service_pb2_grpc
from services.broker.ended_jobs import ended_jobs
from services.broker.failures import request_failures
from services.broker.frontdoor.intake import Intake
from services.broker.frontdoor.selection import EngineDirectory
from services.broker.jobs import metrics
from services.broker.jobs.crash import CrashPoint
from services.broker.jobs.housekeeping import Housekeeper
from services.broker.jobs.runner import Runner
from services.broker.jobs.servicer import FULL_NAME, JobServicer
from services.broker.jobs.shards import ShardStore
from services.broker.journal import Journal, open_database

if TYPE_CHECKING:
    from services.broker.frontdoor.tokenization import CodecStore
    from services.broker.jobs.housekeeping import Keeping
    from services.broker.jobs.runner import RunnerLimits
    from services.broker.journal.sqlite import Synchronous
    from services.broker.work import Catalog, Core
    from services.common.rpc import Server
    from services.common.tasks import Tasks
    from services.common.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What the job service is told."""

    journal: str
    """Path of a SQLite file, or a `postgresql://` URL."""
    synchronous: Synchronous
    """What a commit of SQLite outlives."""
    journal_bytes: int
    """Size at which a SQLite journal counts as full; 0 leaves it to the disk."""
    payload_dir: str
    """Where payloads go; beside a SQLite journal where empty."""
    crash_at: str
    """Where tests have the process end."""
    limits: RunnerLimits
    keeping: Keeping

    @property
    def payload_folder(self) -> Path:
        """Where payloads go."""
        return Path(self.payload_dir or f"{self.journal}.payloads")


class Jobs:
    """The job service of one broker.

    Args:
        settings: What it is told.
        core: Runs rows.
        catalog: Engines that there are.
        codecs: Their tokenizers.
        tasks: Holds background tasks.
        telemetry: Where figures go.

    Raises:
        StartError: the journal cannot be opened.
    """

    def __init__(
        self,
        settings: JobSettings,
        core: Core,
        catalog: Catalog,
        codecs: CodecStore,
        tasks: Tasks,
        telemetry: Telemetry,
    ) -> None:
        crash = CrashPoint(settings.crash_at)
        self._tasks = tasks
        database = open_database(settings.journal, synchronous=settings.synchronous, bytes_max=settings.journal_bytes)
        self.journal = Journal(database, crash.reach, observe=metrics.commit_observer(telemetry))
        shards = ShardStore(settings.payload_folder, sync=settings.synchronous == "FULL")
        directory = EngineDirectory(catalog)
        self.runner = Runner(
            self.journal, core, catalog, directory, Intake(directory, codecs), shards, settings.limits, tasks,
            ended_jobs(telemetry), request_failures(telemetry),
        )  # fmt: skip
        metrics.observe(telemetry, self.journal, self.runner)
        self._keeper = Housekeeper(self.journal, shards, settings.keeping)
        self._shards = shards
        self._housekeeping: asyncio.Task[None] | None = None
        self._servicer = JobServicer(self.journal, self.runner, shards, self._keeper, settings.keeping, crash.reach)

    def serve(self, server: Server) -> None:
        """Has a server serve it; called before the server starts and after the front door was added."""
        server.add(job_service_pb2_grpc.add_JobServiceServicer_to_server, self._servicer, FULL_NAME)
        server.on_drain("job service", self._servicer.drain)
        server.on_drain("job runner", self.runner.drain)
        server.on_close("journal", self._close)

    async def start(self) -> None:
        """Begins to work on what the journal holds. The core has been started."""
        await self.runner.start()
        self._housekeeping = self._tasks.start(self._keeper.run(), name="job-housekeeping")

    async def _close(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self.journal.close()
        await asyncio.to_thread(self._shards.close)
