"""A Ray cluster: joining one or starting one, and how many workers fit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hdruntime.backends.registry import needs_gpu
from hdruntime.bundle.reader import Bundle
from hdruntime.errors import BackendUnavailableError, InputError, Setting
from hdruntime.optional import require

_AUTO = "auto"
_LOCAL = "local"
"""Ray's name for a cluster of this machine, started for one program."""

_KNOCK_SECONDS = 10


class Places(NamedTuple):
    """How many workers of one session fit on a cluster, and how many CPU cores, which are its threads, and GPUs each
    takes.
    """

    workers: int
    cpus: int
    gpus: int


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module ``ray``, connected to a cluster; processes that this started end with the block, and nothing else.

    The address is ``auto`` for the cluster that this machine is a node of, or ``host:port`` of its head; None or "" for
    one of this machine alone, started for the block. Where the process is connected already, that cluster is used, and
    no other may be named.
    """
    # Before Ray is imported, and only if the user has not set it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray")
    if ray.is_initialized():
        if address:
            raise InputError("This process is connected to Ray already.", hint=f"Leave out the address {address}.")
        yield ray
        return
    with _quiet(ray):
        try:
            _connect(ray, address or _LOCAL)
            yield ray
        finally:
            ray.shutdown()


def places(nodes: Sequence[Mapping[str, float]], bundle: Bundle, *, backend: str, threads: int | None) -> Places:
    """How a cluster, whose living nodes have these ``CPU`` and ``GPU``, is divided into workers of so many threads.

    A worker of an engine takes a GPU; any other takes ``threads`` cores, by default one: where there are rows
    for all of them, many workers of one thread get more done than one worker of many. With the backend ``auto`` GPUs
    are taken if the bundle has an engine.
    """
    cpus = threads or 1
    with_gpu = sum(int(min(node.get("GPU", 0), node.get("CPU", 0) // cpus)) for node in nodes)
    wants_gpu = bool(bundle.manifest.engines) and with_gpu > 0 if backend == _AUTO else needs_gpu(backend)
    workers = with_gpu if wants_gpu else sum(int(node.get("CPU", 0) // cpus) for node in nodes)
    if workers:
        return Places(workers=workers, cpus=cpus, gpus=int(wants_gpu))
    if wants_gpu and not any(node.get("GPU", 0) for node in nodes):
        raise BackendUnavailableError(
            f"The backend {backend} needs a GPU, and the Ray cluster has none.",
            hint=("Use ", Setting("backend", "onnxruntime"), ", or add nodes with GPUs: ray start --address HOST:PORT"),
        )
    most = int(max((node.get("CPU", 0) for node in nodes), default=0))
    raise InputError(
        f"A worker of {cpus} threads needs a node with {cpus} cores; the largest node of the Ray cluster has {most}.",
        hint=("Reduce ", Setting("threads"), "."),
    )


def _connect(ray: Any, address: str) -> None:
    local = {"include_dashboard": False} if address == _LOCAL else {}
    try:
        _knock(os.environ.get("RAY_ADDRESS", "") if address == _AUTO else address)
        with _own_signal_handler():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address == _LOCAL:
            raise BackendUnavailableError(
                f"Ray cannot start on this machine: {error}", hint=("Leave out ", Setting("ray", command="run"), ".")
            ) from error
        raise BackendUnavailableError(
            f"There is no Ray cluster to join at {address}: {error}",
            hint="Start one: ray start --head; or leave the address out for a cluster of this machine alone.",
        ) from error


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces: the program decides what the signal means."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # In other threads neither Ray nor we may set it.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _knock(address: str) -> None:
    """Raise OSError within seconds if no cluster answers; Ray (2.60) tries for more than ten minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Keep Ray's threads from printing on stdout, where a command's results are; we log what matters.

    ``log_to_driver=False`` is not enough: a worker's death is printed all the same. Ray's own debugger sets this flag.
    """
    worker = ray._private.worker
    before = worker._worker_logs_enabled
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before
