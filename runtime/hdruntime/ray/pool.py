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
from hdruntime.ray.cluster import connected, places
from hdruntime.ray.worker import JobWorker, Loaded
from hdruntime.tasks.text_inference import WINDOW_CHARACTERS

logger = logging.getLogger(__name__)

_SHARDS_PER_WORKER = 2
"""One shard that runs, and one that waits for the first to end."""

_HELD_A_WORKER = 4
"""Shards in the driver's memory for each worker: the worker's, and results that wait for an earlier one."""

_MOST_DEATHS = 3
"""The job ends with an error when so many workers died over one shard, or while they loaded the bundle."""

_PATIENCE_SECONDS = 60
"""After so long without an answer, the log says how many workers have not loaded."""


@dataclass(eq=False)
class _Piece:
    """A shard that a worker has, or whose result waits for an earlier one."""

    shard: Shard
    result: ShardResult | None = None
    deaths: int = 0


@dataclass(eq=False)
class _Place:
    """A slot for a worker; when it dies, another replaces it.

    Attributes:
        loading: the worker's answer when it is ready; None after that.
        pieces: the results to come, each with its shard, in the order in which the worker runs them.
        failed_loads: workers in a row that died here before they were ready.
    """

    actor: Any
    loading: Any
    pieces: deque[tuple[Any, _Piece]] = field(default_factory=deque)
    failed_loads: int = 0

    @property
    def next_answer(self) -> Any:
        """The worker's next answer; None if it has nothing to do."""
        if self.loading is not None:
            return self.loading
        return self.pieces[0][0] if self.pieces else None


