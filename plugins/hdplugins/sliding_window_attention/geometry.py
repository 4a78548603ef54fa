"""How the kernels of sliding-window attention are compiled and launched: tiles, workspace, grids, scalar arguments.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = [
    "HEAD_DIMS",
    "PLAN_CHUNK",
    "SUMMARY_INTS",
    "TRITON_TYPE",
    "Geometry",
    "cubin_architecture",
    "geometry_for",
    "kernel_sources",
    "launches",
    "workspace_bytes",
]

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hdplugins.aot import KernelSource
from hdplugins.cuda_launch import FIRST_ARCHITECTURE_OF_ITS_OWN, Launch

HEAD_DIMS = (32, 64, 80, 96, 128)
"""Sizes of a head that the kernels are written for."""

SUMMARY_INTS = 4
"""int32 values at the start of a text's plan: globals listed, first local token, one past the last, unused."""

PLAN_CHUNK = 256
"""Tokens that one program of `plan_keys` describes. To be tuned on a GPU."""

_MOST_PROGRAMS = 2**16 - 1
"""Of a grid along y and z: CUDA's limit."""

_MOST_INT32 = 2**31 - 1
_LOG2_E = math.log2(math.e)
_MODULE = "hdplugins.sliding_window_attention.triton_kernel"

TRITON_TYPE = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""Dtype of query, key and value -> Triton's name of it."""


@dataclass(frozen=True)
class Geometry:
    """Tiles of `attend`.

    Attributes:
        block_queries: queries of one program.
        block_keys: keys of one step of the window.
        block_globals: keys of one step over the global columns; small, for a text has few of them.
        num_warps: warps of one program.
        num_stages: blocks of keys in flight.
        head: columns of a head that one product takes; the rest of head_dim is a second product. Both are powers of
            two.
    """

    block_queries: int
    block_keys: int
    block_globals: int
    num_warps: int
    num_stages: int
    head: int


# Where the numbers come from: of the tiles tried, the largest that `ptxas -v` of Triton 3.9 reports no register spills
# of on that architecture, float16 and bfloat16 alike. None has been timed: tune with benchmarks/gpu_kernels.py.
# A head of 128 is split in two where its fragments would not fit the registers otherwise, and so is every float32 one
# above 32: float32 products are multiply-adds, whose operands Triton keeps in registers over the whole head.
_HALF_WIDE = {
    32: Geometry(128, 64, 32, 8, 3, 32),
    64: Geometry(128, 64, 32, 8, 3, 64),
    80: Geometry(128, 64, 32, 8, 3, 64),
    96: Geometry(128, 64, 32, 8, 3, 64),
    128: Geometry(128, 64, 32, 8, 3, 128),
}
_HALF_NARROW = _HALF_WIDE | {80: Geometry(128, 32, 32, 8, 3, 64), 96: Geometry(128, 32, 32, 8, 2, 64)}
_HALF = {
    80: _HALF_WIDE | {96: Geometry(128, 32, 32, 8, 3, 64), 128: Geometry(128, 32, 32, 8, 3, 64)},
    86: _HALF_NARROW | {128: Geometry(128, 64, 32, 8, 3, 64)},
    90: _HALF_WIDE,
    100: _HALF_WIDE,
    120: _HALF_NARROW | {96: Geometry(64, 64, 32, 8, 3, 64), 128: Geometry(128, 64, 32, 8, 3, 64)},
}
"""Lowest architecture -> head_dim -> tiles, for float16 and bfloat16."""

_FLOAT32_TILES = {
    32: Geometry(64, 32, 16, 8, 2, 32),
    64: Geometry(64, 32, 16, 8, 2, 32),
    80: Geometry(32, 32, 16, 8, 2, 64),
    96: Geometry(32, 32, 16, 8, 2, 64),
    128: Geometry(32, 32, 16, 8, 2, 64),
}
_FLOAT32 = {
    80: _FLOAT32_TILES | {96: Geometry(32, 32, 16, 4, 2, 64)},
    86: _FLOAT32_TILES,
    90: _FLOAT32_TILES,
    100: _FLOAT32_TILES | {80: Geometry(32, 16, 16, 8, 2, 64)},
    120: _FLOAT32_TILES,
}
"""Likewise for float32."""


