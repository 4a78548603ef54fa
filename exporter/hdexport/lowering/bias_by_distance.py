"""Numbers by distance as what fused attentions take: a bias for every query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hdexport.lowering.multi_head_attention import choice
from hdexport.lowering.nodes import Insertion, add_function, operator_of, token_mask_of
from hdplugins import ONNX_DOMAIN

if TYPE_CHECKING:
    import onnx_ir

    from hdexport.lowering.lowering import SharedParts
    from hdplugins.attention.body_maker import Op, Value

LONG_TEXTS = "_long_texts"
"""Ends the name of the function that computes texts for which no bias is made in ONNX Runtime on a GPU."""

SCORES = 4
"""Position of that input of the operator."""

_NAME = "ClippedDistanceAttention_bias"


def has_shared_numbers(node: onnx_ir.Node) -> bool:
    """Whether a node is a dense attention with a bias that all texts share, by ``ClippedDistanceAttention``."""
    if operator_of(node).name != "ClippedDistanceAttention":
        return False
    scores = node.inputs[SCORES]
    assert scores is not None
    shape = scores.shape
    return len(node.inputs) == SCORES + 1 and shape is not None and (shape[0], shape[1]) == (1, 1)


def bias_by_distance(
    insertion: Insertion,
    node: onnx_ir.Node,
    parts: SharedParts,
    *,
    by_rows: bool,
    is_short: onnx_ir.Value | None = None,
    key_mask: onnx_ir.Value | None = None,
) -> onnx_ir.Value:
    """[1, heads, tokens, tokens], in the dtype of the numbers; layers with the same numbers share it.

    Args:
        by_rows: whether the numbers of a row are copied together, as is fast on a CPU, or looked up one by one.
        is_short: [], bool; where it is false, the bias is empty. None for always.
        key_mask: [batch, tokens], bool, of the tokens that there is a bias for; None for the node's.
    """
    import numpy as np
    import onnx_ir as ir

    scores = node.inputs[SCORES]
    assert scores is not None
    assert scores.dtype is not None
    dtype, mask = scores.dtype, token_mask_of(node) if key_mask is None else key_mask

    def made() -> onnx_ir.Value:
        _add_function(parts.model, _copied if by_rows else _looked_up)
        bias = ir.node(_NAME, [scores, mask], domain=ONNX_DOMAIN)
        if is_short is None:
            return insertion.insert(bias)
        nothing = ir.tensor(np.zeros((1, 1, 0, 0), dtype.numpy()), dtype=dtype)
        none = ir.node("Constant", [], {"value": nothing})
        name = parts.new_name("bias_by_distance")
        return insertion.insert(choice(is_short, then=[bias], otherwise=[none], name=name, dtype=dtype))

    return parts.once((bias_by_distance, scores, is_short, mask), made)


def _add_function(model: onnx_ir.Model, body: Callable[..., Value]) -> None:
    from hdplugins.attention.body_maker import function_of_body

    # Its operators mean the same from opset 18 on, and onnx refuses a function of another opset than the graph's.
    proto = function_of_body(body, domain=ONNX_DOMAIN, name=_NAME, opset=model.graph.opset_imports[""])
    add_function(model, proto)


def _copied(op: Op, scores_by_distance: Value, key_mask: Value) -> Value:
    """The biases, each row of a head copied at once.

    A head after another: in a row of two texts' length, from the farthest key before a query on. Its copies are as many
    as queries, and flattened, each row begins one number less than a row after the one before it.
    """
    from hdplugins.attention.body_maker import scan

    tokens_1d, reach_1d = op.Shape(key_mask, start=1, end=2), _reach(op, scores_by_distance)
    last_1d = op.Sub(tokens_1d, [1])
    around = op.Concat([0], op.Sub(last_1d, reach_1d), [0], op.Sub(tokens_1d, reach_1d), axis=0)
    width_1d = op.Add(tokens_1d, tokens_1d)
    shorter_1d = op.Sub(width_1d, [1])
    copies_shape, rows_shape = op.Concat(tokens_1d, width_1d, axis=0), op.Concat(tokens_1d, shorter_1d, axis=0)
    kept_end_1d = op.Add(op.Mul(tokens_1d, shorter_1d), last_1d)

    def spread(op: Op, head_numbers: Value) -> Value:
        row = op.Pad(head_numbers, around, mode="edge")
        kept = op.Slice(op.Reshape(op.Expand(row, copies_shape), [-1]), last_1d, kept_end_1d, [0])
        head_bias: Value = op.Slice(op.Reshape(kept, rows_shape), [0], tokens_1d, [1])
        return head_bias

    numbers = op.Unsqueeze(op.Squeeze(scores_by_distance, [0, 1]), [1])  # [heads, 1, distances]
    bias: Value = op.Unsqueeze(scan(op, spread, numbers, shapes=[("queries", "keys")]), [0])
    return bias


def _looked_up(op: Op, scores_by_distance: Value, key_mask: Value) -> Value:
    """The biases, each number looked up."""
    tokens, reach_1d = op.Squeeze(op.Shape(key_mask, start=1, end=2)), _reach(op, scores_by_distance)
    places = op.Range(0, tokens, 1)
    distance = op.Sub(op.Unsqueeze(places, [0]), op.Unsqueeze(places, [1]))  # [queries, keys]
    row = op.Min(op.Max(op.Add(distance, reach_1d), [0]), op.Add(reach_1d, reach_1d))
    bias: Value = op.Squeeze(op.Gather(scores_by_distance, row, axis=3), [1])
    return bias


def _reach(op: Op, scores_by_distance: Value) -> Value:
    """[1], the largest distance that has a number of its own."""
    distances_1d = op.Shape(scores_by_distance, start=3, end=4)
    reach_1d: Value = op.Div(op.Sub(distances_1d, [1]), [2])
    return reach_1d
