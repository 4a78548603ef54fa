"""FAVOR+ of one head of one text after another, and of one chunk of its tokens after another, as ONNX text."""

from __future__ import annotations

__all__ = ["CHUNK_TOKENS", "sequential"]

CHUNK_TOKENS = 256
"""Tokens of a chunk: with 256 features in float32, theirs take 256 kB, which a CPU's cache holds."""


def sequential(*, compat: bool, tokens_first: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        compat: whether keys of padding count, with 0 for their values.
        tokens_first: the states and `attended` are [batch, tokens, heads, head_dim] instead, as the projections around
            have them.
    """
    text = _CHUNKS.format(chunk=CHUNK_TOKENS, counted="all_tokens" if compat else "real")
    text += _TOKENS_FIRST if tokens_first else _HEADS_FIRST
    for state in ("query", "key", "value"):
        text += f"wide_{state} = Cast <to = 1> ({state})\nall_{state} = Reshape (wide_{state}, rows_shape)\n"
    text += _SCAN_HEADS.format(of_key=_exponents("key"), of_query=_exponents("query"))
    return text + f"attended = {'Transpose <perm = [0, 2, 1, 3]>' if tokens_first else 'Identity'} (typed_rows)\n"


def _exponents(state: str) -> str:
    """Text that makes `{state}_products`, [chunk, features], and `{state}_half_squares`, [chunk, 1], of a chunk."""
    return f"""
    scaled_{state} = Mul ({state}_rows, root_scale)
    {state}_products = MatMul (scaled_{state}, directions)
    {state}_square_sums = ReduceSumSquare <keepdims = 1> (scaled_{state}, last_axis)
    {state}_half_squares = Mul ({state}_square_sums, half)
"""


# The last chunk is filled up with the last token, which neither counts there nor has a value.
_CHUNKS = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    zero_1d = Constant <value_ints = [0]> ()
    one_1d = Constant <value_ints = [1]> ()
    any_number = Constant <value_ints = [-1]> ()
    last_axis = Constant <value_ints = [-1]> ()
    nothing = Constant <value_float = 0.0> ()
    half = Constant <value_float = 0.5> ()
    masked = Constant <value_float = -1.0e30> ()
    epsilon = Constant <value_float: float = @epsilon> ()
    scale = Constant <value_float: float = @scale> ()
    root_scale = Sqrt (scale)
    wide_projection = Cast <to = 1> (projection)
    directions = Transpose <perm = [1, 0]> (wide_projection)
    batch_1d = Shape <end = 1> (key_mask)
    batch = Squeeze (batch_1d)
    tokens_1d = Shape <start = 1> (key_mask)
    tokens = Squeeze (tokens_1d)
    chunk_tokens = Constant <value_int = {chunk}> ()
    chunk = Min (chunk_tokens, tokens)
    last_token = Sub (tokens, one)
    last_chunk = Div (last_token, chunk)
    num_chunks = Add (last_chunk, one)
    padded = Mul (num_chunks, chunk)
    chunk_1d = Unsqueeze (chunk, zero_1d)
    padded_1d = Unsqueeze (padded, zero_1d)
    places = Range (zero, padded, one)
    near_places = Min (places, last_token)
    is_token = Less (places, tokens)
    near_real = Gather <axis = 1> (key_mask, near_places)
    real = And (near_real, is_token)
    mask_shape = Concat <axis = 0> (batch_1d, padded_1d)
    all_tokens = Expand (is_token, mask_shape)
    real_columns = Unsqueeze (real, last_axis)
    counted_columns = Unsqueeze ({counted}, last_axis)
    whole = Constant <value_float = 1.0> ()
    count_columns = Where (counted_columns, whole, nothing)
    bias_columns = Where (counted_columns, nothing, masked)
    head_dim_1d = Shape <start = 3> (query)
    rows_shape = Concat <axis = 0> (any_number, head_dim_1d)
    features_1d = Shape <end = 1> (projection)
    width_1d = Add (head_dim_1d, one_1d)
    split_sizes = Concat <axis = 0> (head_dim_1d, one_1d)
    sums_shape = Concat <axis = 0> (features_1d, width_1d)
    no_sums = Expand (nothing, sums_shape)
    chunks_shape = Concat <axis = 0> (any_number, chunk_1d, head_dim_1d)
    wide_chunks_shape = Concat <axis = 0> (any_number, chunk_1d, width_1d)
    columns_shape = Concat <axis = 0> (any_number, chunk_1d, one_1d)
    matrix_shape = Constant <value_ints = [1, 1]> ()
    lowest = Expand (masked, matrix_shape)
"""

# The rows of all heads of all tokens of all texts are numbered through: a step takes its own, and nothing is swapped.
_TOKENS_FIRST = """
    heads_1d = Shape <start = 2, end = 3> (query)
    num_heads = Squeeze (heads_1d)
    num_steps = Mul (batch, num_heads)
    step_numbers = Range (zero, num_steps, one)
    step_texts = Div (step_numbers, num_heads)
    step_heads = Mod (step_numbers, num_heads)
    text_rows = Mul (tokens, num_heads)
    text_starts = Mul (step_texts, text_rows)
    first_rows = Add (text_starts, step_heads)
    row_offsets = Mul (near_places, num_heads)
"""

_HEADS_FIRST = """
    heads_1d = Shape <start = 1, end = 2> (query)
    num_heads = Squeeze (heads_1d)
    num_steps = Mul (batch, num_heads)
    step_numbers = Range (zero, num_steps, one)
    step_texts = Div (step_numbers, num_heads)
    first_rows = Mul (step_numbers, tokens)
    row_offsets = Identity (near_places)
"""

# A step is a head of a text, a step in it a chunk. Sums of earlier chunks fade where a later one has a higher product.
# The sums have a last column, of counts. `epsilon` is of every feature, so it adds the sum of the values to each.
_SCAN_HEADS = """
    scanned = Scan <num_scan_inputs = 2, body = attend_head (int64 text, int64 first_row) => (
        float[tokens, head_dim] head_rows
    ) {{
        rows = Add (row_offsets, first_row)
        head_query = Gather <axis = 0> (all_query, rows)
        head_key = Gather <axis = 0> (all_key, rows)
        head_value = Gather <axis = 0> (all_value, rows)
        real_column = Gather <axis = 0> (real_columns, text)
        count_column = Gather <axis = 0> (count_columns, text)
        bias_column = Gather <axis = 0> (bias_columns, text)
        seen_value = Where (real_column, head_value, nothing)
        value_and_count = Concat <axis = 1> (seen_value, count_column)
        query_chunks = Reshape (head_query, chunks_shape)
        key_chunks = Reshape (head_key, chunks_shape)
        value_chunks = Reshape (value_and_count, wide_chunks_shape)
        bias_chunks = Reshape (bias_column, columns_shape)
        key_highest, exponential_sums = Scan <num_scan_inputs = 3, body = sum_up (
            float[row, column] before, float[features, width] sums_before,
            float[chunk, head_dim] key_rows, float[chunk, width] value_rows, float[chunk, column] bias
        ) => (float[row, column] highest, float[features, width] sums) {{
            {of_key}
            counted_products = Add (key_products, bias)
            highest_of_chunk = ReduceMax <keepdims = 1> (counted_products)
            highest = Max (before, highest_of_chunk)
            key_offset = Add (key_half_squares, highest)
            key_exponents = Sub (counted_products, key_offset)
            key_exponentials = Exp (key_exponents)
            rise = Sub (before, highest)
            fading = Exp (rise)
            faded_sums = Mul (sums_before, fading)
            sums = Gemm <transA = 1> (key_exponentials, value_rows, faded_sums)
        }}> (lowest, no_sums, key_chunks, value_chunks, bias_chunks)
        value_sum = ReduceSum <keepdims = 1> (value_and_count, zero_1d)
        least_sum = Mul (value_sum, epsilon)
        feature_sums = Add (exponential_sums, least_sum)
        attended_chunks = Scan <num_scan_inputs = 1, body = attend (float[chunk, head_dim] query_rows) => (
            float[chunk, head_dim] attended_rows
        ) {{
            {of_query}
            query_highest = ReduceMax <keepdims = 1> (query_products, last_axis)
            query_offset = Add (query_half_squares, query_highest)
            query_exponents = Sub (query_products, query_offset)
            query_exponentials = Exp (query_exponents)
            query_features = Add (query_exponentials, epsilon)
            weighted = MatMul (query_features, feature_sums)
            numerators, denominators = Split <axis = 1> (weighted, split_sizes)
            attended_rows = Div (numerators, denominators)
        }}> (query_chunks)
        padded_rows = Reshape (attended_chunks, rows_shape)
        head_rows = Slice (padded_rows, zero_1d, tokens_1d)
    }}> (step_texts, first_rows)
    text_heads_shape = Concat <axis = 0> (batch_1d, heads_1d, tokens_1d, head_dim_1d)
    rows_by_head = Reshape (scanned, text_heads_shape)
    mask_axes = Constant <value_ints = [1, 2, 3]> ()
    mask_numbers = Cast <to = 1> (key_mask)
    most_real = ReduceMax <keepdims = 0> (mask_numbers, one_1d)
    has_keys = Cast <to = 9> (most_real)
    text_has_keys = Unsqueeze (has_keys, mask_axes)
    wide_rows = Where (text_has_keys, rows_by_head, nothing)
    typed_rows = CastLike (wide_rows, query)
"""
