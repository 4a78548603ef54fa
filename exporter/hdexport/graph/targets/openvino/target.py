"""The target ``openvino`` and its verification."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hdruntime
from hdexport.graph.targets.target import Changes, GraphRequest, Target
from hdruntime.backends.openvino import OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, GraphFile, Manifest
from hdruntime.bundle.verification import Skip, SkipCause
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import require

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.graph.targets.target import Run
    from hdruntime.arrays import FloatArray, IntArray
    from hdruntime.bundle.reader import Bundle


class OpenVinoTarget(Target):
    """The graph for any batch, and the one for batches without padding where it differs."""

    name = "openvino"
    help = "openvino adds those for OpenVINO"
    backend = Backend.OPENVINO
    lowerings = (OPENVINO_LOWERING, OPENVINO_UNPADDED_LOWERING)
    title = "OpenVINO"
    rounded = lowerings
    fuses_masks = True
    runs_parts = True

    def require(self) -> None:
        """Without the package the bundle could not be verified."""
        require("openvino")

    def write(self, portable: onnx_ir.Model, directory: Path, request: GraphRequest) -> list[GraphFile]:
        """In float32, whatever the portable graph is in."""
        from hdexport.graph.bundle_graph import write_graph
        from hdexport.graph.targets.openvino.lowering import lower_for_openvino

        differs = lower_for_openvino(for_any := portable.clone(), padded=True)
        graphs = {OPENVINO_LOWERING: for_any}
        if differs:
            lower_for_openvino(unpadded := portable.clone(), padded=False)
            graphs[OPENVINO_UNPADDED_LOWERING] = unpadded
        return [write_graph(graph, directory, lowering=lowering, dtype="float32") for lowering, graph in graphs.items()]

    def sets(self, graphs: Sequence[GraphFile]) -> Iterator[tuple[GraphFile, ...]]:
        """A session takes turns with the two graphs of a dtype."""
        for graph in graphs:
            if graph.lowering == OPENVINO_LOWERING:
                unpadded = (other for other in graphs if other.lowering == OPENVINO_UNPADDED_LOWERING)
                yield (graph, *(other for other in unpadded if other.dtype == graph.dtype))

    def precisions(self, graph: GraphFile) -> tuple[Precision, ...]:
        """A float graph computes in bfloat16, too."""
        precisions = super().precisions(graph)
        return (Precision.FLOAT32, Precision.BFLOAT16) if precisions == (Precision.FLOAT32,) else precisions

    def verification_skip(self, graph: GraphFile, precision: Precision, manifest: Manifest) -> Skip | None:
        """OpenVINO is not installed, or the CPU lacks the precision."""
        from hdruntime.backends.openvino.devices import chosen_device, chosen_precision, new_core

        skip = super().verification_skip(graph, precision, manifest)
        if skip is not None:
            return skip
        try:
            chosen_precision(chosen_device(new_core(), None), precision, manifest)
        except BackendUnavailableError:
            detail = f"this CPU does not compute in {precision}"
            return Skip(cause=SkipCause.NO_KERNEL, detail=detail)
        return None

    def weight_bytes(self, bundle: Bundle, precision: Precision) -> int:
        """OpenVINO has a copy of the weights in its own layout, beside float32 copies of half-precision weights."""
        manifest = bundle.manifest
        size = {Precision.INT8: 1, Precision.BFLOAT16: 2}.get(precision, 8 if manifest.stores_half_weights else 4)
        return size * manifest.parameters

    @contextlib.contextmanager
    def running(self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision) -> Iterator[Run]:
        """Run graphs through the runtime, as users do.

        Of a large model one graph is compiled at a time, since each has copies of the weights: the graph for batches
        without padding, or, once a batch has padding or one token, the other.
        """
        from hdruntime.backends.cpu_runner import give_memory_back
        from hdruntime.backends.openvino.runner import is_unpadded

        if len(graphs) == 1 or 4 * bundle.manifest.parameters < _LARGE_BYTES:
            with super().running(bundle, graphs, precision) as run:
                yield run
            return
        others = tuple(graph for graph in bundle.manifest.graphs if graph not in graphs[1:])
        padded = type(bundle)(bundle.path, dataclasses.replace(bundle.manifest, graphs=others))
        with contextlib.ExitStack() as opened:
            sessions: dict[bool, hdruntime.Session] = {}

            def run_alone(feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
                without = is_unpadded(bundle.manifest, feeds)
                if without not in sessions:
                    sessions.clear()
                    opened.close()
                    give_memory_back()
                    session = hdruntime.load(bundle if without else padded, self.backend, precision=precision)
                    sessions[without] = opened.enter_context(session)
                return sessions[without](**feeds)

            yield run_alone

    def graph_of(self, manifest: Manifest, graphs: tuple[GraphFile, ...], feeds: Mapping[str, IntArray]) -> GraphFile:
        """The first graph, or, for batches without padding, the last."""
        from hdruntime.backends.openvino.runner import is_unpadded

        return graphs[-1 if is_unpadded(manifest, feeds) else 0]

    def run_of(self, path: Path, graph: GraphFile, precision: Precision) -> Run:
        """Compile the part on the CPU, and run it by inference requests."""
        core = require("openvino").Core()
        return _run_of_model(core, core.read_model(path), precision)

    def changed_run(
        self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision, changes: Changes
    ) -> Run | None:
        """Run the graph that the runtime would run, with the changes."""
        from hdexport.graph.targets.openvino.changed_models import sampled, watch

        manifest, core = bundle.manifest, require("openvino").Core()
        models = {graph.file: core.read_model(bundle.file(graph.file)) for graph in graphs}
        for model in models.values():
            if changes.discrete_outputs is not None:
                watch(model, changes.discrete_outputs)
            if changes.is_sampled and not sampled(model, manifest.outputs[0].name, manifest.vocab_size):
                return None
        runs = {file: _run_of_model(core, model, precision) for file, model in models.items()}
        return lambda feeds: runs[self.graph_of(manifest, graphs, feeds).file](feeds)


_LARGE_BYTES = 2**30
"""Bytes of a model's weights in float32 from which a verification compiles one graph at a time."""

TARGETS = (OpenVinoTarget(),)


def _run_of_model(core: Any, model: Any, precision: Precision) -> Run:
    import numpy as np

    hint = {"INFERENCE_PRECISION_HINT": "bf16" if precision is Precision.BFLOAT16 else "f32"}
    compiled = core.compile_model(model, "CPU", hint)
    names = {name for value in compiled.inputs for name in value.names}

    def run(feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        request = compiled.create_infer_request()
        # Not `infer`, which loses errors on one CPU (OpenVINO 2026.4.1).
        request.start_async({name: array for name, array in feeds.items() if name in names})
        request.wait()
        # The results are in memory of the request.
        results = {value: np.array(request.get_tensor(value).data) for value in compiled.outputs}
        return {name: array for value, array in results.items() for name in value.get_names()}

    return run
