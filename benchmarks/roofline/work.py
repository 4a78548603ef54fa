"""The least work of a model for a batch, counted in its portable graph, and how near a run came to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.roofline.ceilings import Ceilings
from hdexport.graph.bundle_graph import read_portable_graph
from hdexport.lowering.nodes import attributes_of, operator_nodes, operator_of
from hdplugins import Operator
from hdruntime.bundle.manifest import Role
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir

_TABLE = "listed_blocks"
"""Input of an operator whose content decides the pairs."""

_SHAPE_BYTES = 256
"""Size of constants that may be folded while shapes are computed: other shapes, no weights."""

_NOT_COUNTED = frozenset({"Attention", "Conv", "ConvTranspose", "Einsum"})
"""Products that none of our graphs has, and that this module would not count."""


class Work(NamedTuple):
    """The least cost of one batch.

    Attributes:
        flops: floating-point operations of all matrix products, 2 per multiply-add; attention operators count queries
            and keys that see each other. Softmax, normalisation and activations are not counted.
        dense_flops: the same, had every attention operator been dense.
        moved_bytes: a lower bound of the traffic on the memory bus: every weight, input and output once, as if all
            activations stayed in caches. A table that is looked up counts one row per index, or the whole table if it
            has fewer.
    """

    flops: int
    dense_flops: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Minimum work of a batch, and the fraction of the machine's best rates that a case reached.

    Attributes:
        bound_ms: time of the work at the machine's best rates.
        fraction: `bound_ms` divided by the median latency.
    """

    flops: int
    dense_flops: int
    moved_bytes: int
    bound_ms: float
    fraction: float


def work_of(bundle_path: Path, *, batch: int, tokens: int) -> Work:
    """Counts the work of a bundle's portable graph for single texts without padding, `tokens` each, without reading the
    weights. Carried states are as short as the model allows. A product that cannot be counted is an ExportError.

    Every product counts as the graph has it: a head over one token counts one token, and Longformer's rows of global
    tokens count all their slots in the graph. If the graph itself puts global tokens in front of each text, the padding
    of their last block counts as well. Global tokens are those of a session by default: the leading ones of
    ``--attention window:...``, the first of a Longformer, none of other models; the tokens of a question count as one.
    """
    bundle = open_bundle(bundle_path, check_files=False)
    manifest = bundle.manifest
    model = read_portable_graph(bundle)
    memory, marked = manifest.min_memory, manifest.input_of(Role.GLOBAL_ATTENTION_MASK) is not None
    # The operators lose their names below.
    attentions = [
        (node.outputs[0], operator_of(node), _decisive(node, tokens, memory, marked=marked))
        for node in operator_nodes(model)
    ]
    _fix_shapes(model, {"batch": batch, "tokens": tokens, "memory": memory})
    products = sum(_flops_of_product(node) for node in _computed_for_each_batch(model))
    in_windows = sum(_flops_of_attention(*attention) for attention in attentions)
    if_dense = sum(_flops_of_attention(*attention, dense=True) for attention in attentions)
    ends = (*model.graph.inputs, *model.graph.outputs)
    interface_bytes = sum(int(math.prod(_sizes(value)) * value.dtype.itemsize) for value in ends)
    return Work(
        flops=products + in_windows,
        dense_flops=products + if_dense,
        moved_bytes=_bytes_of_weights(model, tokens) + interface_bytes,
    )


def roofline(work: Work, ceilings: Ceilings, *, p50_ms: float) -> Roofline:
    """Compares a latency with the machine's best rates in the dtype of the computation."""
    products_s = work.flops / ceilings.matmul_flops_per_s
    moves_s = work.moved_bytes / ceilings.copy_bytes_per_s
    bound_ms = max(products_s, moves_s) * 1e3
    return Roofline(**work._asdict(), bound_ms=bound_ms, fraction=bound_ms / p50_ms)


