"""The target ``onnx``, which every build writes, and its verification."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hdruntime
from hdexport.graph.targets.target import Changes, GraphRequest, Target
from hdruntime.backends.onnxruntime import CPU_LOWERING, CUDA_LOWERING
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Backend, GraphFile, Manifest
from hdruntime.bundle.verification import Skip, SkipCause
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import BackendUnavailableError

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.graph.targets.target import Run
    from hdruntime.arrays import FloatArray, IntArray
    from hdruntime.bundle.reader import Bundle

_PROVIDER = "CPUExecutionProvider"


class OnnxTarget(Target):
    """The graphs for ONNX Runtime, on a CPU and on an NVIDIA GPU."""

    name = "onnx"
    help = "The ONNX graphs are always built"
    backend = Backend.ONNXRUNTIME
    lowerings = (PORTABLE_LOWERING, CPU_LOWERING, CUDA_LOWERING)
    title = "ONNX Runtime"
    rounded = (CPU_LOWERING,)
    runs_parts = True

    def write(self, portable: onnx_ir.Model, directory: Path, request: GraphRequest) -> list[GraphFile]:
        """The graph for a GPU is only written where it differs from the portable one."""
        from hdexport.graph.bundle_graph import write_graph
        from hdexport.graph.passes.chunk_feed_forward import ChunkFeedForward
        from hdexport.graph.passes.graph_pass import run_passes
        from hdexport.graph.passes.zero_padding import ZeroPadding
        from hdexport.graph.targets.onnxruntime.cpu import lower_for_onnxruntime_cpu
        from hdexport.graph.targets.onnxruntime.cuda import lower_for_onnxruntime_cuda

        chunking = [] if request.ffn_chunk is None else [ChunkFeedForward(request.ffn_chunk, layers=request.layers)]
        for_gpu = portable.clone()
        chunked = run_passes(for_gpu, chunking)
        cpu_graph = lower_for_onnxruntime_cpu(for_gpu.clone())
        for_cpu = write_graph(cpu_graph, directory, lowering=CPU_LOWERING, dtype="float32")
        if not (lower_for_onnxruntime_cuda(for_gpu) or chunked):
            return [for_cpu]
        run_passes(for_gpu, [ZeroPadding()])
        return [for_cpu, write_graph(for_gpu, directory, lowering=CUDA_LOWERING, dtype=request.dtype)]

    def sets(self, graphs: Sequence[GraphFile]) -> Iterator[tuple[GraphFile, ...]]:
        """All but that for a GPU."""
        return super().sets([graph for graph in graphs if graph.lowering != CUDA_LOWERING])

    def precisions(self, graph: GraphFile) -> tuple[Precision, ...]:
        """The float graph for a CPU computes in bfloat16, too, where ONNX Runtime has that."""
        precisions = super().precisions(graph)
        if graph.lowering != CPU_LOWERING or Precision.FLOAT32 not in precisions:
            return precisions
        return tuple(each for each in self.entry.precisions if not each.has_graphs)

    def verification_skip(self, graph: GraphFile, precision: Precision, manifest: Manifest) -> Skip | None:
        """Kernels are missing for a portable graph in bfloat16, or the CPU lacks the precision."""
        from hdruntime.backends.onnxruntime.bfloat16 import check_bfloat16

        if graph.dtype == "bfloat16":
            return Skip(cause=SkipCause.NO_KERNEL, detail="ONNX Runtime has no bfloat16 graphs on a CPU")
        if precision is Precision.BFLOAT16:
            try:
                check_bfloat16(manifest)
            except BackendUnavailableError:
                return Skip(cause=SkipCause.NO_KERNEL, detail=f"this CPU does not compute in {precision}")
        return None

    @contextlib.contextmanager
    def running(self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision) -> Iterator[Run]:
        """The portable graph as it is, that for a CPU as users run it.

        Threads do not spin while they wait: they would keep the cores from PyTorch's, which runs between two cases.
        """
        from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
        from hdruntime.backends.onnxruntime.sessions import open_session, session_options

        if graphs[0].lowering == PORTABLE_LOWERING:
            options = session_options(None, spinning=False)
            yield _plain_run(open_session(bundle, graphs[0], options, providers=[(_PROVIDER, {})]))
            return
        opened = OnnxRuntimeRunner(bundle, spinning=False, precision=precision)
        with hdruntime.Session(bundle, opened) as session:
            yield lambda feeds: session(**feeds)

    def runs_padding(self, graph: GraphFile) -> bool:
        """The portable graph, as other programs do."""
        return graph.lowering == PORTABLE_LOWERING

    def run_of(self, path: Path, graph: GraphFile, precision: Precision) -> Run:
        """Open the part in a session on the CPU, with the kernels of the runtime's session."""
        import onnxruntime

        from hdruntime.backends.onnxruntime.cpu import SLOW_FUSIONS
        from hdruntime.backends.onnxruntime.sessions import session_options

        options = session_options(None, spinning=False, precision=precision)
        disabled = [] if self.runs_padding(graph) else SLOW_FUSIONS
        return _plain_run(
            onnxruntime.InferenceSession(path, options, providers=[_PROVIDER], disabled_optimizers=disabled)
        )

    def changed_run(
        self, bundle: Bundle, graphs: tuple[GraphFile, ...], precision: Precision, changes: Changes
    ) -> Run | None:
        """In memory; the weights stay in the bundle's files."""
        import onnx_ir as ir
        import onnxruntime

        from hdexport.graph.bundle_graph import read_graph
        from hdexport.graph.vocabulary_head import sampled_graph
        from hdruntime.backends.onnxruntime.sessions import session_options

        model, manifest = read_graph(bundle, graphs[0]), bundle.manifest
        if changes.discrete_outputs is not None:
            changes.discrete_outputs.watch(model)
        if changes.is_sampled and not sampled_graph(model, manifest.outputs[0].name, manifest.vocab_size):
            return None
        options = session_options(None, spinning=False, precision=precision)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
        content = ir.to_proto(model).SerializeToString()
        return _plain_run(onnxruntime.InferenceSession(content, options, providers=[_PROVIDER]))


TARGETS = (OnnxTarget(),)


def _plain_run(session: Any) -> Run:
    outputs = [value.name for value in session.get_outputs()]

    def run(feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        return dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True))

    return run
