"""Dense attention as function bodies of standard ONNX operators.

Scores and softmax are float32 whatever the dtype of the inputs. The scores of all keys are materialised, so memory is
quadratic in tokens: these bodies are for runtimes without a fused attention.

Heads of queries that share one of keys stand behind each other as rows of one matrix, so that no key is repeated:
reshaping [batch, heads, tokens, head_dim] to [batch, kv_heads, heads / kv_heads * tokens, head_dim] copies nothing.
"""

from __future__ import annotations

__all__ = ["function_of_node"]

from collections.abc import Mapping

import onnx

from hdplugins.operators.dense_attention import OPERATOR
from hdplugins.operators.onnx_text import function, nodes_of

# The masked score is finite, so that no runtime meets inf - inf, and so far below any score that exp() of it is
# exactly 0 in float32. The query is scaled, not the scores: half-precision products then stay in range.
_SCORES = """
    scale_value = Constant <value_float: float = @scale> ()
    scale_typed = CastLike (scale_value, query)
    scaled_query = Mul (query, scale_typed)
    copied_axis = Constant <value_ints = [0]> ()
    row_axes = Constant <value_ints = [-1, 0]> ()
    kv_heads = Shape <start = 1, end = 2> (key)
    grouped_shape = Concat <axis = 0> (copied_axis, kv_heads, row_axes)
    grouped_query = Reshape (scaled_query, grouped_shape)
    key_transposed = Transpose <perm = [0, 1, 3, 2]> (key)
    products = MatMul (grouped_query, key_transposed)
    scores = Cast <to = 1> (products)
    mask_axes = Constant <value_ints = [1, 2]> ()
    mask = Unsqueeze (key_mask, mask_axes)
"""

_ALL_KEYS = """
    seen = Identity (mask)
"""

# Row r of a group is the token r modulo the tokens.
_EARLIER_KEYS = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    tokens_1d = Shape <start = 1, end = 2> (key_mask)
    tokens = Squeeze (tokens_1d)
    rows_1d = Shape <start = 2, end = 3> (grouped_query)
    rows = Squeeze (rows_1d)
    row_numbers = Range (zero, rows, one)
    places = Mod (row_numbers, tokens)
    place_axis = Constant <value_ints = [1]> ()
    place_column = Unsqueeze (places, place_axis)
    key_places = Range (zero, tokens, one)
    is_earlier = LessOrEqual (key_places, place_column)
    seen = And (mask, is_earlier)
"""

_WEIGHTED_SUMS = """
    masked_score = Constant <value_float = -1.0e30> ()
    masked_scores = Where (seen, scores, masked_score)
    weights = Softmax <axis = -1> (masked_scores)
    weights_typed = CastLike (weights, query)
    grouped_sums = MatMul (weights_typed, value)
    heads = Shape <start = 1, end = 2> (query)
    split_shape = Concat <axis = 0> (copied_axis, heads, row_axes)
    sums = Reshape (grouped_sums, split_shape)
"""

_ROWS_WITH_KEYS = """
    mask_number = Cast <to = 1> (mask)
    key_axis = Constant <value_ints = [3]> ()
    any_key = ReduceMax <keepdims = 1> (mask_number, key_axis)
    any_key_typed = CastLike (any_key, query)
    attended = Mul (sums, any_key_typed)
"""

_ROWS_OF_TOKENS = """
    token_axes = Constant <value_ints = [1, 3]> ()
    token_column = Unsqueeze (key_mask, token_axes)
    is_token = CastLike (token_column, query)
    attended = Mul (sums, is_token)
"""


def function_of_node(*, inputs: int, attributes: Mapping[str, object]) -> onnx.FunctionProto:
    """The body for a node of the portable graph, and for others of that name.

    Args:
        inputs: of the node: 4.
        attributes: of the node; ``causal`` decides the body, which reads ``scale`` itself.

    Raises:
        ValueError: there is no body for that arity.
    """
    if inputs != len(OPERATOR.inputs):
        raise ValueError(f"{OPERATOR.name} has {len(OPERATOR.inputs)} inputs, not {inputs}.")
    causal = attributes.get("causal", 0)
    text = _SCORES + (_EARLIER_KEYS if causal else _ALL_KEYS) + _WEIGHTED_SUMS
    text += _ROWS_OF_TOKENS if causal else _ROWS_WITH_KEYS
    nodes = nodes_of(text, inputs=OPERATOR.inputs, attributes=OPERATOR.attributes)
    return function(OPERATOR, nodes, suffix="_causal" if causal else "", inputs=inputs)
