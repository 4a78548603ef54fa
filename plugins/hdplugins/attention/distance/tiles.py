"""Tiles that the kernel of attention by clipped distance is compiled with: by architecture, head_dim and dtype.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = ["tiles_by_distance"]

from hdplugins.kernels.attention_tiles import Tiles, listed_architecture, tiles_for

# Found like those of `attention_tiles`. None has been timed.
_HALF = {
    32: Tiles(128, 64, 8, 3, 32),
    64: Tiles(128, 64, 8, 3, 64),
    80: Tiles(128, 64, 8, 3, 64),
    96: Tiles(128, 64, 8, 3, 64),
    128: Tiles(64, 64, 8, 2, 64),
}
"""head_dim -> tiles without values by distance, for float16 and bfloat16."""

_HALF_OTHERWISE = {
    **dict.fromkeys([(90, 128), (100, 128)], Tiles(128, 64, 8, 3, 64)),
    **dict.fromkeys([(80, 96), (86, 96)], Tiles(64, 32, 8, 2, 64)),
    **dict.fromkeys([(86, 80), (120, 80), (120, 128)], Tiles(32, 64, 8, 2, 64)),
    (120, 96): Tiles(32, 32, 4, 2, 64),
}
"""(lowest architecture, head_dim) -> tiles instead of these."""

_HALF_WITH_VALUES = {
    32: Tiles(128, 64, 8, 3, 32),
    64: Tiles(128, 64, 8, 3, 64),
    80: Tiles(32, 64, 8, 2, 64),
    96: Tiles(16, 32, 4, 2, 64),
    128: Tiles(32, 64, 8, 2, 64),
}
"""Likewise with values."""

_HALF_WITH_VALUES_OTHERWISE = {
    **dict.fromkeys([(80, 32), (90, 32)], Tiles(128, 32, 8, 3, 32)),
    **dict.fromkeys([(90, 64), (90, 80)], Tiles(128, 32, 8, 3, 64)),
    (100, 64): Tiles(128, 64, 8, 2, 64),
    (100, 96): Tiles(128, 64, 8, 3, 64),
    **dict.fromkeys([(120, 64), (100, 80), (90, 128), (100, 128)], Tiles(64, 64, 8, 2, 64)),
    (120, 32): Tiles(64, 64, 8, 2, 32),
    (120, 80): Tiles(32, 16, 4, 2, 64),
    **dict.fromkeys([(80, 64), (86, 64)], Tiles(32, 64, 8, 2, 64)),
    (80, 80): Tiles(32, 32, 4, 2, 64),
}

_FLOAT32 = {
    32: Tiles(32, 32, 8, 2, 32),
    64: Tiles(32, 32, 8, 2, 64),
    80: Tiles(32, 32, 8, 2, 64),
    96: Tiles(32, 32, 8, 2, 64),
    128: Tiles(32, 32, 8, 2, 64),
}
"""Likewise for float32, without values."""

_FLOAT32_OTHERWISE = {
    (100, 32): Tiles(16, 32, 8, 2, 32),
    (100, 128): Tiles(16, 32, 8, 2, 64),
    **dict.fromkeys([(86, 96), (86, 128)], Tiles(32, 16, 8, 2, 64)),
}

_FLOAT32_WITH_VALUES = {
    32: Tiles(32, 32, 8, 2, 32),
    64: Tiles(32, 32, 8, 2, 64),
    80: Tiles(16, 32, 8, 2, 64),
    96: Tiles(16, 32, 8, 2, 64),
    128: Tiles(16, 32, 8, 2, 64),
}
"""Likewise with values."""

_FLOAT32_WITH_VALUES_OTHERWISE = {
    (86, 32): Tiles(16, 16, 8, 2, 32),
    (90, 32): Tiles(16, 32, 8, 2, 32),
    (100, 64): Tiles(16, 32, 8, 2, 64),
    (80, 96): Tiles(32, 16, 8, 2, 64),
}

_TABLES = {
    (False, False): (_HALF, _HALF_OTHERWISE),
    (False, True): (_HALF_WITH_VALUES, _HALF_WITH_VALUES_OTHERWISE),
    (True, False): (_FLOAT32, _FLOAT32_OTHERWISE),
    (True, True): (_FLOAT32_WITH_VALUES, _FLOAT32_WITH_VALUES_OTHERWISE),
}
"""(float32, with values) -> tables."""


def tiles_by_distance(architecture: int, head_dim: int, dtype: str, *, values: bool) -> Tiles:
    """The tiles for one kind of GPU.

    Args:
        architecture: compute capability as in sm_90: 90.
        head_dim: one of `attention_tiles.HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".
        values: whether there are values by distance.

    Raises:
        ValueError: the kernel is not written for one of these.
    """
    tiles_for(architecture, head_dim, dtype)  # refuses what no attention kernel is for
    tiles, otherwise = _TABLES[dtype == "float32", values]
    return otherwise.get((listed_architecture(architecture), head_dim), tiles[head_dim])
