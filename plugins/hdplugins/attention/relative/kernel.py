"""Relative attention on a GPU: a FlashAttention-style forward pass whose scores get a term of the distance.

Within a tile of queries and keys the scores by distance are a band of the products of its queries with rows of the
positions: the row of a query's first key is one below that of the query before. A step multiplies all queries of the
tile with as many rows as it has keys, which follow those of the step before. The products of both hold the band, and
one gather moves it to the columns of the keys. So a program multiplies each row once, and keeps nothing that grows with
the keys. Products with positions take some columns of a head at a time, for which queries are loaded again: they would
need too many registers beside those for the products with keys.

All that decides the machine code lies in this file and in `running_softmax`, or comes as a constant. Letters in the
kernel: m and n count queries and keys; `tail` is explained in `running_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.running_softmax import attend_keys, load_rows, load_tail, nothing_seen, rows_of, store_shares

_NOT_SPECIALIZED = ("tokens", "keys", "distances", "causal", "reach")
"""Nothing is compiled for certain values of these, here as ahead of time: what is timed is then what is shipped."""


@triton.jit
def _biased(states, bias, columns: tl.constexpr):
    """[queries, columns]: states plus a bias."""
    return states + tl.load(bias + tl.arange(0, columns))[None, :]


@triton.jit
def _position_products(
    query, bias, query_offsets, is_real, positions, first, distances,
    rows: tl.constexpr, columns: tl.constexpr, head_dim: tl.constexpr,
):  # fmt: skip
    """[queries, rows]: products of biased queries with the positions' rows first..; those that do not exist are 0."""
    row = first + tl.arange(0, rows)
    present = (row >= 0) & (row < distances)
    products = tl.zeros((query_offsets.shape[0], rows), tl.float32)
    for start in range(0, head_dim, columns):
        states = _biased(load_rows(query + start, query_offsets, is_real, columns, 0, True), bias + start, columns)
        position = load_rows(positions + start, row * head_dim, present, columns, 0, True)
        products = tl.dot(states, tl.trans(position), products, input_precision="ieee")
    return products


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
    stride_position_head,
    tokens,
    keys,
    distances,
    causal,
    reach,
    scale,  # holds log2(e), so that exp2 serves
    head: tl.constexpr,
    tail: tl.constexpr,
    columns: tl.constexpr,  # of a product with positions
    block_queries: tl.constexpr,  # at most block_keys
    block_keys: tl.constexpr,
):
    """Attention of a tile of queries of one head and text. Rows of padding are 0."""
    row, of_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = rows_of(query, row, of_head, stride_query_batch, stride_query_head)
    key = rows_of(key, row, of_head, stride_key_batch, stride_key_head)
    value = rows_of(value, row, of_head, stride_value_batch, stride_value_head)
    kinds = key_kind + row * keys
    positions += of_head * stride_position_head
    memory = keys - tokens

    first = tl.program_id(0) * block_queries
    within = tl.arange(0, block_queries)
    m = first + within
    asked = m < tokens
    query_kind = tl.load(kinds + memory + m, mask=asked, other=0)
    query_offsets = m * stride_query_token
    # Queries of padding are not read: NaN there would reach their answers, which are 0.
    is_real = query_kind != 0
    q = load_rows(query, query_offsets, is_real, head, 0, True)
    q_tail = load_tail(query, query_offsets, is_real, q, head, tail)
    content_bias += of_head * (head + tail)
    position_bias += of_head * (head + tail)
    content = _biased(q, content_bias, head)
    content_tail = content
    if tail:
        content_tail = _biased(q_tail, content_bias + head, tail)
    if segment_scores is not None:
        of_queries = (row * tokens + m) * tl.num_programs(1) + of_head
        segment = tl.load(segment_scores + of_queries, mask=is_real, other=0.0).to(tl.float32)

    # The keys that some query of the tile sees.
    begin = 0
    end = keys
    if causal:
        end = memory + tl.minimum(first + block_queries, tokens)
    if reach:
        begin = tl.maximum(memory + first - reach + 1, 0)
    if tl.max(query_kind, 0) == 0:
        end = begin

    column = tl.arange(0, block_keys)
    # Of the tile's first column and each query, in the rows that its products are of.
    shift = block_queries - 1 - within
    next_row = tokens - first - block_queries + begin
    ahead = _position_products(
        query, position_bias, query_offsets, is_real, positions, next_row, distances,
        block_keys, columns, head + tail,
    )  # fmt: skip
    state = nothing_seen(block_queries, head, tail)
    for start in range(begin, end, block_keys):
        n = start + column
        kind = tl.load(kinds + n, mask=n < end, other=0)
        present = kind != 0
        next_row += block_keys
        behind = ahead
        ahead = _position_products(
            query, position_bias, query_offsets, is_real, positions, next_row, distances,
            block_keys, columns, head + tail,
        )  # fmt: skip
        band = tl.where(column[None, :] >= shift[:, None], behind, ahead)
        added = tl.gather(band, (shift[:, None] + column[None, :]) % block_keys, 1)
        initial = None
        if segment_scores is not None:
            initial = tl.where(query_kind[:, None] != kind[None, :], segment[:, None], 0.0)
        distance = memory + m[:, None] - n[None, :]
        seen = present[None, :] & ((distance >= 0) | (causal == 0)) & ((distance < reach) | (reach == 0))
        state = attend_keys(
            content, content_tail, key, value, n * stride_key_token, n * stride_value_token, present, seen, None, state,
            scale, head, tail, True, initial=initial, added=added,
        )  # fmt: skip
    out = rows_of(out, row, of_head, stride_out_batch, stride_out_head)
    store_shares(out, m * stride_out_token, asked, is_real, state, head, tail)
