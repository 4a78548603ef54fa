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

_CONNECT_SECONDS = 10


class WorkerPlacement(NamedTuple):
    """Placement of workers on a cluster.

    Attributes:
        workers: number of workers.
        cpus: CPU cores, and threads, of a worker.
        gpus: GPUs of a worker.
    """

    workers: int
    cpus: int
    gpus: int


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect the module ``ray`` to a cluster; at the end of the block the processes that it started end.

    Args:
        address: ``auto`` for the cluster of this machine, ``host:port`` of a cluster's head, or None or "" for a
            cluster of this machine only, which is started for the block. A process that is connected to a cluster
            accepts no address.
    """
    # Before Ray is imported, and only if the user has not set it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray")
    if ray.is_initialized():
        if address:
            raise InputError("This process is already connected to Ray.", hint=f"Leave out the address {address}.")
        yield ray
        return
    with _quiet(ray):
        try:
            _connect(ray, address or _LOCAL)
            yield ray
        finally:
            ray.shutdown()


def worker_placement(
    nodes: Sequence[Mapping[str, float]], bundle: Bundle, *, backend: str, threads: int | None
) -> WorkerPlacement:
    """Divide the living nodes of a cluster into workers.

    A worker on a GPU takes one GPU. Other workers take ``threads`` cores, by default one, because many workers of one
    thread have a higher throughput than one worker of many threads. The backend ``auto`` uses GPUs if the bundle has an
    engine.
    """
    cpus = threads or 1
    with_gpu = sum(int(min(node.get("GPU", 0), node.get("CPU", 0) // cpus)) for node in nodes)
    wants_gpu = bool(bundle.manifest.engines) and with_gpu > 0 if backend == _AUTO else needs_gpu(backend)
    workers = with_gpu if wants_gpu else sum(int(node.get("CPU", 0) // cpus) for node in nodes)
    if workers:
        return WorkerPlacement(workers=workers, cpus=cpus, gpus=int(wants_gpu))
    if wants_gpu and not any(node.get("GPU", 0) for node in nodes):
        raise BackendUnavailableError(
            f"The backend {backend} needs a GPU, and the Ray cluster has none.",
            hint=("Use ", Setting("backend", "onnxruntime"), ", or add nodes with GPUs: ray start --address HOST:PORT"),
        )
    max_cpus = int(max((node.get("CPU", 0) for node in nodes), default=0))
    raise InputError(
        f"A worker of {cpus} threads needs a node with {cpus} cores; the largest node of the cluster has {max_cpus}.",
        hint=("Reduce ", Setting("threads"), "."),
    )


def _connect(ray: Any, address: str) -> None:
    local = {"include_dashboard": False} if address == _LOCAL else {}
    try:
        _check_reachable(os.environ.get("RAY_ADDRESS", "") if address == _AUTO else address)
        with _own_signal_handler():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if address == _LOCAL:
            raise BackendUnavailableError(
                f"Ray cannot start on this machine: {error}", hint=("Leave out ", Setting("ray", command="run"), ".")
            ) from error
        raise BackendUnavailableError(
            f"There is no Ray cluster to join at {address}: {error}",
            hint="Start one: ray start --head. Or leave out the address for a cluster of this machine only.",
        ) from error


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Only the main thread may set a handler.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _check_reachable(address: str) -> None:
    """Raise OSError within seconds if no cluster responds; Ray 2.60 retries for more than ten minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Keep Ray's threads from printing to stdout, which has a command's results.

    ``log_to_driver=False`` is not enough: the death of a worker is printed anyway. Ray's debugger sets this flag, too.
    """
    worker = ray._private.worker
    before = worker._worker_logs_enabled
    worker._worker_logs_enabled = False
    try:
        yield
    finally:
        worker._worker_logs_enabled = before
