"""Tiles that the kernel of sliding-window attention is compiled with: those of `attention_tiles`, and wider heads.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = ["WINDOW_HEAD_DIMS", "candidates_for_windows", "tiles_for_windows"]

from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles, check_head_dim, listed_architecture, tiles_for

_WIDE = 256
"""Gemma's size of a head."""

WINDOW_HEAD_DIMS = (*HEAD_DIMS, _WIDE)
"""Sizes of a head that the kernel is written for."""

# Found like those of `attention_tiles`. None has been timed.
_WIDE_HALF = Tiles(64, 32, 8, 2, 256)
_WIDE_FLOAT32 = Tiles(32, 16, 8, 2, 128)

_CANDIDATES = {(90, 64): Tiles(64, 64, 4, 3, 64), (90, 128): Tiles(64, 64, 4, 2, 128)}
"""(lowest architecture, head_dim) -> tiles that may be faster in half precision: two blocks share a processor instead
of one, and fewer keys at the window's edges are computed in vain."""


def tiles_for_windows(architecture: int, head_dim: int, dtype: str) -> Tiles:
    """The tiles for one kind of GPU.

    Args:
        architecture: compute capability as in sm_90: 90.
        head_dim: one of `WINDOW_HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".

    Raises:
        ValueError: the kernel is not written for that head_dim, dtype or GPU.
    """
    check_head_dim(head_dim, WINDOW_HEAD_DIMS)
    # Those of another size refuse what no attention kernel is for.
    tiles = tiles_for(architecture, min(head_dim, HEAD_DIMS[-1]), dtype)
    if head_dim != _WIDE:
        return tiles
    return _WIDE_HALF if dtype != "float32" else _WIDE_FLOAT32


def candidates_for_windows(architecture: int, head_dim: int, dtype: str) -> tuple[Tiles, ...]:
    """The tiles of `tiles_for_windows`, and those that are to be timed beside them on a GPU.

    Raises:
        ValueError: as `tiles_for_windows`.
    """
    table = tiles_for_windows(architecture, head_dim, dtype)
    other = None if dtype == "float32" else _CANDIDATES.get((listed_architecture(architecture), head_dim))
    return (table,) if other is None else (table, other)
