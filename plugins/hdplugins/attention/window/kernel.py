"""Sliding-window attention on a GPU: a kernel that plans, and one that computes a softmax over window and globals.

`plan_keys` reads the token kinds of each text once and writes a plan, which the layers of a graph share: where the
text's real tokens begin and end, which runs of tokens are all local, and the list of the text's global tokens. `attend`
is a FlashAttention-style forward pass of one block of queries, in three loops that share one running softmax:

1. the global columns, gathered through the list, so that they may stand anywhere;
2. the key blocks at both edges of the window, and those that hold padding or globals: masked;
3. the key blocks that every query of the block sees whole: no mask and no bounds check.

Keys outside the window are never loaded. A head of dilation D is D windows over every D-th token: a program takes
queries of one such residue class, and its keys lie D tokens apart.

All that decides the machine code lies in this file and in `running_softmax`, or comes as a constant. Letters in the
kernels: m and n count queries and keys within a residue class; `tail` is explained in `running_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.running_softmax import attend_keys, load_rows, load_tail, nothing_seen, rows_of, store_shares

_NOT_SPECIALIZED = ("tokens", "left", "right", "first_head", "group", "dilation", "global_bound")
"""Nothing is compiled for certain values of these, here as ahead of time: what is timed is then what is shipped."""

_LOCAL = tl.constexpr(1)
_GLOBAL = tl.constexpr(2)
_NOWHERE = tl.constexpr(-(2**30))
"""Before every window."""


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _smaller(left, right):
    return tl.minimum(left, right)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def plan_keys(
    token_kind,  # [batch, tokens] int32; see the reference
    plan,  # int32, [batch, summary_ints + 2 * tokens + global_bound]
    tokens,
    global_bound,
    summary_ints: tl.constexpr,
    chunk: tl.constexpr,
):
    """Write what `attend` asks about the keys of a text; the program of one chunk of it counts the others' itself.

    A row of the plan: globals listed, first local token, one past the last local token, unused | for each token, where
    the run of local tokens begins that holds it | where that run ends | the indices of the globals, ascending, then -1.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kinds = token_kind + row * tokens
    plan += row * (summary_ints + 2 * tokens + global_bound)
    begins, ends, listed = plan + summary_ints, plan + summary_ints + tokens, plan + summary_ints + 2 * tokens
    lane = tl.arange(0, chunk)
    first = part * chunk

    # Element-wise over the chunks of the text, reduced across lanes once at the end.
    globals_before = tl.zeros((chunk,), tl.int32)
    globals_all = tl.zeros((chunk,), tl.int32)
    run_begin = tl.zeros((chunk,), tl.int32)
    run_end = tl.full((chunk,), 0, tl.int32) + tokens
    local_first = tl.full((chunk,), 0, tl.int32) + tokens
    local_end = tl.zeros((chunk,), tl.int32)
    for start in range(0, tokens, chunk):
        token = start + lane
        kind = tl.load(kinds + token, mask=token < tokens, other=0)
        is_global = (kind == _GLOBAL).to(tl.int32)
        globals_all += is_global
        globals_before += tl.where(start < first, is_global, 0)
        broken = (kind != _LOCAL) & (token < tokens)
        run_begin = tl.where(broken & (start < first), token + 1, run_begin)
        run_end = tl.where(broken & (start > first), tl.minimum(run_end, token), run_end)
        local_first = tl.where(kind == _LOCAL, tl.minimum(local_first, token), local_first)
        local_end = tl.where(kind == _LOCAL, token + 1, local_end)
    globals_all = tl.sum(globals_all, 0)

    token = first + lane
    kind = tl.load(kinds + token, mask=token < tokens, other=0)
    broken = (kind != _LOCAL) & (token < tokens)
    run_begin = tl.maximum(tl.associative_scan(tl.where(broken, token + 1, 0), 0, _larger), tl.max(run_begin, 0))
    run_end = tl.minimum(
        tl.associative_scan(tl.where(broken, token, tokens), 0, _smaller, reverse=True), tl.min(run_end, 0)
    )
    tl.store(begins + token, run_begin, mask=token < tokens)
    tl.store(ends + token, run_end, mask=token < tokens)

    is_global = kind == _GLOBAL
    slot = tl.sum(globals_before, 0) + tl.cumsum(is_global.to(tl.int32), 0) - 1
    tl.store(listed + slot, token, mask=is_global & (slot < global_bound))
    count = tl.minimum(globals_all, global_bound)
    for start in range(first, global_bound, chunk * tl.num_programs(0)):
        slot = start + lane
        tl.store(listed + slot, -1, mask=(slot >= count) & (slot < global_bound))
    if part == 0:
        tl.store(plan, count)
        tl.store(plan + 1, tl.min(local_first, 0))
        tl.store(plan + 2, tl.max(local_end, 0))
        tl.store(plan + 3, 0)


