"""One block of one text after another, in a Scan, as ONNX text."""

from __future__ import annotations

__all__ = ["sequential"]

from hdplugins.operators.block_sparse_attention import OPERATOR
from hdplugins.operators.block_sparse_attention.onnx_parts import Parts, listing, sparse_attention
from hdplugins.operators.onnx_text import attention, heads_and_tokens


def sequential(parts: Parts, *, tokens_first: bool) -> str:
    """Text that makes `attended`, [batch, heads, tokens, head_dim].

    Args:
        parts: what the body is made of.
        tokens_first: query, key, value and `attended` are [batch, tokens, heads, head_dim] instead, as the projections
            around have them: nothing is turned, in memory or time.
    """
    text = "".join(
        heads_and_tokens(state, f"token_{state}", swapped=not tokens_first) for state in OPERATOR.state_names
    )
    text += _index(parts) + _STEPS
    inputs = {
        "int64[heads, one] row_starts": "all_row_starts",
        "int64[block] query_offsets": "query_tables",
        "int64[any_heads, span] listed_offsets": "key_tables",
        "float[any_heads, one, span] listed_bias_row": "bias_tables",
        "bool[block, one, one] real_row": "real_tables",
    }
    body = _STEP_ATTENTION.format(
        attention=sparse_attention(parts, "block_key", "block_value", "step_bias", "list_sums", axes=3)
    )
    if parts.dense:
        text += _SHORT_STEPS
        inputs |= {"bool is_short_step": "short_steps", "int64 text": "texts"}
        body = _SHORT_OR_LISTED + body
    else:
        body = "step_offsets = Identity (listed_offsets)\nstep_bias = Identity (listed_bias_row)\n" + body
    if parts.global_rows:
        text += _sequential_global_rows(parts)
        inputs |= {"bool is_global_step": "global_steps", "int64 place": "global_places"}
        body = _GLOBAL_OR_LISTED.format(of_list=body)
    else:
        body += "step_sums = Identity (list_sums)\n"
    signature, given = ", ".join(inputs), ", ".join(inputs.values())
    text += _SCAN_BLOCKS.format(number=len(inputs), signature=signature, given=given, body=body)
    return text + heads_and_tokens("rows", "attended", swapped=not tokens_first)


def _index(parts: Parts) -> str:
    """Text that makes `key_tokens`, [batch, 1 or heads, blocks, span]: the tokens that `bias` is about."""
    text = _INDEX_SHAPE
    if parts.front:
        text += _FRONT_INDEX
    if parts.last:
        text += _LAST_INDEX
    if parts.window >= 0:
        text += _NEAR_INDEX.format(offsets=list(range(-parts.window, parts.window + 1)))
    if parts.spans:
        text += f"""
    row_index = Concat <axis = 2> ({listing("{}_index", parts.spans)})
    span_index = Unsqueeze (row_index, one_1d)
"""
    if parts.listed:
        text += _LISTED_INDEX + (_JOIN_LISTED_INDEX if parts.spans else "index = Identity (text_listed_index)\n")
    else:
        text += "index = Identity (span_index)\n"
    return text + _KEY_TOKENS


def _sequential_global_rows(parts: Parts) -> str:
    """Text that makes `global_rows`, [batch * slots, heads, block, head_dim], and where each step finds its own."""
    text = ""
    slots = []
    if parts.first:
        text += _FIRST_SLOTS
        slots.append("first_slots")
    if parts.last:
        text += _LAST_SLOT.format(number="first_global" if parts.first else "zero")
        slots.append("last_slot")
    text += f"global_blocks = Concat <axis = 1> ({', '.join(slots)})\n"
    places = {
        (True, True): "Where (is_first, block_numbers, last_place)",
        (True, False): "Identity (block_row)",
        (False, True): "Identity (last_place)",
    }[parts.first, parts.last]
    of_head = attention("head_rows", "head_keys", "head_values", "head_bias", "head_sums", axes=2, scaled=True)
    return text + _GLOBAL_ROWS.format(places=places, attention=of_head)


_INDEX_SHAPE = """
    of_blocks = Concat <axis = 0> (batch_1d, blocks_1d, one_1d)
    block_range = Range (zero, block, one)
"""

_FRONT_INDEX = """
    front_numbers = Slice (block_numbers, zero_1d, front_end, zero_1d)
    front_index = Expand (front_numbers, of_blocks)
"""

_LAST_INDEX = """
    last_index = Expand (last_cell, of_blocks)
"""

_NEAR_INDEX = """
    near_offsets = Constant <value_ints = {offsets}> ()
    block_column = Unsqueeze (block_numbers, one_1d)
    near_numbers = Add (block_column, near_offsets)
    above_first = Max (near_numbers, zero)
    in_text = Min (above_first, last_number)
    near_index = Expand (in_text, of_blocks)
"""

_LISTED_INDEX = """
    of_texts = Concat <axis = 0> (batch_1d, one_1d, one_1d, one_1d)
    text_listed_index = Expand (listed_index, of_texts)
"""

