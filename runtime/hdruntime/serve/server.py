"""The server: one process, with one bundle or several, each in one session or several."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import HdexportError, InputError, Setting
from hdruntime.hub import opened_bundle
from hdruntime.optional import require
from hdruntime.process_limits import chosen_threads
from hdruntime.serve.asgi import application_of_models
from hdruntime.serve.connections import ListeningSocket
from hdruntime.serve.interfaces import served_task
from hdruntime.serve.model_registry import check_names
from hdruntime.serve.options import ServeOptions
from hdruntime.serve.running_model import LoadedModel
from hdruntime.serve.stores import is_in_store, opened_in_store
from hdruntime.session import Session, load
from hdruntime.text.lengths import MaxSeqLength

_DRAIN_SECONDS = 30
"""Maximum seconds that a stopping server waits for running requests."""


@dataclass(frozen=True, kw_only=True)
class BundleToServe:
    """A bundle, and how it is loaded and named.

    Attributes:
        bundle: its directory, its name on the Hugging Face Hub, or its URL in a store, such as ``gs://bucket/bundle``.
        names: names by which requests choose it; the first one is shown. Empty: the name in its manifest.
        sessions: number of sessions on each device, which run batches at the same time.
        devices: devices that have sessions, as `device` of `hdruntime.load`.
        threads: CPU threads of all sessions together; None for one per core of the process.
        backend, precision, max_seq_length: see `hdruntime.load`.
        ranges: see `LoadedModel`.
    """

    bundle: Path | str
    names: Sequence[str] = ()
    sessions: int = 1
    devices: Sequence[str | None] = (None,)
    threads: int | None = None
    backend: Backend | str = "auto"
    precision: Precision | str = Precision.AUTO
    max_seq_length: int | MaxSeqLength | None = None
    ranges: str | None = None

    def load(self, opened: Bundle) -> Iterator[Session]:
        """Load the sessions, one after the other."""
        number, threads = self.sessions * len(self.devices), self.threads
        if number > 1:
            threads = max(1, chosen_threads(threads)[0] // number)
        for device in self.devices:
            for _ in range(self.sessions):
                yield load(
                    opened,
                    self.backend,
                    threads=threads,
                    precision=self.precision,
                    device=device,
                    max_seq_length=self.max_seq_length,
                )


def serve(
    *bundles: BundleToServe | Path | str,
    options: ServeOptions | None = None,
    on_ready: Callable[[str], None] = lambda lines: None,
) -> None:
    """Serve bundles until SIGINT, SIGTERM or SIGHUP; requests that run are answered.

    Args:
        bundles: one or several. If one cannot be loaded, none is served.
        options: options of the server; None for the defaults.
        on_ready: takes lines that say where the server listens, and what runs each bundle, before it answers.

    Raises:
        MissingDependencyError: the extra ``serve`` is not installed.
        HdexportError: a bundle cannot be loaded, an option is invalid, or another program listens there.
    """
    options = options or ServeOptions()
    options.check()
    uvicorn = require("uvicorn")
    settings = _uvicorn_settings(options)
    host, port = options.host, options.port
    to_serve = [each if isinstance(each, BundleToServe) else BundleToServe(bundle=each) for each in bundles]
    with bound_sockets(host, port) as bound, contextlib.ExitStack() as sessions:
        models = _loaded(to_serve, sessions)
        # Asked only when requests come, after the server was made.
        served = application_of_models(models, options, is_stopping=lambda: server.should_exit)
        with _listen_errors(host, port):
            for bound_socket in bound:
                # Another server may have bound the port while the bundle was loaded: one of them listens.
                bound_socket.listen()
        place = f"[{host}]" if ":" in host else host
        url = f"http://{place}:{bound[0].getsockname()[1]}"
        lines = [_line(model) for model in models]
        on_ready(f"{lines[0]}: {url}" if len(lines) == 1 else "\n".join([f"{len(lines)} models: {url}", *lines]))
        # What is there now stays: the garbage collector would search it again and again.
        gc.freeze()
        server = uvicorn.Server(uvicorn.Config(served, **settings))
        with _stopped_by_hangup():
            server.run(sockets=bound)


@contextlib.contextmanager
def _stopped_by_hangup() -> Iterator[None]:
    """Handle SIGHUP, of a terminal that is closed, as uvicorn handles SIGTERM, unless ``nohup`` ignores it."""
    hangup = getattr(signal, "SIGHUP", None)
    is_main = threading.current_thread() is threading.main_thread()
    if hangup is None or not is_main or (before := signal.getsignal(hangup)) is signal.SIG_IGN:
        yield
        return
    signal.signal(hangup, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(hangup, before)


def _loaded(bundles: Sequence[BundleToServe], sessions: contextlib.ExitStack) -> list[LoadedModel]:
    """Load all bundles, or none: what can be said without loading is said first, of each."""
    models = []
    for each in bundles:
        with _named_errors(each, bundles):
            opens = opened_in_store if is_in_store(each.bundle) else opened_bundle
            opened = opens(str(each.bundle), each.backend, each.precision)
            served_task(opened)
        models.append(LoadedModel(bundle=opened, sessions=[], names=each.names, ranges=each.ranges))
    check_names(models)
    for each, model in zip(bundles, models, strict=True):
        with _named_errors(each, bundles):
            model.sessions.extend(sessions.enter_context(session) for session in each.load(model.bundle))
    number = sum(len(model.sessions) for model in models)
    for model in models:
        for session in model.sessions:
            session.share_memory(number)
    return models


@contextlib.contextmanager
def _named_errors(bundle: BundleToServe, bundles: Sequence[BundleToServe]) -> Iterator[None]:
    """Say which of several bundles an error is about."""
    try:
        yield
    except HdexportError as error:
        if len(bundles) == 1:
            raise
        raise error.prefixed(f"{bundle.names[0] if bundle.names else bundle.bundle} cannot be served: ") from error


def _line(model: LoadedModel) -> str:
    """What runs a model."""
    manifest, session, number = model.bundle.manifest, model.sessions[0], len(model.sessions)
    name = model.name if model.name == manifest.name else f"{model.name}: {manifest.name}"
    several = "" if number == 1 else f", {number} sessions"
    return (
        f"{name}, {manifest.task}, 1 to {session.max_seq_length} tokens, {session.backend} "
        f"({session.backend_reason}){several}"
    )


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
