"""Dense attention on a GPU: that of windows as wide as the text, which needs no plan of keys.

A program looks at the mask itself: at a byte per token, beside keys and values of hundreds. Keys before a text's first
real token and behind its last are never loaded. Where all between are real, which they are but for holes in a mask,
none of them is masked but for those of a block that begins too late to be whole, or where attention is causal.

All that decides the machine code lies in this file, in `running_softmax` and the windows' kernel, or comes as a
constant. Letters in the kernel: m counts queries; `tail` is explained in `running_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.attention.window.kernel import attend_window
from hdplugins.kernels.running_softmax import load_rows, load_tail, nothing_seen, rows_of, store_shares

_NOT_SPECIALIZED = ("tokens", "group", "causal")
"""Nothing is compiled for certain values of these, here as ahead of time: what is timed is then what is shipped."""


@triton.jit
def _real_keys(mask, until, chunk: tl.constexpr):
    """Among the first tokens of a text: the first that is real, one past the last, and how many are."""
    lane = tl.arange(0, chunk)
    # Element-wise over the chunks of the text, reduced across lanes once at the end.
    begin = tl.full((chunk,), 0, tl.int32) + until
    end = tl.zeros((chunk,), tl.int32)
    count = tl.zeros((chunk,), tl.int32)
    for start in range(0, until, chunk):
        token = start + lane
        is_real = tl.load(mask + token, mask=token < until, other=0) != 0
        begin = tl.where(is_real, tl.minimum(begin, token), begin)
        end = tl.where(is_real, token + 1, end)
        count += is_real.to(tl.int32)
    return tl.min(begin, 0), tl.max(end, 0), tl.sum(count, 0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, out: [batch, tokens, heads, head_dim]
    key,  # key, value: [batch, tokens, heads / group, head_dim]
    value,
    key_mask,  # [batch, tokens] bool
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
    group,  # heads in a row that share a head of keys and values
    causal,
    scale,  # holds log2(e), so that exp2 serves
    head: tl.constexpr,
    tail: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
    mask_chunk: tl.constexpr,
):
    """Attention of a block of queries of one head and text. Rows of texts without a real token are 0, and of padding
    where attention is causal."""
    # The last queries, which see the most keys where attention is causal, are not the last to start.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_queries
    row, head_number = tl.program_id(2).to(tl.int64), tl.program_id(1)
    query = rows_of(query, row, head_number, stride_query_batch, stride_query_head)
    key = rows_of(key, row, head_number // group, stride_key_batch, stride_key_head)
    value = rows_of(value, row, head_number // group, stride_value_batch, stride_value_head)
    mask = key_mask + row * tokens

    m = first + tl.arange(0, block_queries)
    asked = m < tokens
    until = tl.where(causal != 0, tl.minimum(first + block_queries, tokens), tokens)
    begin, end, count = _real_keys(mask, until, mask_chunk)
    answered = asked & (tl.load(mask + m, mask=asked & (causal != 0), other=1) != 0)
    if tl.max(answered.to(tl.int32), 0) == 0:
        end = begin
    end = tl.maximum(begin, end)
    # Without holes every query sees all keys, up to the first one where attention is causal.
    whole_end = tl.where(causal != 0, tl.minimum(end, first + 1), end)
    whole_end = tl.where(count == end - begin, tl.maximum(begin, whole_end), begin)

    # Queries that are not answered are not read: NaN there would reach their answers, which are 0.
    query_offsets = m * stride_query_token
    q = load_rows(query, query_offsets, answered, head, 0, True)
    q_tail = load_tail(query, query_offsets, answered, q, head, tail)
    state = attend_window(
        q, q_tail, key, value, mask, m, begin, end, begin, whole_end, tokens, tl.where(causal != 0, 0, tokens),
        stride_key_token, stride_value_token, 1, nothing_seen(block_queries, head, tail), scale, head, tail, block_keys,
    )  # fmt: skip
    out = rows_of(out, row, head_number, stride_out_batch, stride_out_head)
    store_shares(out, m * stride_out_token, asked, answered, state, head, tail)
