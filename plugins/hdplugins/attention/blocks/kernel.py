"""Block-sparse attention on a GPU: two kernels index the blocks, one attends to them, and one combines splits.

`count_tokens` reads the mask of each sequence once. `list_blocks` writes, for each block of queries, the blocks of keys
that the queries see, in the manner of FlexAttention's BlockMask: the number and the indices of *full* blocks, which
need no mask and count once, and of *partial* ones, which hold padding or count several times, each with the logarithm
of its count. Blocks without a real token are in no list. One more list has all blocks of the sequence, for global
queries.

`attend` is a FlashAttention-style forward pass of one block of BLOCK_M queries in two loops with one online softmax:
the partial blocks with a mask, the full ones without. A block that counts m times adds log2(m) to its scores, and is
loaded once. The queries of a long sequence's global blocks see all keys: one CTA for them would run long after all
others have ended. As in FlashDecoding, their keys are split among CTAs, which start first; `combine` merges the
results of the splits.

The machine code depends on this file, on `online_softmax` and on constants. The notation is explained in
`online_softmax`; `i_block` and `o_block` are blocks of `block_size` tokens.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.attention.blocks.plugin import HEADER_INTS
from hdplugins.kernels.online_softmax import attention_step, head_rows, init_state, load_rows, normalize_and_store

_NOT_SPECIALIZED = (
    "tokens", "blocks", "index_ints", "list_ints", "max_listed", "first_global", "last_global", "window",
    "first_repeats", "dense_tokens", "ends_by_row", "table_heads", "table_rows", "table_listed", "tokens_of_full",
    "splits",
)  # fmt: skip
"""Triton compiles no special versions for values of these, as ahead of time: the timed kernel is the shipped one."""

# A literal: the cache of compiled kernels hashes this file, and not the file of HEADER_INTS.
_HEADER = tl.constexpr(4)
assert _HEADER.value == HEADER_INTS


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def count_tokens(
    token_mask,  # [batch, tokens] int32
    block_index,  # see list_blocks
    tokens,
    blocks,
    index_ints,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,  # a power of two, BLOCK_SIZE or more
    BLOCKS: tl.constexpr,  # blocks of one CTA
):
    """Write the number of real tokens of each block, and the index after the last of them."""
    i_b = tl.program_id(1).to(tl.int64)
    block_index += i_b * index_ints
    # [BLOCKS]
    o_block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    # [BLOCK_T]
    o_in_block = tl.arange(0, BLOCK_T)
    # [BLOCKS, BLOCK_T]
    o_t = o_block[:, None] * BLOCK_SIZE + o_in_block[None, :]
    m_t = (o_in_block < BLOCK_SIZE)[None, :] & (o_t < tokens)
    m_real = tl.load(token_mask + i_b * tokens + o_t, mask=m_t, other=0) != 0
    tl.store(block_index + _HEADER + o_block, tl.sum(m_real.to(tl.int32), 1), mask=o_block < blocks)
    tl.store(block_index + _HEADER + blocks + o_block, tl.max(tl.where(m_real, o_t + 1, 0), 1), mask=o_block < blocks)


@triton.jit
def _is_global(i_block, last, first_global, last_global):
    return (i_block < first_global) | ((last_global != 0) & (i_block == last))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def list_blocks(
    listed_blocks,  # [table_heads, table_rows, table_listed] int32, or None
    block_index,  # [batch, index_ints] int32
    tokens,
    blocks,
    index_ints,
    list_ints,
    max_listed,
    first_global,
    last_global,
    window,
    first_repeats,
    dense_tokens,
    ends_by_row,
    table_rows,
    table_listed,
    tokens_of_full,  # block_size, or -1 if it is not a multiple of BLOCK_N of `attend`
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Write the list of one block of queries and head; the CTA after the last block writes the list of all blocks.

    A row of the index: last block, whether the sequence is short, 2 unused | number of real tokens of each block |
    index after the last of them | the list of all blocks | a list for each head of the table, or for all heads, and
    block of queries. A list: number of full blocks, of partial ones | full blocks, ascending | partial ones | log2 of
    the count of each partial block, as bits of a float32. Each of these three parts has room for the largest number of
    blocks.
    """
    i_block, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    is_all = i_block == blocks
    block_index += i_b * index_ints
    counts = block_index + _HEADER
    lists = counts + 2 * blocks
    # [CHUNK]
    o_chunk = tl.arange(0, CHUNK)

    b_end = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, blocks, CHUNK):
        o_block = start + o_chunk
        b_end = tl.maximum(b_end, tl.load(counts + blocks + o_block, mask=o_block < blocks, other=0))
    end = tl.where(ends_by_row != 0, tl.max(b_end, 0), tokens)
    last = (end + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
    is_short = end <= dense_tokens

    capacity = tl.where(is_all, blocks, max_listed)
    if is_all == 0:
        lists += 2 + 3 * blocks + (i_h * blocks + i_block) * list_ints
    end_of_blocks = blocks
    if is_all:
        if i_h != 0:
            end_of_blocks = 0
    else:
        if _is_global(i_block, last, first_global, last_global) | is_short | (i_block > last):
            end_of_blocks = 0  # this list is not read, and has no room for all blocks

    row_entries = 0
    table = listed_blocks
    if listed_blocks is not None:
        i_row = i_block - first_global
        if (i_row >= 0) & (i_row < table_rows) & (is_all == 0):
            row_entries = table_listed
        table += (i_h.to(tl.int64) * table_rows + i_row) * table_listed
    # [ENTRIES]
    o_entry = tl.arange(0, ENTRIES)

    full, partial = 0, 0
    for start in range(0, end_of_blocks, CHUNK):
        # [CHUNK]
        o_block = start + o_chunk
        b_real = tl.load(counts + o_block, mask=o_block < blocks, other=0)
        m_seen = is_all | (tl.abs(o_block - i_block) <= window) | _is_global(o_block, last, first_global, last_global)
        b_count = m_seen.to(tl.float32)
        if is_all == 0:
            b_count += tl.where(o_block == 0, first_repeats, 0).to(tl.float32)
        if listed_blocks is not None:
            for i_entry in range(0, row_entries, ENTRIES):
                # [ENTRIES]
                b_listed = tl.load(table + i_entry + o_entry, mask=i_entry + o_entry < row_entries, other=-1)
                b_count += tl.sum((b_listed[:, None] == o_block[None, :]).to(tl.float32), 0)
        m_seen = (b_count > 0) & (b_real > 0)
        m_full = m_seen & (b_real == tokens_of_full) & (b_count == 1)
        m_partial = m_seen & (m_full == 0)
        o_slot = full + tl.cumsum(m_full.to(tl.int32), 0) - 1
        tl.store(lists + 2 + o_slot, o_block, mask=m_full)
        o_slot = partial + tl.cumsum(m_partial.to(tl.int32), 0) - 1
        tl.store(lists + 2 + capacity + o_slot, o_block, mask=m_partial)
        b_log2_count = tl.log2(tl.where(m_seen, b_count, 1.0))
        tl.store(lists + 2 + 2 * capacity + o_slot, b_log2_count.to(tl.int32, bitcast=True), mask=m_partial)
        full += tl.sum(m_full.to(tl.int32), 0)
        partial += tl.sum(m_partial.to(tl.int32), 0)
    if (is_all == 0) | (i_h == 0):
        tl.store(lists, full)
        tl.store(lists + 1, partial)
    if is_all & (i_h == 0):
        tl.store(block_index, last)
        tl.store(block_index + 1, is_short.to(tl.int32))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, key, value, out: [batch, tokens, heads, head_dim]
    key,
    value,
    token_mask,  # [batch, tokens] int32
    block_index,  # see list_blocks
    split_results,  # see _split_addresses
    out,
    query_strides,  # (batch, head, token) strides in elements, as are all strides
    key_strides,
    value_strides,
    out_strides,
    tokens,
    blocks,
    index_ints,
    list_ints,
    max_listed,
    table_heads,  # 1 if all heads have equal lists
    first_global,
    last_global,
    splits,  # CTAs that share the keys of global queries; 0 if one CTA takes all keys
    scale,  # includes log2(e), because the softmax uses exp2
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute BLOCK_M queries of one block, or one split of the keys of global queries. Rows of padding are 0."""
    NUM_M: tl.constexpr = (BLOCK_SIZE + BLOCK_M - 1) // BLOCK_M  # CTAs per block of queries
    NUM_N: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N  # steps per block of keys
    i_b, i_h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    q, stride_q = head_rows(query, query_strides, i_b, i_h)
    k, stride_k = head_rows(key, key_strides, i_b, i_h)
    v, stride_v = head_rows(value, value_strides, i_b, i_h)
    mask = token_mask + i_b * tokens
    block_index += i_b * index_ints
    last = tl.load(block_index)
    is_short = tl.load(block_index + 1) != 0
    counts = block_index + _HEADER
    lists = counts + 2 * blocks

    # The splits of global queries come first in the grid: they take the longest. CTAs of one split are neighbours,
    # which share keys in the L2 cache, and so are CTAs of neighbouring queries.
    num_global = (first_global + last_global) * NUM_M
    i_m = tl.program_id(0) - num_global * splits
    is_split = i_m < 0
    i_split = tl.program_id(0) // tl.maximum(num_global, 1)
    if is_split:
        i_m = tl.program_id(0) - i_split * num_global
    i_block = i_m // NUM_M
    # [BLOCK_M]
    o_in_block = (i_m - i_block * NUM_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_global = i_block * BLOCK_SIZE + o_in_block
    # `combine` writes the rows of split queries.
    is_active = (splits == 0) | is_short | (_is_global(i_block, last, first_global, last_global) == 0)
    if is_split:
        # Not twice: the last block may be one of the first.
        is_active = (is_short == 0) & ((i_block < first_global) | (last >= first_global))
        i_block = tl.where(i_block < first_global, i_block, last)
    # [BLOCK_M]
    o_q = i_block * BLOCK_SIZE + o_in_block
    sees_all = _is_global(i_block, last, first_global, last_global) | is_short
    m_q = (o_in_block < BLOCK_SIZE) & (o_q >= 0) & (o_q < tokens)
    m_real = tl.load(mask + o_q, mask=m_q, other=0) != 0
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D]
    b_q, b_q_rem = load_rows(q, o_q * stride_q, m_real, BLOCK_D, REM_D)

    capacity = blocks
    if sees_all == 0:
        i_table_head = i_h % table_heads
        lists += 2 + 3 * blocks + (i_table_head * blocks + i_block) * list_ints
        capacity = max_listed
    full, partial = 0, 0
    if is_active & (tl.max(m_real.to(tl.int32), 0) > 0):
        full = tl.load(lists)
        partial = tl.load(lists + 1)
    full_begin, partial_begin = 0, 0
    if is_split:
        share = (full + partial + splits - 1) // splits
        full_begin = tl.minimum(i_split * share, full)
        partial_begin = tl.minimum(i_split * share - full_begin, partial)
        partial = tl.minimum(tl.maximum((i_split + 1) * share - full, 0), partial)
        full = tl.minimum((i_split + 1) * share, full)

    state = init_state(BLOCK_M, BLOCK_D, REM_D)
    # The block of the next step is read one step ahead: its keys can then be requested without waiting.
    next_block = tl.load(lists + 2 + capacity + partial_begin)
    for step in range(partial_begin * NUM_N, partial * NUM_N):
        i_key_block = next_block
        next_block = tl.load(lists + 2 + capacity + (step + 1) // NUM_N)
        log2_count = tl.load(lists + 2 + 2 * capacity + step // NUM_N).to(tl.float32, bitcast=True)
        # [BLOCK_N]
        o_in_key_block = (step % NUM_N) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = i_key_block * BLOCK_SIZE + o_in_key_block
        m_k = (o_in_key_block < BLOCK_SIZE) & (o_k < tokens)
        m_s = tl.load(mask + o_k, mask=m_k, other=0) != 0
        state = attention_step(
            b_q, b_q_rem, k, v, o_k * stride_k, o_k * stride_v, m_k, m_s[None, :], log2_count, state, scale, BLOCK_D,
            REM_D, True,
        )  # fmt: skip
    next_block = tl.load(lists + 2 + full_begin)
    for step in range(full_begin * NUM_N, full * NUM_N):
        i_key_block = next_block
        next_block = tl.load(lists + 2 + (step + 1) // NUM_N)
        # [BLOCK_N]
        o_k = i_key_block * BLOCK_SIZE + (step % NUM_N) * BLOCK_N + tl.arange(0, BLOCK_N)
        state = attention_step(
            b_q, b_q_rem, k, v, o_k * stride_k, o_k * stride_v, o_k < tokens, o_k[None, :] < tokens, None, state, scale,
            BLOCK_D, REM_D, False,
        )  # fmt: skip

    m_stored = m_q & (o_in_block < tl.where(is_active, BLOCK_SIZE, 0))
    if is_split:
        acc, acc_rem, m_i, l_i = state
        p_acc, p_ml = _split_addresses(
            split_results, o_global, i_split, splits, first_global, last_global, BLOCK_SIZE, BLOCK_D + REM_D
        )
        tl.store(p_acc[:, None] + tl.arange(0, BLOCK_D)[None, :], acc, mask=m_stored[:, None])
        if REM_D:
            tl.store(p_acc[:, None] + BLOCK_D + tl.arange(0, REM_D)[None, :], acc_rem, mask=m_stored[:, None])
        tl.store(p_ml, m_i, mask=m_stored)
        tl.store(p_ml + 1, l_i, mask=m_stored)
    else:
        o, stride_o = head_rows(out, out_strides, i_b, i_h)
        normalize_and_store(o, o_q * stride_o, m_stored, m_real, state, BLOCK_D, REM_D)


@triton.jit
def _split_addresses(
    split_results, o_global, i_split, splits, first_global, last_global, BLOCK_SIZE: tl.constexpr, head_dim
):
    """Return the addresses of acc, and of m_i and l_i, of global queries in one split.

    The buffer: acc, [batch, heads, splits, global rows, head_dim], then (m_i, l_i), [batch, heads, splits, global rows,
    2].
    """
    rows = ((first_global + last_global) * BLOCK_SIZE).to(tl.int64)
    i_bh = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    o_row = (i_bh * splits + i_split) * rows + o_global
    acc_values = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * splits * rows * head_dim
    return split_results + o_row * head_dim, split_results + acc_values + o_row * 2


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def combine(
    token_mask,  # [batch, tokens] int32
    block_index,  # see list_blocks
    split_results,  # see _split_addresses
    out,  # [batch, tokens, heads, head_dim]
    out_strides,  # (batch, head, token) strides in elements
    tokens,
    index_ints,
    first_global,
    last_global,
    splits,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge the states of the splits of some global queries, and store the normalized result."""
    i_b = tl.program_id(2).to(tl.int64)
    block_index += i_b * index_ints
    last = tl.load(block_index)
    is_short = tl.load(block_index + 1) != 0
    # [ROWS]
    o_global = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_block = o_global // BLOCK_SIZE
    o_q = tl.where(o_block < first_global, o_block, last) * BLOCK_SIZE + o_global % BLOCK_SIZE
    # Not twice: the last block may be one of the first.
    end = first_global + tl.where((last_global != 0) & (last >= first_global), 1, 0)
    m_q = (o_block < tl.where(is_short, 0, end)) & (o_q < tokens)
    m_real = tl.load(token_mask + i_b * tokens + o_q, mask=m_q, other=0) != 0

    # [MAX_SPLITS, 1]
    o_split = tl.arange(0, MAX_SPLITS)[:, None]
    # [MAX_SPLITS, ROWS]
    p_acc, p_ml = _split_addresses(
        split_results, o_global[None, :], o_split, splits, first_global, last_global, BLOCK_SIZE, BLOCK_D + REM_D
    )
    m_split = m_real[None, :] & (o_split < splits)
    b_m = tl.load(p_ml, mask=m_split, other=float("-inf"))
    # [ROWS]
    m_i = tl.max(b_m, 0)
    # [MAX_SPLITS, ROWS]
    b_alpha = tl.exp2(b_m - tl.where(m_i == float("-inf"), 0.0, m_i)[None, :])
    # [ROWS]
    l_i = tl.sum(tl.load(p_ml + 1, mask=m_split, other=0.0) * b_alpha, 0)
    # [MAX_SPLITS, ROWS, BLOCK_D]
    p_columns = p_acc[:, :, None] + tl.arange(0, BLOCK_D)[None, None, :]
    # [ROWS, BLOCK_D]
    acc = tl.sum(tl.load(p_columns, mask=m_split[:, :, None], other=0.0) * b_alpha[:, :, None], 0)
    acc_rem = l_i
    if REM_D:
        # [MAX_SPLITS, ROWS, REM_D]
        p_columns = p_acc[:, :, None] + BLOCK_D + tl.arange(0, REM_D)[None, None, :]
        # [ROWS, REM_D]
        acc_rem = tl.sum(tl.load(p_columns, mask=m_split[:, :, None], other=0.0) * b_alpha[:, :, None], 0)
    o, stride_o = head_rows(out, out_strides, i_b, tl.program_id(1))
    normalize_and_store(o, o_q * stride_o, m_q, m_real, (acc, acc_rem, m_i, l_i), BLOCK_D, REM_D)
