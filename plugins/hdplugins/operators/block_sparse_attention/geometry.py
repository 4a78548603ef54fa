"""How the kernels of block-sparse attention are compiled and launched: tiles, workspace, grids, scalar arguments.

Nothing here needs Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

__all__ = [
    "HEADER_INTS",
    "KERNELS",
    "constants_of",
    "kernel_sources",
    "launches",
    "tiles_for_blocks",
    "workspace_bytes",
]

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdplugins.kernels.aot import Constant, KernelSource
from hdplugins.kernels.attention_sources import attention_source
from hdplugins.kernels.attention_tiles import (
    LOG2_E,
    TRITON_TYPE,
    Tiles,
    ceil_div,
    check_sizes,
    listed_architecture,
    tiles_for,
)
from hdplugins.kernels.cuda_launch import Launch

HEADER_INTS = 4
"""int32 values at the start of a text's plan: its last block, whether it is short, 2 unused."""

KERNELS = ("count_tokens", "list_blocks", "attend", "combine")

_MODULE = "hdplugins.operators.block_sparse_attention.triton_kernel"

_LARGEST_BLOCK = 1024
"""Tokens; `count_tokens` holds a block in registers."""

_SMALLEST_TILE = 16
"""Rows of a product on tensor cores."""

_LARGEST_TILE = 128

# Found as those of `attention_tiles` are, with blocks of 16, 32, 64, 84 and 128 tokens.
_HALF_OTHERWISE = {
    (80, 80, 32): Tiles(32, 32, 2, 2, 64),
    (86, 80, 32): Tiles(32, 32, 2, 2, 64),
    (86, 128, 64): Tiles(64, 64, 8, 3, 64),
    (90, 96, 32): Tiles(32, 32, 2, 2, 64),
    (100, 96, 32): Tiles(32, 32, 2, 2, 64),
    (100, 96, 128): Tiles(128, 32, 8, 3, 64),
    (120, 32, 64): Tiles(64, 64, 4, 2, 32),
    (120, 96, 32): Tiles(32, 32, 4, 2, 64),
    (120, 96, 64): Tiles(64, 64, 8, 2, 64),
    (120, 96, 128): Tiles(64, 32, 8, 3, 64),
}
"""(lowest architecture, head_dim, tokens of a block rounded up to a power of two) -> tiles, for float16, bfloat16."""

_FLOAT32_OTHERWISE = {
    (80, 32, 128): Tiles(64, 16, 8, 2, 32),
    (80, 80, 16): Tiles(16, 16, 8, 2, 64),
    (80, 80, 32): Tiles(32, 32, 4, 2, 64),
    (86, 32, 16): Tiles(16, 16, 1, 2, 32),
    (86, 32, 128): Tiles(64, 16, 8, 2, 32),
    (86, 80, 32): Tiles(32, 32, 4, 2, 64),
    (86, 80, 64): Tiles(32, 32, 4, 2, 64),
    (86, 80, 128): Tiles(32, 32, 4, 2, 64),
    (86, 96, 64): Tiles(32, 32, 4, 2, 64),
    (86, 96, 128): Tiles(32, 32, 4, 2, 64),
    (90, 80, 64): Tiles(32, 32, 4, 2, 64),
    (90, 80, 128): Tiles(32, 32, 4, 2, 64),
    (90, 96, 64): Tiles(32, 32, 4, 2, 64),
    (90, 96, 128): Tiles(32, 32, 4, 2, 64),
    (90, 128, 128): Tiles(32, 32, 4, 2, 64),
    (100, 64, 32): Tiles(32, 32, 8, 2, 32),
    (100, 64, 128): Tiles(64, 16, 8, 2, 32),
    (100, 80, 32): Tiles(32, 16, 4, 2, 64),
    (100, 96, 64): Tiles(32, 32, 4, 2, 64),
    (100, 96, 128): Tiles(32, 32, 4, 2, 64),
    (120, 64, 32): Tiles(32, 32, 8, 2, 32),
    (120, 80, 16): Tiles(16, 16, 8, 2, 64),
    (120, 80, 128): Tiles(32, 32, 4, 2, 64),
}
"""Likewise for float32."""

