"""Relative attention on a GPU: a FlashAttention-style forward pass whose scores get a term of the distance.

Within a block of queries and keys, the distance terms are a band of the products of the queries with rows of
`positions`: the row of a query's first key is one below the row of the previous query. A step multiplies all queries of
the block with BLOCK_N rows, which follow the rows of the previous step. The products of both steps hold the band, and
one gather moves the band to the columns of the keys. So a CTA multiplies each row once, and keeps nothing that grows
with the keys. Products with positions take COLUMNS columns of a head at a time, for which queries are loaded again:
whole heads would need too many registers beside the products with keys.

The machine code depends on this file, on `online_softmax` and on constants. The notation is explained in
`online_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.online_softmax import (
    attention_step,
    head_rows,
    init_state,
    load_columns,
    load_rows,
    normalize_and_store,
)

_NOT_SPECIALIZED = ("tokens", "keys", "distances", "causal", "reach")
"""Triton compiles no special versions for values of these, as ahead of time: the timed kernel is the shipped one."""


@triton.jit
def _add_bias(b_x, bias, COLUMNS: tl.constexpr):
    """Add a bias to every row, [BLOCK_M, COLUMNS]."""
    return b_x + tl.load(bias + tl.arange(0, COLUMNS))[None, :]


@triton.jit
def _position_scores(
    q, bias, o_q_rows, m_real, positions, first, distances,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Multiply biased queries with ROWS rows of `positions` from row `first` on; rows that do not exist give 0.

    Returns [BLOCK_M, ROWS].
    """
    # [ROWS]
    o_row = first + tl.arange(0, ROWS)
    m_row = (o_row >= 0) & (o_row < distances)
    # [BLOCK_M, ROWS]
    b_s = tl.zeros((o_q_rows.shape[0], ROWS), tl.float32)
    for start in range(0, HEAD_DIM, COLUMNS):
        # [BLOCK_M, COLUMNS]
        b_q = _add_bias(load_columns(q + start, o_q_rows, m_real, COLUMNS, 0, True), bias + start, COLUMNS)
        # [ROWS, COLUMNS]
        b_position = load_columns(positions + start, o_row * HEAD_DIM, m_row, COLUMNS, 0, True)
        b_s = tl.dot(b_q, tl.trans(b_position), b_s, input_precision="ieee")
    return b_s


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, out: [batch, tokens, heads, head_dim]
    key,  # key, value: [batch, keys, heads, head_dim]
    value,
    key_kind,  # [batch, keys] int32
    positions,  # [heads, distances, head_dim]
    content_bias,  # [heads, head_dim]
    position_bias,  # [heads, head_dim]
    segment_scores,  # [batch, tokens, heads], or None
    out,
    query_strides,  # (batch, head, token) strides in elements, as are all strides
    key_strides,
    value_strides,
    out_strides,
    stride_position_head,
    tokens,
    keys,
    distances,
    causal,
    reach,
    scale,  # includes log2(e), because the softmax uses exp2
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    COLUMNS: tl.constexpr,  # columns of one product with positions
    BLOCK_M: tl.constexpr,  # at most BLOCK_N
    BLOCK_N: tl.constexpr,
):
    """Compute a block of queries of one head and sequence. Rows of padding are 0."""
    i_b, i_h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    q, stride_q = head_rows(query, query_strides, i_b, i_h)
    k, stride_k = head_rows(key, key_strides, i_b, i_h)
    v, stride_v = head_rows(value, value_strides, i_b, i_h)
    kinds = key_kind + i_b * keys
    positions += i_h * stride_position_head
    memory = keys - tokens

    first = tl.program_id(0) * BLOCK_M
    # [BLOCK_M]
    o_m = tl.arange(0, BLOCK_M)
    o_q = first + o_m
    m_q = o_q < tokens
    b_query_kind = tl.load(kinds + memory + o_q, mask=m_q, other=0)
    o_q_rows = o_q * stride_q
    # Queries of padding are not read: NaN there would reach their results, which are 0.
    m_real = b_query_kind != 0
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D]
    b_q, b_q_rem = load_rows(q, o_q_rows, m_real, BLOCK_D, REM_D)
    content_bias += i_h * (BLOCK_D + REM_D)
    position_bias += i_h * (BLOCK_D + REM_D)
    b_content = _add_bias(b_q, content_bias, BLOCK_D)
    b_content_rem = b_content
    if REM_D:
        b_content_rem = _add_bias(b_q_rem, content_bias + BLOCK_D, REM_D)
    if segment_scores is not None:
        o_segment = (i_b * tokens + o_q) * tl.num_programs(1) + i_h
        # [BLOCK_M]
        b_segment = tl.load(segment_scores + o_segment, mask=m_real, other=0.0).to(tl.float32)

    # The keys that some query of the block sees.
    begin = 0
    end = keys
    if causal:
        end = memory + tl.minimum(first + BLOCK_M, tokens)
    if reach:
        begin = tl.maximum(memory + first - reach + 1, 0)
    if tl.max(b_query_kind, 0) == 0:
        end = begin

    # [BLOCK_N]
    o_n = tl.arange(0, BLOCK_N)
    # [BLOCK_M], the column of each query's first key in the products with positions.
    shift = BLOCK_M - 1 - o_m
    next_row = tokens - first - BLOCK_M + begin
    # [BLOCK_M, BLOCK_N]
    b_next = _position_scores(
        q, position_bias, o_q_rows, m_real, positions, next_row, distances, BLOCK_N, COLUMNS, BLOCK_D + REM_D,
    )  # fmt: skip
    state = init_state(BLOCK_M, BLOCK_D, REM_D)
    for start in range(begin, end, BLOCK_N):
        # [BLOCK_N]
        o_k = start + o_n
        b_kind = tl.load(kinds + o_k, mask=o_k < end, other=0)
        m_k = b_kind != 0
        next_row += BLOCK_N
        # [BLOCK_M, BLOCK_N]
        b_current = b_next
        b_next = _position_scores(
            q, position_bias, o_q_rows, m_real, positions, next_row, distances, BLOCK_N, COLUMNS, BLOCK_D + REM_D,
        )  # fmt: skip
        b_band = tl.where(o_n[None, :] >= shift[:, None], b_current, b_next)
        b_s_bias = tl.gather(b_band, (shift[:, None] + o_n[None, :]) % BLOCK_N, 1)
        b_s_init = None
        if segment_scores is not None:
            b_s_init = tl.where(b_query_kind[:, None] != b_kind[None, :], b_segment[:, None], 0.0)
        distance = memory + o_q[:, None] - o_k[None, :]
        m_s = m_k[None, :] & ((distance >= 0) | (causal == 0)) & ((distance < reach) | (reach == 0))
        state = attention_step(
            b_content, b_content_rem, k, v, o_k * stride_k, o_k * stride_v, m_k, m_s, None, state, scale, BLOCK_D,
            REM_D, True, b_s_init=b_s_init, b_s_bias=b_s_bias,
        )  # fmt: skip
    o, stride_o = head_rows(out, out_strides, i_b, i_h)
    normalize_and_store(o, o_q * stride_o, m_q, m_real, state, BLOCK_D, REM_D)