def geometry_for(architecture: int, head_dim: int, dtype: str) -> Geometry:
    """The tiles for one kind of GPU.

    Args:
        architecture: compute capability as in sm_90: 90.
        head_dim: one of `HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".

    Raises:
        ValueError: the kernel is not written for that head_dim or dtype.
    """
    _check_head_dim(head_dim)
    if dtype not in TRITON_TYPE:
        raise ValueError(f"The kernel has no {dtype}; it has {', '.join(TRITON_TYPE)}.")
    return (_FLOAT32 if dtype == "float32" else _HALF)[_listed_architecture(architecture)][head_dim]


def cubin_architecture(architecture: int) -> int:
    """What to compile for, so that a GPU is served with its tiles and no kernel is compiled twice.

    sm_89 runs what was compiled for sm_86 and has the same tiles. From sm_90 on Triton compiles for one architecture
    alone, with all its instructions, so that even sm_121 needs kernels of its own beside sm_120's.

    Args:
        architecture: compute capability as in sm_90: 90.

    Raises:
        ValueError: the kernel is not written for that GPU.
    """
    listed = _listed_architecture(architecture)
    return architecture if architecture >= FIRST_ARCHITECTURE_OF_ITS_OWN else listed


def kernel_sources(
    *, head_dim: int, dtype: str, architectures: Sequence[int], geometry: Geometry | None = None
) -> tuple[KernelSource, ...]:
    """What `hdplugins.aot.compile_kernels` compiles: two kernels for each architecture.

    Args:
        head_dim: one of `HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".
        architectures: compute capabilities as in sm_90: 90.
        geometry: tiles to use instead of the table's.

    Raises:
        ValueError: the kernel is not written for one of them.
    """
    sources: list[KernelSource] = []
    for architecture in architectures:
        tiles = geometry or geometry_for(architecture, head_dim, dtype)
        sources += [_plan_source(architecture), _attend_source(architecture, head_dim, dtype, tiles)]
    return tuple(sources)


def workspace_bytes(batch: int, tokens: int, global_bound: int) -> int:
    """Size of the plan, [batch, SUMMARY_INTS + 2 * tokens + global_bound] int32; its contents need not be set."""
    return 4 * batch * (SUMMARY_INTS + 2 * tokens + global_bound)


