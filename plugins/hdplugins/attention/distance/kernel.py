"""Bucketed relative position attention on a GPU: a FlashAttention-style forward pass in two loops over the keys.

For a block of queries, most keys of a long sequence are so far before or after the block that all distances are clipped
to -reach, or all to reach. Both loops update one online softmax:

1. far keys: a query has one bias for all keys before it and one for all keys after it, and the table of values has one
   row for each side. These two rows are added once, after the loop, times the sums of the weights of each side;
2. near keys: each pair of query and key has its own bias. The weights are moved from the columns of keys to the columns
   of distances, and multiplied with the table's rows like weights with values.

The terms of the value table are added to the same accumulator as the values, so that the online softmax rescales both
at once.

The machine code depends on this file, on `online_softmax` and on constants. The notation is explained in
`online_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.online_softmax import (
    accumulate_values,
    head_rows,
    init_state,
    load_columns,
    load_rows,
    normalize_and_store,
    online_softmax_step,
)

_NOT_SPECIALIZED = ("bias_batch", "bias_head", "bias_query", "tokens", "reach")
"""Triton compiles no special versions for values of these, as ahead of time: the timed kernel is the shipped one."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_row(acc, b_p, values_by_distance, i_row, BLOCK_D: tl.constexpr, REM_D: tl.constexpr, FIRST: tl.constexpr):
    """Add a row of the value table, from column FIRST on, times one weight per query, [BLOCK_M], to the accumulator."""
    COLUMNS: tl.constexpr = acc.shape[1]
    # [COLUMNS]
    b_v = tl.load(values_by_distance + i_row * (BLOCK_D + REM_D) + FIRST + tl.arange(0, COLUMNS))
    return acc + b_p[:, None] * b_v.to(tl.float32)[None, :]


