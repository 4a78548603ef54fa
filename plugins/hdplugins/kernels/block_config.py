"""Block configs of the attention kernels, by architecture, head_dim and dtype.

This module needs neither Triton nor PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdplugins.kernels.cuda_launch import FIRST_SINGLE_ARCHITECTURE

HEAD_DIMS = (32, 64, 80, 96, 128)
"""Values of head_dim that the kernels support."""

TRITON_TYPE = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Dtype of query, key and value -> Triton's name of the dtype."""

ONLINE_SOFTMAX = "hdplugins.kernels.online_softmax"
"""Import path of the functions that all kernels call."""

LOG2_E = math.log2(math.e)
"""Factor of the scale, because the kernels use exp2."""

_MAX_GRID_YZ = 2**16 - 1
"""CUDA's limit of CTAs along y and z of a grid."""

_MAX_INT32 = 2**31 - 1

_STRIDE_MULTIPLE = 16
"""Elements: the kernels are compiled for strides that are multiples of it, so that loads are 16 bytes wide."""

_REGISTERS_OF_SM = 2**16
_REGISTER_GRANULARITY = 8
"""Registers of a thread are allocated in multiples of it (CUDA C++ Programming Guide, compute capabilities 8.0 to
12.0)."""


@dataclass(frozen=True)
class BlockConfig:
    """The block sizes, warps and pipeline stages of `attend`.

    Attributes:
        block_m: queries of one CTA, BLOCK_M of the kernel.
        block_n: keys of one step, BLOCK_N.
        num_warps: warps of one CTA.
        num_stages: depth of the software pipeline, in blocks of keys.
        block_d: columns of a head in one product, BLOCK_D; the remaining columns, REM_D, are a second product. Both are
            powers of two.
        ctas_per_sm: CTAs that should share the registers of a multiprocessor; 1 leaves the number to the assembler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    block_d: int
    ctas_per_sm: int = 1

    def constants(self, head_dim: int) -> dict[str, int]:
        """Return the constants that every `attend` is compiled with."""
        return {
            "BLOCK_D": self.block_d,
            "REM_D": head_dim - self.block_d,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
        }

    @property
    def max_registers(self) -> int | None:
        """Maximum registers of a thread with which `ctas_per_sm` CTAs fit; None for no limit."""
        if self.ctas_per_sm == 1:
            return None
        registers = _REGISTERS_OF_SM // (self.ctas_per_sm * 32 * self.num_warps)
        return registers // _REGISTER_GRANULARITY * _REGISTER_GRANULARITY


# Each config has the largest blocks that spill no register on the architecture, for float16 and bfloat16 alike, as
# `ptxas -v` of Triton 3.6, 3.7.1 and 3.9 reports (docs/sliding_window_attention.md); versions differ in what they
# spill (findings/triton_versions_move_spills.sh). The configs of sliding windows, and some of other operators, were
# timed on an H100 (docs/gpu.md), where smaller blocks are faster: tune others with `benchmarks.gpu kernels --tune`. A
# head of 128 is split in two if its fragments would not fit into registers, and so is every float32 head above 32:
# float32 products are multiply-adds, whose operands Triton keeps in registers over the whole head.
_HALF_LARGE = {
    32: BlockConfig(128, 64, 8, 3, 32),
    64: BlockConfig(128, 64, 8, 3, 64),
    80: BlockConfig(128, 64, 8, 3, 64),
    96: BlockConfig(128, 64, 8, 3, 64),
    128: BlockConfig(128, 64, 8, 3, 128),
}
_HALF_SMALL = _HALF_LARGE | {80: BlockConfig(128, 32, 8, 3, 64), 96: BlockConfig(128, 32, 8, 2, 64)}
_HALF = {
    80: _HALF_LARGE | {96: BlockConfig(128, 32, 8, 3, 64), 128: BlockConfig(128, 32, 8, 3, 64)},
    86: _HALF_SMALL | {128: BlockConfig(128, 32, 8, 3, 64)},
    90: _HALF_LARGE,
    100: _HALF_LARGE,
    120: _HALF_SMALL | {96: BlockConfig(64, 64, 8, 3, 64), 128: BlockConfig(128, 32, 8, 2, 64)},
}
"""Lowest architecture -> head_dim -> block config, for float16 and bfloat16."""

_FLOAT32_CONFIGS = {
    32: BlockConfig(64, 32, 8, 2, 32),
    64: BlockConfig(64, 32, 8, 2, 32),
    80: BlockConfig(32, 32, 8, 2, 64),
    96: BlockConfig(32, 32, 8, 2, 64),
    128: BlockConfig(32, 32, 8, 2, 64),
}
_FLOAT32 = {
    80: _FLOAT32_CONFIGS | {96: BlockConfig(32, 32, 4, 2, 64)},
    86: _FLOAT32_CONFIGS,
    90: _FLOAT32_CONFIGS,
    100: _FLOAT32_CONFIGS | {80: BlockConfig(32, 16, 8, 2, 64)},
    120: _FLOAT32_CONFIGS,
}
"""Lowest architecture -> head_dim -> block config, for float32."""


def block_config_for(architecture: int, head_dim: int, dtype: str) -> BlockConfig:
    """Return the block config for GPUs of a compute capability (90 for sm_90).

    Raises:
        ValueError: no kernel supports the architecture, the head_dim or the dtype.
    """
    check_head_dim(head_dim)
    if dtype not in TRITON_TYPE:
        raise ValueError(f"The kernels do not support {dtype}; they support {', '.join(TRITON_TYPE)}.")
    return (_FLOAT32 if dtype == "float32" else _HALF)[listed_architecture(architecture)][head_dim]


def cubin_architecture(architecture: int) -> int:
    """Return the architecture to compile for, so that no kernel is compiled twice.

    sm_89 runs kernels of sm_86 and has equal block configs. From sm_90 on Triton compiles for a single architecture,
    with all its instructions, so that sm_120 and sm_121 need separate kernels.
    """
    listed = listed_architecture(architecture)
    return architecture if architecture >= FIRST_SINGLE_ARCHITECTURE else listed


def check_sizes(
    *, batch: int, heads: int, tokens: int, head_dim: int, scale: float, head_dims: Sequence[int] = HEAD_DIMS
) -> None:
    """Raise a ValueError if the kernels cannot be launched for these sizes."""
    check_head_dim(head_dim, head_dims)
    for name, number in (("batch", batch), ("heads", heads), ("tokens", tokens)):
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be 1 or more.")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; the kernels need a finite one greater than 0.")
    if max(batch, heads) > _MAX_GRID_YZ or heads * tokens * head_dim > _MAX_INT32:
        raise ValueError(
            f"[{batch}, {tokens}, {heads}, {head_dim}] is too large for one launch: batch and heads are at most "
            f"{_MAX_GRID_YZ}, and a sequence has at most {_MAX_INT32} values."
        )


def check_strides(name: str, strides: Sequence[int], *, tokens: int) -> None:
    """Raise a ValueError if the kernels do not support these (batch, head, token) strides."""
    for axis, stride in zip(("batch", "heads", "tokens"), strides, strict=True):
        if stride < 0 or stride % _STRIDE_MULTIPLE:
            raise ValueError(
                f"The stride of {name} along {axis} is {stride} elements; the kernels need a multiple of "
                f"{_STRIDE_MULTIPLE}, 0 or more."
            )
    # Kernels multiply tokens by their stride as int32, and sequences and heads as int64.
    if max(*strides, tokens * strides[-1]) > _MAX_INT32:
        raise ValueError(
            f"The strides of {name}, {list(strides)} elements along batch, heads and tokens, are too large for one "
            f"launch: they are at most {_MAX_INT32}, and so is the stride of tokens times {tokens} tokens."
        )


def listed_architecture(architecture: int) -> int:
    """Return the newest architecture in the tables that is not newer than the GPU; a ValueError if all are newer."""
    listed = [known for known in _HALF if known <= architecture]
    if not listed:
        raise ValueError(f"The kernels need a GPU of compute capability 8.0 or newer, not sm_{architecture}.")
    return max(listed)


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient of two integers, rounded up."""
    return -(-number // divisor)


def check_head_dim(head_dim: int, head_dims: Sequence[int] = HEAD_DIMS) -> None:
    """Raise a ValueError if a kernel does not support this head_dim."""
    if head_dim not in head_dims:
        raise ValueError(
            f"The kernels do not support head_dim {head_dim}; they support {', '.join(map(str, head_dims))}."
        )
