"""Tiles that the kernel of sliding-window attention is compiled with: those of `attention_tiles`, and wider heads.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = ["WINDOW_HEAD_DIMS", "tiles_for_windows"]

from hdplugins.kernels.attention_tiles import HEAD_DIMS, Tiles, check_head_dim, tiles_for

_WIDE = 256
"""Gemma's size of a head."""

WINDOW_HEAD_DIMS = (*HEAD_DIMS, _WIDE)
"""Sizes of a head that the kernel is written for."""

# Found like those of `attention_tiles`. None has been timed.
_WIDE_HALF = Tiles(64, 32, 8, 2, 256)
_WIDE_FLOAT32 = Tiles(32, 16, 8, 2, 128)


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