_TOKENS_COUNTED = 2048
"""By one program of `count_tokens`, where a block is shorter. To be tuned on a GPU, as are the three below."""

_BLOCKS_LISTED = 256
"""Blocks of keys that a step of `list_blocks` looks at."""

_ENTRIES_READ = 8
"""Entries of the table that it compares with them at a time."""

_ROWS_COMBINED = 4
"""Queries of one program of `combine`."""

_LEAST_KEYS_OF_PART = 512
_MOST_SPLITS = 16
"""Parts that the keys of global queries are split into: few, for each leaves its sums in the workspace."""

_MOST_INT32 = 2**31 - 1

Shape = Sequence[int]


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
    _check_block_size(block_size)
    tiles = tiles_for(architecture, head_dim, dtype)
    whole_block = min(_LARGEST_TILE, max(_SMALLEST_TILE, _power_of_two(block_size)))
    otherwise = _FLOAT32_OTHERWISE if dtype == "float32" else _HALF_OTHERWISE
    if (listed_architecture(architecture), head_dim, whole_block) in otherwise:
        return otherwise[listed_architecture(architecture), head_dim, whole_block]
    queries = min(tiles.block_queries, whole_block)
    return dataclasses.replace(
        tiles,
        block_queries=queries,
        block_keys=min(tiles.block_keys, whole_block),
        # As many queries a warp as the table's, for they decide what must fit the registers.
        num_warps=max(1, tiles.num_warps * queries // tiles.block_queries),
    )


def constants_of(tiles: Tiles, *, head_dim: int, block_size: int) -> Mapping[str, Mapping[str, Constant]]:
    """The constants of each kernel."""
    lanes = _power_of_two(block_size)
    head = {"head": tiles.head, "tail": head_dim - tiles.head}
    return {
        "count_tokens": {"block_size": block_size, "lanes": lanes, "chunk": max(1, _TOKENS_COUNTED // lanes)},
        "list_blocks": {"block_size": block_size, "chunk": _BLOCKS_LISTED, "entries": _ENTRIES_READ},
        "attend": {
            "block_size": block_size,
            **head,
            "block_queries": tiles.block_queries,
            "block_keys": tiles.block_keys,
        },
        "combine": {"block_size": block_size, **head, "rows": _ROWS_COMBINED, "most_splits": _MOST_SPLITS},
    }


def kernel_sources(
    *,
    head_dim: int,
    block_size: int,
    has_table: bool,
    dtype: str,
    architectures: Sequence[int],
    tiles: Tiles | None = None,
) -> tuple[KernelSource, ...]:
    """What `hdplugins.kernels.aot.compile_kernels` compiles: four kernels for each architecture.

    Args:
        head_dim: one of `attention_tiles.HEAD_DIMS`.
        block_size: tokens of a block.
        has_table: whether there is a table of listed blocks.
        dtype: "float16", "bfloat16" or "float32".
        architectures: compute capabilities as in sm_90: 90.
        tiles: to use instead of the table's.

    Raises:
        ValueError: the kernels are not written for one of them.
    """
    sources = []
    for architecture in architectures:
        of_gpu = tiles or tiles_for_blocks(architecture, head_dim, dtype, block_size)
        constants = constants_of(of_gpu, head_dim=head_dim, block_size=block_size)
        for function in KERNELS:
            no_table = {"listed_blocks": None} if function == "list_blocks" and not has_table else {}
            own = {**no_table, **constants[function]}
            signature = _signature(function, dtype, has_table)
            sources.append(attention_source(_MODULE, function, architecture, signature, own, of_gpu))
    return tuple(sources)


def workspace_bytes(shape: Shape, table: Shape | None, **attributes: Any) -> dict[str, int]:
    """Size of each scratch buffer, whose contents need not be set; at most as many for smaller shapes.

    Args:
        shape: of query, [batch, heads, tokens, head_dim].
        table: of listed_blocks, [1 or heads, rows, listed]; None for none.
        attributes: of the operator.
    """
    sizes = _sizes(shape, table, **attributes)
    batch, heads, _, head_dim = shape
    return {
        "plan": 4 * batch * sizes.plan_ints,
        "partials": 4 * batch * heads * sizes.splits * sizes.global_rows * (head_dim + 2),
    }


def launches(
    shape: Shape, table: Shape | None, *, constants: Mapping[str, Mapping[str, Any]], **attributes: Any
) -> tuple[Launch, ...]:
    """The kernels to start for one call of the operator on contiguous tensors, in order.

    Args:
        shape: of query, [batch, heads, tokens, head_dim].
        table: of listed_blocks, [1 or heads, rows, listed]; None for none.
        constants: of each compiled kernel, see `constants_of`.
        attributes: of the operator.

    Raises:
        ValueError: a size or an attribute is out of its range.
    """
    batch, heads, tokens, head_dim = shape
    check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=attributes["scale"])
    _check_attributes(heads, table, **attributes)
    sizes = _sizes(shape, table, **attributes)
    if max(sizes.plan_ints, sizes.splits * sizes.global_rows * head_dim) > _MOST_INT32:
        raise ValueError(f"{tokens} tokens in {sizes.blocks} blocks with a table of {table} are too many.")
    known = _scalars(shape, table, sizes, constants["attend"]["block_keys"], **attributes)
    tiles_of_block = ceil_div(sizes.block_size, constants["attend"]["block_queries"])
    programs = (sizes.global_blocks * sizes.splits + sizes.blocks) * tiles_of_block
    grids = {
        "count_tokens": (ceil_div(sizes.blocks, constants["count_tokens"]["chunk"]), batch, 1),
        "list_blocks": (sizes.blocks + 1, known["table_heads"], batch),
        "attend": (programs, heads, batch),
        "combine": (ceil_div(sizes.global_rows, constants["combine"]["rows"]), heads, batch),
    }
    return tuple(
        Launch(kernel=name, grid=grids[name], scalars={scalar: known[scalar] for scalar in _SCALARS[name]})
        for name in KERNELS
        if name != "combine" or sizes.splits
    )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What follows from shapes and attributes.

    Attributes:
        block_size: tokens of a block.
        blocks: of a text with its padding.
        global_blocks: whose queries see all, in a text that is not short.
        most_listed: blocks that any other block of queries sees at most.
        list_ints: int32 values of a list.
        plan_ints: of a text's plan.
        splits: parts that the keys of global blocks are split into; 0 where they are not.
    """

    block_size: int
    blocks: int
    global_blocks: int
    most_listed: int
    list_ints: int
    plan_ints: int
    splits: int

    @property
    def global_rows(self) -> int:
        """Queries of the global blocks."""
        return self.global_blocks * self.block_size


def _sizes(
    shape: Shape,
    table: Shape | None,
    *,
    block_size: int,
    first_global: int,
    last_global: int,
    window: int,
    first_repeats: int,
    dense_tokens: int,
    ends_by_row: int,
    scale: float,
) -> _Sizes:
    tokens = shape[2]
    blocks = ceil_div(tokens, block_size)
    listed = table[2] if table is not None else 0
    global_blocks = min(first_global, blocks) + bool(last_global)
    most_listed = min(blocks, global_blocks + max(0, 2 * window + 1) + bool(first_repeats) + listed)
    list_ints = 2 + 3 * most_listed
    lists = (table[0] if table is not None else 1) * blocks
    parts = min(_MOST_SPLITS, ceil_div(tokens, _LEAST_KEYS_OF_PART))
    # Texts that end with the batch are all short or none is.
    is_any_long = bool(ends_by_row) or tokens > dense_tokens
    return _Sizes(
        block_size=block_size,
        blocks=blocks,
        global_blocks=global_blocks,
        most_listed=most_listed,
        list_ints=list_ints,
        plan_ints=HEADER_INTS + 2 * blocks + 2 + 3 * blocks + lists * list_ints,
        splits=parts if parts > 1 and global_blocks and is_any_long else 0,
    )


_PLANNED = ("tokens", "blocks", "plan_ints")
_STRIDES = ("stride_batch", "stride_head", "stride_token")
_SCALARS: dict[str, tuple[str, ...]] = {
    "count_tokens": _PLANNED,
    "list_blocks": (
        *_PLANNED, "list_ints", "most_listed", "first_global", "last_global", "window", "first_repeats",
        "dense_tokens", "ends_by_row", "table_rows", "table_listed", "tokens_of_whole",
    ),
    "attend": (
        *_STRIDES, *_PLANNED, "list_ints", "most_listed", "table_heads", "first_global", "last_global", "splits",
        "scale",
    ),
    "combine": (*_STRIDES, "tokens", "plan_ints", "first_global", "last_global", "splits"),
}  # fmt: skip
"""Kernel -> the arguments that are no pointers, in the function's order."""

_POINTERS = {
    "count_tokens": ("token_mask", "plan"),
    "list_blocks": ("listed_blocks", "plan"),
    "attend": ("query", "key", "value", "token_mask", "plan", "partials", "out"),
    "combine": ("token_mask", "plan", "partials", "out"),
}
_INT_POINTERS = ("token_mask", "listed_blocks", "plan")


def _signature(function: str, dtype: str, has_table: bool) -> dict[str, str]:
    pointers = [name for name in _POINTERS[function] if has_table or name != "listed_blocks"]
    types = dict.fromkeys(_INT_POINTERS, "*i32") | {"partials": "*fp32"}
    return {
        **{name: types.get(name, f"*{TRITON_TYPE[dtype]}") for name in pointers},
        **{name: "fp32" if name == "scale" else "i32" for name in _SCALARS[function]},
    }


def _scalars(shape: Shape, table: Shape | None, sizes: _Sizes, block_keys: int, **attributes: Any) -> dict[str, Any]:
    """Every scalar argument of any kernel. More blocks than there are is as many, and cannot overflow."""
    _, heads, tokens, head_dim = shape
    table_heads, table_rows, table_listed = table or (1, 0, 0)
    blocks = sizes.blocks
    return {
        "stride_batch": heads * tokens * head_dim,
        "stride_head": tokens * head_dim,
        "stride_token": head_dim,
        "tokens": tokens,
        "blocks": blocks,
        "plan_ints": sizes.plan_ints,
        "list_ints": sizes.list_ints,
        "most_listed": sizes.most_listed,
        "first_global": min(int(attributes["first_global"]), blocks),
        "last_global": int(bool(attributes["last_global"])),
        "window": min(int(attributes["window"]), blocks),
        "first_repeats": int(attributes["first_repeats"]),
        "dense_tokens": min(int(attributes["dense_tokens"]), tokens),
        "ends_by_row": int(bool(attributes["ends_by_row"])),
        "table_heads": table_heads,
        "table_rows": table_rows,
        "table_listed": table_listed,
        # Steps without a mask must not reach into the next block.
        "tokens_of_whole": -1 if sizes.block_size % block_keys else sizes.block_size,
        "splits": sizes.splits,
        "scale": attributes["scale"] * LOG2_E,
    }


def _check_attributes(heads: int, table: Shape | None, **attributes: Any) -> None:
    _check_block_size(int(attributes["block_size"]))
    for name, least, most in (
        ("first_global", 0, _MOST_INT32), ("last_global", 0, 1), ("window", -1, _MOST_INT32),
        ("first_repeats", 0, _MOST_INT32), ("dense_tokens", 0, _MOST_INT32), ("ends_by_row", 0, 1),
    ):  # fmt: skip
        if not least <= attributes[name] <= most:
            raise ValueError(f"{name} is {attributes[name]}; it is {least} to {most}.")
    if table is not None and (len(table) != 3 or table[0] not in (1, heads) or min(table) < 1):
        raise ValueError(f"listed_blocks is {list(table)}; for {heads} heads it is [1 or {heads}, rows, listed].")


def _check_block_size(block_size: int) -> None:
    if not 1 <= block_size <= _LARGEST_BLOCK:
        raise ValueError(f"block_size is {block_size}; the kernel has blocks of 1 to {_LARGEST_BLOCK} tokens.")


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()
