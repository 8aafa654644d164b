# SPDX-License-Identifier: Apache-2.0
"""A real worker process beside a real provisioner process: start, refusal, health, signals, loss, end."""

from __future__ import annotations

import os
import signal
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from engines.simulated import ABSENT, RequestFault, write_simulated_engine
from ifabric.provisioner.v1 import provisioner_service_pb2 as provisioning
from ifabric.provisioner.v1 import provisioner_service_pb2_grpc
from services.common import contract, reasons
from services.common.errors import UnavailableError, from_status
from services.common.rpc import channel
from services.worker.native._layout import ABI_MAJOR, ABI_MINOR, STRUCT_SIZES
from services.worker.native._library import _FUNCTIONS
from tests.support.ports import held_port
from tests.support.processes import ServiceProcess, flags, run_to_end
from tests.support.waiting import PATIENCE_S, block_until, wait_until
from tests.worker.made import unpacked, work
from tests.worker.peers import Broker, health
from tests.worker.running import GENERATING, LONG, LONG_TOKENS
from tests.worker.test_native_library import build, speaking

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

HEARTBEAT_MS = 200
ACCEPTED, REFUSED = provisioning.NODE_STATE_ACCEPTED, provisioning.NODE_STATE_REFUSED


@pytest.fixture(scope="module")
def provisioner() -> Iterator[ServiceProcess]:
    with ServiceProcess("services.provisioner", {"heartbeat_interval_ms": HEARTBEAT_MS}) as process:
        yield process


def engine(directory: Path, **fields: Any) -> str:
    """Writes an engine directory and returns its digest."""
    write_simulated_engine(directory, **{**GENERATING, **fields})
    return contract.engine_digest(directory)


def worker(directory: Path, provisioner: str, name: str, **settings: Any) -> ServiceProcess:
    return ServiceProcess(
        "services.worker",
        {"engine_dir": directory, "provisioner": provisioner, "node_id": name, "drain_grace_s": "5", **settings},
    )


async def nodes(address: str) -> dict[str, provisioning.Node]:
    async with channel(address) as made:
        stub = provisioner_service_pb2_grpc.ProvisionerServiceStub(made)
        listed = await stub.ListNodes(provisioning.ListNodesRequest(), timeout=PATIENCE_S)
        return {node.description.node_id: node for node in listed.nodes}


async def in_state(address: str, name: str, state: int, *, within_s: float = PATIENCE_S) -> provisioning.Node:
    async def found() -> provisioning.Node | None:
        node = (await nodes(address)).get(name)
        return node if node is not None and node.state == state else None

    node: provisioning.Node = await wait_until(found, within_s=within_s, what=f"{name} in state {state}")
    return node


async def healthy(process: ServiceProcess, expected: str = "SERVING", *, within_s: float = PATIENCE_S) -> None:
    async def found() -> bool:
        return await health(process.address) == expected

    await wait_until(found, within_s=within_s, what=f"health {expected}")


def metrics_of(process: ServiceProcess) -> str:
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=PATIENCE_S) as page:
        return str(page.read().decode())


async def test_a_worker_serves_says_so_and_leaves_in_order(provisioner: ServiceProcess, tmp_path: Path) -> None:
    digest = engine(tmp_path)
    with worker(tmp_path, provisioner.address, "orderly") as process:
        node = await in_state(provisioner.address, "orderly", ACCEPTED)
        assert node.description.address == process.address
        assert node.report.engine_digest == digest
        names = ("", "liveness", "ifabric.worker.v1.WorkerService", "engine/simulated-test")
        assert [await health(process.address, name) for name in names] == ["SERVING"] * 4
        async with Broker(process.address, digest) as broker:
            await broker.dispatch(*[work(handle, max_tokens=3) for handle in range(10)])
            for handle in range(10):
                await broker.finish_of(handle)

            async def counted() -> bool:
                stats = (await nodes(provisioner.address))["orderly"].stats
                return stats.generated_tokens >= 30 and stats.requests_finished >= 10

            await wait_until(counted, what="the counters in a heartbeat")
            text = metrics_of(process)
            assert 'ifabric_worker_engine_tokens_total{engine="simulated-test",kind="generated"}' in text
            assert "ifabric_worker_streams 1" in text
            process.signal(signal.SIGTERM)
            assert isinstance(await broker.end(), UnavailableError)
        assert process.wait() == 0
        assert "orderly" not in await nodes(provisioner.address)


