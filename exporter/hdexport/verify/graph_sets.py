"""Graphs and engines of a bundle that are verified here: sets that one session runs, each in a precision,
and the runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import hdruntime
from hdexport.graph.targets.registry import target_of, targets
from hdexport.graph.targets.target import Changes, Target
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.backends.choice import unavailable_reason
from hdruntime.backends.entry import UnavailableReason
from hdruntime.backends.precision import BUILD_OPTIONS, Precision
from hdruntime.backends.registry import backends, computing_in, needs_gpu
from hdruntime.bundle.manifest import Backend, EngineFile, GraphFile, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.bundle.verification import Skip, SkipCause
from hdruntime.errors import BackendError, BackendUnavailableError, BundleError, HdexportError, InputError, Setting
from hdruntime.gpu.driver import gpus

if TYPE_CHECKING:
    from hdexport.graph.targets.target import Run


@dataclass(frozen=True, kw_only=True)
class GraphSet:
    """Graphs, or an engine, that one session of `backend` runs, in one precision.

    Attributes:
        graphs: one, or graphs of which a runner takes one for each batch, that for any batch first; none for an engine.
        precision: the precision of its answers; ``auto`` on a GPU, where the bundle's type decides.
        engine: the engine that runs in place of a graph.
        part_bytes: maximum bytes of the weights of a part, where the graphs run part by part; None for whole graphs.
    """

    backend: Backend
    graphs: tuple[GraphFile, ...]
    precision: Precision
    engine: EngineFile | None = None
    part_bytes: int | None = None

    @property
    def is_on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return needs_gpu(self.backend)

    @property
    def target(self) -> Target:
        target = target_of(self.graphs[0].lowering)
        assert target is not None
        return target

    @property
    def name(self) -> str:
        """Name in reports and in the manifest: the files, and the precision where they do not tell it."""
        files = " and ".join(self.files)
        return f"{files} in bfloat16" if self.precision is Precision.BFLOAT16 else files

    @property
    def files(self) -> tuple[str, ...]:
        return (self.engine.file,) if self.engine is not None else tuple(graph.file for graph in self.graphs)

    @property
    def lowering(self) -> str | None:
        """Lowering of the graph that takes any batch; None for an engine."""
        return self.graphs[0].lowering if self.graphs else None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest text that an engine takes; None for all that the bundle takes."""
        return None if self.engine is None else max(profile.tokens[2] for profile in self.engine.profiles)

    def alone(self, bundle: Bundle) -> Bundle:
        """The bundle with this engine and no other, so that a session runs only this one."""
        engines = () if self.engine is None else (self.engine,)
        return Bundle(bundle.path, dataclasses.replace(bundle.manifest, engines=engines))


def graph_sets(
    manifest: Manifest,
    backend: Backend | None,
    precisions: Collection[Precision] | None,
    skip: Callable[[Skip], None],
) -> list[GraphSet]:
    """The sets to run on this CPU: by `backend`, or by every backend that runs here. `precisions` are the precisions to
    compute in; None for float32, for the precisions that the bundle has graphs for, and for bfloat16 if the bundle's
    weights are in half precision. `skip` is called for each graph and precision
    that is not run."""
    is_half = manifest.dtype != Precision.FLOAT32.value or manifest.stores_half_weights
    if precisions is None:
        precisions = {Precision.FLOAT32, *BUILD_OPTIONS, *([Precision.BFLOAT16] if is_half else [])}
    sets = []
    for target, graphs in _together(manifest.graphs):
        if backend not in (None, target.backend):
            continue
        for precision in target.precisions(graphs[0]):
            graph_set = GraphSet(backend=target.backend, graphs=graphs, precision=precision)
            reason = (
                target.verification_skip(graphs[0], precision, manifest)
                if precision in precisions
                else Skip(cause=SkipCause.PRECISION)
            )
            if reason is None:
                sets.append(graph_set)
            elif precision is not Precision.BFLOAT16 or precision in precisions or is_half:
                skip(dataclasses.replace(reason, graph=graph_set.name))
    for graph in manifest.graphs:
        if backend is None and target_of(graph.lowering) is None:
            detail = f"the target that wrote the lowering {graph.lowering}"
            skip(Skip(cause=SkipCause.NOT_INSTALLED, graph=graph.file, detail=detail))
    return sets