class RayPool:
    """The workers of a Ray cluster as a `JobPool`, one session each; a context manager.

    ::

        with RayPool(Path("bundle"), job) as pool:
            done = run_job(job, pool)

    As many workers as fit on the cluster: one GPU each if there are GPUs and the backend uses them, else ``threads``
    cores each. The bundle must be at the same path on every node. When a worker is killed or its node is lost, another
    starts and runs its shards again.

    Args:
        bundle: its directory, at this path on every node.
        job: to run.
        backend: as :func:`hdruntime.load` takes it.
        threads: CPU cores of a worker; None for one.
        address: ``auto`` for the cluster that this machine is a node of, or ``host:port`` of its head; None or "" for
            one of this machine alone that ends with the block.

    Raises:
        MissingDependencyError: Ray is not installed.
        BackendUnavailableError: there is no such cluster, or no GPU in it that the backend needs.
        HdexportError: as `hdruntime.load`, from the worker that was ready first.
    """

    computes_beside = True

    shard_characters = WINDOW_CHARACTERS
    """About how many characters a shard should have; inside the block, as many as suit the workers' backend."""

    loaded: Loaded | None = None
    """The report of the latest worker when it was ready."""

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
        self._places: list[_Place] = []
        self._again: deque[_Piece] = deque()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> RayPool:
        with contextlib.ExitStack() as exits:
            self._ray = exits.enter_context(connected(self._address))
            exits.callback(self._kill_workers)
            nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
            place = places(nodes, self._bundle, backend=self._backend, threads=self._threads)
            logger.info("Ray: %d workers, each %d CPU cores and %d GPUs", place.workers, place.cpus, place.gpus)
            # We restart workers ourselves: Ray would restart one forever that dies each time it loads.
            self._actor_class = self._ray.remote(
                num_cpus=place.cpus, num_gpus=place.gpus, max_restarts=0, max_task_retries=0
            )(JobWorker)
            self._cpus = place.cpus
            for _ in range(place.workers):
                self._places.append(_Place(*self._new_worker()))
            while all(place.loading is not None for place in self._places):
                self._wait()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def map(self, shards: Iterator[Shard]) -> Generator[tuple[Shard, ShardResult], None, None]:
        """Run every shard; see `hdruntime.jobs.shards.JobPool`. Workers that die repeatedly are a BackendError."""
        held: deque[_Piece] = deque()
        more = True
        while held or more:
            while more and len(held) < _HELD_A_WORKER * len(self._places) and (place := self._free_place()):
                shard = next(shards, None)
                if shard is None:
                    more = False
                else:
                    held.append(_Piece(shard))
                    self._give(place, held[-1])
            if held and held[0].result is not None:
                piece = held.popleft()
                assert piece.result is not None
                yield piece.shard, piece.result
            elif held or more:
                self._wait()

    def _new_worker(self) -> tuple[Any, Any]:
        """An actor, and its answer when it has loaded the bundle."""
        actor = self._actor_class.remote()
        loading = actor.load.remote(
            self._bundle.path,
            self._job.options,
            backend=self._backend,
            threads=self._cpus,
            identity=identity_of_bundle(self._bundle.manifest),
        )
        return actor, loading

    def _free_place(self) -> _Place | None:
        """The place with the fewest shards; None if all are busy or not ready."""
        ready = [place for place in self._places if place.loading is None]
        free = min(ready, key=lambda place: len(place.pieces), default=None)
        return free if free is not None and len(free.pieces) < _SHARDS_PER_WORKER else None

    def _give(self, place: _Place, piece: _Piece) -> None:
        place.pieces.append((place.actor.infer.remote(piece.shard.rows), piece))

    def _wait(self) -> None:
        """Wait for a worker's answer and take it; hand out the shards of a dead worker."""
        answers = {place.next_answer: place for place in self._places if place.next_answer is not None}
        done, _ = self._ray.wait(list(answers), num_returns=1, timeout=_PATIENCE_SECONDS)
        if not done:
            loading = sum(place.loading is not None for place in self._places)
            logger.warning("Ray: no answer for %d s; %d workers have not loaded yet", _PATIENCE_SECONDS, loading)
        for answer in done:
            self._take(answers[answer], answer)
        while self._again and (place := self._free_place()):
            self._give(place, self._again.popleft())

    def _take(self, place: _Place, answer: Any) -> None:
        try:
            value = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            # Ray wraps our errors in its own, with a traceback in the message.
            raise (error.cause if isinstance(error.cause, HdexportError) else error) from None
        except self._ray.exceptions.RayError as error:
            self._replace(place, error)
            return
        if isinstance(value, Loaded):
            logger.info("Ray: a worker on %s runs %s", value.node, value.backend)
            self.shard_characters, self.loaded = value.shard_characters, value
            place.loading, place.failed_loads = None, 0
        else:
            _, piece = place.pieces.popleft()
            piece.result = value

    def _replace(self, place: _Place, error: Exception) -> None:
        """Replace a dead worker and run its shards again, unless too many have died."""
        reason = str(error).strip()
        if place.loading is not None:
            place.failed_loads += 1
            if place.failed_loads == _MOST_DEATHS:
                raise _dying(f"loading the bundle {self._bundle.path}", reason)
        elif place.pieces:
            first = place.pieces[0][1]
            first.deaths += 1
            if first.deaths == _MOST_DEATHS:
                ids = f"{first.shard.rows[0].id} to {first.shard.rows[-1].id}"
                raise _dying(f"running the rows {ids}", reason)
        logger.warning("Ray: a worker died and is replaced; its shards run again: %s", reason.partition("\n")[0])
        self._ray.kill(place.actor)
        self._again.extend(piece for _, piece in place.pieces)
        place.pieces.clear()
        place.actor, place.loading = self._new_worker()

    def _kill_workers(self) -> None:
        for place in self._places:
            self._ray.kill(place.actor)
        self._places = []


def _dying(doing: str, reason: str) -> BackendError:
    return BackendError(
        f"{_MOST_DEATHS} workers of the Ray cluster died {doing}. Ray says about the last one: {reason}",
        hint=(
            "If memory is short, reduce ",
            Setting("batch_tokens"),
            ", or use fewer workers with more ",
            Setting("threads"),
            " each.",
        ),
    )
