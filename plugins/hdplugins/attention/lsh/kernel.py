"""LSH attention on a GPU: tokens are hashed, sorted by a stable counting sort, and attended to round by round.

`hash_tokens` writes the bucket of every token in every round, and the factor that makes a key of its query_key; padding
has a bucket of its own, the last. `count`, `scan` and `place` sort: `count` cuts the text into spans and counts each
span's tokens by bucket, `scan` turns the counts into the places of the first tokens counted, ordered by bucket and then
by span, and `place` writes each span's tokens in order. The sorted text then has all real tokens in front.

`attend` is a FlashAttention-style forward pass of a tile of the queries of one sorted chunk, whose keys are gathered
through the sorted order. It is launched once per round. The workspace keeps the running softmax of each token between
rounds, since the keys of all rounds share one softmax; in a round one program owns a token, and the last round writes
the answers. The softmax begins with the token's own value, at a score below all others: it is the answer where nothing
else is seen, and has no weight otherwise.

All that decides the machine code lies in this file, in `running_softmax` and in the kernel of chunk attention, or comes
as a constant. Letters in the kernels: m and n are queries and keys, as tokens of the text; `tail` is explained in
`running_softmax`.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

from hdplugins.attention.chunks.kernel import chunk_at
from hdplugins.kernels.running_softmax import attend_keys, load_rows, load_tail, rows_of, store_shares

_NOT_SPECIALIZED = (
    "tokens", "head_dim", "rounds", "directions", "first_direction", "half", "size", "buckets", "spans", "span_tokens",
    "chunk", "chunks", "multiple", "before", "after", "causal", "ends_by_row", "this_round",
)  # fmt: skip
"""Nothing is compiled for certain values of these, here as ahead of time: what is timed is then what is shipped."""

_EPSILON = tl.constexpr(1e-6)
"""Added to a key's mean square."""

_LEAST = tl.constexpr(-1e30)
"""Score of a token's own value: below all scores, and finite."""


@triton.jit
def _text():
    """This program's text and head, as one index."""
    return tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def hash_tokens(
    query_key,  # [batch, tokens, heads, head_dim]
    token_mask,  # [batch, tokens] int32
    rotations,  # [heads, head_dim, rounds, directions] float32
    hashes,  # [batch, heads, rounds, tokens] int32
    factors,  # [batch, heads, tokens] float32
    stride_query_key_batch,  # in elements, as are all strides
    stride_query_key_head,
    stride_query_key_token,
    tokens,
    head_dim,
    rounds,
    directions,
    first_direction,  # of the factor of the buckets that this launch adds
    half,  # directions of the factor; their opposites come after them
    size,  # buckets per step of the factor, 1 for the first factor
    buckets,  # with the one for padding, the last
    rows: tl.constexpr,  # tokens of one program
    lanes: tl.constexpr,  # directions at a time
    columns: tl.constexpr,  # of a head at a time
):
    """Add one factor's part to the buckets of some tokens; the first factor also writes the factors of the keys."""
    row, text = tl.program_id(2).to(tl.int64), _text()
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    present = token < tokens
    is_real = tl.load(token_mask + row * tokens + token, mask=present, other=0) != 0
    base = rows_of(query_key, row, tl.program_id(1), stride_query_key_batch, stride_query_key_head)
    offsets = token * stride_query_key_token
    if size == 1:
        squares = tl.zeros((rows,), tl.float32)
        for start in range(0, head_dim, columns):
            part = load_rows(base + start, offsets, is_real, columns, 0, True).to(tl.float32)
            squares += tl.sum(part * part, 1)
        factor = tl.rsqrt(squares / head_dim + _EPSILON)
        tl.store(factors + text * tokens + token, factor, mask=present)

    column, lane = tl.arange(0, columns), tl.arange(0, lanes)
    rotations += tl.program_id(1).to(tl.int64) * head_dim * rounds * directions + first_direction
    hashes += text * rounds * tokens + token
    for this_round in range(rounds):
        # The largest product, and the first direction that has it; likewise of the opposites.
        most = tl.full((rows,), float("-inf"), tl.float32)
        least = tl.full((rows,), float("inf"), tl.float32)
        at_most = tl.zeros((rows,), tl.int32)
        at_least = tl.zeros((rows,), tl.int32)
        for start in range(0, half, lanes):
            direction = start + lane
            products = tl.zeros((rows, lanes), tl.float32)
            for skip in range(0, head_dim, columns):
                part = load_rows(base + skip, offsets, is_real, columns, 0, True).to(tl.float32)
                of_round = ((skip + column) * rounds + this_round) * directions
                rotated = tl.load(
                    rotations + of_round[:, None] + direction[None, :], mask=(direction < half)[None, :], other=0.0
                )
                products = tl.dot(part, rotated, products, input_precision="ieee")
            # A comparison with NaN is false, and the bucket one of those that there are.
            is_direction = (direction < half)[None, :]
            highest = tl.max(tl.where(is_direction, products, float("-inf")), 1)
            found = tl.min(tl.where(is_direction & (products == highest[:, None]), direction[None, :], half - 1), 1)
            at_most = tl.where(highest > most, found, at_most)
            most = tl.where(highest > most, highest, most)
            lowest = tl.min(tl.where(is_direction, products, float("inf")), 1)
            found = tl.min(tl.where(is_direction & (products == lowest[:, None]), direction[None, :], half - 1), 1)
            at_least = tl.where(lowest < least, found, at_least)
            least = tl.where(lowest < least, lowest, least)
        bucket = size * tl.where(-least > most, half + at_least, at_most)
        if size > 1:
            bucket += tl.load(hashes, mask=present, other=0)
        tl.store(hashes, tl.where(is_real, bucket, buckets - 1), mask=present)
        hashes += tokens


