"""Tiles that the kernels of block-sparse attention are compiled with: those of `attention_tiles`, cut to the block.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = ["check_block_size", "power_of_two", "tiles_for_blocks"]

import dataclasses

from hdplugins.kernels.attention_tiles import Tiles, listed_architecture, tiles_for

_LARGEST_BLOCK = 1024
"""Tokens; `count_tokens` holds a block in registers."""

_SMALLEST_TILE = 16
"""Rows of a product on tensor cores."""

_LARGEST_TILE = 128

# Found like those of `attention_tiles`, with blocks of 16, 32, 64, 84 and 128 tokens.
_HALF_OTHERWISE = {
    (80, 80, 32): Tiles(32, 32, 2, 2, 64),
    (86, 80, 32): Tiles(32, 32, 2, 2, 64),
    **dict.fromkeys([(80, 64, 64), (86, 64, 64), (86, 128, 64)], Tiles(64, 64, 8, 3, 64)),
    (90, 96, 32): Tiles(32, 32, 2, 2, 64),
    (100, 96, 32): Tiles(32, 32, 2, 2, 64),
    (100, 96, 128): Tiles(128, 32, 8, 3, 64),
    (120, 32, 64): Tiles(64, 64, 4, 2, 32),
    (120, 64, 64): Tiles(64, 32, 4, 3, 64),
    (120, 96, 32): Tiles(32, 32, 4, 2, 64),
    (120, 96, 64): Tiles(64, 64, 8, 2, 64),
    (120, 96, 128): Tiles(64, 32, 8, 3, 64),
}
"""(lowest architecture, head_dim, tokens of a block rounded up to a power of two) -> tiles, for float16, bfloat16."""

_FLOAT32_OTHERWISE = {
    **dict.fromkeys([(80, 32, 128), (86, 32, 128), (100, 64, 128)], Tiles(64, 16, 8, 2, 32)),
    **dict.fromkeys([(80, 80, 16), (120, 80, 16)], Tiles(16, 16, 8, 2, 64)),
    **dict.fromkeys([
        (80, 80, 32), (86, 80, 32), (86, 80, 64), (86, 80, 128), (86, 96, 64), (86, 96, 128), (90, 80, 64),
        (90, 80, 128), (90, 96, 64), (90, 96, 128), (90, 128, 128), (100, 96, 64), (120, 80, 128),
    ], Tiles(32, 32, 4, 2, 64)),
    (86, 32, 16): Tiles(16, 16, 1, 2, 32),
    **dict.fromkeys([(100, 64, 32), (120, 64, 32)], Tiles(32, 32, 8, 2, 32)),
    (100, 80, 32): Tiles(32, 16, 4, 2, 64),
    **dict.fromkeys([(90, 96, 32), (100, 96, 128)], Tiles(32, 16, 8, 2, 64)),
}  # fmt: skip
"""Likewise for float32."""


def tiles_for_blocks(architecture: int, head_dim: int, dtype: str, block_size: int) -> Tiles:
    """The tiles for one kind of GPU: those of `attention_tiles`, cut to the block, but where registers spill then.

    Args:
        architecture: compute capability as in sm_90: 90.
        head_dim: one of `attention_tiles.HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".
        block_size: tokens of a block.

    Raises:
        ValueError: the kernels are not written for one of these.
    """
    check_block_size(block_size)
    tiles = tiles_for(architecture, head_dim, dtype)
    whole_block = min(_LARGEST_TILE, max(_SMALLEST_TILE, power_of_two(block_size)))
    otherwise = _FLOAT32_OTHERWISE if dtype == "float32" else _HALF_OTHERWISE
    if (listed_architecture(architecture), head_dim, whole_block) in otherwise:
        return otherwise[listed_architecture(architecture), head_dim, whole_block]
    queries = min(tiles.block_queries, whole_block)
    return dataclasses.replace(
        tiles,
        block_queries=queries,
        block_keys=min(tiles.block_keys, whole_block),
        # As many queries per warp as in the table: they decide what must fit in the registers.
        num_warps=max(1, tiles.num_warps * queries // tiles.block_queries),
    )


def check_block_size(block_size: int) -> None:
    """Refuse a block that the kernels are not written for.

    Raises:
        ValueError: it says what fits.
    """
    if not 1 <= block_size <= _LARGEST_BLOCK:
        raise ValueError(f"block_size is {block_size}; the kernels support blocks of 1 to {_LARGEST_BLOCK} tokens.")


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least this number."""
    return 1 << (number - 1).bit_length()
