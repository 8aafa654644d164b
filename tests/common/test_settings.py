# SPDX-License-Identifier: Apache-2.0
"""Settings: where values come from, what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, SecretStr, ValidationError

from services.common.errors import StartError
from services.common.settings import (
    PeerAddress,
    ServiceSettings,
    join_address,
    load,
    split_address,
    usage,
)


class SampleSettings(ServiceSettings, env_prefix="IFAB_SAMPLE_"):
    """Settings of no service."""

    count: int = Field(default=3, ge=1, le=10)
    """How many."""
    where: Path = Path("/nowhere")
    """A path."""
    peer: PeerAddress | None = None
    """Somebody else."""
    words: tuple[str, ...] = ()
    """Several words."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Several figures."""
    token: SecretStr = Field(default=SecretStr(""), max_length=20)
    """A secret."""


class DemandingSettings(ServiceSettings, env_prefix="IFAB_DEMANDING_"):
    """Settings with something required."""

    engine_dir: Path
    """Required."""


def refused(argv: list[str], env: dict[str, str] | None = None) -> str:
    with pytest.raises(StartError) as caught:
        load(SampleSettings, argv, env or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_defaults_hold_where_nothing_is_said() -> None:
    made = load(SampleSettings, [], {})
    assert made == SampleSettings()
    assert (made.count, made.listen, made.reflection) == (3, "127.0.0.1:0", True)


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('count = 4\nlog_level = "debug"\nwhere = "/file"\n')
    env = {"IFAB_SAMPLE_COUNT": "5", "IFAB_SAMPLE_LOG_LEVEL": "error", "IFAB_OTHER_COUNT": "9"}
    made = load(SampleSettings, ["--config", str(file), "--count", "6"], env)
    assert (made.count, made.log_level, made.where) == (6, "error", Path("/file"))
    assert load(SampleSettings, [], {"IFAB_SAMPLE_CONFIG": str(file)}).count == 4


def test_text_becomes_what_the_field_is() -> None:
    made = load(
        SampleSettings,
        ["--words", '["a", "b"]', "--reflection=false", "--where=/x=y", "--drain-grace-s", "2.5"],
        {"IFAB_SAMPLE_TOKEN": "hush", "IFAB_SAMPLE_PEER": "dns:///broker:50051"},
    )
    assert made.words == ("a", "b")
    assert (made.reflection, made.where, made.drain_grace_s) == (False, Path("/x=y"), 2.5)
    assert made.token.get_secret_value() == "hush"
    assert made.peer == "dns:///broker:50051"


@pytest.mark.parametrize(
    ("argv", "env", "sentence"),
    [
        (["--cuont", "1"], {}, "--cuont is not a setting of sample; did you mean --count?"),
        (["--xyzzy=1"], {}, "--xyzzy is not a setting of sample"),
        (
            [],
            {"IFAB_SAMPLE_CUONT": "1"},
            "IFAB_SAMPLE_CUONT is not a setting of sample; did you mean IFAB_SAMPLE_COUNT?",
        ),
        (["--count"], {}, "--count needs a value"),
        (
            ["count", "1"],
            {},
            "'count' is not a flag; flags are written --key value; '1' is not a flag; flags are written --key value",
        ),
        (["--count", "11"], {}, "--count is '11'; allowed is less than or equal to 10"),
        (
            [],
            {"IFAB_SAMPLE_COUNT": "many"},
            "IFAB_SAMPLE_COUNT is 'many'; allowed is a valid integer, unable to parse string as an integer",
        ),
        (["--log-level", "loud"], {}, "--log-level is 'loud'; allowed is 'debug', 'info', 'warning' or 'error'"),
        (
            ["--listen", "50051"],
            {},
            "--listen is '50051'; allowed is host:port, such as 127.0.0.1:50051 or [::1]:50051",
        ),
        (["--peer", "h:0"], {}, "--peer is 'h:0'; allowed is host:port with a port from 1 to 65535"),
        *(
            (
                ["--otlp-endpoint", url],
                {},
                f"--otlp-endpoint is '{url}'; allowed is http://host:port, or https://host:port for TLS, and nothing "
                "else",
            )
            for url in (
                "collector:4317",
                "ftp://collector:4317",
                "http://collector",
                "http://collector:0",
                "http://a:1/v1",
            )
        ),
        *(
            (
                ["--otlp-endpoint", url],
                {},
                "--otlp-endpoint is 'https://…'; allowed is http://host:port, or https://host:port for TLS, and "
                "nothing else",
            )
            for url in ("https://user:hush@collector:1", "https://collector:1?key=hush")
        ),
        (["--words", "a b"], {}, "--words is 'a b'; allowed is a valid tuple"),
        (["--words", '["a", 3]'], {}, "--words.1 is 3; allowed is a valid string"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(argv: list[str], env: dict[str, str], sentence: str) -> None:
    assert refused(argv, env) == sentence


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("colour = 1\ncount = 0\n")
    said = refused(["--config", str(file), "--shape", "round"], {"IFAB_SAMPLE_LOG_LEVEL": "loud"}).split("; ")
    assert said[0] == f"colour in {file} is not a setting of sample"
    assert said[1] == "--shape is not a setting of sample"
    assert f"count in {file} is 0" in said
    assert "IFAB_SAMPLE_LOG_LEVEL is 'loud'" in said


def test_what_is_required_is_named_with_both_ways_to_give_it() -> None:
    with pytest.raises(StartError, match=r"^--engine-dir \(or IFAB_DEMANDING_ENGINE_DIR\) is required$"):
        load(DemandingSettings, [], {})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read the settings file {file}: No such file or directory"),
        (b"count = ", "the settings file {file} is not TOML: "),
        (b"\xff\xfe", "cannot read the settings file {file}: it is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_bytes(content)
    assert refused(["--config", str(file)]).startswith(sentence.format(file=file))


def test_secrets_are_shown_nowhere() -> None:
    made = load(SampleSettings, ["--token", "hush"], {})
    assert "hush" not in repr(made) + str(made.effective())
    assert made.effective()["token"] == "**********"
    assert "hush" not in refused(["--token", "hush" * 10])


def test_settings_do_not_change_and_do_not_read_the_environment_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFAB_SAMPLE_COUNT", "9")
    made = SampleSettings()
    assert made.count == 3
    assert load(SampleSettings).count == 9
    with pytest.raises(ValidationError):
        made.count = 4


def test_the_help_names_every_key() -> None:
    text = usage(SampleSettings)
    assert SampleSettings.service() == "sample"
    for key, field in SampleSettings.model_fields.items():
        assert f"--{key.replace('_', '-')}  (IFAB_SAMPLE_{key.upper()}" in text
        assert field.description, key
    assert "--weights  (IFAB_SAMPLE_WEIGHTS; default {})" in text
    assert "--engine-dir  (IFAB_DEMANDING_ENGINE_DIR; required)" in usage(DemandingSettings)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("broker.ns.svc:50051", ("broker.ns.svc", 50051)),
    ],
)
def test_addresses_come_apart_and_together(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "h",
        "h:",
        "h:x",
        "h:-1",
        "h:65536",
        "::1:5",
        "h:\u0663",
        "exämple:1",
        "a b:1",
        "%zz:1",
        "\x00:1",
        "x" * 254 + ":1",
        "[::1:1",
        "[host]:1",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