@triton.jit
def _span_of_round(rounds, spans):
    """This program's text, head and round, as one index, and its span of tokens."""
    this_round = tl.program_id(0) // spans
    return _text() * rounds + this_round, tl.program_id(0) - this_round * spans


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def count(
    hashes,  # [batch, heads, rounds, tokens] int32
    places,  # [batch, heads, rounds, buckets, spans] int32
    tokens,
    rounds,
    buckets,
    spans,
    span_tokens,
    lanes: tl.constexpr,
):
    """Write how many tokens of one span each bucket has."""
    text, span = _span_of_round(rounds, spans)
    hashes += text * tokens
    places += text * buckets * spans + span
    lane = tl.arange(0, lanes)
    for start in range(0, buckets, lanes):
        bucket = start + lane
        tl.store(places + bucket * spans, 0, mask=bucket < buckets)
    tl.debug_barrier()
    first = span * span_tokens
    end = tl.minimum(first + span_tokens, tokens)
    for start in range(first, end, lanes):
        present = start + lane < end
        bucket = tl.load(hashes + start + lane, mask=present, other=0)
        tl.atomic_add(places + bucket * spans, 1, mask=present, sem="relaxed")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def scan(
    places,  # [batch, heads, rounds, buckets, spans] int32
    buckets,
    spans,
    lanes: tl.constexpr,
):
    """Turn the counts of one round, text and head into the places of the first tokens counted."""
    counts = buckets * spans
    places += (_text() * tl.num_programs(0) + tl.program_id(0)) * counts
    lane = tl.arange(0, lanes)
    before = 0
    for start in range(0, counts, lanes):
        at = start + lane
        counted = tl.load(places + at, mask=at < counts, other=0)
        tl.store(places + at, before + tl.cumsum(counted, 0) - counted, mask=at < counts)
        before += tl.sum(counted, 0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def place(
    hashes,  # [batch, heads, rounds, tokens] int32
    places,  # [batch, heads, rounds, buckets, spans] int32
    order,  # [batch, heads, rounds, tokens] int32
    tokens,
    rounds,
    buckets,
    spans,
    span_tokens,
    lanes: tl.constexpr,
):
    """Write the tokens of one span to the sorted text; `places` then holds where each bucket's tokens end."""
    text, span = _span_of_round(rounds, spans)
    hashes += text * tokens
    order += text * tokens
    places += text * buckets * spans + span
    lane = tl.arange(0, lanes)
    first = span * span_tokens
    end = tl.minimum(first + span_tokens, tokens)
    for start in range(first, end, lanes):
        token = start + lane
        bucket = tl.load(hashes + token, mask=token < end, other=-1)
        alike = bucket[:, None] == bucket[None, :]
        before = tl.sum((alike & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        behind = tl.sum((alike & (lane[None, :] > lane[:, None])).to(tl.int32), 1)
        # The next tokens of a bucket follow these: all threads read its place before one changes it, and after.
        at = tl.load(places + bucket * spans, mask=token < end, other=0) + before
        tl.store(order + at, token, mask=token < end)
        tl.debug_barrier()
        tl.store(places + bucket * spans, at + 1, mask=(token < end) & (behind == 0))
        tl.debug_barrier()


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend(
    query_key,  # query_key, value, out: [batch, tokens, heads, head_dim]
    value,
    factors,  # [batch, heads, tokens] float32
    order,  # [batch, heads, rounds, tokens] int32
    places,  # [batch, heads, rounds, buckets, spans] int32
    sums,  # [batch, heads, tokens, head_dim] float32, not used where there is one round
    weights,  # [batch, heads, tokens, 2] float32, likewise
    out,
    stride_query_key_batch,  # in elements, as are all strides
    stride_query_key_head,
    stride_query_key_token,
    stride_value_batch,
    stride_value_head,
    stride_value_token,
    stride_out_batch,
    stride_out_head,
    stride_out_token,
    tokens,
    rounds,
    buckets,
    spans,
    chunk,
    chunks,  # of the padded batch
    multiple,
    before,
    after,
    causal,
    ends_by_row,
    this_round,
    scale,  # holds log2(e), so that exp2 serves
    head: tl.constexpr,
    tail: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Attention of a tile of queries of one chunk, round, head and text. Rows of padding are 0."""
    text = _text()
    row, head_number = tl.program_id(2), tl.program_id(1)
    query_key = rows_of(query_key, row, head_number, stride_query_key_batch, stride_query_key_head)
    value = rows_of(value, row, head_number, stride_value_batch, stride_value_head)
    order += text * rounds * tokens
    factors += text * tokens
    # Where the tokens of the last bucket before that of padding end, in any round.
    real = tl.load(places + text * rounds * buckets * spans + (buckets - 1) * spans - 1)
    if ends_by_row:
        chunks = tl.cdiv(tl.maximum(real, 1), multiple) * (multiple // chunk)

    # A chunk may be larger than the text.
    size = tl.minimum(chunk, tokens)
    tiles, steps = tl.cdiv(size, block_queries), tl.cdiv(size, block_keys)
    own = tl.program_id(0) // tiles
    query_within = (tl.program_id(0) - own * tiles) * block_queries + tl.arange(0, block_queries)
    query_at = own * chunk + query_within
    asked = (query_within < chunk) & (query_at < tokens)
    is_real = asked & (query_at < real)
    m = tl.load(order + this_round.to(tl.int64) * tokens + query_at, mask=asked, other=0)
    query_offsets = m * stride_query_key_token
    # Queries of padding are not read: NaN there would reach their answers, which are 0.
    q = load_rows(query_key, query_offsets, is_real, head, 0, True)
    q_tail = load_tail(query_key, query_offsets, is_real, q, head, tail)

    of_sums, of_weights = sums + text * tokens * (head + tail), weights + (text * tokens + m) * 2
    sum_offsets = m * (head + tail)
    if this_round == 0:
        own_offsets = m * stride_value_token
        shares = load_rows(value, own_offsets, is_real, head, 0, True).to(tl.float32)
        top = tl.full((block_queries,), _LEAST, tl.float32)
        norm = tl.full((block_queries,), 1.0, tl.float32)
        shares_tail = load_tail(value, own_offsets, is_real, norm, head, tail).to(tl.float32)
    else:
        shares = load_rows(of_sums, sum_offsets, is_real, head, 0, True)
        top = tl.load(of_weights, mask=is_real, other=_LEAST)
        norm = tl.load(of_weights + 1, mask=is_real, other=1.0)
        shares_tail = load_tail(of_sums, sum_offsets, is_real, norm, head, tail)
    state = shares, shares_tail, top, norm

    end = (before + 1 + after) * steps
    if tl.max(is_real.to(tl.int32), 0) == 0:
        end = 0
    for step in range(end):
        seen_chunk = chunk_at(this_round * chunks + own, step // steps - before, rounds * chunks)
        of_round = seen_chunk // chunks
        key_within = (step % steps) * block_keys + tl.arange(0, block_keys)
        key_at = (seen_chunk - of_round * chunks) * chunk + key_within
        present = (key_within < chunk) & (key_at < real)
        n = tl.load(order + of_round.to(tl.int64) * tokens + key_at, mask=present, other=0)
        factor = tl.load(factors + n, mask=present, other=0.0)
        visible = (n[None, :] < m[:, None]) | ((causal == 0) & (n[None, :] > m[:, None]))
        state = attend_keys(
            q, q_tail, query_key, value, n * stride_query_key_token, n * stride_value_token, present,
            present[None, :] & visible, None, state, scale, head, tail, True, factor,
        )  # fmt: skip

    if this_round == rounds - 1:
        out = rows_of(out, row, head_number, stride_out_batch, stride_out_head)
        store_shares(out, m * stride_out_token, asked, is_real, state, head, tail)
    else:
        shares, shares_tail, top, norm = state
        tl.store(of_sums + sum_offsets[:, None] + tl.arange(0, head)[None, :], shares, mask=is_real[:, None])
        if tail:
            columns = head + tl.arange(0, tail)
            tl.store(of_sums + sum_offsets[:, None] + columns[None, :], shares_tail, mask=is_real[:, None])
        tl.store(of_weights, top, mask=is_real)
        tl.store(of_weights + 1, norm, mask=is_real)
