"""The online softmax of the attention kernels: keys are taken block by block, as in FlashAttention.

Notation of all kernels. Constants are capitals: BLOCK_M queries and BLOCK_N keys form a block; a head has
head_dim = BLOCK_D + REM_D columns. Prefixes: `i_` index of a program or loop, `b_` block of values in registers, `o_`
offsets or token indices, `m_` boolean mask. The state of the softmax is (acc, acc_rem, m_i, l_i), as in FlashAttention:
the weighted sum of values, the sum's REM_D remaining columns, the largest score, and the sum of exponentials.

BLOCK_D and REM_D are powers of two, so that no head is padded: 80 = 64 + 16 and 96 = 64 + 32 instead of 128, and
128 = 64 + 64 where registers are short. REM_D is 0 if BLOCK_D is the whole head. Values named `_rem` hold the last
REM_D columns; with REM_D = 0 they are placeholders, which no code reads.

float32 inputs are multiplied in IEEE single precision and not in TF32: users pick float32 to get the checkpoint's exact
numbers, and TF32 keeps 10 bits of the mantissa, no more than float16, which is the faster choice then.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_rows(x, strides, i_b, i_h):
    """Return the address of a head's first row, and the elements between the rows of two tokens.

    `x` is [batch, tokens, heads, head_dim], and `strides` are its (batch, head, token) strides.
    """
    return x + i_b.to(tl.int64) * strides[0] + i_h.to(tl.int64) * strides[1], strides[2]


@triton.jit
def load_columns(x, o_rows, m_rows, COLUMNS: tl.constexpr, FIRST: tl.constexpr, MASKED: tl.constexpr):
    """Load columns FIRST to FIRST + COLUMNS of the rows at `o_rows`, [rows, COLUMNS]; rows outside `m_rows` are 0."""
    p_x = x + o_rows[:, None] + FIRST + tl.arange(0, COLUMNS)[None, :]
    if MASKED:
        return tl.load(p_x, mask=m_rows[:, None], other=0.0)
    return tl.load(p_x)


@triton.jit
def load_rows(x, o_rows, m_rows, BLOCK_D: tl.constexpr, REM_D: tl.constexpr):
    """Load whole rows, [rows, BLOCK_D] and [rows, REM_D]; rows outside `m_rows` are 0."""
    b_x = load_columns(x, o_rows, m_rows, BLOCK_D, 0, True)
    b_x_rem = b_x
    if REM_D:
        b_x_rem = load_columns(x, o_rows, m_rows, REM_D, BLOCK_D, True)
    return b_x, b_x_rem


@triton.jit
def init_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, REM_D: tl.constexpr):
    """Return the state of the softmax before the first key."""
    # [BLOCK_M, BLOCK_D]
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # [BLOCK_M]
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc_rem = l_i
    if REM_D:
        # [BLOCK_M, REM_D]
        acc_rem = tl.zeros((BLOCK_M, REM_D), tl.float32)
    return acc, acc_rem, m_i, l_i


@triton.jit
def online_softmax_step(
    b_q,  # [BLOCK_M, BLOCK_D]
    b_q_rem,  # [BLOCK_M, REM_D]
    k,
    o_k,  # [BLOCK_N], offset of each key's row
    m_k,  # [BLOCK_N], rows that may be read
    m_s,  # [BLOCK_M or 1, BLOCK_N], keys that a query sees
    log2_count,  # log2 of the number of equal keys that each key stands for; None for 1
    state,
    scale,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    MASKED: tl.constexpr,
    key_factors=None,  # [BLOCK_N], factors of the keys' scores; None for 1
    b_s_init=None,  # [BLOCK_M, BLOCK_N], initial value of the dot products; None for 0
    b_s_bias=None,  # [BLOCK_M, BLOCK_N], added to the dot products; None for 0. Layouts of these two may differ.
):
    """Compute the weights of one block of keys.

    `m_k` and `m_s` are read only if MASKED. Returns the weights b_p, [BLOCK_M, BLOCK_N], the factor alpha of the
    accumulator, [BLOCK_M], and the new m_i and l_i.
    """
    _, _, m_i, l_i = state
    # [BLOCK_N, BLOCK_D]
    b_k = load_columns(k, o_k, m_k, BLOCK_D, 0, MASKED)
    # [BLOCK_M, BLOCK_N]
    b_s = tl.dot(b_q, tl.trans(b_k), b_s_init, input_precision="ieee")
    if REM_D:
        # [BLOCK_N, REM_D]
        b_k_rem = load_columns(k, o_k, m_k, REM_D, BLOCK_D, MASKED)
        b_s = tl.dot(b_q_rem, tl.trans(b_k_rem), b_s, input_precision="ieee")
    if b_s_bias is not None:
        b_s += b_s_bias
    if key_factors is not None:
        b_s *= key_factors[None, :]
    if MASKED:
        b_s = tl.where(m_s, b_s, float("-inf"))
    # scale > 0, so the largest score stays the largest, and the scores are scaled by the subtraction's multiply-add.
    # [BLOCK_M]
    b_max = tl.max(b_s, 1) * scale
    if log2_count is not None:
        b_max += log2_count
    m_new = tl.maximum(m_i, b_max)
    # A query that has seen no key yet has m_new = -inf, and -inf - -inf would be NaN. Without a mask every query sees
    # keys.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    alpha = tl.exp2(m_i - shift)
    if log2_count is not None:
        shift -= log2_count
    # [BLOCK_M, BLOCK_N]
    b_p = tl.exp2(b_s * scale - shift[:, None])
    return b_p, alpha, m_new, l_i * alpha + tl.sum(b_p, 1)


@triton.jit
def accumulate_values(
    b_p,  # [BLOCK_M, BLOCK_N], cast to the dtype of the values
    alpha,  # [BLOCK_M], factor of the accumulator
    v,
    o_v,  # [BLOCK_N], offset of each value's row
    m_v,  # [BLOCK_N], rows that may be read
    acc,
    acc_rem,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Rescale the accumulator and add the weighted values of one block of keys."""
    # [BLOCK_N, BLOCK_D]
    b_v = load_columns(v, o_v, m_v, BLOCK_D, 0, MASKED)
    b_p = b_p.to(b_v.dtype)
    # [BLOCK_M, BLOCK_D]
    acc = tl.dot(b_p, b_v, acc * alpha[:, None], input_precision="ieee")
    if REM_D:
        # [BLOCK_N, REM_D]
        b_v_rem = load_columns(v, o_v, m_v, REM_D, BLOCK_D, MASKED)
        acc_rem = tl.dot(b_p, b_v_rem, acc_rem * alpha[:, None], input_precision="ieee")
    return acc, acc_rem