_JOIN_LISTED_INDEX = """
    index_heads = Shape <start = 1, end = 2> (text_listed_index)
    to_index_heads = Concat <axis = 0> (one_1d, index_heads, one_1d, one_1d)
    headed_index = Expand (span_index, to_index_heads)
    index = Concat <axis = 3> (headed_index, text_listed_index)
"""

_KEY_TOKENS = """
    block_starts = Mul (index, block)
    block_start_column = Unsqueeze (block_starts, last_axis)
    block_tokens = Add (block_start_column, block_range)
    key_tokens_shape = Constant <value_ints = [0, 0, 0, -1]> ()
    all_key_tokens = Reshape (block_tokens, key_tokens_shape)
    key_tokens = Min (all_key_tokens, last_token)
"""

# A step is a block of a text. Rows of all heads of all tokens of all texts are numbered through, in that order from the
# inside, so that nothing of other texts is copied: row (text * tokens + token) * heads + head.
_STEPS = """
    batch = Gather (mask_shape, zero)
    num_steps = Mul (batch, blocks)
    step_numbers = Range (zero, num_steps, one)
    texts = Div (step_numbers, blocks)
    step_blocks = Mod (step_numbers, blocks)
    heads_1d = Shape <start = 2, end = 3> (token_query)
    num_heads = Squeeze (heads_1d)
    head_numbers = Range (zero, num_heads, one)
    text_rows = Mul (tokens, num_heads)
    text_column = Unsqueeze (texts, one_1d)
    first_rows = Mul (text_column, text_rows)
    head_starts = Add (first_rows, head_numbers)
    all_row_starts = Unsqueeze (head_starts, last_axis)
    query_starts = Mul (step_blocks, block)
    query_column = Unsqueeze (query_starts, one_1d)
    all_query_tokens = Add (query_column, block_range)
    query_tokens_in_text = Min (all_query_tokens, last_token)
    query_tables = Mul (query_tokens_in_text, num_heads)
    key_row_offsets = Mul (key_tokens, num_heads)
    turned_tokens = Transpose <perm = [0, 2, 1, 3]> (key_row_offsets)
    turned_tokens_shape = Shape <start = 2> (turned_tokens)
    key_tables_shape = Concat <axis = 0> (any_number, turned_tokens_shape)
    key_tables = Reshape (turned_tokens, key_tables_shape)
    turned_bias = Transpose <perm = [0, 2, 1, 3, 4]> (bias)
    turned_bias_shape = Shape <start = 2> (turned_bias)
    bias_tables_shape = Concat <axis = 0> (any_number, turned_bias_shape)
    bias_tables = Reshape (turned_bias, bias_tables_shape)
    hidden_score = Constant <value_float = -1.0e29> ()
    real_keys = Greater (key_bias, hidden_score)
    real_tables_shape = Concat <axis = 0> (any_number, block_1d, one_1d, one_1d)
    real_tables = Reshape (real_keys, real_tables_shape)
    head_dim = Shape <start = 3, end = 4> (token_query)
    all_rows_shape = Concat <axis = 0> (any_number, head_dim)
    all_queries = Reshape (token_query, all_rows_shape)
    all_keys = Reshape (token_key, all_rows_shape)
    all_values = Reshape (token_value, all_rows_shape)
"""

_STEP_ATTENTION = """
    head_query_rows = Add (row_starts, query_offsets)
    head_key_rows = Add (row_starts, step_offsets)
    block_query = Gather <axis = 0> (all_queries, head_query_rows)
    block_key = Gather <axis = 0> (all_keys, head_key_rows)
    block_value = Gather <axis = 0> (all_values, head_key_rows)
    {attention}
"""

_SHORT_STEPS = """
    short_steps = Gather <axis = 0> (is_short, texts)
    short_end = Min (tokens, dense_tokens)
    short_end_1d = Unsqueeze (short_end, zero_1d)
    short_range = Range (zero, short_end, one)
    short_row_offsets = Mul (short_range, num_heads)
    short_offsets = Unsqueeze (short_row_offsets, zero_1d)
    short_token_bias = Slice (token_bias, zero_1d, short_end_1d, one_1d)
    short_bias = Unsqueeze (short_token_bias, both_axes)
"""

_SHORT_OR_LISTED = """
    step_offsets, step_bias = If <
        then_branch = short_keys () => (dense_step_offsets, dense_step_bias) {
            dense_step_offsets = Identity (short_offsets)
            dense_step_bias = Gather <axis = 0> (short_bias, text)
        },
        else_branch = listed_keys_of_step () => (sparse_step_offsets, sparse_step_bias) {
            sparse_step_offsets = Identity (listed_offsets)
            sparse_step_bias = Identity (listed_bias_row)
        }
    > (is_short_step)
"""

_GLOBAL_OR_LISTED = """
    step_sums = If <
        then_branch = global_block () => (global_step_sums) {{
            global_step_sums = Gather <axis = 0> (global_rows, place)
        }},
        else_branch = other_block () => (list_sums) {{ {of_list} }}
    > (is_global_step)
"""

