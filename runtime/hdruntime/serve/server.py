"""The server: one process, one bundle, one session."""

from __future__ import annotations

import contextlib
import functools
import gc
import ipaddress
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import HdexportError, InputError, Setting
from hdruntime.hub import opened_bundle
from hdruntime.optional import require
from hdruntime.serve.asgi import application
from hdruntime.serve.connections import ListeningSocket
from hdruntime.serve.options import ServeOptions
from hdruntime.session import load
from hdruntime.text.lengths import MaxSeqLength

_DRAIN_SECONDS = 30
"""Maximum seconds that a stopping server waits for running requests."""


def serve(
    bundle: Path | str,
    *,
    backend: Backend | str = "auto",
    threads: int | None = None,
    precision: Precision | str = Precision.AUTO,
    max_seq_length: int | MaxSeqLength | None = None,
    options: ServeOptions | None = None,
    on_ready: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve a bundle until SIGINT or SIGTERM; requests that run are answered.

    Args:
        bundle: its directory, or its name on the Hugging Face Hub.
        backend, threads, precision, max_seq_length: as of `hdruntime.load`.
        options: options of the server; None for the defaults.
        on_ready: takes a line that says where the server listens, and what runs the bundle, before it answers.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        HdexportError: the bundle cannot be loaded, an option is invalid, or another program listens there.
    """
    options = options or ServeOptions()
    options.check()
    uvicorn = require("uvicorn")
    settings = _uvicorn_settings(options)
    host, port = options.host, options.port
    opened = opened_bundle(bundle, backend, precision)
    loaded = functools.partial(
        load, opened, backend, threads=threads, precision=precision, max_seq_length=max_seq_length
    )
    with bound_sockets(host, port) as bound, loaded() as session:
        # Asked only when requests come, after the server was made.
        served = application(opened, session, options, is_stopping=lambda: server.should_exit)
        with _listen_errors(host, port):
            for bound_socket in bound:
                # Another server may have bound the port while the bundle was loaded: one of them listens.
                bound_socket.listen()
        place = f"[{host}]" if ":" in host else host
        on_ready(
            f"{opened.manifest.name}, {opened.manifest.task}, 1 to {session.max_seq_length} tokens, "
            f"{session.backend} ({session.backend_reason}): http://{place}:{bound[0].getsockname()[1]}"
        )
        # What is there now stays: the garbage collector would search it again and again.
        gc.freeze()
        server = uvicorn.Server(uvicorn.Config(served, **settings))
        server.run(sockets=bound)


def _uvicorn_settings(options: ServeOptions) -> dict[str, Any]:
    from hdruntime.serve.http_protocols import http_protocol

    trusted = options.forwarded_allow_ips
    for address in ("*" if trusted is None else trusted).split(","):
        if address.strip() != "*":
            try:
                ipaddress.ip_network(address.strip())
            except ValueError as error:
                raise InputError(
                    Setting("forwarded_allow_ips"),
                    f": {error}.",
                    hint="Give addresses or networks of proxies, such as 10.0.0.0/8,::1.",
                ) from None
    return {
        "access_log": False,
        "http": http_protocol(),
        # Whether a library for WebSockets is installed changes no answer.
        "ws": "none",
        "log_level": "warning",
        "timeout_graceful_shutdown": _DRAIN_SECONDS,
        "timeout_keep_alive": options.keep_alive,
        "forwarded_allow_ips": trusted,
    }


@contextlib.contextmanager
def bound_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """A socket at each address of the host, as localhost has two; clients are refused until the bundle is loaded."""
    with contextlib.ExitStack() as exits:
        sockets: list[socket.socket] = []
        with _listen_errors(host, port):
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                # With its protocol: asyncio sends small writes at once (TCP_NODELAY) on sockets that say that they are
                # TCP; the second part of an answer would wait for the client's delayed acknowledgement, 40 ms.
                bound = exits.enter_context(ListeningSocket(family, kind, protocol))
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # A free port is the same one at every address.
                free = port or (sockets[0].getsockname()[1] if sockets else 0)
                bound.bind((address[0], free, *address[2:]))
                sockets.append(bound)
        yield sockets


@contextlib.contextmanager
def _listen_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    # A name that no host can have is an error of its encoding.
    except (OSError, UnicodeError) as error:
        raise HdexportError(
            f"The server cannot listen on {host}, port {port}: {getattr(error, 'strerror', error)}.",
            hint=(
                "Choose another port (",
                Setting("port"),
                "), or an address of this machine (",
                Setting("host"),
                ").",
            ),
        ) from error
