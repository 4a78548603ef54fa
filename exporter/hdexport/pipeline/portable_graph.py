"""The portable graph of a bundle, from which all others are lowered, and the manifest that describes it."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import onnx_ir as ir

from hdexport.attention.attention_type import AttentionConversion, OperatorNode
from hdexport.attention.registry import attention_records, check_unseen_tokens
from hdexport.checkpoint import Checkpoint
from hdexport.graph.bundle_graph import graph_file
from hdexport.graph.passes.graph_pass import run_passes
from hdexport.lowering.kernel_nodes import kernel_records
from hdexport.lowering.nodes import attributes_of, operator_nodes, operator_of
from hdexport.model.memory_cache import counts_tokens
from hdexport.model.task import TASKS
from hdexport.pipeline.options import BuildOptions
from hdplugins import ONNX_DOMAIN
from hdruntime.bundle.manifest import Manifest, Positions, Role, TensorDtype, TensorSpec
from hdruntime.constants import FORMAT_VERSION, PORTABLE_LOWERING, WEIGHTS_FILE

if TYPE_CHECKING:
    from hdexport.graph.tracing import Trace
    from hdexport.model.graph_module import GraphModule

_FILE = "model.onnx"

# Smaller constants stay in the graph file, where shape inference of every tool finds them.
_INLINE_BYTES = 1024


def portable_graph(module: GraphModule, directory: Path, *, max_len: int, computes_in_float32: bool) -> Trace:
    """Trace, complete and write the portable graph, for inputs of at most so many tokens; frees the module's weights.

    A module that computes in float32 may have weights in half precision, which the graph upcasts. The returned graph is
    the one that was written, its weights on the disk. ExportError if it holds wide logits of all tokens, which should
    be pooled in blocks.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    from hdexport.graph.passes.attach_functions import AttachFunctions
    from hdexport.graph.passes.lay_out_weights import LayOutWeights
    from hdexport.graph.passes.pool_in_blocks import check_pools_logits
    from hdexport.graph.passes.store_half_weights import StoreHalfWeights
    from hdexport.graph.tracing import Trace, trace
    from hdexport.model.half_weights import VirtualWeights

    virtual = VirtualWeights(module) if computes_in_float32 else None
    model, branches = trace(module, max_len=max_len, vocab_size=module.model.config.vocab_size)
    passes = [AttachFunctions(), ClearMetadataAndDocStringPass(), *([StoreHalfWeights(virtual)] if virtual else [])]
    run_passes(model, [*passes, LayOutWeights()])
    # Logits of a small vocabulary are no wider than the states, which are in memory anyway.
    is_wide = module.model.config.vocab_size > module.model.config.hidden_size
    if TASKS[module.task].pools_logits and is_wide:
        check_pools_logits(model, model_type=module.model.config.model_type)
    model.producer_name = "hdexport"
    path = directory / _FILE
    ir.save(model, path, external_data=WEIGHTS_FILE, size_threshold_bytes=_INLINE_BYTES)
    _let_go_of_weights(module, model)
    return Trace(ir.load(path), branches)


def manifest_of_graph(
    traced: Trace,
    module: GraphModule,
    checkpoint: Checkpoint,
    positions: Positions,
    conversions: Mapping[str, AttentionConversion],
    options: BuildOptions,
    *,
    parameters: int,
) -> Manifest:
    """The manifest of a bundle when its portable graph is written, of the traced module.

    Other graphs, engines, tokenizer, settings of sentence-transformers, files and verification come later. ModelError
    if attention cannot hide tokens from others, and the model adds such tokens.
    """
    config, task, portable = module.model.config, module.task, traced.model
    nodes = [OperatorNode(operator_of(node).name, attributes_of(node)) for node in operator_nodes(portable)]
    if any(spec.role is Role.ATTENDED for spec in module.inputs):
        check_unseen_tokens(conversions, nodes, model_type=checkpoint.config["model_type"])
    return Manifest(
        format_version=FORMAT_VERSION,
        name=checkpoint.name,
        model_type=checkpoint.config["model_type"],
        task=task,
        max_len=options.max_len,
        dtype=options.precision,
        hidden_size=_token_width(portable, default=checkpoint.family.token_width(config)),
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        parameters=parameters,
        positions=positions,
        operators=dict(Counter(f"{ONNX_DOMAIN}::{node.operator}" for node in nodes)),
        kernel_nodes=options.engines.chosen(kernel_records(portable, dtype=options.precision)),
        attention=tuple(attention_records(conversions, nodes)),
        inputs=module.inputs,
        outputs=tuple(_tensor_spec(value) for value in portable.graph.outputs),
        graphs=(graph_file(portable, _FILE, lowering=PORTABLE_LOWERING, dtype=options.precision),),
        engines=(),
        tokenizer=None,
        padding=next(
            (conversion.padding for conversion in conversions.values() if conversion.padding is not None), None
        ),
        labels=tuple(config.id2label[index] for index in sorted(config.id2label)) if TASKS[task].has_labels else (),
        verification=None,
        made_by=_made_by(checkpoint, options),
        branches=traced.branches,
        ffn_chunk=options.ffn_chunk,
        document_tokens=options.max_len if counts_tokens(module.inputs) else None,
        adapter=checkpoint.adapter,
        files={},
    )


def _let_go_of_weights(module: GraphModule, model: ir.Model) -> None:
    """Free the weights, which are on the disk, although the module and the graph may still be referenced.

    The rewrite rules of onnxscript live as long as the process and keep everything in the last graph alive.
    """
    for value in model.graph.initializers.values():
        value.const_value = None
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.new_empty(0)


def _token_width(portable: ir.Model, *, default: int) -> int:
    """Width of the vectors that a graph gives for tokens; the default where it gives none."""
    shapes = {str(value.name): value.shape for value in portable.graph.outputs}
    shape = shapes.get("last_hidden_state")
    return default if shape is None else int(shape[2])


def _tensor_spec(value: ir.Value) -> TensorSpec:
    assert value.name is not None
    assert value.dtype is not None
    assert value.shape is not None
    return TensorSpec(
        name=value.name,
        dtype=cast(TensorDtype, str(value.dtype.numpy())),
        shape=tuple(axis if isinstance(axis, int) else str(axis) for axis in value.shape),
    )


def _made_by(checkpoint: Checkpoint, options: BuildOptions) -> dict[str, str]:
    packages = ("hdexport", "torch", "transformers", "onnx", "onnxruntime")
    return {
        "command": options.command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "source": checkpoint.source,
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
    }