async def test_work_in_flight_ends_within_the_grace_and_the_node_drains_meanwhile(
    provisioner: ServiceProcess, tmp_path: Path
) -> None:
    digest = engine(tmp_path, step_us=20_000, **LONG)
    with worker(tmp_path, provisioner.address, "draining", drain_grace_s="60") as process:
        await in_state(provisioner.address, "draining", ACCEPTED)
        async with Broker(process.address, digest) as broker:
            # The second one keeps the worker draining until everything has been seen of that.
            await broker.dispatch(work(1, max_tokens=60, stream_tokens=True), work(3, max_tokens=LONG_TOKENS))
            await wait_until(lambda: broker.tokens[1, 0])
            process.signal(signal.SIGTERM)
            await in_state(provisioner.address, "draining", provisioning.NODE_STATE_DRAINING)
            assert await health(process.address) == "NOT_SERVING"
            assert await health(process.address, "liveness") == "SERVING"
            await broker.dispatch(work(2))
            assert from_status((await broker.failure_of(2)).status).reason == reasons.DRAINING
            await broker.finish_of(1)
            assert len(broker.tokens[1, 0]) == 60
            await broker.cancel(3)
            await broker.finish_of(3)
        assert process.wait() == 0


async def test_a_refused_directory_is_named_field_by_field_and_accepted_once_mended(
    provisioner: ServiceProcess, tmp_path: Path
) -> None:
    engine(tmp_path, contract_changes={"limits.step_token_budget": ABSENT, "model.layers": "four", "extra": 1})
    with worker(tmp_path, provisioner.address, "mended") as process:
        node = await in_state(provisioner.address, "mended", REFUSED)
        paths = {violation.path for violation in node.violations}
        assert {"contract.limits.step_token_budget", "contract.model.layers", "contract.extra"} <= paths
        line = block_until(lambda: process.logs("node.not_in_service"))[0]
        assert {violation["field"] for violation in line["violations"]} == paths
        assert await health(process.address) == "NOT_SERVING"
        assert await health(process.address, "liveness") == "SERVING"
        assert not process.logs("engine.loaded")
        digest = engine(tmp_path)
        node = await in_state(provisioner.address, "mended", ACCEPTED)
        assert node.description.engine_digest == digest
        await healthy(process)
        assert process.stop() == 0


async def test_a_file_that_is_not_the_contracts_is_a_finding(provisioner: ServiceProcess, tmp_path: Path) -> None:
    engine(tmp_path)
    content = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content[:-2] + b" \n")
    with worker(tmp_path, provisioner.address, "tampered"):
        node = await in_state(provisioner.address, "tampered", REFUSED)
        assert ["files[1].sha256" in violation.path for violation in node.violations] == [True]
        (tmp_path / "tokenizer.json").write_bytes(content)
        await in_state(provisioner.address, "tampered", ACCEPTED)


async def test_services_start_in_any_order_and_find_each_other_again(tmp_path: Path) -> None:
    engine(tmp_path)
    settings = {"heartbeat_interval_ms": HEARTBEAT_MS}
    with held_port() as address, worker(tmp_path, address, "early") as process:
        assert await health(process.address) == "NOT_SERVING"
        for _ in range(2):
            with ServiceProcess("services.provisioner", {**settings, "listen": address}):
                await in_state(address, "early", ACCEPTED)
                await healthy(process)
            assert await health(process.address) == "SERVING", "a provisioner that is gone takes nothing away"
        assert len(process.logs("engine.loaded")) == 1
        assert process.stop() == 0


