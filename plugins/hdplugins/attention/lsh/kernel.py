"""LSH attention on a GPU: tokens are hashed, sorted by a stable counting sort, and attended to round by round.

`hash_tokens` writes the bucket of every token in every round, and the factor that turns a query_key into a key; padding
has the last bucket. `count`, `scan` and `scatter` sort: `count` divides the sequence into spans and counts the tokens
of each span by bucket, `scan` turns the counts into offsets by a prefix sum, ordered by bucket and then by span, and
`scatter` writes the tokens of each span in order. All real tokens then precede the padding.

`attend` is a FlashAttention-style forward pass of a block of queries of one sorted chunk, whose keys are gathered
through the sorted order. It is launched once per round. The workspace keeps the softmax state of each token between
rounds, because the keys of all rounds share one softmax; in a round one CTA owns a token, and the last round writes the
result. The softmax starts with the value of the token itself, at a score below all others: this value is the result if
the query sees no other key, and has no weight otherwise.

The machine code depends on this file, on `online_softmax`, on the kernel of chunk attention and on constants. The
notation is explained in `online_softmax`; `o_sorted` are indices in the sorted order.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of device functions as Triton types.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.attention.chunks.kernel import chunk_at
from hdplugins.kernels.online_softmax import (
    attention_step,
    head_rows,
    load_columns,
    load_rows,
    normalize_and_store,
)

_NOT_SPECIALIZED = (
    "tokens", "head_dim", "rounds", "directions", "first_direction", "half", "size", "buckets", "spans", "span_tokens",
    "chunk", "chunks", "multiple", "before", "after", "causal", "ends_by_row", "i_round",
)  # fmt: skip
"""Triton compiles no special versions for values of these, as ahead of time: the timed kernel is the shipped one."""

_EPSILON = tl.constexpr(1e-6)
"""Added to a key's mean square."""

_LOWEST_SCORE = tl.constexpr(-1e30)
"""Score of a token's own value: below all scores, and finite."""


