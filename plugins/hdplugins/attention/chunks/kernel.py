"""Chunk attention on a GPU: a FlashAttention-style forward pass over the chunks that a chunk of queries sees.

A CTA computes a block of queries of one chunk, and loads only keys of the chunks that the queries see. The machine code
depends on this file, on `online_softmax` and on constants. The notation is explained in `online_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.online_softmax import attention_step, head_rows, init_state, load_rows, normalize_and_store

_NOT_SPECIALIZED = ("tokens", "chunk", "chunks", "before", "after", "causal")
"""Triton compiles no special versions for values of these, as ahead of time: the timed kernel is the shipped one."""


@triton.jit
def chunk_at(i_chunk, step, chunks):
    """Return the chunk `step` after a chunk in a circle of `chunks`; a step of a whole circle or more counts as 0."""
    step = tl.where((step < chunks) & (step > -chunks), step, 0)
    return (i_chunk + step + chunks) % chunks


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, key, value, out: [batch, tokens, heads, head_dim]
    key,
    value,
    token_mask,  # [batch, tokens] int32
    out,
    query_strides,  # (batch, head, token) strides in elements, as are all strides
    key_strides,
    value_strides,
    out_strides,
    tokens,
    chunk,
    chunks,
    before,
    after,
    causal,
    scale,  # includes log2(e), because the softmax uses exp2
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a block of queries of one chunk, head and sequence. Rows of padding are 0."""
    i_b, i_h = tl.program_id(2).to(tl.int64), tl.program_id(1)
    q, stride_q = head_rows(query, query_strides, i_b, i_h)
    k, stride_k = head_rows(key, key_strides, i_b, i_h)
    v, stride_v = head_rows(value, value_strides, i_b, i_h)
    mask = token_mask + i_b * tokens
    # A chunk may be larger than the sequence.
    size = tl.minimum(chunk, tokens)
    num_m, num_n = tl.cdiv(size, BLOCK_M), tl.cdiv(size, BLOCK_N)
    i_chunk = tl.program_id(0) // num_m
    # [BLOCK_M]
    o_in_chunk = (tl.program_id(0) - i_chunk * num_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_q = i_chunk * chunk + o_in_chunk
    m_q = (o_in_chunk < chunk) & (o_q < tokens)
    m_real = tl.load(mask + o_q, mask=m_q, other=0) != 0
    # Queries of padding are not read: NaN there would reach their results, which are 0.
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D]
    b_q, b_q_rem = load_rows(q, o_q * stride_q, m_real, BLOCK_D, REM_D)

    state = init_state(BLOCK_M, BLOCK_D, REM_D)
    end = (before + 1 + after) * num_n
    if tl.max(m_real.to(tl.int32), 0) == 0:
        end = 0
    for i_n in range(end):
        # [BLOCK_N]
        o_in_key_chunk = (i_n % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = chunk_at(i_chunk, i_n // num_n - before, chunks) * chunk + o_in_key_chunk
        m_k = (o_in_key_chunk < chunk) & (o_k < tokens)
        m_k = tl.load(mask + o_k, mask=m_k, other=0) != 0
        # [BLOCK_M, BLOCK_N]
        m_s = m_k[None, :] & ((o_k[None, :] <= o_q[:, None]) | (causal == 0))
        state = attention_step(
            b_q, b_q_rem, k, v, o_k * stride_k, o_k * stride_v, m_k, m_s, None, state, scale, BLOCK_D, REM_D, True,
        )  # fmt: skip
    o, stride_o = head_rows(out, out_strides, i_b, i_h)
    normalize_and_store(o, o_q * stride_o, m_q, m_real, state, BLOCK_D, REM_D)
