"""Sliding-window attention on a GPU: one kernel indexes the keys, the other computes a softmax over window and globals.

`index_keys` reads the token mask codes of each sequence once and writes an index of the keys, which all layers of a
graph share: the first and last local token, the runs of tokens that are all local, and the list of global tokens.
`attend` is a FlashAttention-style forward pass of one block of queries, in three loops with one online softmax:

1. the global keys, gathered through the list, so that they may be anywhere;
2. the key blocks at both edges of the window, and key blocks that hold padding or globals: with a mask;
3. the key blocks that every query of the block sees in full: without a mask or bounds check.

Keys outside the window are never loaded. A head of dilation D consists of D windows over every D-th token: a CTA takes
queries of one residue class, and their keys are D tokens apart.

The machine code depends on this file, on `online_softmax` and on constants. The notation is explained in
`online_softmax`; token indices `o_q` and `o_k` count the tokens of a residue class.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.online_softmax import attention_step, head_rows, init_state, load_rows, normalize_and_store

_NOT_SPECIALIZED = ("tokens", "left", "right", "first_head", "group", "dilation", "global_bound")
"""Triton compiles no special versions for values of these, as ahead of time: the timed kernel is the shipped one."""

_LOCAL = tl.constexpr(1)
_GLOBAL = tl.constexpr(2)
_NOWHERE = tl.constexpr(-(2**30))
"""An index before every window."""


@triton.jit
def _max(left, right):
    return tl.maximum(left, right)


@triton.jit
def _min(left, right):
    return tl.minimum(left, right)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def index_keys(
    token_kind,  # [batch, tokens] int32, token mask codes; see the reference
    block_index,  # [batch, HEADER + 2 * tokens + global_bound] int32
    tokens,
    global_bound,
    HEADER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Index the keys of one chunk of a sequence; each CTA counts the tokens of the other chunks itself.

    A row of the index: number of listed globals, first local token, index after the last local token, unused | for each
    token, the begin of the run of local tokens around the token | the end of this run | the indices of the globals,
    ascending, then -1.
    """
    i_chunk, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kinds = token_kind + i_b * tokens
    block_index += i_b * (HEADER + 2 * tokens + global_bound)
    run_begins, run_ends, globals_ = (
        block_index + HEADER,
        block_index + HEADER + tokens,
        block_index + HEADER + 2 * tokens,
    )
    # [CHUNK]
    o_chunk = tl.arange(0, CHUNK)
    first = i_chunk * CHUNK

    # Element-wise over the chunks of the sequence, reduced across threads once at the end.
    b_globals_before = tl.zeros((CHUNK,), tl.int32)
    b_globals = tl.zeros((CHUNK,), tl.int32)
    b_run_begin = tl.zeros((CHUNK,), tl.int32)
    b_run_end = tl.full((CHUNK,), 0, tl.int32) + tokens
    b_local_first = tl.full((CHUNK,), 0, tl.int32) + tokens
    b_local_end = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, tokens, CHUNK):
        o_t = start + o_chunk
        b_kind = tl.load(kinds + o_t, mask=o_t < tokens, other=0)
        b_is_global = (b_kind == _GLOBAL).to(tl.int32)
        b_globals += b_is_global
        b_globals_before += tl.where(start < first, b_is_global, 0)
        m_break = (b_kind != _LOCAL) & (o_t < tokens)
        b_run_begin = tl.where(m_break & (start < first), o_t + 1, b_run_begin)
        b_run_end = tl.where(m_break & (start > first), tl.minimum(b_run_end, o_t), b_run_end)
        b_local_first = tl.where(b_kind == _LOCAL, tl.minimum(b_local_first, o_t), b_local_first)
        b_local_end = tl.where(b_kind == _LOCAL, o_t + 1, b_local_end)
    num_globals = tl.sum(b_globals, 0)

    # [CHUNK]
    o_t = first + o_chunk
    b_kind = tl.load(kinds + o_t, mask=o_t < tokens, other=0)
    m_break = (b_kind != _LOCAL) & (o_t < tokens)
    b_run_begin = tl.maximum(tl.associative_scan(tl.where(m_break, o_t + 1, 0), 0, _max), tl.max(b_run_begin, 0))
    b_run_end = tl.minimum(
        tl.associative_scan(tl.where(m_break, o_t, tokens), 0, _min, reverse=True), tl.min(b_run_end, 0)
    )
    tl.store(run_begins + o_t, b_run_begin, mask=o_t < tokens)
    tl.store(run_ends + o_t, b_run_end, mask=o_t < tokens)

    m_global = b_kind == _GLOBAL
    o_slot = tl.sum(b_globals_before, 0) + tl.cumsum(m_global.to(tl.int32), 0) - 1
    tl.store(globals_ + o_slot, o_t, mask=m_global & (o_slot < global_bound))
    count = tl.minimum(num_globals, global_bound)
    for start in range(first, global_bound, CHUNK * tl.num_programs(0)):
        o_slot = start + o_chunk
        tl.store(globals_ + o_slot, -1, mask=(o_slot >= count) & (o_slot < global_bound))
    if i_chunk == 0:
        tl.store(block_index, count)
        tl.store(block_index + 1, tl.min(b_local_first, 0))
        tl.store(block_index + 2, tl.max(b_local_end, 0))
        tl.store(block_index + 3, 0)


