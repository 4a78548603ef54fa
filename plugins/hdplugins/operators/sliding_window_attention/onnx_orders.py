"""The two orders of the blocks of sliding-window attention, as ONNX text.

With fewer heads of keys than of queries, heads are two axes, [key_heads, group]: keys and values have 1 in place of the
group, so that products broadcast and nothing is copied for each head.
"""

from __future__ import annotations

__all__ = ["block_size", "in_order"]

from hdplugins.operators.operator import BlockOrder
from hdplugins.operators.sliding_window_attention.onnx_parts import attention, find_globals


def block_size(order: BlockOrder) -> str:
    """Text that makes `block`, the queries of one."""
    return _BLOCK_SIZE[order]


def in_order(order: BlockOrder, *, bound: int, grouped: bool) -> str:
    """Text that makes `row_sums`, [batch, heads, blocks, block, step, head_dim], of the heads of a step.

    Args:
        order: of the blocks.
        bound: the most global tokens of a text.
        grouped: whether there are fewer heads of keys.
    """
    gather = _GATHER[order, grouped]
    if order is BlockOrder.SEQUENTIAL:
        gather = gather.format(find_globals=find_globals(bound))
    axes = (6 if order is BlockOrder.PARALLEL else 4) + grouped
    blocks = _IN_ORDER[order].format(
        attention=attention(gather=gather, bound=bound, axes=axes),
        ungrouped=_UNGROUPED[order] if grouped else _NOT_GROUPED,
        head_numbers=_NUMBERS_OF_GROUPS if grouped else _NUMBERS_OF_HEADS,
    )
    return _HEADS + blocks


_HEADS = """
    head_shape = Shape <start = 1, end = 2> (step_query)
    any_number = Constant <value_ints = [-1]> ()
"""

# Larger blocks copy fewer keys twice and compute more masked scores. In parallel a quarter of the reach was best; in
# sequence 32 to 256 queries hardly differed in time.
_BLOCK_SIZE = {
    BlockOrder.PARALLEL: """
    quarter = Constant <value_int = 256> ()
    smallest_block = Constant <value_int = 64> ()
    largest_block = Constant <value_int = 256> ()
    quarters = Div (reach, quarter)
    quarter_reach = Mul (quarters, smallest_block)
    at_least = Max (quarter_reach, smallest_block)
    block = Min (at_least, largest_block)
""",
    BlockOrder.SEQUENTIAL: """
    largest_block = Constant <value_int = 64> ()
    block = Min (largest_block, rows)
""",
}

_GATHER = {
    (BlockOrder.PARALLEL, False): """
    mask_axes = Constant <value_ints = [1, -2]> ()
    visible_keys = Gather <axis = 1> (visible, source_index)
    key_mask = Unsqueeze (visible_keys, mask_axes)
    block_query = Gather <axis = 2> (step_query, query_index)
    block_key = Gather <axis = 2> (step_keys, source_index)
    block_value = Gather <axis = 2> (step_values, source_index)
""",
    (BlockOrder.PARALLEL, True): """
    mask_axes = Constant <value_ints = [1, 2, -2]> ()
    visible_keys = Gather <axis = 1> (visible, source_index)
    key_mask = Unsqueeze (visible_keys, mask_axes)
    key_head_shape = Shape <start = 1, end = 2> (step_keys)
    query_row_shape = Shape <start = 2> (step_query)
    group_shape = Concat <axis = 0> (axis_0, key_head_shape, any_number, query_row_shape)
    groups = Reshape (step_query, group_shape)
    block_query = Gather <axis = 3> (groups, query_index)
    gathered_keys = Gather <axis = 2> (step_keys, source_index)
    gathered_values = Gather <axis = 2> (step_values, source_index)
    block_key = Unsqueeze (gathered_keys, axis_2)
    block_value = Unsqueeze (gathered_values, axis_2)
""",
    # Rows of all heads of all texts are numbered through, so that nothing of other texts is copied.
    (BlockOrder.SEQUENTIAL, False): """
    visible_tokens = Gather <axis = 0> (visible, text)
    visible_keys = Gather <axis = 0> (visible_tokens, source_index)
    key_mask = Unsqueeze (visible_keys, axis_before_last)
    first_head = Mul (text, num_heads)
    text_heads = Add (first_head, head_numbers)
    first_rows = Mul (text_heads, tokens)
    head_queries = Add (first_rows, query_index)
    {find_globals}
    head_keys = Add (first_rows, found_index)
    block_query = Gather <axis = 0> (all_queries, head_queries)
    block_key = Gather <axis = 0> (all_keys, head_keys)
    block_value = Gather <axis = 0> (all_values, head_keys)
""",
    (BlockOrder.SEQUENTIAL, True): """
    visible_tokens = Gather <axis = 0> (visible, text)
    visible_keys = Gather <axis = 0> (visible_tokens, source_index)
    key_mask = Unsqueeze (visible_keys, axis_before_last)
    first_head = Mul (text, num_heads)
    text_heads = Add (first_head, head_numbers)
    first_rows = Mul (text_heads, tokens)
    head_queries = Add (first_rows, query_index)
    {find_globals}
    first_key_head = Mul (text, num_key_heads)
    text_key_heads = Add (first_key_head, key_head_numbers)
    first_key_rows = Mul (text_key_heads, tokens)
    head_keys = Add (first_key_rows, found_index)
    block_query = Gather <axis = 0> (all_queries, head_queries)
    block_key = Gather <axis = 0> (all_keys, head_keys)
    block_value = Gather <axis = 0> (all_values, head_keys)
""",
}

