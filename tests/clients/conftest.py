# SPDX-License-Identifier: Apache-2.0
"""One suite of simulated engines for everything that clients of these tests do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines.simulated import write_simulated_engine
from tests.support.door import Door, contract
from tests.support.suite import up

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A suite with an engine that generates, `texts`, and one that gives hidden states, `states`."""
    engines = tmp_path_factory.mktemp("engines")
    texts, states = engines / "texts", engines / "states"
    # Its longest answer takes four seconds and more: what is to be left in its middle is not over before.
    write_simulated_engine(
        texts, engine_id="texts", time_mode="real", step_us=1000, max_input_tokens=512, max_output_tokens=4096,
        max_sequence_tokens=4608,
    )  # fmt: skip
    write_simulated_engine(
        states, engine_id="states", time_mode="real", max_output_tokens=0, max_input_tokens=128,
        payload_dtype="float16",
    )  # fmt: skip
    with up(tmp_path_factory.mktemp("logs"), [texts, states]) as running:
        yield Door(running, contract(texts), contract(states))