@triton.jit
def _run_around(run_begins, run_ends, i_k, begin, end, residue, dilation):
    """Intersect [begin, end) of a residue class with the run of local tokens around key `i_k` of the class."""
    i_t = residue + dilation * i_k
    # Rounded up: the first key of the class at or after a token.
    run_begin = (tl.load(run_begins + i_t) - residue + dilation - 1) // dilation
    run_end = (tl.load(run_ends + i_t) - residue + dilation - 1) // dilation
    return tl.maximum(begin, run_begin), tl.minimum(end, run_end)


@triton.jit
def attend_window(
    b_q,  # [BLOCK_M, BLOCK_D]
    b_q_rem,  # [BLOCK_M, REM_D]
    k,
    v,
    kinds,  # token mask codes of the keys, from key 0 on
    o_q,  # [BLOCK_M]
    begin,  # begin of the keys that some query may see
    end,
    full_begin,  # begin of the keys that every query sees
    full_end,
    left,
    right,
    stride_k,  # elements between the rows of two keys
    stride_v,
    stride_kind,
    state,
    scale,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Update the state with the local keys around the queries: first partial blocks, masked, then full blocks."""
    # Whole blocks, counted from the first key; an empty range is [begin, begin).
    partial_blocks = tl.cdiv(full_begin - begin, BLOCK_N)
    full_begin = begin + partial_blocks * BLOCK_N
    full_blocks = tl.maximum(full_end - full_begin, 0) // BLOCK_N
    if full_blocks == 0:
        partial_blocks = 0
        full_begin = begin
    full_end = full_begin + full_blocks * BLOCK_N

    for i_n in range(partial_blocks + tl.cdiv(end - full_end, BLOCK_N)):
        start = begin + i_n * BLOCK_N + tl.where(i_n < partial_blocks, 0, full_end - full_begin)
        # [BLOCK_N]
        o_k = start + tl.arange(0, BLOCK_N)
        m_k = o_k < end
        # Dense attention has a boolean mask here, sliding windows have int32 codes.
        b_kind = tl.load(kinds + o_k * stride_kind, mask=m_k, other=0).to(tl.int32)
        # The first loop has seen the globals.
        # One comparison of unsigned numbers: a key before the window becomes a large number.
        o_local = tl.where(b_kind == _LOCAL, o_k, _NOWHERE)
        # [BLOCK_M, BLOCK_N]
        m_s = (o_local[None, :] - (o_q - left)[:, None]).to(tl.uint32, bitcast=True) <= (left + right).to(tl.uint32)
        state = attention_step(
            b_q, b_q_rem, k, v, o_k * stride_k, o_k * stride_v, m_k, m_s, None, state, scale, BLOCK_D, REM_D, True,
        )  # fmt: skip

    for start in range(full_begin, full_end, BLOCK_N):
        # [BLOCK_N]
        o_k = start + tl.arange(0, BLOCK_N)
        state = attention_step(
            b_q, b_q_rem, k, v, o_k * stride_k, o_k * stride_v, o_k < end, o_k[None, :] < end, None, state, scale,
            BLOCK_D, REM_D, False,
        )  # fmt: skip
    return state


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, out: [batch, tokens, heads, head_dim]
    key,  # key, value: [batch, tokens, heads / group, head_dim]
    value,
    token_kind,  # [batch, tokens] int32
    block_index,  # see index_keys
    out,
    query_strides,  # (batch, head, token) strides in elements, as are all strides
    key_strides,
    value_strides,
    out_strides,
    tokens,
    left,
    right,
    first_head,  # all heads of this launch have one dilation
    group,  # consecutive query heads that share a head of keys and values
    dilation,
    global_bound,
    scale,  # includes log2(e), because the softmax uses exp2
    HEADER: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_GLOBALS: tl.constexpr,
):
    """Compute a block of queries of one residue class, head and sequence."""
    num_m = tl.cdiv(tl.cdiv(tokens, dilation), BLOCK_M)  # neighbours in the grid share keys in the L2 cache
    residue = tl.program_id(0) // num_m
    i_m = tl.program_id(0) - residue * num_m
    i_b = tl.program_id(2).to(tl.int64)
    i_h = first_head + tl.program_id(1)
    q, stride_q = head_rows(query, query_strides, i_b, i_h)
    q += residue * stride_q
    k, stride_k = head_rows(key, key_strides, i_b, i_h // group)
    v, stride_v = head_rows(value, value_strides, i_b, i_h // group)
    class_k, class_v = k + residue * stride_k, v + residue * stride_v
    class_stride_k, class_stride_v = stride_k * dilation, stride_v * dilation
    kinds = token_kind + i_b * tokens + residue
    block_index += i_b * (HEADER + 2 * tokens + global_bound)
    run_begins, run_ends, globals_ = (
        block_index + HEADER,
        block_index + HEADER + tokens,
        block_index + HEADER + 2 * tokens,
    )

    count = (tokens - residue + dilation - 1) // dilation  # tokens of the class
    first = i_m * BLOCK_M
    last = tl.minimum(first + BLOCK_M, count) - 1
    # [BLOCK_M]
    o_q = first + tl.arange(0, BLOCK_M)
    o_q_rows = o_q * (stride_q * dilation)
    b_kind = tl.load(kinds + o_q * dilation, mask=o_q < count, other=0)
    # Queries of padding are not read: NaN there would reach their results, which are 0.
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D]
    b_q, b_q_rem = load_rows(q, o_q_rows, b_kind != 0, BLOCK_D, REM_D)

    # The keys of the window, [begin, end) in the class; none for a block of padding.
    num_globals = tl.load(block_index)
    begin = tl.maximum(first - left, (tl.load(block_index + 1) - residue + dilation - 1) // dilation)
    end = tl.minimum(last + right + 1, (tl.load(block_index + 2) - residue + dilation - 1) // dilation)
    begin = tl.maximum(begin, 0)
    if tl.max(tl.abs(b_kind), 0) == 0:
        num_globals = 0
        end = begin
    end = tl.maximum(begin, end)

    # The longest range that needs no mask: seen by the first query and the last, and one run of local tokens. Two
    # candidates suffice: with at most one non-local token between, the longer side is the first's or the last's.
    full_begin = tl.maximum(begin, last - left)
    full_end = tl.minimum(end, first + right + 1)
    if full_begin < full_end:
        a, b = _run_around(run_begins, run_ends, full_begin, full_begin, full_end, residue, dilation)
        c, d = _run_around(run_begins, run_ends, full_end - 1, full_begin, full_end, residue, dilation)
        full_begin = tl.where(d - c > b - a, c, a)
        full_end = tl.where(d - c > b - a, d, b)
    state = init_state(BLOCK_M, BLOCK_D, REM_D)
    for start in range(0, num_globals, BLOCK_GLOBALS):
        # [BLOCK_GLOBALS]
        o_slot = start + tl.arange(0, BLOCK_GLOBALS)
        m_k = o_slot < num_globals
        o_k = tl.load(globals_ + o_slot, mask=m_k, other=0)
        state = attention_step(
            b_q, b_q_rem, k, v, o_k * stride_k, o_k * stride_v, m_k, m_k[None, :], None, state, scale, BLOCK_D, REM_D,
            True,
        )  # fmt: skip

    state = attend_window(
        b_q, b_q_rem, class_k, class_v, kinds, o_q, begin, end, full_begin, full_end, left, right, class_stride_k,
        class_stride_v, dilation, state, scale, BLOCK_D, REM_D, BLOCK_N,
    )  # fmt: skip

    o, stride_o = head_rows(out, out_strides, i_b, i_h)
    o += residue * stride_o
    normalize_and_store(o, o_q * (stride_o * dilation), o_q < count, b_kind, state, BLOCK_D, REM_D)
