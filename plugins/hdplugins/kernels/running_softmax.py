"""What the attention kernels share: a softmax that takes keys block by block, as FlashAttention does.

Letters: names with `tail` hold the last columns of a head that is split in two powers of two: 80 = 64 + 16 and
96 = 64 + 32 instead of padding to 128, and 128 = 64 + 64 where registers are short.

float32 multiplies in IEEE single precision and not in TF32: float32 is what a user picks to get the checkpoint's own
numbers, and TF32 keeps 10 bits of the mantissa, no more than float16, which is the faster choice then.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(states, text, head_number, stride_batch, stride_head):
    """Where the rows of a text and head begin."""
    return states + text.to(tl.int64) * stride_batch + head_number.to(tl.int64) * stride_head


@triton.jit
def load_rows(base, offsets, present, head: tl.constexpr, skip: tl.constexpr, masked: tl.constexpr):
    """[rows, head]: columns skip.. of the rows that start at the offsets; rows that are not present are 0."""
    pointers = base + offsets[:, None] + skip + tl.arange(0, head)[None, :]
    if masked:
        return tl.load(pointers, mask=present[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_tail(base, offsets, present, otherwise, head: tl.constexpr, tail: tl.constexpr):
    """[rows, tail] behind the head, or `otherwise` where a head has no tail."""
    result = otherwise
    if tail:
        result = load_rows(base, offsets, present, tail, head, True)
    return result


@triton.jit
def nothing_seen(block_queries: tl.constexpr, head: tl.constexpr, tail: tl.constexpr):
    """The running softmax before the first key: sums of values, of their tails, largest scores, sums of weights."""
    sums = tl.zeros((block_queries, head), tl.float32)
    norm = tl.zeros((block_queries,), tl.float32)
    top = tl.full((block_queries,), float("-inf"), tl.float32)
    sums_tail = norm
    if tail:
        sums_tail = tl.zeros((block_queries, tail), tl.float32)
    return sums, sums_tail, top, norm


@triton.jit
def weigh_keys(
    query,
    query_tail,
    keys,
    offsets,  # [keys], where each key's row starts
    present,  # [keys], rows that may be read
    seen,  # [queries or 1, keys]
    log2_times,  # of how many equal keys each of these stands for; None for one
    state,
    scale,
    head: tl.constexpr,
    tail: tl.constexpr,
    masked: tl.constexpr,
    factors=None,  # [keys], of their scores; None for 1
    initial=None,  # [queries, keys], what the products are added to; None for 0
    added=None,  # [queries, keys], to the sums; None for nothing. Both may be laid out differently.
):
    """Weights of one block of keys, [queries, keys], and what becomes of the state: the factor of its sums of values,
    and its new largest scores and sums of weights. `present` and `seen` count only where masked.
    """
    _, _, top, norm = state
    key = load_rows(keys, offsets, present, head, 0, masked)
    scores = tl.dot(query, tl.trans(key), initial, input_precision="ieee")
    if tail:
        key_tail = load_rows(keys, offsets, present, tail, head, masked)
        scores = tl.dot(query_tail, tl.trans(key_tail), scores, input_precision="ieee")
    if added is not None:
        scores += added
    if factors is not None:
        scores *= factors[None, :]
    if masked:
        scores = tl.where(seen, scores, float("-inf"))
    # scale > 0, so the largest score stays the largest, and the scores are scaled by the subtraction's multiply-add.
    highest = tl.max(scores, 1) * scale
    if log2_times is not None:
        highest += log2_times
    new_top = tl.maximum(top, highest)
    # Where a query has seen no key yet, -inf - -inf would be NaN. Without a mask every query has.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top) if masked else new_top
    decay = tl.exp2(top - shift)
    if log2_times is not None:
        shift -= log2_times
    weights = tl.exp2(scores * scale - shift[:, None])
    return weights, decay, new_top, norm * decay + tl.sum(weights, 1)


@triton.jit
def add_values(
    weights,  # [queries, keys], of the values' dtype or not
    decay,  # [queries], factor of the sums
    values,
    offsets,
    present,
    sums,
    sums_tail,
    head: tl.constexpr,
    tail: tl.constexpr,
    masked: tl.constexpr,
):
    """The sums of values after one block of keys, and those of their tails."""
    value = load_rows(values, offsets, present, head, 0, masked)
    weights = weights.to(value.dtype)
    sums = tl.dot(weights, value, sums * decay[:, None], input_precision="ieee")
    if tail:
        value_tail = load_rows(values, offsets, present, tail, head, masked)
        sums_tail = tl.dot(weights, value_tail, sums_tail * decay[:, None], input_precision="ieee")
    return sums, sums_tail


@triton.jit
def attend_keys(
    query,
    query_tail,
    keys,
    values,
    key_offsets,
    value_offsets,
    present,
    seen,
    log2_times,
    state,
    scale,
    head: tl.constexpr,
    tail: tl.constexpr,
    masked: tl.constexpr,
    factors=None,
    initial=None,
    added=None,
):
    """Add one block of keys to the running softmax; the arguments are those of `weigh_keys` and `add_values`."""
    weights, decay, top, norm = weigh_keys(
        query, query_tail, keys, key_offsets, present, seen, log2_times, state, scale, head, tail, masked,
        factors, initial, added,
    )  # fmt: skip
    sums, sums_tail, _, _ = state
    sums, sums_tail = add_values(weights, decay, values, value_offsets, present, sums, sums_tail, head, tail, masked)
    return sums, sums_tail, top, norm


@triton.jit
def store_shares(
    out,
    offsets,  # [queries], where each query's row starts
    present,  # [queries], rows that are written
    answered,  # [queries], rows that are not 0 whatever was seen
    state,
    head: tl.constexpr,
    tail: tl.constexpr,
):
    """Divide by the sums of weights and store; rows that saw no key are 0."""
    sums, sums_tail, _, norm = state
    share = tl.where((norm == 0) | (answered == 0), 0.0, 1.0 / tl.where(norm == 0, 1.0, norm))[:, None]
    pointers = out + offsets[:, None] + tl.arange(0, head)[None, :]
    tl.store(pointers, (sums * share).to(out.dtype.element_ty), mask=present[:, None])
    if tail:
        pointers = out + offsets[:, None] + head + tl.arange(0, tail)[None, :]
        tl.store(pointers, (sums_tail * share).to(out.dtype.element_ty), mask=present[:, None])
