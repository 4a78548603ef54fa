"""Causal attention for OpenVINO, as a function body: parts of the queries, each with the keys up to its last query."""

from __future__ import annotations

from onnx_ir import DataType, Value

from hdplugins.attention.function_parts import MASKED, transpose_heads_and_tokens, upcast
from hdplugins.op_builder import OpBuilder

_PARTS = 4
"""Parts of a text's queries. One part computes every score, four 5/8 of them, and eight 9/16. Each part of each layer
takes 1.3 MB of a session (findings/openvino_fused_attention_takes_a_megabyte_each.sh)."""

_MIN_QUERIES = 256
"""Queries of a part at least, so that short texts are one part: the nodes of empty parts do nothing."""


def attend_causally(
    op: OpBuilder, query: Value, key: Value, value: Value, key_mask: Value, *, scale: float, padded: bool, first: int
) -> Value:
    """The attention of a layer, [batch, tokens, heads, head_dim].

    OpenVINO fuses a part, and the mask of a part is the only value with an axis of queries and one of keys: bool,
    [queries, keys]. The standard's ``Attention`` would have a float mask of all queries and keys.

    Args:
        query, key, value: [batch, tokens, heads, head_dim].
        key_mask: [batch, tokens], bool.
        scale: factor of the scores.
        padded: whether batches may have padding, whose rows are 0.
        first: number of the first position. Each layer needs one of its own: OpenVINO computes equal masks once, and
            keeps them until the last layer.
    """
    tokens = op.Squeeze(op.Shape(key_mask, start=1))
    # From the mask, so that a graph whose sizes are known computes the masks of its parts, and does not hold them all.
    zero = op.Min(op.Cast(op.Slice(op.Reshape(key_mask, [-1]), [0], [1]), to=DataType.INT64), 0)
    size = op.Max(op.Div(op.Add(tokens, _PARTS - 1), _PARTS), _MIN_QUERIES)
    queries, keys, values = (transpose_heads_and_tokens(op, state) for state in (query, key, value))
    attended = []
    for number in range(_PARTS):
        start, end = (op.Min(op.Mul(size, each), tokens) for each in (number, number + 1))
        start_1d, end_1d = op.Unsqueeze(start, [0]), op.Unsqueeze(end, [0])
        part = op.Slice(queries, start_1d, end_1d, [2])
        part_keys, part_values = (op.Slice(states, [0], end_1d, [2]) for states in (keys, values))
        last = op.Add(end, first)
        key_positions = op.Unsqueeze(op.Range(first, last, 1), [0, 1, 2])
        query_positions = op.Add(op.Range(op.Add(start, first), last, 1), zero)
        seen = op.LessOrEqual(key_positions, op.Unsqueeze(query_positions, [0, 1, 3]))
        if padded:
            seen = op.And(seen, op.Unsqueeze(op.Slice(key_mask, [0], end_1d, [1]), [1, 2]))
        scores = op.Mul(op.MatMul(part, op.Transpose(part_keys, perm=[0, 1, 3, 2])), scale)
        weights = op.Softmax(op.Where(seen, scores, MASKED), axis=-1)
        attended.append(op.MatMul(weights, part_values))
    whole = transpose_heads_and_tokens(op, op.Concat(*attended, axis=2))
    return op.Mul(whole, upcast(op, op.Unsqueeze(key_mask, [2, 3]))) if padded else whole
