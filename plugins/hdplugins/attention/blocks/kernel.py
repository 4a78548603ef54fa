"""Block-sparse attention on a GPU: two kernels that plan, one that attends to blocks of keys, and one that sums up.

`count_tokens` looks at the mask of each text once. `list_blocks` writes, for each block of queries, the blocks of keys
that its queries see, in the manner of FlexAttention: a count and the indices of *whole* blocks, which need no mask and
count once, and of *partial* ones, which hold padding too or count several times, each with the logarithm of how often.
Blocks without a real token are in no list. One more list has all blocks of the text, for global queries.

`attend` is a FlashAttention-style forward pass of one tile of queries in two loops over one running softmax: the
partial blocks with a mask, the whole ones without. A block that counts m times adds log2(m) to its scores, and is
loaded once. The queries of a long text's global blocks see all of it: one program for them would be running long after
all others have ended. They are split into programs that see a part of the keys each and start first; `combine` makes
one answer of what each of these has found.

All that decides the machine code lies in this file and in `running_softmax`, or comes as a constant. Letters in the
kernels: i and j count blocks of queries and keys, m and n count queries and keys; `tail` is explained in
`running_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.attention.blocks.plugin import HEADER_INTS
from hdplugins.kernels.running_softmax import attend_keys, load_rows, load_tail, nothing_seen, rows_of, store_shares

_NOT_SPECIALIZED = (
    "tokens", "blocks", "plan_ints", "list_ints", "most_listed", "first_global", "last_global", "window",
    "first_repeats", "dense_tokens", "ends_by_row", "table_heads", "table_rows", "table_listed", "tokens_of_whole",
    "splits",
)  # fmt: skip
"""Nothing is compiled for certain values of these, here as ahead of time: what is timed is then what is shipped."""

# A number of its own: the cache of compiled kernels hashes this file, and not the one of HEADER_INTS.
_HEADER = tl.constexpr(4)
assert _HEADER.value == HEADER_INTS


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def count_tokens(
    token_mask,  # [batch, tokens] int32
    plan,  # see list_blocks
    tokens,
    blocks,
    plan_ints,
    block_size: tl.constexpr,
    lanes: tl.constexpr,  # a power of two, block_size or more
    chunk: tl.constexpr,  # blocks of one program
):
    """Write how many real tokens each block has, and one past the last of them."""
    row = tl.program_id(1).to(tl.int64)
    plan += row * plan_ints
    block = tl.program_id(0) * chunk + tl.arange(0, chunk)
    lane = tl.arange(0, lanes)
    token = block[:, None] * block_size + lane[None, :]
    present = (lane < block_size)[None, :] & (token < tokens)
    is_real = tl.load(token_mask + row * tokens + token, mask=present, other=0) != 0
    tl.store(plan + _HEADER + block, tl.sum(is_real.to(tl.int32), 1), mask=block < blocks)
    tl.store(plan + _HEADER + blocks + block, tl.max(tl.where(is_real, token + 1, 0), 1), mask=block < blocks)


@triton.jit
def _sees_all(i, last, first_global, last_global):
    return (i < first_global) | ((last_global != 0) & (i == last))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def list_blocks(
    listed_blocks,  # [table_heads, table_rows, table_listed] int32, or None
    plan,  # int32, [batch, plan_ints]
    tokens,
    blocks,
    plan_ints,
    list_ints,
    most_listed,
    first_global,
    last_global,
    window,
    first_repeats,
    dense_tokens,
    ends_by_row,
    table_rows,
    table_listed,
    tokens_of_whole,  # block_size, or -1 where that is not a multiple of a step's keys
    block_size: tl.constexpr,
    chunk: tl.constexpr,
    entries: tl.constexpr,
):
    """Write the list of one block of queries and head, or, as the program behind the last block, that of all blocks.

    A text's plan: its last block, whether it is short, 2 unused | real tokens of each block | one past the last of them
    | the list of all blocks | a list for each head of the table, or for all heads, and block of queries. A list: number
    of whole blocks, of partial ones | whole blocks, ascending | partial ones | log2 of how often each of these counts,
    as bits of a float32; each of the three parts has room for as many blocks as there may be.
    """
    i, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_all = i == blocks
    plan += row * plan_ints
    counts = plan + _HEADER
    lists = counts + 2 * blocks
    lane = tl.arange(0, chunk)

    latest = tl.zeros((chunk,), tl.int32)
    for start in range(0, blocks, chunk):
        j = start + lane
        latest = tl.maximum(latest, tl.load(counts + blocks + j, mask=j < blocks, other=0))
    end = tl.where(ends_by_row != 0, tl.max(latest, 0), tokens)
    last = (end + block_size - 1) // block_size - 1
    is_short = end <= dense_tokens

    room = tl.where(is_all, blocks, most_listed)
    if is_all == 0:
        lists += 2 + 3 * blocks + (head * blocks + i) * list_ints
    end_of_blocks = blocks
    if is_all:
        if head != 0:
            end_of_blocks = 0
    else:
        if _sees_all(i, last, first_global, last_global) | is_short | (i > last):
            end_of_blocks = 0  # this list is not read, and has no room for all

    listed = 0
    table = listed_blocks
    if listed_blocks is not None:
        at = i - first_global
        if (at >= 0) & (at < table_rows) & (is_all == 0):
            listed = table_listed
        table += (head.to(tl.int64) * table_rows + at) * table_listed
    entry = tl.arange(0, entries)

    wholes, partials = 0, 0
    for start in range(0, end_of_blocks, chunk):
        j = start + lane
        real = tl.load(counts + j, mask=j < blocks, other=0)
        is_seen = is_all | (tl.abs(j - i) <= window) | _sees_all(j, last, first_global, last_global)
        times = is_seen.to(tl.float32)
        if is_all == 0:
            times += tl.where(j == 0, first_repeats, 0).to(tl.float32)
        if listed_blocks is not None:
            for place in range(0, listed, entries):
                named = tl.load(table + place + entry, mask=place + entry < listed, other=-1)
                times += tl.sum((named[:, None] == j[None, :]).to(tl.float32), 0)
        is_seen = (times > 0) & (real > 0)
        is_whole = is_seen & (real == tokens_of_whole) & (times == 1)
        is_partial = is_seen & (is_whole == 0)
        slot = wholes + tl.cumsum(is_whole.to(tl.int32), 0) - 1
        tl.store(lists + 2 + slot, j, mask=is_whole)
        slot = partials + tl.cumsum(is_partial.to(tl.int32), 0) - 1
        tl.store(lists + 2 + room + slot, j, mask=is_partial)
        log2_times = tl.log2(tl.where(is_seen, times, 1.0))
        tl.store(lists + 2 + 2 * room + slot, log2_times.to(tl.int32, bitcast=True), mask=is_partial)
        wholes += tl.sum(is_whole.to(tl.int32), 0)
        partials += tl.sum(is_partial.to(tl.int32), 0)
    if (is_all == 0) | (head == 0):
        tl.store(lists, wholes)
        tl.store(lists + 1, partials)
    if is_all & (head == 0):
        tl.store(plan, last)
        tl.store(plan + 1, is_short.to(tl.int32))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, key, value, out: [batch, tokens, heads, head_dim]
    key,
    value,
    token_mask,  # [batch, tokens] int32
    plan,  # see list_blocks
    partials,  # see _places
    out,
    stride_query_batch,  # in elements, as are all strides
    stride_query_head,
    stride_query_token,
    stride_key_batch,
    stride_key_head,
    stride_key_token,
    stride_value_batch,
    stride_value_head,
    stride_value_token,
    stride_out_batch,
    stride_out_head,
    stride_out_token,
    tokens,
    blocks,
    plan_ints,
    list_ints,
    most_listed,
    table_heads,  # 1 where all heads have the same lists
    first_global,
    last_global,
    splits,  # programs that share the keys of a global tile, 0 where one sees all
    scale,  # holds log2(e), so that exp2 serves
    block_size: tl.constexpr,
    head: tl.constexpr,
    tail: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Attention of a tile of queries, or a part of the keys of a global tile. Rows of padding are 0."""
    tiles: tl.constexpr = (block_size + block_queries - 1) // block_queries  # of a block of queries
    steps: tl.constexpr = (block_size + block_keys - 1) // block_keys  # over a block of keys
    row, head_number = tl.program_id(2).to(tl.int64), tl.program_id(1)
    query = rows_of(query, row, head_number, stride_query_batch, stride_query_head)
    key = rows_of(key, row, head_number, stride_key_batch, stride_key_head)
    value = rows_of(value, row, head_number, stride_value_batch, stride_value_head)
    mask = token_mask + row * tokens
    plan += row * plan_ints
    last = tl.load(plan)
    is_short = tl.load(plan + 1) != 0
    counts = plan + _HEADER
    lists = counts + 2 * blocks

    # The parts of global tiles come first in the grid: they take the longest. Those of one part are neighbours, which
    # share keys in the L2 cache, and so are tiles of queries.
    global_tiles = (first_global + last_global) * tiles
    place = tl.program_id(0) - global_tiles * splits
    is_part = place < 0
    split = tl.program_id(0) // tl.maximum(global_tiles, 1)
    if is_part:
        place = tl.program_id(0) - split * global_tiles
    i = place // tiles
    within_block = (place - i * tiles) * block_queries + tl.arange(0, block_queries)
    global_row = i * block_size + within_block
    # `combine` writes the rows that the parts are of.
    is_wanted = (splits == 0) | is_short | (_sees_all(i, last, first_global, last_global) == 0)
    if is_part:
        # Not twice: the last block may be one of the first.
        is_wanted = (is_short == 0) & ((i < first_global) | (last >= first_global))
        i = tl.where(i < first_global, i, last)
    m = i * block_size + within_block
    sees_all = _sees_all(i, last, first_global, last_global) | is_short
    asked = (within_block < block_size) & (m >= 0) & (m < tokens)
    is_real = tl.load(mask + m, mask=asked, other=0) != 0
    query_offsets = m * stride_query_token
    q = load_rows(query, query_offsets, is_real, head, 0, True)
    q_tail = load_tail(query, query_offsets, is_real, q, head, tail)

    room = blocks
    if sees_all == 0:
        of_head = head_number % table_heads
        lists += 2 + 3 * blocks + (of_head * blocks + i) * list_ints
        room = most_listed
    wholes, masked = 0, 0
    if is_wanted & (tl.max(is_real.to(tl.int32), 0) > 0):
        wholes = tl.load(lists)
        masked = tl.load(lists + 1)
    whole_begin, masked_begin = 0, 0
    if is_part:
        share = (wholes + masked + splits - 1) // splits
        whole_begin = tl.minimum(split * share, wholes)
        masked_begin = tl.minimum(split * share - whole_begin, masked)
        masked = tl.minimum(tl.maximum((split + 1) * share - wholes, 0), masked)
        wholes = tl.minimum((split + 1) * share, wholes)

    state = nothing_seen(block_queries, head, tail)
    # Where the next step's keys are is read a step ahead: they can be asked for then without waiting.
    following = tl.load(lists + 2 + room + masked_begin)
    for step in range(masked_begin * steps, masked * steps):
        j = following
        following = tl.load(lists + 2 + room + (step + 1) // steps)
        log2_times = tl.load(lists + 2 + 2 * room + step // steps).to(tl.float32, bitcast=True)
        within = (step % steps) * block_keys + tl.arange(0, block_keys)
        n = j * block_size + within
        present = (within < block_size) & (n < tokens)
        seen = tl.load(mask + n, mask=present, other=0) != 0
        state = attend_keys(
            q, q_tail, key, value, n * stride_key_token, n * stride_value_token, present, seen[None, :], log2_times,
            state, scale, head, tail, True,
        )  # fmt: skip
    following = tl.load(lists + 2 + whole_begin)
    for step in range(whole_begin * steps, wholes * steps):
        j = following
        following = tl.load(lists + 2 + (step + 1) // steps)
        n = j * block_size + (step % steps) * block_keys + tl.arange(0, block_keys)
        state = attend_keys(
            q, q_tail, key, value, n * stride_key_token, n * stride_value_token, n < tokens, n[None, :] < tokens, None,
            state, scale, head, tail, False,
        )  # fmt: skip

    stored = asked & (within_block < tl.where(is_wanted, block_size, 0))
    if is_part:
        sums, sums_tail, top, norm = state
        of_sums, of_rows = _places(
            partials, global_row, split, splits, first_global, last_global, block_size, head + tail
        )
        tl.store(of_sums[:, None] + tl.arange(0, head)[None, :], sums, mask=stored[:, None])
        if tail:
            tl.store(of_sums[:, None] + head + tl.arange(0, tail)[None, :], sums_tail, mask=stored[:, None])
        tl.store(of_rows, top, mask=stored)
        tl.store(of_rows + 1, norm, mask=stored)
    else:
        out = rows_of(out, row, head_number, stride_out_batch, stride_out_head)
        store_shares(out, m * stride_out_token, stored, is_real, state, head, tail)


@triton.jit
def _places(partials, global_row, split, splits, first_global, last_global, block_size: tl.constexpr, head_dim):
    """Where a part of the keys leaves a global query's sums of values, and its largest score and sum of weights.

    The buffer: [batch, heads, splits, global rows, head_dim], then [batch, heads, splits, global rows, 2].
    """
    rows = ((first_global + last_global) * block_size).to(tl.int64)
    text = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    at = (text * splits + split) * rows + global_row
    behind = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * splits * rows * head_dim
    return partials + at * head_dim, partials + behind + at * 2


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def combine(
    token_mask,  # [batch, tokens] int32
    plan,  # see list_blocks
    partials,  # see _places
    out,  # [batch, tokens, heads, head_dim]
    stride_out_batch,  # in elements, as are all strides
    stride_out_head,
    stride_out_token,
    tokens,
    plan_ints,
    first_global,
    last_global,
    splits,
    block_size: tl.constexpr,
    head: tl.constexpr,
    tail: tl.constexpr,
    rows: tl.constexpr,
    most_splits: tl.constexpr,
):
    """Make the answers of some global queries of what `attend` found in each part of the keys."""
    row = tl.program_id(2).to(tl.int64)
    plan += row * plan_ints
    last = tl.load(plan)
    is_short = tl.load(plan + 1) != 0
    global_row = tl.program_id(0) * rows + tl.arange(0, rows)
    i = global_row // block_size
    m = tl.where(i < first_global, i, last) * block_size + global_row % block_size
    # Not twice: the last block may be one of the first.
    end = first_global + tl.where((last_global != 0) & (last >= first_global), 1, 0)
    asked = (i < tl.where(is_short, 0, end)) & (m < tokens)
    is_real = tl.load(token_mask + row * tokens + m, mask=asked, other=0) != 0

    split = tl.arange(0, most_splits)[:, None]
    of_sums, of_rows = _places(
        partials, global_row[None, :], split, splits, first_global, last_global, block_size, head + tail
    )
    found = is_real[None, :] & (split < splits)
    tops = tl.load(of_rows, mask=found, other=float("-inf"))
    top = tl.max(tops, 0)
    weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top)[None, :])
    norm = tl.sum(tl.load(of_rows + 1, mask=found, other=0.0) * weights, 0)
    columns = of_sums[:, :, None] + tl.arange(0, head)[None, None, :]
    sums = tl.sum(tl.load(columns, mask=found[:, :, None], other=0.0) * weights[:, :, None], 0)
    sums_tail = norm
    if tail:
        columns = of_sums[:, :, None] + head + tl.arange(0, tail)[None, None, :]
        sums_tail = tl.sum(tl.load(columns, mask=found[:, :, None], other=0.0) * weights[:, :, None], 0)
    out = rows_of(out, row, tl.program_id(1), stride_out_batch, stride_out_head)
    store_shares(out, m * stride_out_token, asked, is_real, (sums, sums_tail, top, norm), head, tail)
