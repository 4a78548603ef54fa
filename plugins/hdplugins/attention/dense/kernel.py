"""Dense attention on a GPU: sliding-window attention whose window is the whole sequence, without an index of the keys.

A CTA reads the mask itself: one byte per token, beside keys and values of hundreds. Keys before a sequence's first real
token and after its last are never loaded. Between the two, all keys are real unless the mask has holes. Without holes,
masks are applied to two kinds of key blocks only: blocks that reach past the end, and blocks on the diagonal of causal
attention.

The machine code depends on this file, on `online_softmax`, on the kernel of sliding windows and on constants. The
notation is explained in `online_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.attention.window.kernel import attend_window
from hdplugins.kernels.online_softmax import head_rows, init_state, load_rows, normalize_and_store

_NOT_SPECIALIZED = ("tokens", "group", "causal")
"""Triton compiles no special versions for values of these, as ahead of time: the timed kernel is the shipped one."""


@triton.jit
def _real_keys(mask, end, CHUNK: tl.constexpr):
    """Return the first real token before `end`, the index after the last one, and the number of real tokens."""
    # [CHUNK]
    o_chunk = tl.arange(0, CHUNK)
    # Element-wise over the chunks of the sequence, reduced across threads once at the end.
    b_first = tl.full((CHUNK,), 0, tl.int32) + end
    b_end = tl.zeros((CHUNK,), tl.int32)
    b_count = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, end, CHUNK):
        o_t = start + o_chunk
        m_real = tl.load(mask + o_t, mask=o_t < end, other=0) != 0
        b_first = tl.where(m_real, tl.minimum(b_first, o_t), b_first)
        b_end = tl.where(m_real, o_t + 1, b_end)
        b_count += m_real.to(tl.int32)
    return tl.min(b_first, 0), tl.max(b_end, 0), tl.sum(b_count, 0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, out: [batch, tokens, heads, head_dim]
    key,  # key, value: [batch, tokens, heads / group, head_dim]
    value,
    key_mask,  # [batch, tokens] bool
    out,
    query_strides,  # (batch, head, token) strides in elements, as are all strides
    key_strides,
    value_strides,
    out_strides,
    tokens,
    group,  # consecutive query heads that share a head of keys and values
    causal,
    scale,  # includes log2(e), because the softmax uses exp2
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK_CHUNK: tl.constexpr,
):
    """Compute a block of queries of one head and sequence.

    Rows of sequences without a real token are 0, and so are rows of padding if attention is causal.
    """
    # The last queries, which see the most keys if attention is causal, start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    i_b, i_h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    q, stride_q = head_rows(query, query_strides, i_b, i_h)
    k, stride_k = head_rows(key, key_strides, i_b, i_h // group)
    v, stride_v = head_rows(value, value_strides, i_b, i_h // group)
    mask = key_mask + i_b * tokens

    # [BLOCK_M]
    o_q = first + tl.arange(0, BLOCK_M)
    m_q = o_q < tokens
    visible_end = tl.where(causal != 0, tl.minimum(first + BLOCK_M, tokens), tokens)
    begin, end, count = _real_keys(mask, visible_end, MASK_CHUNK)
    m_defined = m_q & (tl.load(mask + o_q, mask=m_q & (causal != 0), other=1) != 0)
    if tl.max(m_defined.to(tl.int32), 0) == 0:
        end = begin
    end = tl.maximum(begin, end)
    # Without holes every query sees all keys, up to the first query if attention is causal.
    full_end = tl.where(causal != 0, tl.minimum(end, first + 1), end)
    full_end = tl.where(count == end - begin, tl.maximum(begin, full_end), begin)

    # Queries whose result is 0 by definition are not read: NaN there would reach their results.
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D]
    b_q, b_q_rem = load_rows(q, o_q * stride_q, m_defined, BLOCK_D, REM_D)
    state = attend_window(
        b_q, b_q_rem, k, v, mask, o_q, begin, end, begin, full_end, tokens, tl.where(causal != 0, 0, tokens), stride_k,
        stride_v, 1, init_state(BLOCK_M, BLOCK_D, REM_D), scale, BLOCK_D, REM_D, BLOCK_N,
    )  # fmt: skip
    o, stride_o = head_rows(out, out_strides, i_b, i_h)
    normalize_and_store(o, o_q * stride_o, m_q, m_defined, state, BLOCK_D, REM_D)
