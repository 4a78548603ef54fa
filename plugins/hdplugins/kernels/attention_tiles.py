"""Tiles that the attention kernels are compiled with: by architecture, head_dim and dtype.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdplugins.kernels.cuda_launch import FIRST_ARCHITECTURE_OF_ITS_OWN

HEAD_DIMS = (32, 64, 80, 96, 128)
"""Sizes of a head that the kernels are written for."""

TRITON_TYPE = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Dtype of query, key and value -> Triton's name of it."""

INNER_LOOP = "hdplugins.kernels.running_softmax"
"""Module of the functions that the kernels share."""

LOG2_E = math.log2(math.e)
"""Factor of the scale, so that exp2 serves."""

_MOST_PROGRAMS = 2**16 - 1
"""Most programs of a grid along y and z: CUDA's limit."""

_MOST_INT32 = 2**31 - 1

_STRIDE_MULTIPLE = 16
"""Elements: kernels are compiled for such strides, by which loads are 16 bytes wide."""

_REGISTERS_OF_MULTIPROCESSOR = 2**16
_REGISTERS_TOGETHER = 8
"""A thread gets its registers in portions of so many (CUDA C++ Programming Guide, compute capabilities 8.0 to 12.0)."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of `attend`.

    Attributes:
        block_queries: queries of one program.
        block_keys: keys of one step.
        num_stages: blocks of keys in flight.
        head: columns of a head that one product takes; the rest of head_dim is a second product. Both are powers of
            two.
        programs: that a multiprocessor should hold at a time, sharing its registers, where that is faster; 1 leaves the
            number to the assembler.
    """

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int
    head: int
    programs: int = 1

    def constants(self, head_dim: int) -> dict[str, int]:
        """The constants that every `attend` is compiled with."""
        return {
            "head": self.head,
            "tail": head_dim - self.head,
            "block_queries": self.block_queries,
            "block_keys": self.block_keys,
        }

    @property
    def most_registers(self) -> int | None:
        """The most registers that a thread may have, so that all programs fit; None for any number of registers."""
        if self.programs == 1:
            return None
        registers = _REGISTERS_OF_MULTIPROCESSOR // (self.programs * 32 * self.num_warps)
        return registers // _REGISTERS_TOGETHER * _REGISTERS_TOGETHER


# The tiles are the largest of those tried that spill no register on the architecture, float16 and bfloat16 alike, as
# `ptxas -v` of Triton 3.6, 3.7.1 and 3.9 reports (docs/sliding_window_attention.md). Tiles of
# windows, and some of other operators, were timed on an H100 (docs/gpu.md), and are faster where they are smaller: tune
# others with `benchmarks.gpu kernels --tune`.
# A head of 128 is split in two where its fragments would not fit the registers otherwise, and so is every float32 one
# above 32: float32 products are multiply-adds, whose operands Triton keeps in registers over the whole head.
_HALF_WIDE = {
    32: Tiles(128, 64, 8, 3, 32),
    64: Tiles(128, 64, 8, 3, 64),
    80: Tiles(128, 64, 8, 3, 64),
    96: Tiles(128, 64, 8, 3, 64),
    128: Tiles(128, 64, 8, 3, 128),
}
_HALF_NARROW = _HALF_WIDE | {80: Tiles(128, 32, 8, 3, 64), 96: Tiles(128, 32, 8, 2, 64)}
_HALF = {
    80: _HALF_WIDE | {96: Tiles(128, 32, 8, 3, 64), 128: Tiles(128, 32, 8, 3, 64)},
    86: _HALF_NARROW | {128: Tiles(128, 32, 8, 3, 64)},
    90: _HALF_WIDE,
    100: _HALF_WIDE,
    120: _HALF_NARROW | {96: Tiles(64, 64, 8, 3, 64), 128: Tiles(128, 32, 8, 2, 64)},
}
"""Lowest architecture -> head_dim -> tiles, for float16 and bfloat16."""

