# SPDX-License-Identifier: Apache-2.0
"""What a broker can be told, and that the core hears all of it."""

from __future__ import annotations

import dataclasses

import pytest

from services.broker.core.settings import CoreSettings
from services.broker.journal.url import host_in_the_clear
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


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:CANARY@db/jobs?sslmode=verify-full",
        "postgresql://u@127.0.0.1/jobs?password=CANARY",
        "postgresql://u@127.0.0.1/jobs?p%61ssword=CANARY",
        "postgresql://u@127.0.0.1/jobs?sslpassword=CANARY",
        "postgresql://u:CANARY@[db/jobs",
    ],
)
def test_a_password_in_the_journals_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StartError, match=r"--journal is 'postgresql://…'; allowed is") as caught:
        load(BrokerSettings, [*PEER, "--journal", url], {})
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("postgresql://u@db/jobs", "db"),
        ("postgresql://u@db/jobs?sslmode=prefer", "db"),
        ("postgresql://u@db/jobs?sslmode=require&sslmode=disable", "db"),
        ("postgresql:///jobs?host=db", "db"),
        ("postgresql://localhost/jobs?hostaddr=10.0.0.1", "10.0.0.1"),
        ("postgresql://127.0.0.1:5432,db:5432/jobs", "db"),
        ("postgresql://[fd00::1]:5432/jobs", "fd00::1"),
    ],
)
def test_rows_travel_to_no_database_in_the_clear_unless_a_setting_says_so(url: str, host: str) -> None:
    with pytest.raises(
        StartError, match=f"^journal leads to {host}, and rows would travel there in the clear: say ssl"
    ):
        load(BrokerSettings, [*PEER, "--journal", url], {})
    load(BrokerSettings, [*PEER, "--journal", url, "--allow-cleartext", '["journal"]'], {})


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://u@db/jobs?sslmode=verify-full&sslrootcert=/ca.crt",
        "postgresql://u@db/jobs?sslmode=disable&sslmode=require",
        "postgresql://u@/jobs?host=/run/postgresql",
        "postgresql://%2Frun%2Fpostgresql/jobs",
        "postgresql://[::1]:5432/jobs?sslmode=disable",
        "postgresql:///jobs",
        "/var/lib/jobs.sqlite",
    ],
)
def test_tls_sockets_and_loopback_are_no_clear(where: str) -> None:
    assert load(BrokerSettings, [*PEER, "--journal", where], {}).journal == where


@pytest.mark.parametrize(
    ("url", "environment", "host"),
    [
        ("postgresql:///jobs", {"PGHOST": "db"}, "db"),
        ("postgresql://localhost/jobs", {"PGHOSTADDR": "10.0.0.1"}, "10.0.0.1"),
        ("postgresql://db/jobs", {"PGSSLMODE": "prefer"}, "db"),
        ("postgresql://db/jobs?sslmode=disable", {"PGSSLMODE": "verify-full"}, "db"),
        ("postgresql://db/jobs", {"PGSSLMODE": "verify-full"}, ""),
        ("postgresql:///jobs", {"PGHOST": "/run/postgresql"}, ""),
        ("postgresql://localhost/jobs", {"PGHOST": "db"}, ""),
        ("postgresql:///jobs?hostaddr=127.0.0.1", {"PGHOSTADDR": "10.0.0.1"}, ""),
    ],
)
def test_what_a_url_leaves_out_libpq_takes_from_the_environment(
    url: str, environment: dict[str, str], host: str
) -> None:
    assert host_in_the_clear(url, environment) == host
