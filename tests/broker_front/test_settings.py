# SPDX-License-Identifier: Apache-2.0
"""What a broker can be told, and that the core hears all of it."""

from __future__ import annotations

import dataclasses

import pytest

from services.broker.core.settings import CoreSettings
from services.broker.settings import BrokerSettings
from services.common.errors import StartError
from services.common.settings import load

PEER = ["--provisioner", "127.0.0.1:1"]


def test_every_figure_of_the_core_can_be_set_and_has_its_default() -> None:
    settings = load(BrokerSettings, PEER, {})
    given, defaults = settings.core(), CoreSettings()
    for field in dataclasses.fields(CoreSettings):
        assert getattr(given, field.name) == getattr(defaults, field.name) or field.name == "tenant_weights"
    assert dict(given.tenant_weights) == dict(defaults.tenant_weights)


def test_settings_reach_the_core() -> None:
    environment = {"IFAB_BROKER_SILENCE_LIMIT_S": "3.5", "IFAB_BROKER_TENANT_WEIGHTS": '{"gold": 4}'}
    given = load(BrokerSettings, PEER, environment).core()
    assert given.silence_limit_s == 3.5
    assert given.tenant_weights == {"gold": 4.0}


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ([], "provisioner"),
        ([*PEER, "--waiting-requests-max", "0"], "waiting-requests-max"),
        ([*PEER, "--interactive-reserve", "1"], "interactive-reserve"),
        ([*PEER, "--tokenizer-threads", "none"], "tokenizer-threads"),
        ([*PEER, "--stream-window", "5"], "stream-window"),
    ],
    ids=["missing", "zero", "all", "no number", "unknown"],
)
def test_what_cannot_be_is_refused_by_name(flags: list[str], part: str) -> None:
    with pytest.raises(StartError, match=part):
        load(BrokerSettings, flags, {})