@triton.jit
def _program_head():
    """Return this program's sequence and head, as one index."""
    return tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def hash_tokens(
    query_key,  # [batch, tokens, heads, head_dim]
    token_mask,  # [batch, tokens] int32
    rotations,  # [heads, head_dim, rounds, directions] float32
    hashes,  # [batch, heads, rounds, tokens] int32
    factors,  # [batch, heads, tokens] float32
    query_key_strides,  # (batch, head, token) strides in elements, as are all strides
    tokens,
    head_dim,
    rounds,
    directions,
    first_direction,  # first direction of the factor of the buckets that this launch adds
    half,  # directions of the factor; their opposites follow them
    size,  # buckets per step of the factor, 1 for the first factor
    buckets,  # includes the bucket of padding, the last
    BLOCK_T: tl.constexpr,  # tokens of one CTA
    BLOCK_R: tl.constexpr,  # directions of one step
    COLUMNS: tl.constexpr,  # columns of a head of one step
):
    """Add one factor's part to the buckets of some tokens; the first factor also writes the factors of the keys."""
    i_b, i_bh = tl.program_id(2).to(tl.int64), _program_head()
    # [BLOCK_T]
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < tokens
    m_real = tl.load(token_mask + i_b * tokens + o_t, mask=m_t, other=0) != 0
    x, stride_x = head_rows(query_key, query_key_strides, i_b, tl.program_id(1))
    o_rows = o_t * stride_x
    if size == 1:
        # [BLOCK_T]
        b_squares = tl.zeros((BLOCK_T,), tl.float32)
        for start in range(0, head_dim, COLUMNS):
            # [BLOCK_T, COLUMNS]
            b_x = load_columns(x + start, o_rows, m_real, COLUMNS, 0, True).to(tl.float32)
            b_squares += tl.sum(b_x * b_x, 1)
        b_factor = tl.rsqrt(b_squares / head_dim + _EPSILON)
        tl.store(factors + i_bh * tokens + o_t, b_factor, mask=m_t)

    # [COLUMNS], [BLOCK_R]
    o_column, o_r = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_R)
    rotations += tl.program_id(1).to(tl.int64) * head_dim * rounds * directions + first_direction
    hashes += i_bh * rounds * tokens + o_t
    for i_round in range(rounds):
        # [BLOCK_T], the largest product and its first direction; likewise of the opposites.
        b_max = tl.full((BLOCK_T,), float("-inf"), tl.float32)
        b_min = tl.full((BLOCK_T,), float("inf"), tl.float32)
        b_argmax = tl.zeros((BLOCK_T,), tl.int32)
        b_argmin = tl.zeros((BLOCK_T,), tl.int32)
        for start in range(0, half, BLOCK_R):
            o_direction = start + o_r
            # [BLOCK_T, BLOCK_R]
            b_products = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for first in range(0, head_dim, COLUMNS):
                # [BLOCK_T, COLUMNS]
                b_x = load_columns(x + first, o_rows, m_real, COLUMNS, 0, True).to(tl.float32)
                o_rotation = ((first + o_column) * rounds + i_round) * directions
                # [COLUMNS, BLOCK_R]
                b_rotation = tl.load(
                    rotations + o_rotation[:, None] + o_direction[None, :],
                    mask=(o_direction < half)[None, :],
                    other=0.0,
                )
                b_products = tl.dot(b_x, b_rotation, b_products, input_precision="ieee")
            # A comparison with NaN is false, so that the bucket is a valid one.
            m_direction = (o_direction < half)[None, :]
            b_step_max = tl.max(tl.where(m_direction, b_products, float("-inf")), 1)
            m_max = m_direction & (b_products == b_step_max[:, None])
            b_step_arg = tl.min(tl.where(m_max, o_direction[None, :], half - 1), 1)
            b_argmax = tl.where(b_step_max > b_max, b_step_arg, b_argmax)
            b_max = tl.where(b_step_max > b_max, b_step_max, b_max)
            b_step_min = tl.min(tl.where(m_direction, b_products, float("inf")), 1)
            m_min = m_direction & (b_products == b_step_min[:, None])
            b_step_arg = tl.min(tl.where(m_min, o_direction[None, :], half - 1), 1)
            b_argmin = tl.where(b_step_min < b_min, b_step_arg, b_argmin)
            b_min = tl.where(b_step_min < b_min, b_step_min, b_min)
        b_bucket = size * tl.where(-b_min > b_max, half + b_argmin, b_argmax)
        if size > 1:
            b_bucket += tl.load(hashes, mask=m_t, other=0)
        tl.store(hashes, tl.where(m_real, b_bucket, buckets - 1), mask=m_t)
        hashes += tokens


