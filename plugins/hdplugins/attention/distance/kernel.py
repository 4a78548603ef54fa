"""Attention by clipped distance on a GPU: a FlashAttention-style forward pass in two loops over the keys.

Seen from a tile of queries, most keys of a long text are so far before it or behind it that all distances count as
-reach, or all as reach. The loops share one running softmax:

1. keys far away: a query has one number for all keys before, and one for all behind, and the table one row of values
   for each side. Those rows are added at one go after the loop, times the sums of the weights of each side;
2. keys around: each query and key has its own number, and weights are moved from the columns of keys to those of
   distances, whose rows of the table they are multiplied with as keys' weights are with values.

The terms of values are summed where values are, so that the running softmax rescales both at once.

All that decides the machine code lies in this file and in `running_softmax`, or comes as a constant. Letters in the
kernel: m and n count queries and keys; `tail` is explained in `running_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.kernels.running_softmax import (
    add_values,
    load_rows,
    load_tail,
    nothing_seen,
    rows_of,
    store_shares,
    weigh_keys,
)

_NOT_SPECIALIZED = ("table_batch", "table_head", "table_query", "tokens", "reach")
"""Nothing is compiled for certain values of these, here as ahead of time: what is timed is then what is shipped."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_row(sums, weights, values_by_distance, row, head: tl.constexpr, tail: tl.constexpr, skip: tl.constexpr):
    """Sums of values with those of a row of the table added: [queries] weights times its columns skip.. ."""
    columns: tl.constexpr = sums.shape[1]
    values = tl.load(values_by_distance + row * (head + tail) + skip + tl.arange(0, columns))
    return sums + weights[:, None] * values.to(tl.float32)[None, :]