def _decisive(node: onnx_ir.Node, tokens: int, memory: int, *, marked: bool) -> dict[str, Any]:
    """The attributes, numbers of tokens and table from which an operator counts the pairs of queries and keys.

    Windows that took the place of dense attention have as many global tokens as the node has place for. Where callers
    mark global tokens (`marked`), one token is global.
    """
    import onnx_ir as ir

    decisive = attributes_of(node)
    leading = 1 if marked else decisive.get("global_bound", 0)
    decisive |= {"memory": memory, "global_tokens": min(tokens, leading)}
    for name, value in zip(operator_of(node).inputs, node.inputs, strict=False):
        if name == _TABLE and value is not None:
            table = ir.convenience.get_const_tensor(value)
            if table is None:
                raise ExportError(
                    f"The graph computes {value.name}, the table of an attention, so its work cannot be counted.\n"
                    "Please report the model and the versions that `hdexport doctor` prints."
                )
            decisive[name] = table.numpy()
    return decisive


def _fix_shapes(model: onnx_ir.Model, sizes: Mapping[str, int]) -> None:
    """Gives every value of the graph its shape for axes of these sizes, in place. An attention operator's result has
    the shape of its query, so that ONNX need not look into its body."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ShapeInferencePass
    from onnxscript.optimizer import fold_constants

    for value in model.graph.inputs:
        assert value.shape is not None
        value.shape = ir.Shape([axis if isinstance(axis, int) else sizes[str(axis)] for axis in value.shape])
    for node in operator_nodes(model):
        node.op_type, node.domain = "Identity", ""
        node.attributes.clear()
        node.resize_inputs(1)
    model.functions.clear()
    fold_constants(model, onnx_shape_inference=True, input_size_limit=_SHAPE_BYTES, output_size_limit=_SHAPE_BYTES)
    ShapeInferencePass()(model)


def _computed_for_each_batch(model: onnx_ir.Model) -> list[onnx_ir.Node]:
    """Nodes that depend on an input of the graph; a runtime computes the others once."""
    given, nodes = set(model.graph.inputs), []
    for node in model.graph:
        if any(value in given for value in node.inputs):
            given.update(node.outputs)
            nodes.append(node)
    return nodes


def _flops_of_product(node: onnx_ir.Node) -> int:
    if node.op_type in _NOT_COUNTED:
        raise ExportError(
            f"The graph has a product of type {node.op_type}, whose work is not counted.\n"
            "Please report the model and the versions that `hdexport doctor` prints."
        )
    if node.op_type not in ("MatMul", "Gemm"):
        return 0
    is_transposed = node.op_type == "Gemm" and node.attributes.get_int("transA", 0) == 1
    summed = _sizes(node.inputs[0])[-2 if is_transposed else -1]
    return 2 * math.prod(_sizes(node.outputs[0])) * summed


def _flops_of_attention(
    output: onnx_ir.Value, operator: Operator, decisive: dict[str, Any], *, dense: bool = False
) -> int:
    """Operations for the pairs of queries and keys that see each other, by `_decisive`; for all pairs if dense."""
    batch, tokens, heads, head_dim = _sizes(output)
    if dense and operator.as_dense is None:
        pairs = heads * tokens * tokens
    else:
        changes = operator.as_dense or {} if dense else {}
        pairs = operator.pairs({**decisive, **changes}, tokens=tokens, heads=heads)
    return 2 * operator.products * batch * pairs * head_dim


def _bytes_of_weights(model: onnx_ir.Model, tokens: int) -> int:
    total = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        used_rows = [_rows_used(use.node, use.idx, tokens) for use in value.uses()]
        if used_rows and None not in used_rows:
            rows = int(tensor.shape[0])
            total += int(tensor.nbytes) // rows * min(rows, sum(row for row in used_rows if row is not None))
        else:
            total += int(tensor.nbytes)
    return total


def _rows_used(node: onnx_ir.Node, index: int, tokens: int) -> int | None:
    """How many rows a node looks up in the table that is its input of that index; None where it looks nothing up."""
    if index == 0 and node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        return math.prod(_sizes(node.inputs[1]))
    # The rows of the positions, in order: the table is cut to the length of the text.
    return tokens if index == 0 and node.op_type == "Slice" else None


def _sizes(value: onnx_ir.Value | None) -> list[int]:
    """The value's shape, which must be static."""
    if value is None or value.shape is None or not value.shape.is_static():
        name, shape = (value.name, value.shape) if value is not None else ("an input", None)
        raise ExportError(
            f"The graph does not state the shape of {name} (it is {shape}), so its work cannot be counted.\n"
            "Please report the model and the versions that `hdexport doctor` prints."
        )
    return [int(size) for size in value.shape]
