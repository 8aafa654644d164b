# SPDX-License-Identifier: Apache-2.0
"""The Prometheus endpoint: HTTP, or HTTPS for peers with a certificate; bounded, so that it cannot be held open.

A thread serves each connection, at most `CONNECTIONS` at a time. A further one takes the place of the oldest: a scrape
is over in milliseconds, so what has been there longest is somebody who holds on. A connection that says nothing for
`PATIENCE_S` is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from services.common.settings import join_address

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from services.common.security import Credentials
    from services.common.security.certificates import Bundle

CONNECTIONS = 64
PATIENCE_S = 10.0


class MetricsEndpoint:
    """What serves a registry.

    Args:
        registry: What is shown.
        host: Where to listen.
        port: 0 takes a free one.
        credentials: The process's certificate; peers then have to show one of the same authorities. None is HTTP.

    Raises:
        OSError: the address is taken or not ours.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int, credentials: Credentials | None) -> None:
        family = _Server6 if ":" in host else _Server
        self._server: _Server = make_server(host, port, make_wsgi_app(registry), family, _Handler)
        if credentials is not None:
            self._server.tls = _Tls(credentials)
        self.address = join_address(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Tls:
    """TLS with the certificate in force."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = threading.Lock()
        self._bundle = credentials.current()
        self._context = _context(self._bundle)

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Returns the connection under TLS, hands not yet shaken."""
        with self._lock:
            bundle = self._credentials.current()
            if bundle is not self._bundle:
                self._bundle, self._context = bundle, _context(bundle)
            context = self._context
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


class _Server(WSGIServer):
    """One thread a connection; the oldest gives way where there are too many."""

    request_queue_size = 128
    tls: _Tls | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()
        self._places = itertools.count()
        self._held: dict[int, socket.socket] = {}
        """Open connections by place, the oldest first. One is closed once it has left, under the lock: nobody cuts off
        whoever gets its descriptor next."""

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection on a thread of its own."""
        with self._lock:
            if len(self._held) >= CONNECTIONS:
                _cut(self._held.pop(next(iter(self._held))))
            place = next(self._places)
            self._held[place] = request
        try:
            threading.Thread(target=self._serve, args=(place, request, client_address), daemon=True).start()
        except RuntimeError:  # the machine has no thread left
            self._let_go(place, request)

    def _serve(self, place: int, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(PATIENCE_S)
            if self.tls is not None:
                request = self._under_tls(self.tls, place, request)
                request.do_handshake()
            self.finish_request(request, client_address)
        except (OSError, ValueError):  # gone, too slow, or no HTTP: its own business
            pass
        finally:
            self._let_go(place, request)

    def _under_tls(self, tls: _Tls, place: int, request: socket.socket) -> ssl.SSLSocket:
        """The same connection in another object, which has its descriptor from now on."""
        with self._lock:
            wrapped = tls.wrap(request)
            if place in self._held:
                self._held[place] = wrapped
            return wrapped

    def _let_go(self, place: int, request: Any) -> None:
        with self._lock:
            self._held.pop(place, None)
        self.shutdown_request(request)


def _cut(connection: socket.socket) -> None:
    """Ends a connection that another thread works on; that thread closes it."""
    with contextlib.suppress(OSError):
        # Of the socket itself: TLS would let go of its state, which the other thread may be using.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Server6(_Server):
    """The same over IPv6."""

    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    """Writes no line for each scrape."""

    timeout = PATIENCE_S

    def log_message(self, format: str, *_args: Any) -> None:
        """Nothing."""


def _context(bundle: Bundle) -> ssl.SSLContext:
    """A context from memory; `ssl` takes files only, so that the key goes through one that has no name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=bundle.authorities.decode("ascii", "ignore"))  # comments may be in any tongue
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, bundle.key + b"\n" + bundle.certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