async def test_a_worker_that_is_killed_is_gone_within_its_lease_and_comes_back(
    provisioner: ServiceProcess, tmp_path: Path
) -> None:
    digest = engine(tmp_path, request_faults=(RequestFault("kill_process", "prompt_token", 500),), step_us=5000)
    with worker(tmp_path, provisioner.address, "killed") as process:
        await in_state(provisioner.address, "killed", ACCEPTED)
        async with Broker(process.address, digest) as broker:
            await broker.dispatch(work(1, max_tokens=60), work(2, [500]))
            assert isinstance(await broker.end(), UnavailableError)
            assert not broker.finished
        assert process.wait() == -signal.SIGKILL

        async def gone() -> bool:
            return "killed" not in await nodes(provisioner.address)

        await wait_until(gone, what="the end of the lease")
    with worker(tmp_path, provisioner.address, "killed"):
        await in_state(provisioner.address, "killed", ACCEPTED)


async def test_a_worker_that_stands_still_loses_its_lease_and_registers_again_when_it_goes_on(
    provisioner: ServiceProcess, tmp_path: Path
) -> None:
    digest = engine(tmp_path, step_us=5000)
    with worker(tmp_path, provisioner.address, "frozen") as process:
        await in_state(provisioner.address, "frozen", ACCEPTED)
        async with Broker(process.address, digest) as broker:
            await broker.dispatch(work(1, max_tokens=60))
            process.signal(signal.SIGSTOP)
            try:

                async def gone() -> bool:
                    return "frozen" not in await nodes(provisioner.address)

                await wait_until(gone, what="the end of the lease")
            finally:
                process.signal(signal.SIGCONT)
            await in_state(provisioner.address, "frozen", ACCEPTED)
            assert await health(process.address) == "SERVING"
            assert len(unpacked((await broker.finish_of(1)).samples[0].token_ids)) == 60
        assert len(process.logs("engine.loaded")) == 1


async def test_work_that_stands_still_is_not_serving_until_it_moves_again(
    provisioner: ServiceProcess, tmp_path: Path
) -> None:
    """One step of 10 s: a stall to a contract that allows 0.1 s, and none to one that allows 20 s."""
    slow = (RequestFault("slow_step", "prompt_token", 500, 10_000),)
    impatient, patient = tmp_path / "impatient", tmp_path / "patient"
    first = engine(impatient, request_faults=slow, longest_step_ms=100)
    second = engine(patient, request_faults=slow, longest_step_ms=20_000)
    with (
        worker(impatient, provisioner.address, "stalls") as stalls,
        worker(patient, provisioner.address, "waits") as waits,
    ):
        await in_state(provisioner.address, "stalls", ACCEPTED)
        await in_state(provisioner.address, "waits", ACCEPTED)
        async with Broker(stalls.address, first) as one, Broker(waits.address, second) as other:
            await one.dispatch(work(1, [500]), work(2))
            await other.dispatch(work(1, [500]), work(2))
            await healthy(stalls, "NOT_SERVING")
            assert await health(stalls.address, "engine/simulated-test") == "NOT_SERVING"
            assert await health(stalls.address, "liveness") == "SERVING"
            assert 'ifabric_worker_engine_stalled{engine="simulated-test"} 1.0' in metrics_of(stalls)
            assert await health(waits.address) == "SERVING"
            await one.finish_of(1)
            await healthy(stalls)
            assert await health(stalls.address, "engine/simulated-test") == "SERVING"
            await other.finish_of(2)
        assert not waits.logs("health.changed")[1:], "it was never anything but serving once it was loaded"
        assert 'ifabric_worker_engine_stalls_total{engine="simulated-test"} 1.0' in metrics_of(stalls)
        assert 'ifabric_worker_engine_stalled{engine="simulated-test"} 0.0' in metrics_of(stalls)


async def test_an_engine_that_fails_ends_the_process_after_handing_everything_back(
    provisioner: ServiceProcess, tmp_path: Path
) -> None:
    digest = engine(tmp_path, request_faults=(RequestFault("throw", "prompt_token", 500),), step_us=5000, **LONG)
    with worker(tmp_path, provisioner.address, "failing") as process:
        await in_state(provisioner.address, "failing", ACCEPTED)
        async with Broker(process.address, digest) as broker:
            await broker.dispatch(*[work(handle, max_tokens=LONG_TOKENS) for handle in range(4)], work(4, [500]))
            for handle in range(5):
                error = from_status((await broker.failure_of(handle)).status)
                assert (error.code, error.reason) == (14, reasons.ENGINE_FAILED)
            end = await broker.end()
            assert isinstance(end, UnavailableError)
            assert end.reason == reasons.ENGINE_FAILED
        assert process.wait() == 1
        assert "failing" not in await nodes(provisioner.address)


