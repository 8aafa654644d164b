# SPDX-License-Identifier: Apache-2.0
"""What was acknowledged outlives a power cut where the journal is `FULL`, and need not where it is `NORMAL`.

The broker runs with `power_cut.cpp` before its libc, which keeps, beside the real folder, what a disk that lost power
would hold: only what was synced. A cut is the broker's death and that copy in the folder's place.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engines.simulated import SimulatedEngine, Simulation
from ifabric.broker.v1 import broker_service_pb2 as broker_pb2
from services.broker.journal.postgres import PostgresConnection
from services.common.errors import NotFoundError
from tests.jobs.client import JobClient, row
from tests.jobs.proof import QUICK, check_whole, lines, undisturbed, work
from tests.jobs.running import ENGINE, Fabric
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from tests.jobs.databases import PostgresServer

pytestmark = pytest.mark.timeout(240)

ROWS = work(300)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shim") / "power_cut.so"
    source = Path(__file__).with_name("power_cut.cpp")
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]
    command += [str(made), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=100)
    return made


class Disk:
    """The folder of a journal and its payloads, and what is left of it without power."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self.folder = folder / "kept"
        self._durable = folder / "durable"
        self.env = {
            "LD_PRELOAD": str(shim),
            "IFAB_TEST_WATCHED": str(self.folder),
            "IFAB_TEST_DURABLE": str(self._durable),
        }

    def cut(self, fabric: Fabric) -> None:
        """Takes the power from the broker and its disk; the broker starts again."""
        [broker] = fabric.brokers
        broker.kill()
        shutil.rmtree(self.folder)
        self._restore(self._durable, self.folder)
        broker.start()

    def _restore(self, durable: Path, folder: Path) -> None:
        folder.mkdir()
        for name in (durable / ".entries").read_text().splitlines():
            kept = durable / name
            if kept.is_dir():
                self._restore(kept, folder / name)
            elif kept.exists():
                shutil.copyfile(kept, folder / name)
            else:
                (folder / name).touch()  # its name was synced, none of its bytes were


def cuttable(folder: Path, shim: Path, **settings: Any) -> tuple[Disk, Fabric]:
    disk = Disk(folder, shim)
    journal = str(disk.folder / "journal.db")
    broker = {"payload_dir": str(disk.folder / "payloads"), **settings.pop("broker", {})}
    return disk, Fabric(folder, journal=journal, broker=broker, broker_env=disk.env, **settings)


def finished(job: JobClient, least: int) -> int:
    """Waits for so many results, and returns how many the broker has told of."""
    return int(block_until(lambda: (rows := job.get().finished_rows) >= least and rows, within_s=60, what="results"))


def test_rows_and_results_outlive_power_cuts(tmp_path: Path, shim: Path) -> None:
    expected = undisturbed(tmp_path / "undisturbed", ROWS)
    disk, made = cuttable(tmp_path, shim, engine={**QUICK, "step_us": 8000})
    with made as fabric, JobClient(fabric.start().brokers[0].address) as job:
        job.create()
        job.upload(ROWS[:200], message_rows=40)
        disk.cut(fabric)
        assert job.get().durable_rows == 200
        job.upload(ROWS)
        job.seal(len(ROWS))
        disk.cut(fabric)
        seen: list[Any] = []
        for reached in (1, 150):
            told = finished(job, reached)
            seen = job.results(follow=False)
            disk.cut(fabric)
            assert job.get().finished_rows >= told
            assert job.results(follow=False)[: len(seen)] == seen
        assert seen
        assert lines(job.results()) == expected
        check_whole(job, ROWS)


def test_payloads_outlive_a_power_cut(tmp_path: Path, shim: Path) -> None:
    engine = {"max_output_tokens": 0, "payload_dtype": "float32", "hidden_size": 256, "samples_max": 1}
    disk, made = cuttable(tmp_path, shim, engine=engine)
    with made as fabric, JobClient(fabric.start().brokers[0].address) as job:
        job.create()
        texts = [f"Row {number}" for number in range(100)]
        sent = [row(text, broker_pb2.GenerationRequest(prompt=broker_pb2.Prompt(text=text))) for text in texts]
        job.upload(sent)
        job.seal(len(sent))
        whole = job.results()
        disk.cut(fabric)
        assert job.results() == whole
        simulation = Simulation(SimulatedEngine(**{**ENGINE, **engine}))
        for text, each in zip(texts, whole, strict=True):
            assert each.finished.payload.data == simulation.payload(list(text.encode())).tobytes()


def test_a_journal_that_is_not_synced_loses_what_was_acknowledged(tmp_path: Path, shim: Path) -> None:
    """Shows that the cut takes something, and what NORMAL promises: a journal that is whole, and older."""
    disk, made = cuttable(tmp_path, shim, broker={"journal_synchronous": "NORMAL"})
    with made as fabric, JobClient(fabric.start().brokers[0].address) as job:
        job.create()
        assert job.upload(ROWS) == len(ROWS)
        disk.cut(fabric)
        with pytest.raises(NotFoundError):
            job.get()
        job.create()
        job.upload(ROWS)
        job.seal(len(ROWS))
        check_whole(job, ROWS)


def test_commits_wait_for_the_disk_of_postgresql_whatever_the_database_is_set_to(postgres: PostgresServer) -> None:
    where = postgres.new_database()
    connection = PostgresConnection(where)
    name = connection.rows("SELECT current_database()")[0][0]
    connection.change(f"ALTER DATABASE {name} SET synchronous_commit = off")
    connection.close()
    again = PostgresConnection(where)
    try:
        assert again.rows("SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'") == [("off",)]
        assert again.rows("SHOW synchronous_commit") == [("on",)]
        assert again.rows("SHOW fsync") == [("on",)]
    finally:
        again.close()
