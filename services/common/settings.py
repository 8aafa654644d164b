# SPDX-License-Identifier: Apache-2.0
"""Settings of a process: one frozen, typed model a service.

A value comes from, first match wins: a flag (`--log-level debug`), the environment (`IFAB_WORKER_LOG_LEVEL=debug`), the
file named by `--config FILE` or `IFAB_WORKER_CONFIG` (TOML, top-level keys), the default that the model states. A key
that the model does not know is refused wherever it comes from, so a misspelt one never becomes a silent default.

On Kubernetes set `enableServiceLinks: false`: the variables that it would inject for a Service called `ifab-worker`
start like ours and would be refused.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.common.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

S = TypeVar("S", bound="ServiceSettings")

_CONFIG_KEY = "config"
_HOST = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?\]")
"""A name or IPv4 address, or an IPv6 address in brackets."""


def split_address(address: str) -> tuple[str, int]:
    """Takes `host:port` or `[ipv6]:port` apart.

    Raises:
        ValueError: It is neither, or the port is not 0 to 65535.
    """
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host):
        raise ValueError("host:port, such as 127.0.0.1:50051 or [::1]:50051")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError("host:port with a port from 0 to 65535")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Puts `host:port` together, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_address(address: str) -> str:
    split_address(address)
    return address


def _peer_address(address: str) -> str:
    if address.startswith(("dns:///", "unix:")):
        return address
    if split_address(address)[1] == 0:
        raise ValueError("host:port with a port from 1 to 65535")
    return address


def _collector(url: str) -> str:
    scheme, _, address = url.removesuffix("/").partition("://")
    try:
        plain = scheme in ("http", "https") and "@" not in address and split_address(address)[1] > 0
    except ValueError:
        plain = False
    if not plain:
        raise ValueError("http://host:port, or https://host:port for TLS, and nothing else")
    return url


Door = Literal["grpc", "metrics", "health"]
"""What of a service listens: the gRPC server, the Prometheus endpoint, the health-only server."""
ListenAddress = Annotated[str, AfterValidator(_listen_address)]
"""Where to listen, `host:port`; port 0 takes a free one."""
PeerAddress = Annotated[str, AfterValidator(_peer_address)]
"""Where somebody else listens: `host:port`, `dns:///name:port` or `unix:/path`."""

CollectorUrl = Annotated[str, AfterValidator(_collector)]
"""Where a collector takes OTLP over gRPC: `http://host:port`, in the clear, or `https://host:port`."""


class ServiceSettings(BaseSettings):
    """What every service can be told.

    Services derive from it and name the prefix of their environment variables, from which their name follows:

        class WorkerSettings(ServiceSettings, env_prefix="IFAB_WORKER_"): ...
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        env_prefix="IFAB_",
    )

    listen: ListenAddress = "127.0.0.1:0"
    """Where the gRPC server listens, `host:port`; port 0 takes a free one."""
    metrics_listen: ListenAddress = "127.0.0.1:0"
    """Where the Prometheus endpoint listens, `host:port`; port 0 takes a free one."""
    health_listen: ListenAddress | None = None
    """Where health alone is served, in the clear, `host:port`; nowhere if absent. For probes that speak no TLS."""
    tls_cert: Path | None = None
    """Certificate of the service and those that lead to its authority, PEM; read again when the file changes."""
    tls_key: Path | None = None
    """Private key of tls_cert, PEM without a pass phrase."""
    tls_ca: Path | None = None
    """Certificates of the authorities whose peers are trusted, PEM."""
    allow_cleartext: tuple[Door | Literal["journal"], ...] = ()
    """What may speak in the clear where other machines reach it, a JSON list of grpc, metrics and health, which listen,
    and journal, the broker's connection to a database."""
    calls_per_connection_max: int = Field(default=4096, ge=1, le=1_000_000)
    """Calls that may be open on one connection; further ones wait at their client."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is written."""
    reflection: bool = True
    """Whether gRPC reflection is served, so that grpcurl needs no protoset."""
    message_bytes_max: int = Field(default=16 * 1024 * 1024, ge=64 * 1024, le=1024 * 1024 * 1024)
    """Longest gRPC message that is sent or taken, in bytes."""
    drain_propagation_s: float = Field(default=0.0, ge=0, le=300)
    """How long a server that drains waits for balancers to see it, in seconds."""
    drain_grace_s: float = Field(default=15.0, ge=0, le=3600)
    """How long calls that run may take to end once the process is told to stop, in seconds."""
    supervised: bool = False
    """Whether a supervisor holds stdin: the process ends once it closes, so that none outlives a killed supervisor."""
    otlp_endpoint: CollectorUrl | None = None
    """Where traces and metrics are pushed to by OTLP over gRPC, `http://host:port` or `https://host:port`; nowhere if
    absent."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of traces that start here and are recorded, where otlp_endpoint is set."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> ServiceSettings:
        absent = [key for key in ("tls_cert", "tls_key", "tls_ca") if getattr(self, key) is None]
        if len(absent) in (1, 2):
            raise ValueError(f"tls_cert, tls_key and tls_ca go together: {' and '.join(absent)} left out")
        return self

    @classmethod
    def service(cls) -> str:
        """Name of the service, from the prefix of its environment variables: `worker` for `IFAB_WORKER_`."""
        return cls.prefix().removeprefix("IFAB_").rstrip("_").lower()

    @classmethod
    def prefix(cls) -> str:
        """What the names of its environment variables start with: `IFAB_WORKER_`."""
        return str(cls.model_config.get("env_prefix"))

    def effective(self) -> dict[str, Any]:
        """Returns every value in force, secrets masked, in a form that can be logged."""
        return self.model_dump(mode="json")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` gathered counts, so that a model made in a test never reads the environment."""
        return (init_settings,)


