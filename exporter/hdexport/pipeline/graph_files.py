"""The graph files of a bundle: the portable graph, and the graphs that are lowered from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.graph.targets.registry import ONNX, targets_named
from hdexport.graph.targets.target import GraphRequest
from hdexport.model.task import TASKS
from hdruntime.bundle.manifest import GraphFile
from hdruntime.constants import PORTABLE_LOWERING
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.model.graph_module import GraphModule

_PORTABLE_FILE = "model.onnx"
_WEIGHTS_FILE = "model.onnx.data"

# Smaller constants stay in the graph file, where shape inference of every tool finds them.
_INLINE_BYTES = 1024


def portable_graph(module: GraphModule, directory: Path, *, max_len: int) -> onnx_ir.Model:
    """Trace, complete and write the portable graph, for inputs of at most so many tokens; frees the module's weights.

    Returns the graph that was written, its weights on the disk. ExportError if it holds logits of all tokens where they
    should be pooled in blocks.
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
    portable: onnx_ir.Model, directory: Path, request: GraphRequest, targets: Sequence[str]
) -> tuple[GraphFile, ...]:
    """Write the graphs for ONNX Runtime and these targets, which share the portable graph's weights; returns all graphs
    of the bundle, the portable one first.
    """
    graphs = [GraphFile(file=_PORTABLE_FILE, lowering=PORTABLE_LOWERING, dtype=request.dtype)]
    for target in targets_named([ONNX, *targets]):
        graphs += target.write(portable, directory, request)
    return tuple(graphs)


def _let_go_of_weights(module: GraphModule, model: onnx_ir.Model) -> None:
    """Free the weights, which are on the disk, although the module and the graph may still be referenced.

    The rewrite rules of onnxscript live as long as the process and keep everything in the last graph alive.
    """
    for value in model.graph.initializers.values():
        value.const_value = None
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.new_empty(0)