_NUMBERS_OF_HEADS = """
    head_numbers = Unsqueeze (head_range, table_axes)
"""

# head_numbers are [key_heads, group, 1, 1], key_head_numbers [key_heads, 1, 1, 1].
_NUMBERS_OF_GROUPS = """
    key_head_shape = Shape <start = 1, end = 2> (step_keys)
    num_key_heads = Squeeze (key_head_shape)
    key_head_range = Range (zero, num_key_heads, one)
    key_axes = Constant <value_ints = [1, 2, 3]> ()
    key_head_numbers = Unsqueeze (key_head_range, key_axes)
    number_shape = Concat <axis = 0> (key_head_shape, any_number, axis_1, axis_1)
    head_numbers = Reshape (head_range, number_shape)
"""

_NOT_GROUPED = """
    head_sums = Identity (block_sums)
"""

_UNGROUPED = {
    BlockOrder.PARALLEL: """
    inner_shape = Shape <start = 3> (block_sums)
    head_sums_shape = Concat <axis = 0> (axis_0, head_shape, inner_shape)
    head_sums = Reshape (block_sums, head_sums_shape)
""",
    BlockOrder.SEQUENTIAL: """
    inner_shape = Shape <start = 2> (block_sums)
    head_sums_shape = Concat <axis = 0> (head_shape, inner_shape)
    head_sums = Reshape (block_sums, head_sums_shape)
""",
}

_IN_ORDER = {
    # head_sums are [batch, heads, blocks, step, block, head_dim].
    BlockOrder.PARALLEL: """
    query_tokens = Identity (query_table)
    key_tokens = Identity (key_table)
    {attention}
    {ungrouped}
    row_sums = Transpose <perm = [0, 1, 2, 4, 3, 5]> (head_sums)
""",
    # A step is one block of one text. scanned_sums are [batch * blocks, heads, step, block, head_dim], float32 because
    # a Scan must declare a type.
    BlockOrder.SEQUENTIAL: """
    batch = Gather (kind_shape, zero)
    num_heads = Squeeze (head_shape)
    head_range = Range (zero, num_heads, one)
    {head_numbers}
    dim = Shape <start = 3, end = 4> (query)
    all_rows_shape = Concat <axis = 0> (any_number, dim)
    all_queries = Reshape (step_query, all_rows_shape)
    all_keys = Reshape (step_keys, all_rows_shape)
    all_values = Reshape (step_values, all_rows_shape)
    all_blocks = Mul (batch, blocks)
    scan_steps = Range (zero, all_blocks, one)
    texts = Div (scan_steps, blocks)
    once = Constant <value_ints = [1, 1]> ()
    batch_shape = Unsqueeze (batch, axis_0)
    repeats = Concat <axis = 0> (batch_shape, once)
    query_tables = Tile (query_table, repeats)
    key_tables = Tile (key_table, repeats)
    scanned_sums = Scan <num_scan_inputs = 3, body = attend (
        int64 text, int64[step, block] query_tokens, int64[step, span] key_tokens
    ) => (float[heads, step, block, head_dim] wide_sums) {{
        {attention}
        {ungrouped}
        wide_sums = Cast <to = 1> (head_sums)
    }}> (texts, query_tables, key_tables)
    typed_sums = CastLike (scanned_sums, query)
    blocks_shape = Unsqueeze (blocks, axis_0)
    block_shape = Shape <start = 1> (typed_sums)
    text_shape = Concat <axis = 0> (batch_shape, blocks_shape, block_shape)
    text_sums = Reshape (typed_sums, text_shape)
    row_sums = Transpose <perm = [0, 2, 1, 4, 3, 5]> (text_sums)
""",
}