def load(settings: type[S], argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> S:
    """Reads the settings of a process.

    Args:
        settings: The model.
        argv: Flags, without the program's name: `--key value`, `--key=value`, `--config FILE`.
        environ: The environment; the process's own if absent.

    Raises:
        StartError: Keys are unknown, values are not allowed, or the file cannot be read; names all of them.
    """
    environ = os.environ if environ is None else environ
    prefix = settings.prefix()
    problems: list[str] = []
    flags = _flags(argv, problems)
    variables = {key.removeprefix(prefix).lower(): text for key, text in environ.items() if key.startswith(prefix)}
    file = flags.pop(_CONFIG_KEY, None) or variables.pop(_CONFIG_KEY, None)
    variables.pop(_CONFIG_KEY, None)

    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    decode = _Decoder(settings)
    # Least urgent first: each layer overrides the one before.
    layers: tuple[tuple[dict[str, Any], Callable[[str], str], bool], ...] = (
        (_read(Path(file)) if file else {}, lambda key: f"{key} in {file}", False),
        (dict(variables), lambda key: prefix + key.upper(), True),
        (dict(flags), lambda key: "--" + key.replace("_", "-"), True),
    )
    for layer, spell, is_text in layers:
        for key, value in layer.items():
            if key not in settings.model_fields:
                problems.append(f"{spell(key)} is not a setting of {settings.service()}{_hint(key, spell, settings)}")
                continue
            values[key] = decode(key, value) if is_text else value
            names[key] = spell(key)
    try:
        made = settings(**values)
    except ValidationError as error:
        problems += [_sentence(settings, entry, names) for entry in error.errors()]
    if problems:
        raise StartError("; ".join(problems))
    return made


def usage(settings: type[ServiceSettings]) -> str:
    """Returns the help text of a service: every flag, its variable, default and meaning."""
    lines = [f"usage: python -m services.{settings.service()} [--config FILE.toml] [--KEY VALUE ...]", ""]
    for key, field in settings.model_fields.items():
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)!r}"
        lines += [
            f"  --{key.replace('_', '-')}  ({settings.prefix()}{key.upper()}; {default})",
            f"      {' '.join((field.description or '').split())}",
        ]
    return "\n".join(lines) + "\n"


class _Decoder(PydanticBaseSettingsSource):
    """Turns text from a flag or variable into a value: text as it is for plain fields, JSON for the others."""

    def __call__(self, key: str = "", text: str = "") -> Any:
        value, name, is_complex = self.get_field_value(self.settings_cls.model_fields[key], key)
        try:
            return self.prepare_field_value(name, self.settings_cls.model_fields[key], text or value, is_complex)
        except ValueError:
            return text  # not JSON: the model says what it wants instead

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return "", field_name, self.field_is_complex(field)


def _flags(argv: Sequence[str], problems: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    rest = list(argv)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            problems.append(f"{flag!r} is not a flag; flags are written --key value")
            continue
        if not equals and not rest:
            problems.append(f"{flag} needs a value")
            continue
        found[flag[2:].replace("-", "_")] = value if equals else rest.pop(0)
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartError(f"cannot read the settings file {file}: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise StartError(f"the settings file {file} is not TOML: {error}") from error


def _hint(key: str, spell: Callable[[str], str], settings: type[ServiceSettings]) -> str:
    close = difflib.get_close_matches(key, settings.model_fields, n=1)
    return f"; did you mean {spell(close[0])}?" if close else ""


def _sentence(settings: type[ServiceSettings], entry: ErrorDetails, names: Mapping[str, str]) -> str:
    """Says which key is wrong, what it holds and what is allowed."""
    if not entry["loc"]:
        return entry["msg"].removeprefix("Value error, ")
    key = str(entry["loc"][0])
    flag = "--" + key.replace("_", "-")
    if entry["type"] == "missing" and len(entry["loc"]) == 1:
        return f"{flag} (or {settings.prefix()}{key.upper()}) is required"
    field = settings.model_fields.get(key)
    found = "" if field is None or _is_secret(field) else f" is {_quoted(entry['input'])}"
    path = ".".join(str(part) for part in entry["loc"][1:])
    wanted = entry["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return f"{names.get(key, key)}{'.' + path if path else ''}{found}; allowed is {wanted}"


def _quoted(value: Any) -> str:
    """What a key holds; of a URL that could carry a password only the scheme, whether one is allowed there or not."""
    scheme, separator, rest = str(value).partition("://")
    return repr(f"{scheme}://…") if separator and ("@" in rest or "?" in rest) else repr(value)


def _is_secret(field: FieldInfo) -> bool:
    return "Secret" in str(field.annotation)
