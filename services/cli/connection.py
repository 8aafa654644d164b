# SPDX-License-Identifier: Apache-2.0
"""How commands reach services: in the clear, or by TLS, with a certificate or a token, and with a trace around it.

The options stand before the subcommand and hold for all of its calls (`ifab --tls-ca ca.pem --token-file key nodes`);
each has an environment variable, so that they are said once.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import grpc
import typer

from services.cli import running
from services.cli.running import CommandError
from services.common.errors import StartError
from services.common.rpc import channel as plain_channel
from services.common.rpc import options
from services.common.rpc.following import FollowingChannel
from services.common.rpc.tls import channel_credentials
from services.common.security import Credentials, Files
from services.common.security.certificates import REALM
from services.common.security.exposure import is_loopback
from services.common.security.needs import BROKER
from services.common.settings import split_address
from services.common.telemetry import Telemetry, names, propagation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.common.security.certificates import Bundle

_TOKEN = re.compile(r"[!-~]*")
"""What can be a token: one word of visible ASCII, or nothing."""
TOKEN_VARIABLE = "IFAB_CLI_TOKEN"  # noqa: S105 -- the name of a variable


@dataclass(frozen=True, slots=True)
class Connection:
    """What the options say."""

    tls: bool = False
    """Whether to speak TLS without authorities of our own: the system's are trusted, and the address is the name."""
    authorities: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """Name that the server's certificate has to have, where it is neither the role's nor the address's."""
    token_file: Path | None = None
    otlp_endpoint: str = ""
    without_token: bool = False
    """Whether no token is sent, not even the environment's."""

    @property
    def protected(self) -> bool:
        """Whether calls go through TLS."""
        return self.tls or self.authorities is not None


_in_force = Connection()


def configure(
    context: typer.Context,
    tls: Annotated[
        bool, typer.Option("--tls", envvar="IFAB_CLI_TLS", help="Speak TLS; the system's authorities are trusted.")
    ] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", envvar="IFAB_CLI_TLS_CA", metavar="FILE", help="Speak TLS; trust these, PEM."),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", envvar="IFAB_CLI_TLS_CERT", metavar="FILE", help="Certificate to show, PEM."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", envvar="IFAB_CLI_TLS_KEY", metavar="FILE", help="Its private key, PEM.")
    ] = None,
    tls_server_name: Annotated[
        str,
        typer.Option(
            "--tls-server-name",
            envvar="IFAB_CLI_TLS_SERVER_NAME",
            metavar="NAME",
            help="Name in the server's certificate; with --tls-ca otherwise <role>.ifabric.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            envvar="IFAB_CLI_TOKEN_FILE",
            metavar="FILE",
            help="File with the token to send, read at each call; IFAB_CLI_TOKEN holds one instead.",
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            "--otlp-endpoint",
            envvar="IFAB_CLI_OTLP_ENDPOINT",
            metavar="URL",
            help="Where the command's trace is pushed to, http://host:port.",
        ),
    ] = "",
) -> None:
    """Inference Fabric: send bulk and online LLM work to nodes with LLM engines.

    Example: ifab --tls-ca ca.pem --token-file key nodes --provisioner fabric.example:7601
    """
    global _in_force
    _in_force = Connection(tls, tls_ca, tls_cert, tls_key, tls_server_name, token_file, otlp_endpoint)
    if otlp_endpoint:
        context.with_resource(_traced(context.invoked_subcommand or "", otlp_endpoint))


def channel(address: str, *, role: str = BROKER) -> grpc.aio.Channel:
    """Opens a channel as the options say.

    Args:
        address: `host:port`, `dns:///name:port` or `unix:/path`.
        role: What listens there; with --tls-ca its certificate has to have the DNS name `<role>.ifabric`.

    Raises:
        CommandError: the options contradict each other, a file cannot be used, or a token would go in the clear.
    """
    said = _in_force
    running.goes_to(role, address, protected=said.protected)
    has_token = bool(_authorization(said))
    if not said.protected:
        if said.certificate is not None or said.key is not None:
            raise CommandError("--tls-cert and --tls-key say nothing without --tls-ca or --tls")
        if has_token and not _is_local(address):
            raise CommandError(f"the token would go to {address} in the clear: add --tls-ca FILE or --tls")
    follow = _following(said)
    if not said.protected and not has_token and not said.otlp_endpoint:
        return plain_channel(address)
    arguments = options.client(options.MESSAGE_BYTES_MAX, balanced=False)
    name = said.server_name or (role + REALM if said.authorities is not None else "")
    if name:
        arguments.append(("grpc.ssl_target_name_override", name))

    def make(bundle: Bundle | None) -> grpc.aio.Channel:
        if not said.protected:
            return grpc.aio.insecure_channel(address, options=arguments)
        if bundle is not None:
            return grpc.aio.secure_channel(address, channel_credentials(bundle), options=arguments)
        trusted = None if said.authorities is None else _read(said.authorities)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted), options=arguments)

    def shown() -> Bundle | None:
        return None if follow is None else follow.current()

    return FollowingChannel(shown, make, lambda: (*_authorization(said), *propagation.metadata()))


@contextmanager
def in_the_clear() -> Iterator[None]:
    """Has channels leave the options out: what a command starts itself listens on loopback without TLS."""
    global _in_force
    said, _in_force = _in_force, Connection(otlp_endpoint=_in_force.otlp_endpoint, without_token=True)
    try:
        yield
    finally:
        _in_force = said


@contextmanager
def _traced(command: str, endpoint: str) -> Iterator[None]:
    """Puts a trace around a command; services below continue it."""
    telemetry = Telemetry("cli", otlp_endpoint=endpoint)
    try:
        with telemetry.tracer.start_as_current_span(
            names.SPAN_COMMAND, attributes={"command": command}, record_exception=False
        ):
            yield
    finally:
        telemetry.close()


def _following(said: Connection) -> Credentials | None:
    """The certificate to show, followed as its files change; None where none is named."""
    if said.certificate is None and said.key is None:
        return None
    if said.certificate is None or said.key is None or said.authorities is None:
        raise CommandError("--tls-cert, --tls-key and --tls-ca go together")
    try:
        return Credentials(Files(said.certificate, said.key, said.authorities))
    except StartError as error:
        raise CommandError(str(error)) from error


def _authorization(said: Connection) -> Sequence[tuple[str, str]]:
    if said.without_token:
        return ()
    file = said.token_file
    token = os.environ.get(TOKEN_VARIABLE, "") if file is None else _read(file).decode("utf-8", "replace").strip()
    if not _TOKEN.fullmatch(token):
        where = TOKEN_VARIABLE if file is None else str(file)
        raise CommandError(
            f"{where} holds something else than one token; of what `ifab key` prints, it is the first line"
        )
    return (("authorization", f"Bearer {token}"),) if token else ()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error


def _is_local(address: str) -> bool:
    return address.startswith("unix:") or (not address.startswith("dns:") and is_loopback(split_address(address)[0]))
