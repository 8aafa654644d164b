# SPDX-License-Identifier: Apache-2.0
"""Why nobody could be reached, as gRPC says it of real connections, and as `ifab` says it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import typer

from services.cli.connection import TOKEN_VARIABLE, channel, configure
from services.cli.running import CommandError
from services.cli.unreachable import sentence
from tests.support.authority import Authority
from tests.support.ports import held_port
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = (("grpc.ssl_target_name_override", "broker.ifabric"),)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def secured(ours: Authority) -> Iterator[str]:
    """A server that asks for a certificate of ours."""
    authorities, key, certificate = ours.issue("broker").pem()
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(key, certificate)], authorities, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def web() -> Iterator[str]:
    """A server of something else, in the clear."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def said(address: str, credentials: grpc.ChannelCredentials | None = None, *, name: bool = True) -> str:
    """What the command says of a call there."""
    options = NAME if name else ()
    made = (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials, options=options)
    )
    method: Any = made.unary_unary("/any/Method")
    with made, pytest.raises(grpc.RpcError) as caught:
        method(b"", timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return sentence(caught.value.details() or "", address, protected=credentials is not None)


def test_tls_that_fails_says_what_to_change(ours: Authority, secured: str, web: str, tmp_path: Path) -> None:
    (tmp_path / "strangers").mkdir()
    strangers = Authority(tmp_path / "strangers", "strangers")
    authorities, key, certificate = ours.issue("client").pem()
    theirs, their_key, their_certificate = strangers.issue("client").pem()
    mine = grpc.ssl_channel_credentials(authorities, key, certificate)
    assert f"{secured} shows a certificate that no authority" in said(secured, grpc.ssl_channel_credentials(theirs))
    assert f"the certificate of what answers at {secured} has another name" in said(secured, mine, name=False)
    for shown in (
        grpc.ssl_channel_credentials(authorities),
        grpc.ssl_channel_credentials(authorities, their_key, their_certificate),
    ):
        assert f"{secured} ends the connection; if it asks for a certificate" in said(secured, shown)
    for useless in (
        grpc.ssl_channel_credentials(b"no authority"),
        grpc.ssl_channel_credentials(authorities, their_key, certificate),
    ):
        assert "cannot be used: one holds no certificate or key, or the key" in said(secured, useless)
    assert f"{web} speaks no TLS" in said(web, mine)


def test_without_tls_the_other_sides_is_thought_of(secured: str, web: str) -> None:
    assert f"{secured} ends the connection; if it speaks TLS, add --tls-ca FILE or --tls" in said(secured)
    assert f"{web} does not speak gRPC" in said(web)


@pytest.mark.parametrize("protected", [False, True])
def test_where_nobody_listens_nothing_answers(ours: Authority, protected: bool) -> None:
    with held_port() as address:
        credentials = grpc.ssl_channel_credentials(ours.issue("client").pem()[0]) if protected else None
        assert said(address, credentials).startswith(f"nothing answers at {address}; start a suite with `ifab up`")


@pytest.mark.parametrize("text", ["one two", "ifab_key\n\n[[keys]]\n", "kéy", "\x00"])
def test_what_is_no_token_is_not_sent(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    try:
        configure(context, token_file=file)
        with pytest.raises(CommandError, match="holds something else than one token") as caught:
            channel("127.0.0.1:1")
        assert str(file) in str(caught.value)
    finally:
        configure(context)
    if "\x00" not in text:
        monkeypatch.setenv(TOKEN_VARIABLE, text)
        with pytest.raises(CommandError, match=TOKEN_VARIABLE):
            channel("127.0.0.1:1")


@pytest.mark.parametrize("protected", [False, True])
def test_a_connection_that_stood_and_was_lost_is_nobodys_mistake(protected: bool) -> None:
    assert sentence("Socket closed", "127.0.0.1:7600", protected=protected).startswith(
        "nothing answers at 127.0.0.1:7600"
    )
