"""Relative position bias as fused attentions take it: one value for every query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hdexport.lowering.nodes import add_function, operator_of, token_mask_of
from hdplugins import ONNX_DOMAIN
from hdplugins.op_builder import OpBuilder, build_function, cond, scan

if TYPE_CHECKING:
    import onnx_ir
    from onnx_ir import Value

    from hdexport.lowering.lowering import SharedParts

LONG_SEQUENCES = "_long_sequences"
"""Suffix of the function that computes the sequences for which ONNX Runtime on a GPU makes no bias."""

SCORES = 4
"""Index of the operator's input with the bias of each distance, [1 or batch, 1 or tokens, heads, distances]."""

_NAME = "ClippedDistanceAttention_bias"


def has_shared_bias(node: onnx_ir.Node) -> bool:
    """Whether a node is dense attention with a relative position bias that all sequences share."""
    if operator_of(node).name != "ClippedDistanceAttention":
        return False
    scores = node.inputs[SCORES]
    assert scores is not None
    shape = scores.shape
    return len(node.inputs) == SCORES + 1 and shape is not None and (shape[0], shape[1]) == (1, 1)


def relative_position_bias(
    op: OpBuilder,
    node: onnx_ir.Node,
    parts: SharedParts,
    *,
    by_rows: bool,
    is_short: onnx_ir.Value | None = None,
    key_mask: onnx_ir.Value | None = None,
) -> onnx_ir.Value:
    """[1, heads, tokens, tokens], in the dtype of the operator's input; layers with one such input share the bias.

    Args:
        by_rows: whether the values of a row are copied together, which is fast on a CPU, or looked up one by one.
        is_short: [], bool; where it is false, the bias is empty. None for always.
        key_mask: [batch, tokens], bool, whose tokens the bias is for; None for the node's mask.
    """
    import numpy as np
    import onnx_ir as ir

    scores = node.inputs[SCORES]
    assert scores is not None
    assert scores.dtype is not None
    dtype, mask = scores.dtype, token_mask_of(node) if key_mask is None else key_mask

    def bias(op: OpBuilder) -> onnx_ir.Value:
        return op.call(_NAME, scores, mask, _domain=ONNX_DOMAIN)

    def empty(op: OpBuilder) -> onnx_ir.Value:
        return op.Constant(value=ir.tensor(np.zeros((1, 1, 0, 0), dtype.numpy()), dtype=dtype))

    def make() -> onnx_ir.Value:
        _add_function(parts.model, _copied_rows if by_rows else _looked_up)
        if is_short is None:
            return bias(op)
        return cond(op, is_short, bias, empty, name=parts.new_name("relative_position_bias"), dtype=dtype)

    return parts.once((relative_position_bias, scores, is_short, mask), make)


def _add_function(model: onnx_ir.Model, body: Callable[..., Value]) -> None:
    # The operators mean the same from opset 18 on, and onnx rejects a function of another opset than the graph's.
    add_function(model, build_function(body, domain=ONNX_DOMAIN, name=_NAME, opset=model.graph.opset_imports[""]))


def _copied_rows(op: OpBuilder, scores_by_distance: Value, key_mask: Value) -> Value:
    """The bias, each row of a head copied at once.

    One head after another: a row as long as two sequences starts at the farthest key before a query. There are as many
    copies of the row as queries. In the flattened copies, each row starts one value earlier than the row before it.
    """
    tokens_1d, reach_1d = op.Shape(key_mask, start=1, end=2), _reach(op, scores_by_distance)
    last_1d = op.Sub(tokens_1d, [1])
    around = op.Concat([0], op.Sub(last_1d, reach_1d), [0], op.Sub(tokens_1d, reach_1d), axis=0)
    width_1d = op.Add(tokens_1d, tokens_1d)
    shorter_1d = op.Sub(width_1d, [1])
    copies_shape, rows_shape = op.Concat(tokens_1d, width_1d, axis=0), op.Concat(tokens_1d, shorter_1d, axis=0)
    kept_end_1d = op.Add(op.Mul(tokens_1d, shorter_1d), last_1d)

    def spread(op: OpBuilder, head_scores: Value) -> Value:
        row = op.Pad(head_scores, around, mode="edge")
        kept = op.Slice(op.Reshape(op.Expand(row, copies_shape), [-1]), last_1d, kept_end_1d, [0])
        return op.Slice(op.Reshape(kept, rows_shape), [0], tokens_1d, [1])

    scores = op.Unsqueeze(op.Squeeze(scores_by_distance, [0, 1]), [1])  # [heads, 1, distances]
    return op.Unsqueeze(scan(op, spread, scores, shapes=[("queries", "keys")]), [0])


def _looked_up(op: OpBuilder, scores_by_distance: Value, key_mask: Value) -> Value:
    """The bias, each value looked up."""
    tokens, reach_1d = op.Squeeze(op.Shape(key_mask, start=1, end=2)), _reach(op, scores_by_distance)
    positions = op.Range(0, tokens, 1)
    distance = op.Sub(op.Unsqueeze(positions, [0]), op.Unsqueeze(positions, [1]))  # [queries, keys]
    row = op.Min(op.Max(op.Add(distance, reach_1d), [0]), op.Add(reach_1d, reach_1d))
    return op.Squeeze(op.Gather(scores_by_distance, row, axis=3), [1])


def _reach(op: OpBuilder, scores_by_distance: Value) -> Value:
    """[1], the largest distance that has a value of its own."""
    distances_1d = op.Shape(scores_by_distance, start=3, end=4)
    return op.Div(op.Sub(distances_1d, [1]), [2])
