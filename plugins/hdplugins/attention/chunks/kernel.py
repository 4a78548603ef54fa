"""Chunk attention on a GPU: a FlashAttention-style forward pass over the chunks that a chunk of queries sees.

A program takes a tile of the queries of one chunk, and loads the keys of no other chunks than it sees. All that decides
the machine code lies in this file and in `running_softmax`, or comes as a constant. Letters in the kernel: m and n
count queries and keys; `tail` is explained in `running_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.running_softmax import attend_keys, load_rows, load_tail, nothing_seen, rows_of, store_shares

_NOT_SPECIALIZED = ("tokens", "chunk", "chunks", "before", "after", "causal")
"""Nothing is compiled for certain values of these, here as ahead of time: what is timed is then what is shipped."""


@triton.jit
def chunk_at(own, step, chunks):
    """The chunk `step` after a chunk in a circle of `chunks`; a step of as many or more leads nowhere."""
    step = tl.where((step < chunks) & (step > -chunks), step, 0)
    return (own + step + chunks) % chunks


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, key, value, out: [batch, tokens, heads, head_dim]
    key,
    value,
    token_mask,  # [batch, tokens] int32
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
    chunk,
    chunks,
    before,
    after,
    causal,
    scale,  # holds log2(e), so that exp2 serves
    head: tl.constexpr,
    tail: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Attention of a tile of queries of one chunk, head and text. Rows of padding are 0."""
    row, head_number = tl.program_id(2).to(tl.int64), tl.program_id(1)
    query = rows_of(query, row, head_number, stride_query_batch, stride_query_head)
    key = rows_of(key, row, head_number, stride_key_batch, stride_key_head)
    value = rows_of(value, row, head_number, stride_value_batch, stride_value_head)
    mask = token_mask + row * tokens
    # A chunk may be larger than the text.
    size = tl.minimum(chunk, tokens)
    tiles, steps = tl.cdiv(size, block_queries), tl.cdiv(size, block_keys)
    own = tl.program_id(0) // tiles
    query_within = (tl.program_id(0) - own * tiles) * block_queries + tl.arange(0, block_queries)
    m = own * chunk + query_within
    asked = (query_within < chunk) & (m < tokens)
    is_real = tl.load(mask + m, mask=asked, other=0) != 0
    query_offsets = m * stride_query_token
    # Queries of padding are not read: NaN there would reach their answers, which are 0.
    q = load_rows(query, query_offsets, is_real, head, 0, True)
    q_tail = load_tail(query, query_offsets, is_real, q, head, tail)

    state = nothing_seen(block_queries, head, tail)
    end = (before + 1 + after) * steps
    if tl.max(is_real.to(tl.int32), 0) == 0:
        end = 0
    for at in range(end):
        key_within = (at % steps) * block_keys + tl.arange(0, block_keys)
        n = chunk_at(own, at // steps - before, chunks) * chunk + key_within
        present = (key_within < chunk) & (n < tokens)
        present = tl.load(mask + n, mask=present, other=0) != 0
        seen = present[None, :] & ((n[None, :] <= m[:, None]) | (causal == 0))
        state = attend_keys(
            q, q_tail, key, value, n * stride_key_token, n * stride_value_token, present, seen, None, state, scale,
            head, tail, True,
        )  # fmt: skip
    out = rows_of(out, row, head_number, stride_out_batch, stride_out_head)
    store_shares(out, m * stride_out_token, asked, is_real, state, head, tail)
