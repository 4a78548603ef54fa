"""A candidate for the windows' kernel on Hopper (sm_90), in Gluon: products of tiles are asynchronous, and while the
tensor cores multiply the weights of one tile of keys with its values, the softmax of the next tile is computed.

Never run: it compiles without a GPU, where nothing interprets Gluon. The step that times it compares its answers first.
Texts are whole, without padding, globals or dilation. Letters: m counts queries and n keys.
"""

# mypy: disable-error-code="no-untyped-def"
# Annotations of device functions are read by Triton, as types of its own.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

ARCHITECTURE = 90

TILES = {64: (128, 64, 8), 128: (128, 64, 8)}
"""Size of a head -> queries and keys of a tile, and warps."""

_LOG2_E = math.log2(math.e)

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 renamed it


@gluon.jit
def _copy_rows(place, rows, first, end, stride_token, count: gl.constexpr, head: gl.constexpr):
    """Begin to copy `count` rows into shared memory; rows from `end` on become 0."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (head // 8), head // 8], [warps, 1], [1, 0])
    row = first + gl.arange(0, count, gl.SliceLayout(1, layout))
    column = gl.arange(0, head, gl.SliceLayout(0, layout))
    addresses = rows + row[:, None] * stride_token + column[None, :]
    async_copy.async_copy_global_to_shared(place, addresses, mask=(row < end)[:, None])


@gluon.jit
def _wait_for_copies(outstanding: gl.constexpr):
    """Until all but the last `outstanding` groups are there, for every warp and for the tensor cores."""
    async_copy.wait_group(outstanding)
    _barrier()
    fence_async_shared()


@gluon.jit
def _weigh(scores, m, start, end, left, right, top, norm, scale, masked, block_keys: gl.constexpr, of: gl.constexpr):
    """Weights of a tile of keys, and the running softmax behind it: top, norm, and the decay of what came before."""
    if masked:
        n = start + gl.arange(0, block_keys, gl.SliceLayout(0, of))
        near = (n[None, :] >= (m - left)[:, None]) & (n[None, :] <= (m + right)[:, None])
        scores = gl.where(near & (n < end)[None, :], scores, float("-inf"))
    risen = gl.maximum(top, gl.max(scores, 1) * scale)
    # A query that has seen no key yet: -inf - -inf is no number.
    shift = gl.where(risen == float("-inf"), 0.0, risen)
    decay = gl.exp2(top - shift)
    weights = gl.exp2(scores * scale - shift[:, None])
    return weights, decay, risen, norm * decay + gl.sum(weights, 1)


@gluon.jit
def attend(
    query,  # query, key, value, out: [batch, tokens, heads, head_dim]
    key,
    value,
    out,
    stride_batch,  # of query, key and value, in elements
    stride_token,
    stride_head,
    stride_out_batch,
    stride_out_token,
    stride_out_head,
    tokens,
    left,
    right,
    scale,  # holds log2(e), so that exp2 serves
    head: gl.constexpr,
    block_queries: gl.constexpr,
    block_keys: gl.constexpr,
):
    """Attention of a tile of queries of one head and text."""
    dtype: gl.constexpr = query.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_keys, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, head, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    in_memory: gl.constexpr = gl.NVMMASharedLayout.get_default_for([block_keys, head], dtype)
    start_of_text = gl.program_id(2).to(gl.int64) * stride_batch + gl.program_id(1).to(gl.int64) * stride_head
    query, key, value = query + start_of_text, key + start_of_text, value + start_of_text
    first = gl.program_id(0) * block_queries
    last = gl.minimum(first + block_queries, tokens) - 1
    begin = gl.maximum(first - left, 0)
    end = gl.minimum(last + right + 1, tokens)
    tiles = gl.cdiv(end - begin, block_keys)

    queries = gl.allocate_shared_memory(dtype, [block_queries, head], in_memory)
    keys = gl.allocate_shared_memory(dtype, [2, block_keys, head], in_memory)
    values = gl.allocate_shared_memory(dtype, [2, block_keys, head], in_memory)
    m = first + gl.arange(0, block_queries, gl.SliceLayout(1, of_scores))
    top = gl.full([block_queries], float("-inf"), gl.float32, gl.SliceLayout(1, of_scores))
    norm = gl.full([block_queries], 0.0, gl.float32, gl.SliceLayout(1, of_scores))
    sums = gl.zeros([block_queries, head], gl.float32, of_sums)
    zero = gl.zeros([block_queries, block_keys], gl.float32, of_scores)

    _copy_rows(queries, query, first, tokens, stride_token, block_queries, head)
    _copy_rows(keys.index(0), key, begin, end, stride_token, block_keys, head)
    async_copy.commit_group()
    _copy_rows(keys.index(1), key, begin + block_keys, end, stride_token, block_keys, head)
    _copy_rows(values.index(0), value, begin, end, stride_token, block_keys, head)
    async_copy.commit_group()
    _wait_for_copies(1)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), zero, use_acc=False)
    weights, decay, top, norm = _weigh(
        scores, m, begin, end, left, right, top, norm, scale, True, block_keys, of_scores
    )
    for tile in range(1, tiles):
        # Keys of this tile and values of the tile before are there; the next ones go on their way into free places.
        _wait_for_copies(0)
        start = begin + tile * block_keys
        _copy_rows(keys.index((tile + 1) % 2), key, start + block_keys, end, stride_token, block_keys, head)
        _copy_rows(values.index(tile % 2), value, start, end, stride_token, block_keys, head)
        async_copy.commit_group()
        factors = gl.convert_layout(weights.to(dtype), of_weights)
        scores_going = warpgroup_mma(queries, keys.index(tile % 2).permute((1, 0)), zero, use_acc=False, is_async=True)
        sums_going = warpgroup_mma(factors, values.index((tile - 1) % 2), sums, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores_going])
        masked = (start < last - left) | (start + block_keys - 1 > first + right) | (start + block_keys > end)
        weights, decay, top, norm = _weigh(
            scores, m, start, end, left, right, top, norm, scale, masked, block_keys, of_scores
        )
        # ptxas would move the wait for the sums above the softmax, and nothing would overlap, but for something that it
        # may not reorder and that needs the weights' sums. These are never negative: the barrier is never executed.
        norm = gl.inline_asm_elementwise(
            "{ .reg .pred below; setp.lt.f32 below, $1, 0f00000000; @below membar.cta; mov.b32 $0, $1; }",
            "=r,r", [norm], gl.float32, False, 1,
        )  # fmt: skip
        sums, factors = warpgroup_mma_wait(0, deps=[sums_going, factors])
        sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, of_sums))[:, None]
    _wait_for_copies(0)
    factors = gl.convert_layout(weights.to(dtype), of_weights)
    sums = warpgroup_mma(factors, values.index((tiles - 1) % 2), sums)

    sums = sums / gl.convert_layout(norm, gl.SliceLayout(1, of_sums))[:, None]
    rows = first + gl.arange(0, block_queries, gl.SliceLayout(1, of_sums))
    columns = gl.arange(0, head, gl.SliceLayout(0, of_sums))
    out += gl.program_id(2).to(gl.int64) * stride_out_batch + gl.program_id(1).to(gl.int64) * stride_out_head
    addresses = out + rows[:, None] * stride_out_token + columns[None, :]
    gl.store(addresses, sums.to(dtype), mask=(rows < tokens)[:, None])


def prepare(query: Any, key: Any, value: Any, *, left: int, right: int) -> Callable[[], Any]:
    """A call on [batch, tokens, heads, head_dim] of float16 or bfloat16, on an sm_90.

    Query, key and value have the same strides. `left` and `right` count tokens on each side of a query.
    """
    import torch

    batch, tokens, heads, head_dim = query.shape
    block_queries, block_keys, warps = TILES[head_dim]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scale = head_dim**-0.5 * _LOG2_E
    arguments = query, key, value, out, *query.stride()[:3], *out.stride()[:3], tokens, left, right, scale
    grid = (-(-tokens // block_queries), heads, batch)

    def call() -> Any:
        attend[grid](*arguments, head=head_dim, block_queries=block_queries, block_keys=block_keys, num_warps=warps)
        return out

    return call
