"""The graph files of a bundle: the portable graph, and the graphs that are lowered from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.model.task import TASKS
from hdruntime.bundle.manifest import Dtype, GraphFile
from hdruntime.constants import CPU_LOWERING, CUDA_LOWERING, PORTABLE_LOWERING
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.model.graph_module import GraphModule

_PORTABLE_FILE = "model.onnx"
_WEIGHTS_FILE = "model.onnx.data"
_CPU_FILE = "onnxruntime_cpu.onnx"
_CUDA_FILE = "onnxruntime_cuda.onnx"

# Smaller constants stay in the graph file, where shape inference of every tool finds them.
_INLINE_BYTES = 1024


def portable_graph(module: GraphModule, directory: Path, *, max_len: int) -> onnx_ir.Model:
    """Trace, complete and write the portable graph.

    Args:
        module: the module to trace; its weights are freed.
        directory: of the bundle.
        max_len: the longest input, in tokens.

    Returns:
        the graph that was written, its weights on the disk.

    Raises:
        ExportError: the graph holds logits of all tokens where they should be pooled in blocks.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    from hdexport.graph.passes.attach_functions import attach_functions
    from hdexport.graph.passes.lay_out_weights import lay_out_weights
    from hdexport.graph.passes.pool_in_blocks import pools_products
    from hdexport.graph.tracing import trace

    model = trace(module, max_len=max_len, vocab_size=module.model.config.vocab_size)
    attach_functions(model)
    ClearMetadataAndDocStringPass()(model)
    lay_out_weights(model)
    if TASKS[module.task].pools_logits and not pools_products(model):
        raise ExportError(
            f"The graph of a {module.model.config.model_type} pools no product of tokens with a weight, so that logits "
            "of all tokens would be in memory at once.\n"
            "Please report the model and the versions that `hdexport doctor` prints."
        )
    model.producer_name = "hdexport"
    path = directory / _PORTABLE_FILE
    ir.save(model, path, external_data=_WEIGHTS_FILE, size_threshold_bytes=_INLINE_BYTES)
    _let_go_of_weights(module, model)
    return ir.load(path)


def lowered_graphs(
    portable: onnx_ir.Model,
    directory: Path,
    *,
    dtype: Dtype,
    layers: int,
    ffn_chunk: int | None,
    openvino: bool,
) -> tuple[GraphFile, ...]:
    """Write the graphs for ONNX Runtime and OpenVINO, which share the portable graph's weights.

    That for ONNX Runtime on a GPU and that for texts without padding are only written where they differ.

    Args:
        portable: the result of `portable_graph`.
        directory: of the bundle.
        dtype: of the portable graph.
        layers: of the model.
        ffn_chunk: most tokens that a feed-forward network computes at once; None for all.
        openvino: whether graphs for OpenVINO are written, too.

    Returns:
        all graphs of the bundle, the portable one first.
    """
    import onnx_ir as ir

    from hdexport.graph.passes.chunk_feed_forward import chunk_feed_forward
    from hdexport.graph.passes.pool_in_blocks import pool_in_blocks
    from hdexport.graph.targets.onnxruntime_cpu import lower_for_onnxruntime_cpu
    from hdexport.graph.targets.onnxruntime_cuda import lower_for_onnxruntime_cuda
    from hdexport.graph.targets.openvino import write_openvino_graphs

    graphs = [GraphFile(file=_PORTABLE_FILE, lowering=PORTABLE_LOWERING, dtype=dtype)]
    for_gpu, chunked = portable.clone(), 0
    if ffn_chunk is not None:
        chunked = chunk_feed_forward(for_gpu, tokens=ffn_chunk, layers=layers)
    ir.save(lower_for_onnxruntime_cpu(for_gpu.clone()), directory / _CPU_FILE)
    graphs.append(GraphFile(file=_CPU_FILE, lowering=CPU_LOWERING, dtype="float32"))
    pooled = pool_in_blocks(for_gpu)
    if lower_for_onnxruntime_cuda(for_gpu) or chunked or pooled:
        ir.save(for_gpu, directory / _CUDA_FILE)
        graphs.append(GraphFile(file=_CUDA_FILE, lowering=CUDA_LOWERING, dtype=dtype))
    if openvino:
        graphs += write_openvino_graphs(portable, directory)
    return tuple(graphs)


def _let_go_of_weights(module: GraphModule, model: onnx_ir.Model) -> None:
    """Free the weights, which are on the disk, although the module and the graph may still be referenced.

    The rewrite rules of onnxscript live as long as the process and keep everything in the last graph alive.
    """
    for value in model.graph.initializers.values():
        value.const_value = None
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.new_empty(0)
