"""Graphs and engines of a bundle that are verified here, in sets that one session runs, and the precision of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from hdruntime.backends.choice import why_unavailable
from hdruntime.backends.openvino.devices import chosen_device, chosen_precision, new_core
from hdruntime.backends.precision import OPTION_OF_GRAPHS, Precision
from hdruntime.bundle.manifest import Backend, EngineFile, GraphFile, Manifest
from hdruntime.bundle.reader import Bundle
from hdruntime.constants import CUDA_LOWERING, OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING
from hdruntime.errors import BackendUnavailableError, InputError
from hdruntime.gpu.driver import gpus
from hdruntime.optional import is_installed

_RUN_BY = {
    Backend.TENSORRT.value: (Backend.TENSORRT, Backend.TENSORRT_LEAN),
    Backend.TENSORRT_RTX.value: (Backend.TENSORRT_RTX,),
}
"""Flavour of an engine -> the backends that run it."""


@dataclass(frozen=True, kw_only=True)
class GraphSet:
    """Graphs, or an engine, that one session runs, in one precision.

    Attributes:
        graphs: for OpenVINO the graph for any batch and the graph for batches without padding, of which the runner
            takes one; for an engine none; else one.
        precision: the precision of its answers; ``auto`` on a GPU, where the bundle's type decides.
        backend: the backend that runs it on a GPU; None for a CPU.
        engine: the engine that runs in place of a graph.
    """

    graphs: tuple[GraphFile, ...]
    precision: Precision
    backend: Backend | None = None
    engine: EngineFile | None = None

    @property
    def name(self) -> str:
        """Name in reports and in the manifest: the files, and the precision where they do not tell it."""
        if self.engine is not None:
            return self.engine.file
        files = " and ".join(graph.file for graph in self.graphs)
        return f"{files} in bfloat16" if self.precision is Precision.BFLOAT16 else files

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

    @property
    def is_for_openvino(self) -> bool:
        """Whether OpenVINO runs it, and not ONNX Runtime."""
        return self.lowering == OPENVINO_LOWERING


def graph_sets(
    manifest: Manifest, asked: Collection[Precision] | None, leave_out: Callable[[str], None]
) -> list[GraphSet]:
    """The sets to run on this CPU. `asked` are the precisions to compute in; None for float32, for the precisions that
    the bundle has graphs for, and for bfloat16 if the bundle is of half precision, which is then a session's default.
    `leave_out` is called with a sentence for each graph and precision that is not run."""
    is_half = manifest.dtype != Precision.FLOAT32.value
    if asked is None:
        asked = {Precision.FLOAT32, *OPTION_OF_GRAPHS, *([Precision.BFLOAT16] if is_half else [])}
    found = []
    for graphs in _together(manifest.graphs):
        if graphs[0].lowering == CUDA_LOWERING:
            continue
        for precision in _precisions_of(graphs):
            made = GraphSet(graphs=graphs, precision=precision)
            reason = _why_not(made, manifest, asked)
            if reason is None:
                found.append(made)
            elif precision is not Precision.BFLOAT16 or precision in asked or is_half:
                leave_out(f"{made.name}: not checked: {reason}")
    return found


def gpu_sets(bundle: Bundle, asked: Backend | None, leave_out: Callable[[str], None]) -> list[GraphSet]:
    """The sets to run on this machine's GPU: the graph for CUDA, and every engine that runs here, by the backend
    `asked`, or by each that can run. A backend that was asked for and cannot run is refused."""
    manifest = bundle.manifest
    graphs = [graph for graph in manifest.graphs if graph.lowering == CUDA_LOWERING]
    ways = [
        *((GraphSet(graphs=(graph,), precision=Precision.AUTO), (Backend.ONNXRUNTIME_CUDA,)) for graph in graphs),
        *(
            (GraphSet(graphs=(), precision=Precision.AUTO, engine=engine), _RUN_BY[engine.flavour])
            for engine in manifest.engines
        ),
    ]
    found: list[GraphSet] = []
    reasons: list[str | None] = []
    for made, backends in ways:
        wanted = [backend for backend in backends if asked in (None, backend)]
        refusals = {backend: why_unavailable(made.alone(bundle), backend) for backend in wanted}
        runs = next((backend for backend, refusal in refusals.items() if refusal is None), None)
        if runs is not None:
            found.append(dataclasses.replace(made, backend=runs))
        elif refusals:
            reasons += refusals.values()
            why = str(next(iter(refusals.values()))).splitlines()[0] if gpus() else "that needs an NVIDIA GPU"
            command = f"hdexport verify BUNDLE --backend {wanted[0].value}"
            leave_out(f"{made.name}: not checked: {why.removesuffix('.')} ({command})")
    if asked is not None and not found:
        raise BackendUnavailableError(reasons[0] if reasons else f"{bundle.path} has nothing for {asked.value}.")
    return found


def check_precision(bundle: Bundle, precision: Precision) -> None:
    """Refuses a precision in which nothing of a bundle can be verified here."""
    if any(precision in _precisions_of(graphs) for graphs in _together(bundle.manifest.graphs)):
        if precision is Precision.BFLOAT16:
            chosen_precision(chosen_device(new_core(), None), precision, bundle.manifest)
        return
    option = OPTION_OF_GRAPHS.get(precision, "--target openvino")
    raise InputError(
        f"The bundle {bundle.path} has no graph that computes in {precision.value} on a CPU.\n"
        f"Build it again with {option}, or leave out --precision."
    )


def _together(graphs: Sequence[GraphFile]) -> Iterator[tuple[GraphFile, ...]]:
    """Graphs that one session runs, that for any batch first."""
    for graph in graphs:
        if graph.lowering == OPENVINO_LOWERING:
            unpadded = (other for other in graphs if other.lowering == OPENVINO_UNPADDED_LOWERING)
            yield (graph, *(other for other in unpadded if other.dtype == graph.dtype))
        elif graph.lowering != OPENVINO_UNPADDED_LOWERING:
            yield (graph,)


def _precisions_of(graphs: Sequence[GraphFile]) -> tuple[Precision, ...]:
    for precision in OPTION_OF_GRAPHS:
        if graphs[0].dtype == precision.value:
            return (precision,)
    if graphs[0].lowering == OPENVINO_LOWERING:
        return (Precision.FLOAT32, Precision.BFLOAT16)
    return (Precision.FLOAT32,)


def _why_not(graphs: GraphSet, manifest: Manifest, asked: Collection[Precision]) -> str | None:
    """Why they are not run; None where they are."""
    if graphs.precision not in asked:
        return f"{graphs.precision.value} was not asked for"
    if not graphs.is_for_openvino:
        is_bfloat16 = graphs.graphs[0].dtype == "bfloat16"
        return "ONNX Runtime has no bfloat16 on a CPU" if is_bfloat16 else None
    if not is_installed("openvino"):
        return "needs `pip install 'hdexport[openvino]'`"
    try:
        chosen_precision(chosen_device(new_core(), None), graphs.precision, manifest)
    except BackendUnavailableError:
        return f"this CPU does not compute in {graphs.precision.value}"
    return None
