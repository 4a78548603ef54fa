"""Numbers by distance as what fused attentions take: a bias for every query and key."""

from __future__ import annotations

__all__ = ["BiasesByDistance", "has_shared_numbers"]

from typing import TYPE_CHECKING

from hdexport.lowering.multi_head_attention import Insertion, choice
from hdplugins import ONNX_DOMAIN

if TYPE_CHECKING:
    import onnx_ir

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
        import onnx
        import onnx_ir as ir

        # Its operators mean the same from opset 18 on, and onnx refuses a function of another opset than the graph's.
        opset = self._model.graph.opset_imports[""]
        body = _COPIED if self._by_rows else _LOOKED_UP
        text = _FUNCTION.format(domain=ONNX_DOMAIN, opset=opset, name=_NAME, body=body)
        function = ir.serde.deserialize_function(onnx.parser.parse_function(text))
        self._model.functions[function.identifier()] = function


_FUNCTION = """
<domain: "{domain}", opset_import: ["" : {opset}]>
{name} (scores_by_distance, key_mask) => (bias)
{{
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    two_1d = Constant <value_ints = [2]> ()
    tokens_1d = Shape <start = 1, end = 2> (key_mask)
    distances_1d = Shape <start = 3, end = 4> (scores_by_distance)
    twice_reach_1d = Sub (distances_1d, one_1d)
    reach_1d = Div (twice_reach_1d, two_1d)
    {body}
}}
"""

# A head after another: in a row of two texts' length, from the farthest key before a query on. Its copies are as many
# as queries, and flattened, each row begins one number less than a row after the one before it.
_COPIED = """
    last_1d = Sub (tokens_1d, one_1d)
    before_1d = Sub (last_1d, reach_1d)
    behind_1d = Sub (tokens_1d, reach_1d)
    around = Concat <axis = 0> (zero_1d, before_1d, zero_1d, behind_1d)
    width_1d = Add (tokens_1d, tokens_1d)
    copies_shape = Concat <axis = 0> (tokens_1d, width_1d)
    flat_shape = Constant <value_ints = [-1]> ()
    shorter_1d = Sub (width_1d, one_1d)
    kept_1d = Mul (tokens_1d, shorter_1d)
    kept_end_1d = Add (kept_1d, last_1d)
    rows_shape = Concat <axis = 0> (tokens_1d, shorter_1d)
    numbers = Squeeze (scores_by_distance, zero_1d)
    biases = Scan <num_scan_inputs = 1, body = spread (float[1, distances] head_numbers) => (float[q, k] head_bias) {
        row = Pad <mode = "edge"> (head_numbers, around)
        copies = Expand (row, copies_shape)
        flat = Reshape (copies, flat_shape)
        kept = Slice (flat, last_1d, kept_end_1d, zero_1d)
        rows = Reshape (kept, rows_shape)
        head_bias = Slice (rows, zero_1d, tokens_1d, one_1d)
    }> (numbers)
    bias = Unsqueeze (biases, zero_1d)
"""

_LOOKED_UP = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    tokens = Squeeze (tokens_1d)
    places = Range (zero, tokens, one)
    key_row = Unsqueeze (places, zero_1d)
    query_column = Unsqueeze (places, one_1d)
    distance = Sub (key_row, query_column)
    row_or_beyond = Add (distance, reach_1d)
    row_or_above = Max (row_or_beyond, zero_1d)
    row = Min (row_or_above, twice_reach_1d)
    biases = Gather <axis = 3> (scores_by_distance, row)
    bias = Squeeze (biases, two_1d)
"""