async def test_a_second_process_of_a_node_ends_the_first(provisioner: ServiceProcess, tmp_path: Path) -> None:
    engine(tmp_path)
    with worker(tmp_path, provisioner.address, "twin") as first:
        await in_state(provisioner.address, "twin", ACCEPTED)
        with worker(tmp_path, provisioner.address, "twin") as second:
            assert first.wait() == 1
            node = await in_state(provisioner.address, "twin", ACCEPTED)
            assert node.description.address == second.address


async def test_a_worker_may_be_stopped_while_its_engine_loads(provisioner: ServiceProcess, tmp_path: Path) -> None:
    engine(tmp_path, load_ms=60_000)
    with worker(tmp_path, provisioner.address, "loading") as process:
        await in_state(provisioner.address, "loading", provisioning.NODE_STATE_MAY_LOAD)
        assert await health(process.address) == "NOT_SERVING"
        assert process.stop() == 0
        assert "loading" not in await nodes(provisioner.address)


async def test_a_worker_whose_engine_is_stuck_ends_all_the_same(provisioner: ServiceProcess, tmp_path: Path) -> None:
    digest = engine(tmp_path, request_faults=(RequestFault("slow_step", "prompt_token", 500, 60_000),))
    with worker(tmp_path, provisioner.address, "stuck", drain_grace_s="1") as process:
        await in_state(provisioner.address, "stuck", ACCEPTED)
        async with Broker(process.address, digest) as broker:
            await broker.dispatch(work(1, [500], stream_tokens=True, report_context_done=True))
            await wait_until(lambda: any(stats.queued or stats.active for stats in broker.stats))
            process.signal(signal.SIGTERM)
            assert isinstance(await broker.end(), UnavailableError)
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({"engine_dir": "/nowhere"}, {}, "engine_dir /nowhere is not a directory"),
        ({}, {"IFAB_ENGINE_LIBRARY": "/nowhere.so"}, "the native library is not at /nowhere.so: build it"),
        ({"slots": "4"}, {}, "--slots is not a setting of worker"),
        ({"node_id": "Not A Name"}, {}, "--node-id"),
        ({"listen": "192.0.2.1:1"}, {}, "192.0.2.1:1 is reached by other machines, and grpc would speak in the clear"),
        ({"listen": "192.0.2.1:1", "allow_cleartext": '["grpc"]'}, {}, "cannot listen on 192.0.2.1:1"),
    ],
)
def test_what_keeps_a_worker_from_starting_is_one_sentence(
    tmp_path: Path, settings: dict[str, str], environment: dict[str, str], expected: str
) -> None:
    engine(tmp_path)
    words = flags({"engine_dir": str(tmp_path), "provisioner": "127.0.0.1:1", **settings})
    ended = run_to_end("services.worker", words, env=environment)
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("worker: ")
    assert expected in last
    assert os.linesep not in last


def test_a_machine_that_lacks_what_the_engine_runs_on_is_one_sentence(tmp_path: Path) -> None:
    """The library is asked first: without the driver or its runtime no engine could ever be loaded here."""
    lacks = "this engine needs an NVIDIA card, and there is no driver here (libcuda.so.1 is not found)"
    functions = "".join(f"int {name}(void) {{ return 0; }}\n" for name in _FUNCTIONS if name != "ifab_engine_runs_here")
    library = build(
        tmp_path,
        speaking(ABI_MAJOR, ABI_MINOR, dict(STRUCT_SIZES.values()))
        + functions
        + f"""
        #include <stdio.h>
        int ifab_engine_runs_here(const char *directory, char *err, size_t cap) {{
          snprintf(err, cap, "%s", "{lacks}");
          return directory != 0 ? 14 : 3; /* UNAVAILABLE */
        }}
        """,
    )
    engine(tmp_path / "engine")
    words = flags({"engine_dir": str(tmp_path / "engine"), "provisioner": "127.0.0.1:1"})
    ended = run_to_end("services.worker", words, env={"IFAB_ENGINE_LIBRARY": str(library)})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1] == f"worker: {lacks}"