@triton.jit
def _program_span(rounds, spans):
    """Return this program's sequence, head and round, as one index, and its span of tokens."""
    i_round = tl.program_id(0) // spans
    return _program_head() * rounds + i_round, tl.program_id(0) - i_round * spans


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def count(
    hashes,  # [batch, heads, rounds, tokens] int32
    bucket_offsets,  # [batch, heads, rounds, buckets, spans] int32
    tokens,
    rounds,
    buckets,
    spans,
    span_tokens,
    BLOCK_T: tl.constexpr,
):
    """Count the tokens of one span by bucket."""
    i_bhr, i_span = _program_span(rounds, spans)
    hashes += i_bhr * tokens
    bucket_offsets += i_bhr * buckets * spans + i_span
    # [BLOCK_T]
    o_block = tl.arange(0, BLOCK_T)
    for start in range(0, buckets, BLOCK_T):
        o_bucket = start + o_block
        tl.store(bucket_offsets + o_bucket * spans, 0, mask=o_bucket < buckets)
    tl.debug_barrier()
    first = i_span * span_tokens
    end = tl.minimum(first + span_tokens, tokens)
    for start in range(first, end, BLOCK_T):
        m_t = start + o_block < end
        b_bucket = tl.load(hashes + start + o_block, mask=m_t, other=0)
        tl.atomic_add(bucket_offsets + b_bucket * spans, 1, mask=m_t, sem="relaxed")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def scan(
    bucket_offsets,  # [batch, heads, rounds, buckets, spans] int32
    buckets,
    spans,
    BLOCK_C: tl.constexpr,
):
    """Replace the counts of one round, sequence and head by their exclusive prefix sum."""
    counts = buckets * spans
    bucket_offsets += (_program_head() * tl.num_programs(0) + tl.program_id(0)) * counts
    # [BLOCK_C]
    o_block = tl.arange(0, BLOCK_C)
    total = 0
    for start in range(0, counts, BLOCK_C):
        o_count = start + o_block
        b_count = tl.load(bucket_offsets + o_count, mask=o_count < counts, other=0)
        tl.store(bucket_offsets + o_count, total + tl.cumsum(b_count, 0) - b_count, mask=o_count < counts)
        total += tl.sum(b_count, 0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def scatter(
    hashes,  # [batch, heads, rounds, tokens] int32
    bucket_offsets,  # [batch, heads, rounds, buckets, spans] int32
    order,  # [batch, heads, rounds, tokens] int32
    tokens,
    rounds,
    buckets,
    spans,
    span_tokens,
    BLOCK_T: tl.constexpr,
):
    """Write the tokens of one span in sorted order; `bucket_offsets` then holds the end of each bucket's tokens."""
    i_bhr, i_span = _program_span(rounds, spans)
    hashes += i_bhr * tokens
    order += i_bhr * tokens
    bucket_offsets += i_bhr * buckets * spans + i_span
    # [BLOCK_T]
    o_block = tl.arange(0, BLOCK_T)
    first = i_span * span_tokens
    end = tl.minimum(first + span_tokens, tokens)
    for start in range(first, end, BLOCK_T):
        o_t = start + o_block
        b_bucket = tl.load(hashes + o_t, mask=o_t < end, other=-1)
        # [BLOCK_T, BLOCK_T]
        m_equal = b_bucket[:, None] == b_bucket[None, :]
        # [BLOCK_T]
        b_before = tl.sum((m_equal & (o_block[None, :] < o_block[:, None])).to(tl.int32), 1)
        b_after = tl.sum((m_equal & (o_block[None, :] > o_block[:, None])).to(tl.int32), 1)
        # The next tokens of a bucket follow these: all threads read the offset before one thread changes it, and after.
        o_sorted = tl.load(bucket_offsets + b_bucket * spans, mask=o_t < end, other=0) + b_before
        tl.store(order + o_sorted, o_t, mask=o_t < end)
        tl.debug_barrier()
        tl.store(bucket_offsets + b_bucket * spans, o_sorted + 1, mask=(o_t < end) & (b_after == 0))
        tl.debug_barrier()


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query_key,  # query_key, value, out: [batch, tokens, heads, head_dim]
    value,
    factors,  # [batch, heads, tokens] float32
    order,  # [batch, heads, rounds, tokens] int32
    bucket_offsets,  # [batch, heads, rounds, buckets, spans] int32
    round_acc,  # [batch, heads, tokens, head_dim] float32; not used if there is one round
    round_ml,  # [batch, heads, tokens, 2] float32, m_i and l_i; likewise
    out,
    query_key_strides,  # (batch, head, token) strides in elements, as are all strides
    value_strides,
    out_strides,
    tokens,
    rounds,
    buckets,
    spans,
    chunk,
    chunks,  # chunks of the padded batch
    multiple,
    before,
    after,
    causal,
    ends_by_row,
    i_round,
    scale,  # includes log2(e), because the softmax uses exp2
    BLOCK_D: tl.constexpr,
    REM_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a block of queries of one chunk, round, head and sequence. Rows of padding are 0."""
    i_bh = _program_head()
    i_b, i_h = tl.program_id(2), tl.program_id(1)
    qk, stride_qk = head_rows(query_key, query_key_strides, i_b, i_h)
    v, stride_v = head_rows(value, value_strides, i_b, i_h)
    order += i_bh * rounds * tokens
    factors += i_bh * tokens
    # The end of the tokens of the last bucket before the bucket of padding, in any round.
    real = tl.load(bucket_offsets + i_bh * rounds * buckets * spans + (buckets - 1) * spans - 1)
    if ends_by_row:
        chunks = tl.cdiv(tl.maximum(real, 1), multiple) * (multiple // chunk)

    # A chunk may be larger than the sequence.
    size = tl.minimum(chunk, tokens)
    num_m, num_n = tl.cdiv(size, BLOCK_M), tl.cdiv(size, BLOCK_N)
    i_chunk = tl.program_id(0) // num_m
    # [BLOCK_M]
    o_in_chunk = (tl.program_id(0) - i_chunk * num_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_sorted = i_chunk * chunk + o_in_chunk
    m_q = (o_in_chunk < chunk) & (o_sorted < tokens)
    m_real = m_q & (o_sorted < real)
    o_q = tl.load(order + i_round.to(tl.int64) * tokens + o_sorted, mask=m_q, other=0)
    # Queries of padding are not read: NaN there would reach their results, which are 0.
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D]
    b_q, b_q_rem = load_rows(qk, o_q * stride_qk, m_real, BLOCK_D, REM_D)

    p_acc, p_ml = round_acc + i_bh * tokens * (BLOCK_D + REM_D), round_ml + (i_bh * tokens + o_q) * 2
    o_acc = o_q * (BLOCK_D + REM_D)
    # [BLOCK_M, BLOCK_D], [BLOCK_M, REM_D], [BLOCK_M], [BLOCK_M]
    if i_round == 0:
        o_v = o_q * stride_v
        acc = load_columns(v, o_v, m_real, BLOCK_D, 0, True).to(tl.float32)
        m_i = tl.full((BLOCK_M,), _LOWEST_SCORE, tl.float32)
        l_i = tl.full((BLOCK_M,), 1.0, tl.float32)
        acc_rem = l_i
        if REM_D:
            acc_rem = load_columns(v, o_v, m_real, REM_D, BLOCK_D, True).to(tl.float32)
    else:
        acc = load_columns(p_acc, o_acc, m_real, BLOCK_D, 0, True)
        m_i = tl.load(p_ml, mask=m_real, other=_LOWEST_SCORE)
        l_i = tl.load(p_ml + 1, mask=m_real, other=1.0)
        acc_rem = l_i
        if REM_D:
            acc_rem = load_columns(p_acc, o_acc, m_real, REM_D, BLOCK_D, True)
    state = acc, acc_rem, m_i, l_i

    end = (before + 1 + after) * num_n
    if tl.max(m_real.to(tl.int32), 0) == 0:
        end = 0
    for i_n in range(end):
        i_key_chunk = chunk_at(i_round * chunks + i_chunk, i_n // num_n - before, rounds * chunks)
        i_key_round = i_key_chunk // chunks
        # [BLOCK_N]
        o_in_key_chunk = (i_n % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        o_key_sorted = (i_key_chunk - i_key_round * chunks) * chunk + o_in_key_chunk
        m_k = (o_in_key_chunk < chunk) & (o_key_sorted < real)
        o_k = tl.load(order + i_key_round.to(tl.int64) * tokens + o_key_sorted, mask=m_k, other=0)
        b_factor = tl.load(factors + o_k, mask=m_k, other=0.0)
        # [BLOCK_M, BLOCK_N]
        m_order = (o_k[None, :] < o_q[:, None]) | ((causal == 0) & (o_k[None, :] > o_q[:, None]))
        state = attention_step(
            b_q, b_q_rem, qk, v, o_k * stride_qk, o_k * stride_v, m_k, m_k[None, :] & m_order, None, state, scale,
            BLOCK_D, REM_D, True, b_factor,
        )  # fmt: skip

    if i_round == rounds - 1:
        o, stride_o = head_rows(out, out_strides, i_b, i_h)
        normalize_and_store(o, o_q * stride_o, m_q, m_real, state, BLOCK_D, REM_D)
    else:
        acc, acc_rem, m_i, l_i = state
        tl.store(p_acc + o_acc[:, None] + tl.arange(0, BLOCK_D)[None, :], acc, mask=m_real[:, None])
        if REM_D:
            o_rem = BLOCK_D + tl.arange(0, REM_D)
            tl.store(p_acc + o_acc[:, None] + o_rem[None, :], acc_rem, mask=m_real[:, None])
        tl.store(p_ml, m_i, mask=m_real)
        tl.store(p_ml + 1, l_i, mask=m_real)
