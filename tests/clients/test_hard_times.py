# SPDX-License-Identifier: Apache-2.0
"""The Python client against brokers of their own that are full, or die while rows are uploaded and results read."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

import pytest

from ifabric_client import CallError, Client, Request, RetryPolicy
from tests.jobs.running import Fabric
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from pathlib import Path

    from ifabric_client import Outcome

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

POLICY = RetryPolicy(limit_s=60)
ROWS = 40_000


def test_clients_of_a_full_broker_wait_and_lose_nothing(tmp_path: Path) -> None:
    with Fabric(tmp_path, engine={"step_us": 1_000}, broker={"waiting_requests_max": 40}) as fabric:
        address = fabric.start().brokers[0].address
        ended: list[list[Outcome]] = []

        def run(number: int) -> None:
            with Client(address, retries=POLICY) as client:
                rows = (Request([number, place % 250], 8, id=f"{number}-{place}") for place in range(200))
                ended.append(list(client.run(rows, window=128)))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len({outcome.id for outcome in each if outcome.error is None}) for each in ended] == [200] * 3
    assert [len(each) for each in ended] == [200] * 3


def test_a_job_goes_on_while_its_broker_is_killed_again_and_again(tmp_path: Path) -> None:
    rows = [Request([number % 250, number // 250], 2, id=f"r{number}") for number in range(ROWS)]
    with Fabric(tmp_path) as fabric:
        broker = fabric.start().brokers[0]
        ended: list[str] = []

        def bulk() -> None:
            with Client(broker.address, retries=POLICY) as client:
                ended.extend(outcome.id for outcome in client.bulk("killed", rows) if outcome.error is None)

        thread = threading.Thread(target=bulk)
        thread.start()
        with Client(broker.address, retries=POLICY) as watching:
            for part in (1, ROWS // 2):  # in the middle of the upload
                block_until(functools.partial(_has_durable, watching, part), within_s=60)
                broker.kill()
                broker.start()
            for part in (1, ROWS // 2):  # in the middle of the results
                block_until(functools.partial(_has, ended, part), within_s=60)
                broker.kill()
                broker.start()
        thread.join(120)
    assert ended == [row.id for row in rows]


def _has(ended: list[str], count: int) -> bool:
    return len(ended) >= count


def _has_durable(client: Client, count: int) -> bool:
    """Whether the broker keeps so many rows; there may be no job yet."""
    try:
        return client.job("killed").durable_rows >= count
    except CallError as error:
        if error.reason != "JOB_UNKNOWN":
            raise
        return False
