"""Tiles that the kernel of relative attention is compiled with: by architecture, head_dim and dtype.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = ["columns_at_a_time", "tiles_for_distances"]

from hdplugins.kernels.attention_tiles import Tiles, listed_architecture, tiles_for

# Found like those of `attention_tiles`, with and without segments. A tile has no more queries than keys: see
# `kernel`. None has been timed.
_HALF = {
    32: Tiles(64, 64, 8, 2, 32),
    64: Tiles(32, 64, 8, 2, 64),
    80: Tiles(32, 32, 4, 2, 64),
    96: Tiles(32, 32, 4, 2, 64),
    128: Tiles(32, 64, 8, 2, 128),
}
"""head_dim -> tiles, for float16 and bfloat16."""

_HALF_OTHERWISE = {
    # Not 64 queries on sm_90: the assembler makes the products of its tensor cores wait for each other (C7511).
    (90, 32): Tiles(32, 32, 4, 2, 32),
    (86, 96): Tiles(32, 32, 8, 2, 64),
    (100, 64): Tiles(64, 64, 8, 2, 64),
    (100, 128): Tiles(64, 64, 8, 2, 128),
}
"""(lowest architecture, head_dim) -> tiles instead of these; on sm_100 large enough for the newer tensor cores."""

_FLOAT32 = {
    32: Tiles(32, 64, 8, 2, 32),
    64: Tiles(32, 32, 8, 2, 64),
    80: Tiles(16, 32, 8, 2, 64),
    96: Tiles(16, 16, 8, 2, 64),
    128: Tiles(16, 16, 8, 2, 128),
}
"""Likewise for float32."""

_MOST_COLUMNS = {"float16": 64, "bfloat16": 64, "float32": 16}
"""Dtype -> columns of a head that one product with the positions takes, at most: more would not fit the registers."""


def tiles_for_distances(architecture: int, head_dim: int, dtype: str) -> Tiles:
    """The tiles for one kind of GPU.

    Args:
        architecture: compute capability as in sm_90: 90.
        head_dim: one of `attention_tiles.HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".

    Raises:
        ValueError: the kernel is not written for one of these.
    """
    tiles_for(architecture, head_dim, dtype)  # refuses what no attention kernel is for
    if dtype == "float32":
        return _FLOAT32[head_dim]
    return _HALF_OTHERWISE.get((listed_architecture(architecture), head_dim), _HALF[head_dim])


def columns_at_a_time(head_dim: int, dtype: str) -> int:
    """Columns of a head that one product with the positions takes: a power of two that divides the head."""
    return min(head_dim & -head_dim, _MOST_COLUMNS[dtype])