@triton.jit
def _accumulate_by_distance(
    b_p, values_by_distance, min_distance, zero, reach, acc, acc_rem,
    BLOCK_D: tl.constexpr, REM_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the weighted rows of the value table to the accumulator.

    Args:
        b_p: [BLOCK_M, BLOCK_N].
        values_by_distance: [2 * reach + 1, head_dim].
        min_distance: the distance of the first key from the last query.
        zero: 0, as a value that compilers do not know: otherwise they keep values that depend on nothing else in
            registers, and spill.
    """
    b_p = b_p.to(values_by_distance.dtype.element_ty)
    # [BLOCK_N]
    o_n = tl.arange(0, BLOCK_N)
    # A query's smallest distance is `shift` above min_distance. The weights, rotated by `shift`, are in the order of
    # distances; each part of BLOCK_N distances masks the weights that belong to other parts.
    # [BLOCK_M]
    shift = BLOCK_M - 1 - tl.arange(0, BLOCK_M) + zero
    # [BLOCK_M, BLOCK_N]
    b_rotated = tl.gather(b_p, (o_n[None, :] - shift[:, None]) & (BLOCK_N - 1), 1)
    for part in tl.static_range((BLOCK_M + BLOCK_N - 2) // BLOCK_N + 1):
        o_distance = part * BLOCK_N + o_n
        o_k = o_distance[None, :] - shift[:, None]
        # [BLOCK_M, BLOCK_N]
        b_part = tl.where((o_k >= 0) & (o_k < BLOCK_N), b_rotated, 0.0)
        o_row = tl.minimum(tl.maximum(min_distance + o_distance, -reach), reach) + reach
        o_v = o_row * (BLOCK_D + REM_D)
        # [BLOCK_N, BLOCK_D]
        b_v = load_columns(values_by_distance, o_v, o_row, BLOCK_D, 0, False)
        acc = tl.dot(b_part, b_v, acc, input_precision="ieee")
        if REM_D:
            # [BLOCK_N, REM_D]
            b_v_rem = load_columns(values_by_distance, o_v, o_row, REM_D, BLOCK_D, False)
            acc_rem = tl.dot(b_part, b_v_rem, acc_rem, input_precision="ieee")
    return acc, acc_rem


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, key, value, out: [batch, tokens, heads, head_dim]
    key,
    value,
    key_mask,  # [batch, tokens] bool
    scores_by_distance,  # [1 or batch, 1 or tokens, heads, 2 * reach + 1], the relative position bias
    values_by_distance,  # [2 * reach + 1, head_dim], or None
    out,
    query_strides,  # (batch, head, token) strides in elements, as are all strides
    key_strides,
    value_strides,
    out_strides,
    bias_batch,  # strides of scores_by_distance; 0 along an axis of size 1
    bias_head,
    bias_query,
    tokens,
    reach,
    scale,  # includes log2(e), because the softmax uses exp2
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a block of queries of one head and sequence. Rows of sequences without a real token are 0."""
    i_b, i_h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    q, stride_q = head_rows(query, query_strides, i_b, i_h)
    k, stride_k = head_rows(key, key_strides, i_b, i_h)
    v, stride_v = head_rows(value, value_strides, i_b, i_h)
    mask = key_mask + i_b * tokens
    bias = scores_by_distance + i_b * bias_batch + i_h * bias_head

    first = tl.program_id(0) * BLOCK_M
    # [BLOCK_M]
    o_q = first + tl.arange(0, BLOCK_M)
    # [BLOCK_N]
    o_n = tl.arange(0, BLOCK_N)
    m_q = o_q < tokens
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D]
    b_q, b_q_rem = load_rows(q, o_q * stride_q, m_q, BLOCK_D, REM_D)
    # [BLOCK_M]
    p_bias = bias + o_q * bias_query

    # Far keys are the blocks whose distances from all queries are -reach or less, or reach or more.
    near_begin = tl.maximum(first - reach + 1, 0) // BLOCK_N * BLOCK_N
    near_end = tl.minimum(tl.cdiv(first + BLOCK_M - 1 + reach, BLOCK_N) * BLOCK_N, tokens)
    # [BLOCK_M]
    b_bias_before = tl.load(p_bias, mask=m_q, other=0.0).to(tl.float32) * _LOG2_E
    b_bias_after = tl.load(p_bias + 2 * reach, mask=m_q, other=0.0).to(tl.float32) * _LOG2_E

    acc, acc_rem, m_i, l_i = init_state(BLOCK_M, BLOCK_D, REM_D)
    # [BLOCK_M], the part of l_i that belongs to the keys before the near ones.
    l_before = l_i
    blocks_before = near_begin // BLOCK_N
    for i_n in range(blocks_before + tl.cdiv(tokens - near_end, BLOCK_N)):
        is_before = i_n < blocks_before
        # [BLOCK_N]
        o_k = i_n * BLOCK_N + tl.where(is_before, 0, near_end - near_begin) + o_n
        m_k = tl.load(mask + o_k, mask=o_k < tokens, other=0) != 0
        # A bias that all keys of a block share is the logarithm of a factor of their weights.
        b_p, alpha, m_i, l_i = online_softmax_step(
            b_q, b_q_rem, k, o_k * stride_k, m_k, m_k[None, :], tl.where(is_before, b_bias_before, b_bias_after),
            (acc, acc_rem, m_i, l_i), scale, BLOCK_D, REM_D, True,
        )  # fmt: skip
        acc, acc_rem = accumulate_values(b_p, alpha, v, o_k * stride_v, m_k, acc, acc_rem, BLOCK_D, REM_D, True)
        l_before = tl.where(is_before, l_i, l_before * alpha)
    if values_by_distance is not None:
        acc = _add_row(acc, l_before, values_by_distance, 0, BLOCK_D, REM_D, 0)
        acc = _add_row(acc, l_i - l_before, values_by_distance, 2 * reach, BLOCK_D, REM_D, 0)
        if REM_D:
            acc_rem = _add_row(acc_rem, l_before, values_by_distance, 0, BLOCK_D, REM_D, BLOCK_D)
            acc_rem = _add_row(acc_rem, l_i - l_before, values_by_distance, 2 * reach, BLOCK_D, REM_D, BLOCK_D)

    for start in range(near_begin, near_end, BLOCK_N):
        # [BLOCK_N]
        o_k = start + o_n
        m_k = tl.load(mask + o_k, mask=o_k < near_end, other=0) != 0
        # [BLOCK_M, BLOCK_N]
        m_s = m_k[None, :]
        o_bias = tl.minimum(tl.maximum(o_k[None, :] - o_q[:, None], -reach), reach) + reach
        b_bias = tl.load(p_bias[:, None] + o_bias, mask=m_q[:, None] & m_s, other=0.0)
        # Dot products are scaled later, biases are not.
        b_p, alpha, m_i, l_i = online_softmax_step(
            b_q, b_q_rem, k, o_k * stride_k, m_k, m_s, None, (acc, acc_rem, m_i, l_i), scale, BLOCK_D, REM_D, True,
            b_s_bias=b_bias.to(tl.float32) * (_LOG2_E / scale),
        )  # fmt: skip
        acc, acc_rem = accumulate_values(b_p, alpha, v, o_k * stride_v, m_k, acc, acc_rem, BLOCK_D, REM_D, True)
        if values_by_distance is not None:
            acc, acc_rem = _accumulate_by_distance(
                b_p, values_by_distance, start - first - BLOCK_M + 1, tl.maximum(start - tokens, 0), reach, acc,
                acc_rem, BLOCK_D, REM_D, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    o, stride_o = head_rows(out, out_strides, i_b, i_h)
    normalize_and_store(o, o_q * stride_o, m_q, m_q, (acc, acc_rem, m_i, l_i), BLOCK_D, REM_D)
