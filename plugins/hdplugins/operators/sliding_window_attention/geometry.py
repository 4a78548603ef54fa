"""How the kernels of sliding-window attention are compiled and launched: workspace, grids, scalar arguments.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = [
    "BLOCK_GLOBALS",
    "PLAN_CHUNK",
    "SUMMARY_INTS",
    "constants_of",
    "kernel_sources",
    "launches",
    "workspace_bytes",
]

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hdplugins.kernels.aot import Constant, KernelSource
from hdplugins.kernels.attention_sources import attention_source
from hdplugins.kernels.attention_tiles import LOG2_E, TRITON_TYPE, Tiles, ceil_div, check_sizes, tiles_for
from hdplugins.kernels.cuda_launch import Launch

SUMMARY_INTS = 4
"""int32 values at the start of a text's plan: globals listed, first local token, one past the last, unused."""

PLAN_CHUNK = 256
"""Tokens that one program of `plan_keys` describes. To be tuned on a GPU."""

BLOCK_GLOBALS = {"float16": 32, "bfloat16": 32, "float32": 16}
"""Dtype -> keys of one step over the global columns; small, for a text has few of them."""

_MODULE = "hdplugins.operators.sliding_window_attention.triton_kernel"


def kernel_sources(
    *, head_dim: int, dtype: str, architectures: Sequence[int], tiles: Tiles | None = None
) -> tuple[KernelSource, ...]:
    """What `hdplugins.kernels.aot.compile_kernels` compiles: two kernels for each architecture.

    Args:
        head_dim: one of `attention_tiles.HEAD_DIMS`.
        dtype: "float16", "bfloat16" or "float32".
        architectures: compute capabilities as in sm_90: 90.
        tiles: to use instead of the table's.

    Raises:
        ValueError: the kernel is not written for one of them.
    """
    sources: list[KernelSource] = []
    for architecture in architectures:
        of_gpu = tiles or tiles_for(architecture, head_dim, dtype)
        for function, constants in constants_of(of_gpu, head_dim=head_dim, dtype=dtype).items():
            source = attention_source(_MODULE, function, architecture, _signature(function, dtype), constants, of_gpu)
            sources.append(source)
    return tuple(sources)


def constants_of(tiles: Tiles, *, head_dim: int, dtype: str) -> Mapping[str, Mapping[str, Constant]]:
    """The constants of each kernel."""
    return {
        "plan_keys": {"summary_ints": SUMMARY_INTS, "chunk": PLAN_CHUNK},
        "attend": {
            "summary_ints": SUMMARY_INTS,
            "head": tiles.head,
            "tail": head_dim - tiles.head,
            "block_queries": tiles.block_queries,
            "block_keys": tiles.block_keys,
            "block_globals": BLOCK_GLOBALS[dtype],
        },
    }


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
        head_dim: one of `attention_tiles.HEAD_DIMS`.
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
    check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=scale)
    for name, number in (("left", left), ("right", right), ("global_bound", global_bound)):
        if number < 0:
            raise ValueError(f"{name} is {number}; it is 0 or more.")
    if len(dilation) not in (1, heads) or min(dilation) < 1:
        raise ValueError(f"dilation is {list(dilation)}; it has 1 value or {heads}, one a head, each 1 or more.")
    # Steps as long as the text and longer ones are alike: a query sees no local token but itself.
    of_head = [min(step, tokens) for step in (dilation if len(dilation) == heads else list(dilation) * heads)]
    plan = Launch(
        kernel="plan_keys",
        grid=(ceil_div(tokens, plan_chunk), batch, 1),
        scalars={"tokens": tokens, "global_bound": global_bound},
    )
    attends = (
        Launch(
            kernel="attend",
            # Each of the `step` residue classes has blocks of its own.
            grid=(step * ceil_div(ceil_div(tokens, step), block_queries), count, batch),
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
                "scale": scale * LOG2_E,
            },
        )
        for first_head, count, step in _runs(of_head)
    )
    return (plan, *attends)


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, length, value) of each run of equal values."""
    start = 0
    for value, run in itertools.groupby(values):
        length = len(list(run))
        yield start, length, value
        start += length


def _signature(function: str, dtype: str) -> dict[str, str]:
    if function == "plan_keys":
        return {"token_kind": "*i32", "plan": "*i32", "tokens": "i32", "global_bound": "i32"}
    tensor, strides = "*" + TRITON_TYPE[dtype], ("stride_batch", "stride_head", "stride_token")
    return {
        **dict.fromkeys(("query", "key", "value"), tensor),
        **dict.fromkeys(("token_kind", "plan"), "*i32"),
        "out": tensor,
        **dict.fromkeys((*strides, "tokens", "left", "right", "first_head", "dilation", "global_bound"), "i32"),
        "scale": "fp32",
    }
