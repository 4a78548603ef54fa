"""A batch job over the workers of a Ray cluster: in order, each shard once, even if workers die."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdruntime.bundle.identity import identity_of_bundle
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, HdexportError, Setting
from hdruntime.jobs import Job
from hdruntime.jobs.shards import Shard, ShardResult
from hdruntime.ray.cluster import connected, worker_placement
from hdruntime.ray.worker import JobWorker, Loaded
from hdruntime.tasks.text_inference import WINDOW_CHARACTERS

logger = logging.getLogger(__name__)

_SHARDS_PER_WORKER = 2
"""One shard that runs, and one in the queue."""

_HELD_A_WORKER = 4
"""Shards in the driver's memory per worker: the worker's shards, and results that wait for an earlier shard."""

_MAX_DEATHS = 3
"""Number of workers that may die with one shard, or while they load the bundle, before the job fails."""

_PATIENCE_SECONDS = 60
"""Seconds without a result after which the number of loading workers is logged."""


@dataclass(eq=False)
class _Assignment:
    """A shard that a worker runs, or whose result waits for an earlier shard's."""

    shard: Shard
    result: ShardResult | None = None
    deaths: int = 0


@dataclass(eq=False)
class _Slot:
    """A slot for a worker; a dead worker is replaced.

    Attributes:
        actor: actor of the worker.
        loading: reference to the worker's `Loaded`; None when the worker is ready.
        assignments: references to results, each with its shard, in the order in which the worker runs them.
        failed_loads: number of consecutive workers that died before they were ready.
    """

    actor: Any
    loading: Any
    assignments: deque[tuple[Any, _Assignment]] = field(default_factory=deque)
    failed_loads: int = 0

    @property
    def next_reference(self) -> Any:
        """Reference to the worker's next result; None for an idle worker."""
        if self.loading is not None:
            return self.loading
        return self.assignments[0][0] if self.assignments else None


