"""Numbers by distance as what fused attentions take: a bias for every query and key."""

from __future__ import annotations

__all__ = ["BiasesByDistance", "has_shared_numbers"]

from typing import TYPE_CHECKING

from hdexport.lowering.multi_head_attention import Insertion, choice
from hdplugins import ONNX_DOMAIN

if TYPE_CHECKING:
    import onnx_ir

    from hdplugins.attention.body_maker import Op, Value

_KEY_MASK, _SCORES = 3, 4
"""Positions of these inputs of the operator."""

_NAME = "ClippedDistanceAttention_bias"


def has_shared_numbers(node: onnx_ir.Node) -> bool:
    """Whether a node ``ClippedDistanceAttention`` is a dense attention with a bias that all texts share."""
    scores = node.inputs[_SCORES]
    assert scores is not None
    shape = scores.shape
    return len(node.inputs) == _SCORES + 1 and shape is not None and (shape[0], shape[2]) == (1, 1)


class BiasesByDistance:
    """Gives attentions the biases of their numbers by distance; what layers share is made once.

    Args:
        model: receives the function that makes them.
        by_rows: whether the numbers of a row are copied together, as is fast on a CPU, or looked up one by one.
    """

    def __init__(self, model: onnx_ir.Model, *, by_rows: bool) -> None:
        self._model, self._by_rows = model, by_rows
        self._biases: dict[tuple[onnx_ir.Value, onnx_ir.Value | None], onnx_ir.Value] = {}

    def of(self, insertion: Insertion, node: onnx_ir.Node, is_short: onnx_ir.Value | None = None) -> onnx_ir.Value:
        """[1, heads, tokens, tokens], in the dtype of the numbers.

        Args:
            insertion: before the node.
            node: ``ClippedDistanceAttention`` with shared numbers.
            is_short: [], bool; where it is false, the bias is empty. None for always.
        """
        import numpy as np
        import onnx_ir as ir

        scores, key_mask = node.inputs[_SCORES], node.inputs[_KEY_MASK]
        assert scores is not None
        if (scores, is_short) not in self._biases:
            self._add_function()
            made = ir.node(_NAME, [scores, key_mask], domain=ONNX_DOMAIN)
            assert scores.dtype is not None
            if is_short is not None:
                nothing = np.zeros((1, 1, 0, 0), scores.dtype.numpy())
                none = ir.node("Constant", [], {"value": ir.tensor(nothing, dtype=scores.dtype)})
                name = f"bias_by_distance_{len(self._biases)}"
                made = choice(is_short, then=[made], otherwise=[none], name=name, dtype=scores.dtype)
            self._biases[scores, is_short] = insertion.insert(made)
        return self._biases[scores, is_short]

    def _add_function(self) -> None:
        import onnx_ir as ir

        from hdplugins.attention.body_maker import function_of_body

        # Its operators mean the same from opset 18 on, and onnx refuses a function of another opset than the graph's.
        opset, body = self._model.graph.opset_imports[""], _copied if self._by_rows else _looked_up
        proto = function_of_body(body, domain=ONNX_DOMAIN, name=_NAME, opset=opset)
        function = ir.serde.deserialize_function(proto)
        self._model.functions[function.identifier()] = function


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

    numbers = op.Squeeze(scores_by_distance, [0])
    bias: Value = op.Unsqueeze(scan(op, spread, numbers, shapes=[("queries", "keys")]), [0])
    return bias


def _looked_up(op: Op, scores_by_distance: Value, key_mask: Value) -> Value:
    """The biases, each number looked up."""
    tokens, reach_1d = op.Squeeze(op.Shape(key_mask, start=1, end=2)), _reach(op, scores_by_distance)
    places = op.Range(0, tokens, 1)
    distance = op.Sub(op.Unsqueeze(places, [0]), op.Unsqueeze(places, [1]))  # [queries, keys]
    row = op.Min(op.Max(op.Add(distance, reach_1d), [0]), op.Add(reach_1d, reach_1d))
    bias: Value = op.Squeeze(op.Gather(scores_by_distance, row, axis=3), [2])
    return bias


def _reach(op: Op, scores_by_distance: Value) -> Value:
    """[1], the largest distance that has a number of its own."""
    distances_1d = op.Shape(scores_by_distance, start=3, end=4)
    reach_1d: Value = op.Div(op.Sub(distances_1d, [1]), [2])
    return reach_1d
