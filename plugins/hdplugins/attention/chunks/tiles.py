"""Tiles that the kernels of chunk attention and of LSH attention are compiled with, by the tokens of a chunk.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = ["tiles_for_chunks"]

from hdplugins.kernels.attention_tiles import Tiles, listed_architecture, tiles_for

# Found like those of `attention_tiles`, for both operators alike. None has been timed.
_HALF = {16: (16, 16, 2, 3), 32: (32, 32, 2, 3), 64: (64, 64, 4, 3)}
"""Tokens of a chunk rounded up to a power of two, 64 for more -> tiles without `head`, for float16 and bfloat16."""

_FLOAT32 = {16: (16, 16, 4, 2), 32: (32, 32, 4, 2)}
"""Likewise for float32, 32 for more."""

_HALF_OTHERWISE = {
    **dict.fromkeys(
        [(80, 96, 64), (80, 128, 64), (86, 96, 64), (86, 128, 64), (120, 128, 64), (120, 80, 64)],
        Tiles(64, 32, 4, 3, 64),
    ),
    (120, 96, 64): Tiles(64, 32, 4, 2, 64),
}
"""(lowest architecture, head_dim, the tokens above) -> tiles instead of these, where registers would spill."""

_FLOAT32_OTHERWISE = {
    **{(architecture, 80, 32): Tiles(32, 32, 8, 2, 64) for architecture in (80, 86, 90, 100, 120)},
    **{(architecture, 96, 32): Tiles(32, 32, 8, 2, 64) for architecture in (80, 86, 120)},
    **dict.fromkeys([(80, 128, 32), (90, 96, 32), (100, 96, 32)], Tiles(32, 16, 4, 2, 64)),
    (80, 64, 16): Tiles(16, 16, 4, 2, 64),
}
"""Likewise for float32."""


def tiles_for_chunks(architecture: int, head_dim: int, dtype: str, chunk: int) -> Tiles:
    """The tiles for one kind of GPU: a chunk of queries and of keys, or a part of one.

    Args:
        architecture: compute capability as in sm_90: 90.
        head_dim: one of `attention_tiles.HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".
        chunk: tokens, 1 or more.

    Raises:
        ValueError: the kernels are not written for one of these.
    """
    head = tiles_for(architecture, head_dim, dtype).head
    tiles, otherwise = (_FLOAT32, _FLOAT32_OTHERWISE) if dtype == "float32" else (_HALF, _HALF_OTHERWISE)
    side = next((side for side in tiles if chunk <= side), max(tiles))
    return otherwise.get((listed_architecture(architecture), head_dim, side)) or Tiles(*tiles[side], head=head)