def gpu_sets(bundle: Bundle, backend: Backend | None, skip: Callable[[Skip], None]) -> list[GraphSet]:
    """The sets to run on this machine's GPU, the graph for CUDA and engines: by `backend`, or by every backend that
    runs here. Raises a BackendUnavailableError if `backend` cannot run here. `skip` is called for each graph and engine
    that is not run."""
    files: list[tuple[str, GraphFile | None, EngineFile | None, list[Backend]]] = []
    on_gpu = [entry for entry in backends() if entry.needs_gpu]
    for graph in bundle.manifest.graphs:
        if readers := [entry.name for entry in on_gpu if graph.lowering in entry.lowerings[:1]]:
            files.append((graph.file, graph, None, readers))
    for built in bundle.manifest.engines:
        files.append((built.file, None, built, [entry.name for entry in on_gpu if entry.variant == built.variant]))
    runnable: list[GraphSet] = []
    reasons: dict[Backend, UnavailableReason] = {}
    for name, lowered, engine, readers in files:
        candidates = [
            GraphSet(
                backend=reader,
                graphs=() if lowered is None else (lowered,),
                precision=Precision.AUTO,
                engine=engine,
            )
            for reader in readers
            if backend in (None, reader)
        ]
        of_file = {each: unavailable_reason(each.alone(bundle), each.backend) for each in candidates}
        runs = next((each for each, reason in of_file.items() if reason is None), None)
        if runs is not None:
            runnable.append(runs)
            continue
        for each, reason in of_file.items():
            assert reason is not None
            reasons.setdefault(each.backend, reason)
            if each is not candidates[0]:
                continue
            if gpus():
                skip(Skip(cause=SkipCause.BACKEND, graph=name, backend=each.backend, detail=reason.reason))
            else:
                skip(Skip(cause=SkipCause.NO_GPU, graph=name, backend=each.backend.value))
    if backend is not None and not runnable:
        if backend in reasons:
            raise reasons[backend].error(backend, bundle)
        raise BackendUnavailableError(
            f"{bundle.path} has nothing for {backend}.",
            hint=("Leave out ", Setting("backend"), " to verify the graphs and engines that the bundle has."),
        )
    return runnable


def check_precision(bundle: Bundle, precision: Precision) -> None:
    """Rejects a precision in which nothing of a bundle can be verified here."""
    able = [target for target, graphs in _together(bundle.manifest.graphs) if precision in target.precisions(graphs[0])]
    if able:
        able[0].require()
        reasons = [unavailable_reason(bundle, target.backend, precision=precision) for target in able]
        if reasons[0] is not None and all(reasons):
            raise reasons[0].error(able[0].backend, bundle)
        return
    option = BUILD_OPTIONS.get(precision, Setting("targets", computing_in(precision)[0].target, command="build"))
    raise InputError(
        f"The bundle {bundle.path} has no graph that computes in {precision} on a CPU.",
        hint=("Build it again with ", option, ", or leave out ", Setting("precision"), "."),
    )


class Opened(NamedTuple):
    """Graphs or an engine that are ready to run.

    Attributes:
        run: runs a batch; None where the changes are not possible.
        parts: number of parts that a graph runs in, one after another.
    """

    run: Run | None
    parts: int = 1


@contextlib.contextmanager
def opened(bundle: Bundle, graphs: GraphSet, changes: Changes) -> Iterator[Opened]:
    """Runs lowered graphs and engines through the runtime, as users do, and changed graphs and the portable one alone.
    Changes are not possible on a GPU, or where a graph's last projection is not found. What
    cannot be loaded on a GPU raises its error in every run, so that each case has a reason."""
    if not graphs.is_on_gpu:
        if changes:
            yield Opened(graphs.target.changed_run(bundle, graphs.graphs, graphs.precision, changes))
            return
        with graphs.target.running(bundle, graphs.graphs, graphs.precision) as run:
            yield Opened(run)
        return
    if changes.is_sampled:
        yield Opened(None)
        return
    try:
        session = hdruntime.load(graphs.alone(bundle), graphs.backend)
    except (BackendError, BundleError) as error:
        yield Opened(functools.partial(_raise, error))
        return
    with session:
        yield Opened(lambda feeds: session(**feeds))


def _together(graphs: Sequence[GraphFile]) -> list[tuple[Target, tuple[GraphFile, ...]]]:
    """Graphs for a CPU that one session runs, and their target, in the order of the graphs."""
    pairs = [(target, each) for target in targets() for each in target.sets(graphs)]
    return sorted(pairs, key=lambda pair: graphs.index(pair[1][0]))


def _raise(error: HdexportError, feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
    raise error