def launches(
    *,
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
    left: int,
    right: int,
    dilation: Sequence[int] = (1,),
    scale: float,
    global_bound: int,
    block_queries: int,
    plan_chunk: int = PLAN_CHUNK,
) -> tuple[Launch, ...]:
    """The kernels to start for one call of the operator on contiguous tensors, in order.

    `plan_keys` takes the pointers token_kind and plan; `attend` takes query, key, value, token_kind, plan and out.
    Consecutive heads of one dilation are one launch of `attend`.

    Args:
        batch: texts, at least 1.
        heads: heads, at least 1.
        tokens: tokens of each text with its padding, at least 1.
        head_dim: one of `HEAD_DIMS`.
        left: tokens before a query that it sees, in units of the dilation; more than there are is no mistake.
        right: tokens after it, likewise.
        dilation: one a head, or one for all heads.
        scale: factor of the scores, greater than 0.
        global_bound: the most global tokens that a text may have.
        block_queries: of the compiled `attend`, its constant "block_queries".
        plan_chunk: of the compiled `plan_keys`, its constant "chunk".

    Raises:
        ValueError: a size or an attribute is out of its range.
    """
    _check_head_dim(head_dim)
    for name, number, least in (
        ("batch", batch, 1), ("heads", heads, 1), ("tokens", tokens, 1),
        ("left", left, 0), ("right", right, 0), ("global_bound", global_bound, 0),
    ):  # fmt: skip
        if number < least:
            raise ValueError(f"{name} is {number}; it is {least} or more.")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale}; the kernel needs a finite one greater than 0.")
    if len(dilation) not in (1, heads) or min(dilation) < 1:
        raise ValueError(f"dilation is {list(dilation)}; it has 1 value or {heads}, one a head, each 1 or more.")
    if max(batch, heads) > _MOST_PROGRAMS or heads * tokens * head_dim > _MOST_INT32:
        raise ValueError(
            f"[{batch}, {heads}, {tokens}, {head_dim}] is too large for one launch: batch and heads are at most "
            f"{_MOST_PROGRAMS}, and a text has at most {_MOST_INT32} values."
        )
    # Steps as long as the text and longer ones are alike: a query sees no local token but itself.
    of_head = [min(step, tokens) for step in (dilation if len(dilation) == heads else list(dilation) * heads)]
    plan = Launch(
        kernel="plan_keys",
        grid=(_ceil_div(tokens, plan_chunk), batch, 1),
        scalars={"tokens": tokens, "global_bound": global_bound},
    )
    attends = (
        Launch(
            kernel="attend",
            # Each of the `step` residue classes has blocks of its own.
            grid=(step * _ceil_div(_ceil_div(tokens, step), block_queries), count, batch),
            scalars={
                "stride_batch": heads * tokens * head_dim,
                "stride_head": tokens * head_dim,
                "stride_token": head_dim,
                "tokens": tokens,
                # Wider than the text is as wide as the text, and cannot overflow.
                "left": min(left, tokens),
                "right": min(right, tokens),
                "first_head": first_head,
                "dilation": step,
                "global_bound": global_bound,
                "scale": scale * _LOG2_E,
            },
        )
        for first_head, count, step in _runs(of_head)
    )
    return (plan, *attends)


def _listed_architecture(architecture: int) -> int:
    """The row of the tables that is a GPU's."""
    listed = [known for known in _HALF if known <= architecture]
    if not listed:
        raise ValueError(f"The kernel needs a GPU of compute capability 8.0 or newer, not sm_{architecture}.")
    return max(listed)


def _check_head_dim(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"The kernel has no head_dim {head_dim}; it has {', '.join(map(str, HEAD_DIMS))}.")


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, length, value) of each run of equal values."""
    start = 0
    for value, run in itertools.groupby(values):
        length = len(list(run))
        yield start, length, value
        start += length


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _plan_source(architecture: int) -> KernelSource:
    return KernelSource(
        module=_MODULE,
        function="plan_keys",
        architecture=architecture,
        signature={"token_kind": "*i32", "plan": "*i32", "tokens": "i32", "global_bound": "i32"},
        constants={"summary_ints": SUMMARY_INTS, "chunk": PLAN_CHUNK},
        aligned=("token_kind", "plan"),
        num_warps=4,
        num_stages=1,
    )


def _attend_source(architecture: int, head_dim: int, dtype: str, tiles: Geometry) -> KernelSource:
    tensor = "*" + TRITON_TYPE[dtype]
    whole = ("tokens", "left", "right", "first_head", "dilation", "global_bound")
    return KernelSource(
        module=_MODULE,
        function="attend",
        architecture=architecture,
        signature={
            **dict.fromkeys(("query", "key", "value"), tensor),
            **dict.fromkeys(("token_kind", "plan"), "*i32"),
            "out": tensor,
            **dict.fromkeys(("stride_batch", "stride_head", "stride_token", *whole), "i32"),
            "scale": "fp32",
        },
        constants={
            "summary_ints": SUMMARY_INTS,
            "head": tiles.head,
            "tail": head_dim - tiles.head,
            "block_queries": tiles.block_queries,
            "block_keys": tiles.block_keys,
            "block_globals": tiles.block_globals,
        },
        # Every head_dim is a multiple of 16, and so are the strides that it divides.
        aligned=("query", "key", "value", "token_kind", "plan", "out", "stride_batch", "stride_head", "stride_token"),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