@triton.jit
def _add_values_by_distance(
    weights, values_by_distance, lowest, zero, reach, sums, sums_tail,
    head: tl.constexpr, tail: tl.constexpr, block_queries: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    """Sums of values and of their tails, with the rows of the distances added.

    Args:
        weights: [queries, keys].
        values_by_distance: [2 * reach + 1, head + tail].
        lowest: the distance of the first key from the last query.
        zero: 0, which compilers must not see: they would keep what depends on nothing else in registers, and spill.
    """
    weights = weights.to(values_by_distance.dtype.element_ty)
    column = tl.arange(0, block_keys)
    # A query's distances begin so far above the lowest. Its keys in the order of distances, block_keys at a time, are
    # its weights turned by that, of which each part takes what it holds.
    shift = block_queries - 1 - tl.arange(0, block_queries) + zero
    turned = tl.gather(weights, (column[None, :] - shift[:, None]) & (block_keys - 1), 1)
    for part in tl.static_range((block_queries + block_keys - 2) // block_keys + 1):
        place = part * block_keys + column
        of_keys = place[None, :] - shift[:, None]
        share = tl.where((of_keys >= 0) & (of_keys < block_keys), turned, 0.0)
        row = tl.minimum(tl.maximum(lowest + place, -reach), reach) + reach
        rows = load_rows(values_by_distance, row * (head + tail), row, head, 0, False)
        sums = tl.dot(share, rows, sums, input_precision="ieee")
        if tail:
            rows_tail = load_rows(values_by_distance, row * (head + tail), row, tail, head, False)
            sums_tail = tl.dot(share, rows_tail, sums_tail, input_precision="ieee")
    return sums, sums_tail


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query,  # query, key, value, out: [batch, tokens, heads, head_dim]
    key,
    value,
    key_mask,  # [batch, tokens] bool
    scores_by_distance,  # [1 or batch, 1 or tokens, heads, 2 * reach + 1]
    values_by_distance,  # [2 * reach + 1, head_dim], or None
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
    table_batch,  # of scores_by_distance; 0 where it has one for all
    table_head,
    table_query,
    tokens,
    reach,
    scale,  # holds log2(e), so that exp2 serves
    head: tl.constexpr,
    tail: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Attention of a tile of queries of one head and text. Rows of texts without a real token are 0."""
    row, of_head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    query = rows_of(query, row, of_head, stride_query_batch, stride_query_head)
    key = rows_of(key, row, of_head, stride_key_batch, stride_key_head)
    value = rows_of(value, row, of_head, stride_value_batch, stride_value_head)
    mask = key_mask + row * tokens
    table = scores_by_distance + row * table_batch + of_head * table_head

    first = tl.program_id(0) * block_queries
    m = first + tl.arange(0, block_queries)
    column = tl.arange(0, block_keys)
    asked = m < tokens
    query_offsets = m * stride_query_token
    q = load_rows(query, query_offsets, asked, head, 0, True)
    q_tail = load_tail(query, query_offsets, asked, q, head, tail)
    numbers = table + m * table_query

    # Tiles of keys whose distances from all queries are -reach or less, or reach or more.
    near = tl.maximum(first - reach + 1, 0) // block_keys * block_keys
    far = tl.minimum(tl.cdiv(first + block_queries - 1 + reach, block_keys) * block_keys, tokens)
    before = tl.load(numbers, mask=asked, other=0.0).to(tl.float32) * _LOG2_E
    behind = tl.load(numbers + 2 * reach, mask=asked, other=0.0).to(tl.float32) * _LOG2_E

    sums, sums_tail, top, norm = nothing_seen(block_queries, head, tail)
    norm_before = norm
    steps_before = near // block_keys
    for step in range(steps_before + tl.cdiv(tokens - far, block_keys)):
        is_before = step < steps_before
        n = step * block_keys + tl.where(is_before, 0, far - near) + column
        present = tl.load(mask + n, mask=n < tokens, other=0) != 0
        # A number that all keys of a tile share is the logarithm of a factor of their weights.
        weights, decay, top, norm = weigh_keys(
            q, q_tail, key, n * stride_key_token, present, present[None, :], tl.where(is_before, before, behind),
            (sums, sums_tail, top, norm), scale, head, tail, True,
        )  # fmt: skip
        sums, sums_tail = add_values(
            weights, decay, value, n * stride_value_token, present, sums, sums_tail, head, tail, True
        )
        norm_before = tl.where(is_before, norm, norm_before * decay)
    if values_by_distance is not None:
        sums = _add_row(sums, norm_before, values_by_distance, 0, head, tail, 0)
        sums = _add_row(sums, norm - norm_before, values_by_distance, 2 * reach, head, tail, 0)
        if tail:
            sums_tail = _add_row(sums_tail, norm_before, values_by_distance, 0, head, tail, head)
            sums_tail = _add_row(sums_tail, norm - norm_before, values_by_distance, 2 * reach, head, tail, head)

    for start in range(near, far, block_keys):
        n = start + column
        present = tl.load(mask + n, mask=n < far, other=0) != 0
        seen = present[None, :]
        place = tl.minimum(tl.maximum(n[None, :] - m[:, None], -reach), reach) + reach
        number = tl.load(numbers[:, None] + place, mask=asked[:, None] & seen, other=0.0)
        # The sums are scaled, numbers are not.
        weights, decay, top, norm = weigh_keys(
            q, q_tail, key, n * stride_key_token, present, seen, None, (sums, sums_tail, top, norm), scale, head, tail,
            True, added=number.to(tl.float32) * (_LOG2_E / scale),
        )  # fmt: skip
        sums, sums_tail = add_values(
            weights, decay, value, n * stride_value_token, present, sums, sums_tail, head, tail, True
        )
        if values_by_distance is not None:
            sums, sums_tail = _add_values_by_distance(
                weights, values_by_distance, start - first - block_queries + 1, tl.maximum(start - tokens, 0), reach,
                sums, sums_tail, head, tail, block_queries, block_keys,
            )  # fmt: skip
    state = sums, sums_tail, top, norm
    out = rows_of(out, row, of_head, stride_out_batch, stride_out_head)
    store_shares(out, m * stride_out_token, asked, asked, state, head, tail)
