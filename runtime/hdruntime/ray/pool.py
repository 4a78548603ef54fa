"""A batch job over the workers of a Ray cluster: in order, each window once, whatever becomes of a worker."""

from __future__ import annotations

__all__ = ["RayPool"]

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, HdexportError
from hdruntime.jobs import Job
from hdruntime.jobs.identity import identity_of_bundle
from hdruntime.jobs.windows import WINDOW_CHARACTERS, Window, WindowResult
from hdruntime.ray.cluster import connected, places
from hdruntime.ray.worker import Loaded, WindowWorker

logger = logging.getLogger(__name__)

_WINDOWS_A_WORKER = 2
"""One that is done and one that is there when that is finished."""

_HELD_A_WORKER = 4
"""Windows that are in the driver's memory for each worker: those, and results that wait for an earlier one."""

_MOST_DEATHS = 3
"""So many workers may die over one window, or loading, before it is taken for the window's or the bundle's fault."""

_PATIENCE_SECONDS = 60
"""Without news for so long, the log says what is waited for."""


@dataclass(eq=False)
class _Piece:
    """A window on its way: with a worker, or waiting for its turn with its result."""

    window: Window
    result: WindowResult | None = None
    deaths: int = 0


@dataclass(eq=False)
class _Place:
    """Where a worker runs; when it dies, another takes its place.

    Attributes:
        actor: the worker.
        loading: what it answers when it is ready, None once it has.
        pieces: what it was given, each with what will be its result; it does them in this order.
        failed_loads: workers in a row that died here before they were ready.
    """

    actor: Any
    loading: Any
    pieces: deque[tuple[Any, _Piece]] = field(default_factory=deque)
    failed_loads: int = 0

    @property
    def next_answer(self) -> Any:
        """What the worker will answer next, None if nothing."""
        if self.loading is not None:
            return self.loading
        return self.pieces[0][0] if self.pieces else None


class RayPool:
    """The workers of a Ray cluster as a `WindowPool`, one session each; a context manager.

    ::

        with RayPool(Path("bundle"), job) as pool:
            done = run_job(job, pool)

    As many workers as the cluster has place for: a GPU each where there are some and the backend uses them, else
    ``threads`` cores each. The bundle must be at the same path on every node. When a worker is killed or its node is
    lost, another is started, and the windows that it had are done again.

    Args:
        bundle: its directory, which every node has.
        job: what will be run.
        backend: as :func:`hdruntime.load` takes it.
        threads: CPU cores of a worker; None for one.
        address: ``auto`` for the cluster that this machine is a node of, or ``host:port`` of its head; None or "" for
            one of this machine alone that ends with the block.

    Raises:
        MissingDependencyError: Ray is not installed.
        BackendUnavailableError: there is no such cluster, or no GPU in it that the backend needs.
        HdexportError: as `hdruntime.load`, from the worker that was ready first.
    """

    window_characters = WINDOW_CHARACTERS
    """What a window should have, about; when the block has begun, what suits the workers' backend."""

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
            # Restarts are ours to make: Ray would restart a worker for ever that dies whenever it loads.
            self._actor_class = self._ray.remote(
                num_cpus=place.cpus, num_gpus=place.gpus, max_restarts=0, max_task_retries=0
            )(WindowWorker)
            self._cpus = place.cpus
            for _ in range(place.workers):
                self._places.append(_Place(*self._new_worker()))
            while all(place.loading is not None for place in self._places):
                self._wait()
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def map(self, windows: Iterator[Window]) -> Iterator[tuple[Window, WindowResult]]:
        """Do every window; see `hdruntime.jobs.windows.WindowPool`.

        Raises:
            BackendError: a backend is broken, or workers die over and over.
        """
        held: deque[_Piece] = deque()
        more = True
        while held or more:
            while more and len(held) < _HELD_A_WORKER * len(self._places) and (place := self._free_place()):
                window = next(windows, None)
                if window is None:
                    more = False
                else:
                    held.append(_Piece(window))
                    self._give(place, held[-1])
            if held and held[0].result is not None:
                piece = held.popleft()
                assert piece.result is not None
                yield piece.window, piece.result
            elif held or more:
                self._wait()

    def _new_worker(self) -> tuple[Any, Any]:
        """An actor, and what it answers when it has loaded the bundle."""
        actor = self._actor_class.remote()
        loading = actor.load.remote(
            self._bundle.path,
            self._job.options,
            tokenized=self._job.options.columns.input_ids is not None,
            backend=self._backend,
            threads=self._cpus,
            identity=identity_of_bundle(self._bundle.manifest),
        )
        return actor, loading

    def _free_place(self) -> _Place | None:
        """The place with the least to do, None if all have enough or are not ready."""
        ready = [place for place in self._places if place.loading is None]
        free = min(ready, key=lambda place: len(place.pieces), default=None)
        return free if free is not None and len(free.pieces) < _WINDOWS_A_WORKER else None

    def _give(self, place: _Place, piece: _Piece) -> None:
        place.pieces.append((place.actor.infer.remote(piece.window.rows), piece))

    def _wait(self) -> None:
        """Wait for some worker's answer and take it; give out what a dead worker had."""
        answers = {place.next_answer: place for place in self._places if place.next_answer is not None}
        done, _ = self._ray.wait(list(answers), num_returns=1, timeout=_PATIENCE_SECONDS)
        if not done:
            loading = sum(place.loading is not None for place in self._places)
            logger.warning("Ray: nothing for %d s; %d workers have not loaded yet", _PATIENCE_SECONDS, loading)
        for answer in done:
            self._take(answers[answer], answer)
        while self._again and (place := self._free_place()):
            self._give(place, self._again.popleft())

    def _take(self, place: _Place, answer: Any) -> None:
        try:
            value = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            # Ray makes an error of its own of ours, with a traceback in its message.
            raise (error.cause if isinstance(error.cause, HdexportError) else error) from None
        except self._ray.exceptions.RayError as error:
            self._replace(place, error)
            return
        if isinstance(value, Loaded):
            logger.info("Ray: a worker on %s runs %s", value.node, value.backend.value)
            self.window_characters = value.window_characters
            place.loading, place.failed_loads = None, 0
        else:
            _, piece = place.pieces.popleft()
            piece.result = value

    def _replace(self, place: _Place, error: Exception) -> None:
        """Start a worker where one has died, and have its windows done again, unless too many have died."""
        reason = str(error).strip()
        if place.loading is not None:
            place.failed_loads += 1
            if place.failed_loads == _MOST_DEATHS:
                raise _dying(f"loading the bundle {self._bundle.path}", reason)
        elif place.pieces:
            first = place.pieces[0][1]
            first.deaths += 1
            if first.deaths == _MOST_DEATHS:
                ids = f"{first.window.rows[0].id} to {first.window.rows[-1].id}"
                raise _dying(f"running the rows {ids}", reason)
        logger.warning("Ray: a worker died and is replaced; what it had is done again: %s", reason.partition("\n")[0])
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
        f"{_MOST_DEATHS} workers of the Ray cluster died {doing}. Ray says of the last: {reason}\n"
        "If memory was short, use smaller batches (--batch-tokens) or fewer workers (more --threads each)."
    )