@triton.jit
def attention_step(
    b_q,
    b_q_rem,
    k,
    v,
    o_k,
    o_v,
    m_k,
    m_s,
    log2_count,
    state,
    scale,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    MASKED: tl.constexpr,
    key_factors=None,
    b_s_init=None,
    b_s_bias=None,
):
    """Update the state with one block of keys; see `online_softmax_step` and `accumulate_values` for the arguments."""
    b_p, alpha, m_i, l_i = online_softmax_step(
        b_q, b_q_rem, k, o_k, m_k, m_s, log2_count, state, scale, BLOCK_D, REM_D, MASKED, key_factors, b_s_init,
        b_s_bias,
    )  # fmt: skip
    acc, acc_rem, _, _ = state
    acc, acc_rem = accumulate_values(b_p, alpha, v, o_v, m_k, acc, acc_rem, BLOCK_D, REM_D, MASKED)
    return acc, acc_rem, m_i, l_i


@triton.jit
def normalize_and_store(
    out,
    o_out,  # [BLOCK_M], offset of each query's row
    m_out,  # [BLOCK_M], rows that are written
    m_defined,  # [BLOCK_M], rows whose result is not 0 by definition
    state,
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
):
    """Divide the accumulator by l_i and store it; rows that saw no key are 0."""
    acc, acc_rem, _, l_i = state
    # [BLOCK_M, 1]
    inverse = tl.where((l_i == 0) | (m_defined == 0), 0.0, 1.0 / tl.where(l_i == 0, 1.0, l_i))[:, None]
    # [BLOCK_M, BLOCK_D]
    p_out = out + o_out[:, None] + tl.arange(0, BLOCK_D)[None, :]
    tl.store(p_out, (acc * inverse).to(out.dtype.element_ty), mask=m_out[:, None])
    if REM_D:
        # [BLOCK_M, REM_D]
        p_out = out + o_out[:, None] + BLOCK_D + tl.arange(0, REM_D)[None, :]
        tl.store(p_out, (acc_rem * inverse).to(out.dtype.element_ty), mask=m_out[:, None])