class RayPool:
    """The workers of a Ray cluster as a `JobPool`, one session each; a context manager.

    ::

        with RayPool(Path("bundle"), job) as pool:
            done = run_job(job, pool)

    The cluster is filled with workers, each on one GPU if the cluster has GPUs and the backend uses them, else on
    ``threads`` cores. The bundle must have the same path on every node. If a worker is killed or its node is lost,
    another worker runs its shards again.

    Args:
        bundle: path of the bundle on every node.
        job: the job.
        backend: see :func:`hdruntime.load`.
        threads: CPU cores of a worker; None for one.
        address: ``auto`` for the cluster of this machine, ``host:port`` of a cluster's head, or None or "" for a
            cluster of this machine only, which ends with the block.

    Raises:
        MissingDependencyError: Ray is not installed.
        BackendUnavailableError: there is no such cluster, or the backend needs a GPU and the cluster has none.
        HdexportError: see `hdruntime.load`; raised by a worker.
    """

    computes_beside = True

    shard_characters = WINDOW_CHARACTERS
    """About how many characters a shard should have; inside the block, as many as suit the workers' backend."""

    loaded: Loaded | None = None
    """Report of the worker that was ready last."""

    def __init__(
        self,
        bundle: Path,
        job: Job,
        *,
        backend: str = "auto",
        threads: int | None = None,
        address: str | None = None,
    ) -> None:
        self._bundle = open_bundle(Path(bundle).resolve(), check_files=False)
        self._job = job
        self._backend = backend
        self._threads = threads
        self._address = address
        self._slots: list[_Slot] = []
        self._unassigned: deque[_Assignment] = deque()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> RayPool:
        with contextlib.ExitStack() as exits:
            self._ray = exits.enter_context(connected(self._address))
            exits.callback(self._kill_workers)
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            placement = worker_placement(nodes, self._bundle, backend=self._backend, threads=self._threads)
            logger.info(
                "Ray: %d workers, each %d CPU cores and %d GPUs", placement.workers, placement.cpus, placement.gpus
            )
            # `_replace` restarts workers: Ray would restart a worker forever that dies while it loads.
            self._actor_class = self._ray.remote(
                num_cpus=placement.cpus, num_gpus=placement.gpus, max_restarts=0, max_task_retries=0
            )(JobWorker)
            self._cpus = placement.cpus
            for _ in range(placement.workers):
                self._slots.append(_Slot(*self._new_worker()))
            while all(slot.loading is not None for slot in self._slots):
                self._wait()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def map(self, shards: Iterator[Shard]) -> Generator[tuple[Shard, ShardResult], None, None]:
        """Run every shard; see `hdruntime.jobs.shards.JobPool`. Workers that die repeatedly are a BackendError."""
        held: deque[_Assignment] = deque()
        more = True
        while held or more:
            while more and len(held) < _HELD_A_WORKER * len(self._slots) and (slot := self._free_slot()):
                shard = next(shards, None)
                if shard is None:
                    more = False
                else:
                    held.append(_Assignment(shard))
                    self._assign(slot, held[-1])
            if held and held[0].result is not None:
                assignment = held.popleft()
                assert assignment.result is not None
                yield assignment.shard, assignment.result
            elif held or more:
                self._wait()

    def _new_worker(self) -> tuple[Any, Any]:
        """An actor, and the reference to its `Loaded`."""
        actor = self._actor_class.remote()
        loading = actor.load.remote(
            self._bundle.path,
            self._job.options,
            backend=self._backend,
            threads=self._cpus,
            identity=identity_of_bundle(self._bundle.manifest),
        )
        return actor, loading

    def _free_slot(self) -> _Slot | None:
        """The ready slot with the fewest shards; None if all are busy or loading."""
        ready = [slot for slot in self._slots if slot.loading is None]
        free = min(ready, key=lambda slot: len(slot.assignments), default=None)
        return free if free is not None and len(free.assignments) < _SHARDS_PER_WORKER else None

    def _assign(self, slot: _Slot, assignment: _Assignment) -> None:
        slot.assignments.append((slot.actor.infer.remote(assignment.shard.rows), assignment))

    def _wait(self) -> None:
        """Wait for a result of a worker and take it; reassign the shards of dead workers."""
        references = {slot.next_reference: slot for slot in self._slots if slot.next_reference is not None}
        done, _ = self._ray.wait(list(references), num_returns=1, timeout=_PATIENCE_SECONDS)
        if not done:
            loading = sum(slot.loading is not None for slot in self._slots)
            logger.warning("Ray: no result for %d s; %d workers are loading", _PATIENCE_SECONDS, loading)
        for reference in done:
            self._take(references[reference], reference)
        while self._unassigned and (slot := self._free_slot()):
            self._assign(slot, self._unassigned.popleft())

    def _take(self, slot: _Slot, reference: Any) -> None:
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            # Ray wraps the error, with a traceback in the message.
            raise (error.cause if isinstance(error.cause, HdexportError) else error) from None
        except self._ray.exceptions.RayError as error:
            self._replace(slot, error)
            return
        if isinstance(value, Loaded):
            logger.info("Ray: a worker on %s runs %s", value.node, value.backend)
            self.shard_characters, self.loaded = value.shard_characters, value
            slot.loading, slot.failed_loads = None, 0
        else:
            _, assignment = slot.assignments.popleft()
            assignment.result = value

    def _replace(self, slot: _Slot, error: Exception) -> None:
        """Replace a dead worker and reassign its shards, unless too many workers died."""
        reason = str(error).strip()
        if slot.loading is not None:
            slot.failed_loads += 1
            if slot.failed_loads == _MAX_DEATHS:
                raise _death_error(f"loading the bundle {self._bundle.path}", reason)
        elif slot.assignments:
            first = slot.assignments[0][1]
            first.deaths += 1
            if first.deaths == _MAX_DEATHS:
                ids = f"{first.shard.rows[0].id} to {first.shard.rows[-1].id}"
                raise _death_error(f"running the rows {ids}", reason)
        logger.warning("Ray: a worker died and is replaced; its shards run again: %s", reason.partition("\n")[0])
        self._ray.kill(slot.actor)
        self._unassigned.extend(assignment for _, assignment in slot.assignments)
        slot.assignments.clear()
        slot.actor, slot.loading = self._new_worker()

    def _kill_workers(self) -> None:
        for slot in self._slots:
            self._ray.kill(slot.actor)
        self._slots = []


def _death_error(activity: str, reason: str) -> BackendError:
    return BackendError(
        f"{_MAX_DEATHS} workers of the Ray cluster died {activity}. Ray's message about the last one: {reason}",
        hint=(
            "If memory is short, reduce ",
            Setting("batch_tokens"),
            ", or use fewer workers with more ",
            Setting("threads"),
            " each.",
        ),
    )
