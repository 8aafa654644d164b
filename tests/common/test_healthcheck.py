# SPDX-License-Identifier: Apache-2.0
"""What container runtimes without gRPC probes ask: health, once, by an exit status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.common.healthcheck import main
from tests.support.processes import ServiceProcess
from tests.support.waiting import block_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A broker without a provisioner: it lives, and is not ready."""
    settings = {"provisioner": "127.0.0.1:1", "health_listen": "127.0.0.1:0"}
    with ServiceProcess("services.broker", settings) as broker:
        yield str(broker.line["health"])


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Status and sentence, of the first time that an answer comes before the command's own limit."""

    def once() -> tuple[int, str] | None:
        status = main(words)
        said = capsys.readouterr().err
        return None if "DEADLINE_EXCEEDED" in said else (status, said)

    answer: tuple[int, str] = block_until(once, what="an answer")
    return answer


def test_what_lives_is_healthy_by_that_name(address: str) -> None:
    block_until(lambda: main([address, "liveness"]) == 0, what="an answer")


def test_what_is_not_ready_says_so(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, address) == (1, f"{address} is NOT_SERVING\n")


def test_a_name_that_nobody_has_is_not_healthy(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = told(capsys, address, "engine/none")
    assert status == 1
    assert "NOT_FOUND" in said


def test_an_address_where_nobody_listens_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "127.0.0.1:1") == (1, "health of 127.0.0.1:1 cannot be asked: UNAVAILABLE\n")
