"""FAVOR+ of all heads of all texts at once, as ONNX text."""

from __future__ import annotations

__all__ = ["parallel"]


def parallel(*, compat: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        compat: whether keys of padding count, with 0 for their values.
    """
    return _CONSTANTS + _exponents("query") + _QUERY + _exponents("key") + (_ALL_KEYS if compat else _REAL_KEYS) + _SUMS


def _exponents(state: str) -> str:
    """Text that makes `{state}_products`, [..., tokens, features], and `{state}_half_squares`, [..., tokens, 1]."""
    return f"""
    wide_{state} = Cast <to = 1> ({state})
    scaled_{state} = Mul (wide_{state}, root_scale)
    {state}_products = MatMul (scaled_{state}, directions)
    {state}_squares = Mul (scaled_{state}, scaled_{state})
    {state}_square_sums = ReduceSum <keepdims = 1> ({state}_squares, last_axis)
    {state}_half_squares = Mul ({state}_square_sums, half)
"""


_CONSTANTS = """
    nothing = Constant <value_float = 0.0> ()
    half = Constant <value_float = 0.5> ()
    masked = Constant <value_float = -1.0e30> ()
    last_axis = Constant <value_ints = [-1]> ()
    token_axis = Constant <value_ints = [2]> ()
    key_axes = Constant <value_ints = [2, 3]> ()
    mask_axes = Constant <value_ints = [1, 3]> ()
    epsilon = Constant <value_float: float = @epsilon> ()
    scale = Constant <value_float: float = @scale> ()
    root_scale = Sqrt (scale)
    wide_projection = Cast <to = 1> (projection)
    directions = Transpose <perm = [1, 0]> (wide_projection)
    real = Unsqueeze (key_mask, mask_axes)
    wide_value = Cast <to = 1> (value)
"""

_QUERY = """
    query_highest = ReduceMax <keepdims = 1> (query_products, last_axis)
    query_offset = Add (query_half_squares, query_highest)
    query_exponents = Sub (query_products, query_offset)
    query_exponentials = Exp (query_exponents)
    query_features = Add (query_exponentials, epsilon)
"""

_ALL_KEYS = """
    key_highest = ReduceMax <keepdims = 1> (key_products, key_axes)
    key_offset = Add (key_half_squares, key_highest)
    key_exponents = Sub (key_products, key_offset)
    key_exponentials = Exp (key_exponents)
    key_features = Add (key_exponentials, epsilon)
    seen_value = Where (real, wide_value, nothing)
"""

# Where twice: without the first, the exponentials of padding may be infinite, also where all of a text is padding.
_REAL_KEYS = """
    seen_products = Where (real, key_products, masked)
    key_highest = ReduceMax <keepdims = 1> (seen_products, key_axes)
    key_offset = Add (key_half_squares, key_highest)
    key_exponents = Sub (seen_products, key_offset)
    key_exponentials = Exp (key_exponents)
    more_than_nothing = Add (key_exponentials, epsilon)
    key_features = Where (real, more_than_nothing, nothing)
    seen_value = Identity (wide_value)
"""

_SUMS = """
    features_first = Transpose <perm = [0, 1, 3, 2]> (key_features)
    sums = MatMul (features_first, seen_value)
    count_row = ReduceSum <keepdims = 1> (key_features, token_axis)
    counts = Transpose <perm = [0, 1, 3, 2]> (count_row)
    numerators = MatMul (query_features, sums)
    denominators = MatMul (query_features, counts)
    quotients = Div (numerators, denominators)
    real_number = Cast <to = 1> (real)
    most_real = ReduceMax <keepdims = 1> (real_number, token_axis)
    has_keys = Cast <to = 9> (most_real)
    wide_attended = Where (has_keys, quotients, nothing)
    attended = CastLike (wide_attended, query)
"""