_FLOAT32_TILES = {
    32: Tiles(64, 32, 8, 2, 32),
    64: Tiles(64, 32, 8, 2, 32),
    80: Tiles(32, 32, 8, 2, 64),
    96: Tiles(32, 32, 8, 2, 64),
    128: Tiles(32, 32, 8, 2, 64),
}
_FLOAT32 = {
    80: _FLOAT32_TILES | {96: Tiles(32, 32, 4, 2, 64)},
    86: _FLOAT32_TILES,
    90: _FLOAT32_TILES,
    100: _FLOAT32_TILES | {80: Tiles(32, 16, 8, 2, 64)},
    120: _FLOAT32_TILES,
}
"""Likewise for float32."""


def tiles_for(architecture: int, head_dim: int, dtype: str) -> Tiles:
    """The tiles for GPUs of a compute capability, sm_90 is 90; a ValueError says for what no kernel is written."""
    check_head_dim(head_dim)
    if dtype not in TRITON_TYPE:
        raise ValueError(f"The kernels do not support {dtype}; they support {', '.join(TRITON_TYPE)}.")
    return (_FLOAT32 if dtype == "float32" else _HALF)[listed_architecture(architecture)][head_dim]


def cubin_architecture(architecture: int) -> int:
    """The architecture to compile for: a GPU gets its tiles, and no kernel is compiled twice.

    sm_89 runs what was compiled for sm_86 and has the same tiles. From sm_90 on Triton compiles for one architecture
    alone, with all its instructions, so that even sm_121 needs kernels of its own beside sm_120's.
    """
    listed = listed_architecture(architecture)
    return architecture if architecture >= FIRST_ARCHITECTURE_OF_ITS_OWN else listed


def check_sizes(
    *, batch: int, heads: int, tokens: int, head_dim: int, scale: float, head_dims: Sequence[int] = HEAD_DIMS
) -> None:
    """Refuse, by a ValueError, sizes that the kernels cannot be launched for."""
    check_head_dim(head_dim, head_dims)
    for name, number in (("batch", batch), ("heads", heads), ("tokens", tokens)):
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be 1 or more.")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; the kernels need a finite one greater than 0.")
    if max(batch, heads) > _MOST_PROGRAMS or heads * tokens * head_dim > _MOST_INT32:
        raise ValueError(
            f"[{batch}, {tokens}, {heads}, {head_dim}] is too large for one launch: batch and heads are at most "
            f"{_MOST_PROGRAMS}, and a text has at most {_MOST_INT32} values."
        )


def check_strides(name: str, strides: Sequence[int], *, tokens: int) -> None:
    """Refuse, by a ValueError, (batch, head, token) strides that the kernels do not support."""
    for axis, stride in zip(("batch", "heads", "tokens"), strides, strict=True):
        if stride < 0 or stride % _STRIDE_MULTIPLE:
            raise ValueError(
                f"The stride of {name} along {axis} is {stride} elements; the kernels need a multiple of "
                f"{_STRIDE_MULTIPLE}, 0 or more."
            )
    # Kernels multiply tokens by their stride as int32, and texts and heads as int64.
    if max(*strides, tokens * strides[-1]) > _MOST_INT32:
        raise ValueError(
            f"The strides of {name}, {list(strides)} elements along batch, heads and tokens, are too large for one "
            f"launch: they are at most {_MOST_INT32}, as is that of tokens times {tokens} tokens."
        )


def listed_architecture(architecture: int) -> int:
    """The architecture whose tiles a GPU gets: the newest in the tables that is not newer; a ValueError where
    all are.
    """
    listed = [known for known in _HALF if known <= architecture]
    if not listed:
        raise ValueError(f"The kernels need a GPU of compute capability 8.0 or newer, not sm_{architecture}.")
    return max(listed)


def ceil_div(number: int, divisor: int) -> int:
    """The quotient of whole numbers, rounded up."""
    return -(-number // divisor)


def check_head_dim(head_dim: int, head_dims: Sequence[int] = HEAD_DIMS) -> None:
    """Refuse, by a ValueError, a size of a head that a kernel is not written for."""
    if head_dim not in head_dims:
        raise ValueError(
            f"The kernels do not support head_dim {head_dim}; they support {', '.join(map(str, head_dims))}."
        )
