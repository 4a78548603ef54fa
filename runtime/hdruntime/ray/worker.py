"""Processes of a Ray cluster: a session on the assigned GPU or CPUs, and the worker of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import needs_gpu
from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.manifest import Backend
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import BackendUnavailableError, BundleError, BundleNotFoundError, joined
from hdruntime.jobs import JobOptions
from hdruntime.jobs.row_inference import LocalPool
from hdruntime.jobs.rows import Row
from hdruntime.jobs.shards import Shard, ShardResult
from hdruntime.optional import require
from hdruntime.session import Session, load
from hdruntime.tasks.of_bundle import task_of_bundle

_AUTO = "auto"


def session_in_worker(
    path: Path,
    *,
    backend: str,
    threads: int | None,
    precision: Precision | str = Precision.AUTO,
    identity: str | None = None,
) -> tuple[Session, Bundle, str]:
    """Load a bundle in a Ray process, on the cores and the GPU that Ray assigned to the process.

    Ray sets ``CUDA_VISIBLE_DEVICES``, so that the first GPU is the assigned one. The backend ``auto`` uses a GPU only
    if Ray assigned one.

    Args:
        path: path of the bundle.
        backend, precision: see :func:`hdruntime.load`.
        threads: CPU threads; None for the assigned cores.
        identity: expected identity of the bundle; None accepts any.

    Returns:
        the session, its bundle, and the reason for the choice of the backend.
    """
    ray = require("ray")
    resources = ray.get_runtime_context().get_assigned_resources()
    if not resources.get("GPU") and needs_gpu(backend):
        raise BackendUnavailableError(
            f"The backend {backend} needs a GPU, and Ray assigned none to this worker.",
            hint="Request one: map_batches(..., num_gpus=1)",
        )
    try:
        bundle = open_bundle(path)
    except BundleNotFoundError as error:
        raise BundleNotFoundError(
            f"Node {ray.util.get_node_ip_address()} of the Ray cluster: ",
            *joined(error.problem),
            hint="Every node needs the bundle at the same path: put it on a shared file system, or copy it there.",
        ) from None
    if identity is not None and identity_of_bundle(bundle.manifest) != identity:
        raise BundleError(
            f"Node {ray.util.get_node_ip_address()} of the Ray cluster has another bundle at {path} than the machine "
            "that runs the job.",
            hint="Copy the bundle there again, or put it on a shared file system.",
        )
    threads = threads or max(1, int(resources.get("CPU", 1)))
    if backend != _AUTO or resources.get("GPU"):
        session = load(bundle, backend, threads=threads, precision=precision)
        return session, bundle, session.backend_reason
    session = load(bundle, threads=threads, precision=precision, device="cpu")
    return session, bundle, f"Ray assigned no GPU to the workers. {session.backend_reason}"


class Loaded(NamedTuple):
    """The report of a worker that is ready."""

    node: str
    backend: Backend
    precision: Precision
    backend_reason: str
    shard_characters: int


class JobWorker:
    """An actor that runs shards of a job on its node."""

    def load(self, path: Path, options: JobOptions, *, backend: str, threads: int, identity: str) -> Loaded:
        """Load the bundle; not in the constructor, whose errors Ray wraps."""
        session, bundle, reason = session_in_worker(
            path, backend=backend, threads=threads, precision=options.precision, identity=identity
        )
        # A task cannot be pickled.
        task = task_of_bundle(bundle, options, tokenized=options.columns.input_ids is not None)
        self._pool = LocalPool(session, task, options=options)
        return Loaded(
            node=str(require("ray").util.get_node_ip_address()),
            backend=session.backend,
            precision=session.precision,
            backend_reason=reason,
            shard_characters=self._pool.shard_characters,
        )

    def infer(self, rows: Sequence[Row]) -> ShardResult:
        """Run a shard of these rows."""
        ((_, result),) = self._pool.map(iter([Shard(rows=list(rows))]))
        return result
