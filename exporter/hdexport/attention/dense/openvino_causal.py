"""Causal attention for OpenVINO: parts of the queries, each with the keys up to its last query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnx_ir import DataType, Value

from hdplugins.attention.function_parts import MASKED, transpose_heads_and_tokens, upcast
from hdplugins.op_builder import OpBuilder

_PARTS = 4
"""Parts of a text's queries. One part computes every score, four 5/8 of them, and eight 9/16. Each part of each layer
takes 1.3 MB of a session (findings/openvino_fused_attention_takes_a_megabyte_each.sh)."""

_MIN_QUERIES = 256
"""Queries of a part at least, so that short texts are one part: empty parts have no keys either, and do nothing."""

_STEP = 1024
"""Distance of two positions, and most attentions of a graph. OpenVINO computes equal masks once, and keeps them
until the last layer; the queries of each layer are shifted by its number, which changes no comparison."""

_PADDING = 2**31 - 1
"""Position of keys that no query attends to."""


class _Part(NamedTuple):
    """Part of a text's queries, and the keys up to its last query.

    Attributes:
        start: [1], int64, number of the first query.
        end: [1], int64, number after the last query.
        keys: [1], int64, number of the keys, 0 for a part without queries.
        query_positions: [1, 1, queries, 1], int64, `_STEP` apart.
        key_positions: [batch or 1, 1, 1, keys], int64, `_STEP` apart.
    """

    start: Value
    end: Value
    keys: Value
    query_positions: Value
    key_positions: Value


class CausalParts:
    """Parts of a text's queries, computed once for all causal attentions over the same keys.

    Attributes:
        parts: the parts, of which the last ones of a short text are empty.
        is_token: [batch, tokens, 1, 1], float32, 0 for padding, if batches may have padding.
        attentions: number of the attentions so far.
    """

    def __init__(self, op: OpBuilder, key_mask: Value, *, padded: bool) -> None:
        """Add the nodes.

        Args:
            key_mask: [batch, tokens], bool.
            padded: whether batches may have padding.
        """
        self.parts = list(_parts(op, key_mask, padded=padded))
        self.is_token = upcast(op, op.Unsqueeze(key_mask, [2, 3])) if padded else None
        self.attentions = 0


def _parts(op: OpBuilder, key_mask: Value, *, padded: bool) -> Iterator[_Part]:
    tokens = op.Squeeze(op.Shape(key_mask, start=1, end=2))
    # From the mask, so that a graph whose sizes are known computes the masks of its parts, and does not hold them all.
    zero = op.Min(op.Cast(op.Slice(op.Reshape(key_mask, [-1]), [0], [1]), to=DataType.INT64), 0)
    positions = op.Mul(op.Range(0, tokens, 1), _STEP)
    query_positions = op.Unsqueeze(op.Add(positions, zero), [0, 1, 3])
    key_positions = op.Unsqueeze(positions, [0, 1, 2])
    if padded:
        key_positions = op.Where(op.Unsqueeze(key_mask, [1, 2]), key_positions, _PADDING)
    size = op.Max(op.Div(op.Add(tokens, _PARTS - 1), _PARTS), _MIN_QUERIES)
    end = op.Mul(size, [0])
    for number in range(1, _PARTS + 1):
        start, end = end, op.Min(op.Mul(size, [number]), tokens)
        keys = op.Mul(end, op.Min(op.Sub(end, start), 1))
        part_queries, part_keys = op.Slice(query_positions, start, end, [2]), op.Slice(key_positions, [0], keys, [3])
        yield _Part(start, end, keys, part_queries, part_keys)


def attend_causally(op: OpBuilder, states: Sequence[Value], causal: CausalParts, *, scale: float) -> Value:
    """The attention of a layer, [batch, tokens, heads, head_dim]; rows of padding are 0.

    OpenVINO fuses a part and the transposes of its queries and values, not of keys and results. The mask of a part is
    the only value with an axis of queries and one of keys: bool, [queries, keys]. The standard's ``Attention`` would
    have a float mask of all queries and keys.

    Args:
        states: query, key and value, [batch, tokens, heads, head_dim].
        causal: the parts.
        scale: factor of the scores.
    """
    queries, keys, values = states
    keys = transpose_heads_and_tokens(op, keys)
    attended = []
    for part in causal.parts:
        part_queries = transpose_heads_and_tokens(op, op.Slice(queries, part.start, part.end, [1]))
        part_values = transpose_heads_and_tokens(op, op.Slice(values, [0], part.keys, [1]))
        part_keys = op.Transpose(op.Slice(keys, [0], part.keys, [2]), perm=[0, 1, 3, 2])
        seen = op.LessOrEqual(part.key_positions, op.Add(part.query_positions, causal.attentions))
        # Scaled last: OpenVINO moves the factor of a product to the keys, to a node of its own.
        scores = op.Mul(op.Where(seen, op.MatMul(part_queries, part_keys), MASKED), scale)
        attended.append(op.MatMul(op.Softmax(scores, axis=-1), part_values))
    causal.attentions += 1
    whole = transpose_heads_and_tokens(op, op.Concat(*attended, axis=2))
    return whole if causal.is_token is None else op.Mul(whole, causal.is_token)