# Only padding needs a separate rule. Where, not a product: the sums of padded queries may be anything.
_SCAN_BLOCKS = """
    scanned_sums = Scan <num_scan_inputs = {number}, body = attend (
        {signature}
    ) => (float[block, heads, head_dim] wide_sums) {{
        {body}
        turned_sums = Transpose <perm = [1, 0, 2]> (step_sums)
        zero_value = Constant <value_float = 0.0> ()
        nothing = CastLike (zero_value, query)
        real_sums = Where (real_row, turned_sums, nothing)
        wide_sums = Cast <to = 1> (real_sums)
    }}> ({given})
    typed_sums = CastLike (scanned_sums, query)
    all_tokens_shape = Concat <axis = 0> (batch_1d, any_number, heads_1d, head_dim)
    rows_and_more = Reshape (typed_sums, all_tokens_shape)
    rows = Slice (rows_and_more, zero_1d, tokens_1d, one_1d)
"""

_FIRST_SLOTS = """
    first_range = Range (zero, first_global, one)
    first_in_text = Min (first_range, last_number)
    first_slots_shape = Concat <axis = 0> (batch_1d, one_1d)
    first_slots = Expand (first_in_text, first_slots_shape)
    block_row = Unsqueeze (block_numbers, zero_1d)
"""

_LAST_SLOT = """
    last_slot = Unsqueeze (last_block_index, one_1d)
    last_place = Identity ({number})
"""

# The rows of global blocks, one head of one text per step, with all its keys.
_GLOBAL_ROWS = """
    global_starts = Mul (global_blocks, block)
    global_column_starts = Unsqueeze (global_starts, last_axis)
    all_global_tokens = Add (global_column_starts, block_range)
    global_tokens_shape = Constant <value_ints = [0, 1, -1]> ()
    global_token_rows = Reshape (all_global_tokens, global_tokens_shape)
    global_tokens = Min (global_token_rows, last_token)
    text_numbers = Range (zero, batch, one)
    text_starts = Mul (text_numbers, text_rows)
    text_start_column = Unsqueeze (text_starts, one_1d)
    text_head_starts = Add (text_start_column, head_numbers)
    text_head_column = Unsqueeze (text_head_starts, last_axis)
    global_row_offsets = Mul (global_tokens, num_heads)
    global_query_rows = Add (text_head_column, global_row_offsets)
    global_queries = Gather <axis = 0> (all_queries, global_query_rows)
    scaled_global_queries = Mul (global_queries, typed_scale)
    all_heads = Mul (batch, num_heads)
    all_heads_1d = Unsqueeze (all_heads, zero_1d)
    step_of_rows = Concat <axis = 0> (all_heads_1d, any_number, head_dim)
    step_queries = Reshape (scaled_global_queries, step_of_rows)
    step_starts = Reshape (text_head_starts, any_number)
    token_range = Range (zero, tokens, one)
    token_offsets = Mul (token_range, num_heads)
    text_bias = Unsqueeze (token_bias, both_axes)
    to_heads = Concat <axis = 0> (one_1d, heads_1d, one_1d, one_1d)
    headed_token_bias = Expand (text_bias, to_heads)
    step_of_bias = Concat <axis = 0> (any_number, one_1d, tokens_1d)
    step_biases = Reshape (headed_token_bias, step_of_bias)
    scanned_rows = Scan <num_scan_inputs = 3, body = attend_to_all (
        head_rows, int64 head_start, float[one, tokens] head_bias
    ) => (float[rows, head_dim] wide_head_sums) {{
        own_rows = Add (head_start, token_offsets)
        head_keys = Gather <axis = 0> (all_keys, own_rows)
        head_values = Gather <axis = 0> (all_values, own_rows)
        {attention}
        wide_head_sums = Cast <to = 1> (head_sums)
    }}> (step_queries, step_starts, step_biases)
    typed_rows = CastLike (scanned_rows, query)
    slots_1d = Shape <start = 1> (global_blocks)
    of_slots = Concat <axis = 0> (batch_1d, heads_1d, slots_1d, block_1d, head_dim)
    head_slots = Reshape (typed_rows, of_slots)
    text_slots = Transpose <perm = [0, 2, 1, 3, 4]> (head_slots)
    global_rows_shape = Concat <axis = 0> (any_number, heads_1d, block_1d, head_dim)
    global_rows = Reshape (text_slots, global_rows_shape)
    slots = Squeeze (slots_1d)
    first_slot_of_text = Mul (text_numbers, slots)
    first_slot_column = Unsqueeze (first_slot_of_text, one_1d)
    own_slot = {places}
    text_places = Add (first_slot_column, own_slot)
    of_text_blocks = Concat <axis = 0> (batch_1d, blocks_1d)
    all_places = Expand (text_places, of_text_blocks)
    global_places = Reshape (all_places, any_number)
    all_are_global = Expand (is_global, of_text_blocks)
    global_steps = Reshape (all_are_global, any_number)
"""