@triton.jit
def _run_around(begins, ends, at, begin, end, residue, dilation):
    """The part of [begin, end) of a residue class that lies in the run of local tokens around key `at` of the class."""
    token = residue + dilation * at
    # Rounded up: the first key of the class at or after a token.
    run_begin = (tl.load(begins + token) - residue + dilation - 1) // dilation
    run_end = (tl.load(ends + token) - residue + dilation - 1) // dilation
    return tl.maximum(begin, run_begin), tl.minimum(end, run_end)


@triton.jit
def attend_window(
    query,
    query_tail,
    keys,
    values,
    kinds,  # of the keys, from the first on
    m,  # [queries]
    begin,  # of the keys that a query may see, up to `end`
    end,
    whole_begin,  # of the keys that every query sees, up to `whole_end`
    whole_end,
    left,
    right,
    key_step,  # elements from a key to the next
    value_step,
    kind_step,
    state,
    scale,
    head: tl.constexpr,
    tail: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Add the local tokens around queries to the running softmax: those that some may not see, masked, then others."""
    # In whole blocks, counted from the first key; empty is [begin, begin).
    edge_blocks = tl.cdiv(whole_begin - begin, block_keys)
    whole_begin = begin + edge_blocks * block_keys
    whole_blocks = tl.maximum(whole_end - whole_begin, 0) // block_keys
    if whole_blocks == 0:
        edge_blocks = 0
        whole_begin = begin
    whole_end = whole_begin + whole_blocks * block_keys

    for edge in range(edge_blocks + tl.cdiv(end - whole_end, block_keys)):
        start = begin + edge * block_keys + tl.where(edge < edge_blocks, 0, whole_end - whole_begin)
        n = start + tl.arange(0, block_keys)
        present = n < end
        # A truth of masks, a number of kinds.
        kind = tl.load(kinds + n * kind_step, mask=present, other=0).to(tl.int32)
        # Globals are seen already, by the first loop.
        # One comparison of unsigned numbers: whatever is before the window's first key is a large one.
        place = tl.where(kind == _LOCAL, n, _NOWHERE)
        seen = (place[None, :] - (m - left)[:, None]).to(tl.uint32, bitcast=True) <= (left + right).to(tl.uint32)
        state = attend_keys(
            query, query_tail, keys, values, n * key_step, n * value_step, present, seen, None, state, scale, head,
            tail, True,
        )  # fmt: skip

    for start in range(whole_begin, whole_end, block_keys):
        n = start + tl.arange(0, block_keys)
        state = attend_keys(
            query, query_tail, keys, values, n * key_step, n * value_step, n < end, n[None, :] < end, None, state,
            scale, head, tail, False,
        )  # fmt: skip
    return state


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, out: [batch, tokens, heads, head_dim]
    key,  # key, value: [batch, tokens, heads / group, head_dim]
    value,
    token_kind,  # [batch, tokens] int32
    plan,  # see plan_keys
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
    left,
    right,
    first_head,  # the heads of this launch share one dilation
    group,  # heads in a row that share a head of keys and values
    dilation,
    global_bound,
    scale,  # holds log2(e), so that exp2 serves
    summary_ints: tl.constexpr,
    head: tl.constexpr,
    tail: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
    block_globals: tl.constexpr,
):
    """Attention of one block of queries of one residue class, head and text."""
    blocks = tl.cdiv(tl.cdiv(tokens, dilation), block_queries)  # neighbours in the grid share keys in the L2 cache
    residue = tl.program_id(0) // blocks
    block = tl.program_id(0) - residue * blocks
    row = tl.program_id(2).to(tl.int64)
    head_number = first_head + tl.program_id(1)
    query = rows_of(query, row, head_number, stride_query_batch, stride_query_head) + residue * stride_query_token
    key = rows_of(key, row, head_number // group, stride_key_batch, stride_key_head)
    value = rows_of(value, row, head_number // group, stride_value_batch, stride_value_head)
    class_key, class_value = key + residue * stride_key_token, value + residue * stride_value_token
    key_step, value_step = stride_key_token * dilation, stride_value_token * dilation
    kinds = token_kind + row * tokens + residue
    plan += row * (summary_ints + 2 * tokens + global_bound)
    begins, ends, listed = plan + summary_ints, plan + summary_ints + tokens, plan + summary_ints + 2 * tokens

    count = (tokens - residue + dilation - 1) // dilation  # tokens of the class
    first = block * block_queries
    last = tl.minimum(first + block_queries, count) - 1
    m = first + tl.arange(0, block_queries)
    query_offsets = m * (stride_query_token * dilation)
    query_kind = tl.load(kinds + m * dilation, mask=m < count, other=0)
    # Queries of padding are not read: NaN there would reach their answers, which are 0.
    is_real = query_kind != 0
    q = load_rows(query, query_offsets, is_real, head, 0, True)
    q_tail = load_tail(query, query_offsets, is_real, q, head, tail)

    # The keys of the window, [begin, end) in the class, none for a block of padding.
    globals_listed = tl.load(plan)
    begin = tl.maximum(first - left, (tl.load(plan + 1) - residue + dilation - 1) // dilation)
    end = tl.minimum(last + right + 1, (tl.load(plan + 2) - residue + dilation - 1) // dilation)
    begin = tl.maximum(begin, 0)
    if tl.max(tl.abs(query_kind), 0) == 0:
        globals_listed = 0
        end = begin
    end = tl.maximum(begin, end)

    # The longest stretch that needs no mask: seen by the first query and the last, and one run of local tokens. Two
    # candidates serve: with at most one token between that is not local, the longer side is the first's or the last's.
    whole_begin = tl.maximum(begin, last - left)
    whole_end = tl.minimum(end, first + right + 1)
    if whole_begin < whole_end:
        a, b = _run_around(begins, ends, whole_begin, whole_begin, whole_end, residue, dilation)
        c, d = _run_around(begins, ends, whole_end - 1, whole_begin, whole_end, residue, dilation)
        whole_begin = tl.where(d - c > b - a, c, a)
        whole_end = tl.where(d - c > b - a, d, b)
    state = nothing_seen(block_queries, head, tail)
    for start in range(0, globals_listed, block_globals):
        slot = start + tl.arange(0, block_globals)
        present = slot < globals_listed
        n = tl.load(listed + slot, mask=present, other=0)
        state = attend_keys(
            q, q_tail, key, value, n * stride_key_token, n * stride_value_token, present, present[None, :], None, state,
            scale, head, tail, True,
        )  # fmt: skip

    state = attend_window(
        q, q_tail, class_key, class_value, kinds, m, begin, end, whole_begin, whole_end, left, right, key_step,
        value_step, dilation, state, scale, head, tail, block_keys,
    )  # fmt: skip

    out = rows_of(out, row, head_number, stride_out_batch, stride_out_head) + residue * stride_out_token
    store_shares(out, m * (stride_out_token * dilation), m < count, query_kind, state, head, tail)
