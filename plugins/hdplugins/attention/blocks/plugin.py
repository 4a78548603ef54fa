"""Block-sparse attention as a plugin of engines: a call plans, attends, and sums up what global queries saw.

Layers of a graph that see one mask, and one table if there is any, share the plan that the first of the layers makes.

Nothing here, the tiles of the kernels included, needs Triton or PyTorch: a machine that runs compiled kernels has
neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hdplugins.attention.blocks.operator import OPERATOR
from hdplugins.attention.plugin_face import (
    Attributes,
    FieldType,
    PlanSize,
    PluginFace,
    Shapes,
    Strides,
    sizes,
    stride_names,
)
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import LOG2_E, Tiles, ceil_div, check_sizes, listed_architecture, tiles_for
from hdplugins.kernels.cuda_launch import Launch

_LARGEST_BLOCK = 1024
"""Tokens; `count_tokens` holds a block in registers."""

_SMALLEST_TILE = 16
"""Rows of a product on tensor cores."""

_LARGEST_TILE = 128

# Found like those of `attention_tiles`, with blocks of 16, 32, 64, 84 and 128 tokens.
_HALF_OTHERWISE = {
    (80, 80, 32): Tiles(32, 32, 2, 2, 64),
    (86, 80, 32): Tiles(32, 32, 2, 2, 64),
    **dict.fromkeys([(80, 64, 64), (86, 64, 64), (86, 128, 64)], Tiles(64, 64, 8, 3, 64)),
    (90, 96, 32): Tiles(32, 32, 2, 2, 64),
    # Timed on an H100: 0.47 ms instead of 0.75 (docs/gpu.md).
    (90, 128, 64): Tiles(64, 32, 4, 3, 128),
    (100, 96, 32): Tiles(32, 32, 2, 2, 64),
    (100, 96, 128): Tiles(128, 32, 8, 3, 64),
    (120, 32, 64): Tiles(64, 64, 4, 2, 32),
    (120, 64, 64): Tiles(64, 32, 4, 3, 64),
    (120, 96, 32): Tiles(32, 32, 4, 2, 64),
    (120, 96, 64): Tiles(64, 64, 8, 2, 64),
    (120, 96, 128): Tiles(64, 32, 8, 3, 64),
}
"""(lowest architecture, head_dim, tokens of a block rounded up to a power of two) -> tiles, for float16, bfloat16."""

_FLOAT32_OTHERWISE = {
    **dict.fromkeys([(80, 32, 128), (86, 32, 128), (100, 64, 128)], Tiles(64, 16, 8, 2, 32)),
    **dict.fromkeys([(80, 80, 16), (120, 80, 16)], Tiles(16, 16, 8, 2, 64)),
    **dict.fromkeys([
        (80, 80, 32), (86, 80, 32), (86, 80, 64), (86, 80, 128), (86, 96, 64), (86, 96, 128), (90, 80, 64),
        (90, 80, 128), (90, 96, 64), (90, 96, 128), (90, 128, 128), (100, 96, 64), (120, 80, 128),
    ], Tiles(32, 32, 4, 2, 64)),
    (86, 32, 16): Tiles(16, 16, 1, 2, 32),
    **dict.fromkeys([(100, 64, 32), (120, 64, 32)], Tiles(32, 32, 8, 2, 32)),
    (100, 80, 32): Tiles(32, 16, 4, 2, 64),
    **dict.fromkeys([(90, 96, 32), (100, 96, 128)], Tiles(32, 16, 8, 2, 64)),
}  # fmt: skip
"""Likewise for float32."""

HEADER_INTS = 4
"""int32 values at the start of a text's plan: its last block, whether it is short, 2 unused."""

_TOKENS_COUNTED = 2048
"""Tokens of one program of `count_tokens`, where a block is shorter. To be tuned on a GPU, as are the three below."""

_BLOCKS_LISTED = 256
"""Blocks of keys that a step of `list_blocks` looks at."""

_ENTRIES_READ = 8
"""Entries of the table that it compares with them at a time."""

_ROWS_COMBINED = 4
"""Queries of one program of `combine`."""

_MOST_LISTED_IN_SHARED_PLAN = 1024
"""Blocks that a block of queries sees: more are all that there are, and the plan is quadratic in tokens."""

_LEAST_KEYS_OF_PART = 512
_MOST_SPLITS = 16
"""Parts that the keys of global queries are split into: few, for each leaves its sums in the workspace."""

_MOST_INT32 = 2**31 - 1

_PLANNED = ("tokens", "blocks", "plan_ints")


class _Face(PluginFace):
    """Two kernels plan, `attend` attends, and `combine` runs where the keys of global queries are split."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "int32", "int32")
    SCRATCH: ClassVar = {"plan": "i32", "partials": "fp32"}
    PLANNED_BY = tuple(name for name in OPERATOR.attributes if name != "scale")
    POINTERS: ClassVar = {
        "count_tokens": ("token_mask", "plan"),
        "list_blocks": ("listed_blocks", "plan"),
        "attend": ("query", "key", "value", "token_mask", "plan", "partials", "out"),
        "combine": ("token_mask", "plan", "partials", "out"),
    }
    SCALARS: ClassVar = {
        "count_tokens": _PLANNED,
        "list_blocks": (
            *_PLANNED, "list_ints", "most_listed", "first_global", "last_global", "window", "first_repeats",
            "dense_tokens", "ends_by_row", "table_rows", "table_listed", "tokens_of_whole",
        ),
        "attend": (
            *stride_names("query", "key", "value", "out"), *_PLANNED, "list_ints", "most_listed", "table_heads",
            "first_global", "last_global", "splits", "scale",
        ),
        "combine": (*stride_names("out"), "tokens", "plan_ints", "first_global", "last_global", "splits"),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        """The tiles of `attention_tiles`, cut to the block, but where registers spill then."""
        head_dim = sizes(shapes[0]).head_dim
        tiles = tiles_for(architecture, head_dim, dtype)
        whole_block = min(_LARGEST_TILE, max(_SMALLEST_TILE, _power_of_two(attributes["block_size"])))
        otherwise = _FLOAT32_OTHERWISE if dtype == "float32" else _HALF_OTHERWISE
        if (listed_architecture(architecture), head_dim, whole_block) in otherwise:
            return otherwise[listed_architecture(architecture), head_dim, whole_block]
        queries = min(tiles.block_queries, whole_block)
        return dataclasses.replace(
            tiles,
            block_queries=queries,
            block_keys=min(tiles.block_keys, whole_block),
            # As many queries per warp as in the table: they decide what must fit in the registers.
            num_warps=max(1, tiles.num_warps * queries // tiles.block_queries),
        )

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        block_size: int = attributes["block_size"]
        head_dim = sizes(shapes[0]).head_dim
        lanes = _power_of_two(block_size)
        head = {"block_size": block_size, "head": tiles.head, "tail": head_dim - tiles.head}
        return {
            "count_tokens": {"block_size": block_size, "lanes": lanes, "chunk": max(1, _TOKENS_COUNTED // lanes)},
            "list_blocks": {"block_size": block_size, "chunk": _BLOCKS_LISTED, "entries": _ENTRIES_READ},
            "attend": {"block_size": block_size, **tiles.constants(head_dim)},
            "combine": {**head, "rows": _ROWS_COMBINED, "most_splits": _MOST_SPLITS},
        }

    def plan_size(self, shapes: Shapes, attributes: Attributes) -> PlanSize | None:
        table_heads, _, _ = _table(shapes) or (1, 0, 0)
        listed = _most_listed(shapes, attributes)
        if listed > _MOST_LISTED_IN_SHARED_PLAN:
            return None
        return PlanSize(
            fixed=HEADER_INTS + 2, per_unit=5 + table_heads * (2 + 3 * listed), unit=attributes["block_size"]
        )

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """The plan is [batch, plan_ints] int32, `partials` is float32; see `kernel`."""
        batch, heads, _, head_dim = sizes(shapes[0])
        known = _scalars(shapes, attributes)
        return {
            "plan": 4 * batch * known["plan_ints"],
            "partials": 4 * batch * heads * known["splits"] * _global_rows(known, attributes) * (head_dim + 2),
        }

    def launches(
        self,
        shapes: Shapes,
        attributes: Attributes,
        *,
        constants: Mapping[str, Mapping[str, Any]],
        strides: Strides | None = None,
    ) -> tuple[Launch, ...]:
        self.check_shapes(shapes)
        batch, heads, tokens, head_dim = sizes(shapes[0])
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=attributes["scale"])
        _check_attributes(heads, _table(shapes), attributes)
        known = _scalars(shapes, attributes, block_keys=constants["attend"]["block_keys"])
        known |= self.stride_scalars(shapes, strides)
        blocks, splits, global_rows = known["blocks"], known["splits"], _global_rows(known, attributes)
        if max(known["plan_ints"], splits * global_rows * head_dim) > _MOST_INT32:
            raise ValueError(f"{tokens} tokens in {blocks} blocks with a table of {_table(shapes)} are too many.")
        tiles_of_block = ceil_div(attributes["block_size"], constants["attend"]["block_queries"])
        programs = ((known["first_global"] + known["last_global"]) * splits + blocks) * tiles_of_block
        grids = {
            "count_tokens": (ceil_div(blocks, constants["count_tokens"]["chunk"]), batch, 1),
            "list_blocks": (blocks + 1, known["table_heads"], batch),
            "attend": (programs, heads, batch),
            "combine": (ceil_div(global_rows, constants["combine"]["rows"]), heads, batch),
        }
        return tuple(
            Launch(kernel=name, grid=grids[name], scalars={scalar: known[scalar] for scalar in scalars})
            for name, scalars in self.SCALARS.items()
            if name != "combine" or splits
        )


FACE = _Face()


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least this number."""
    return 1 << (number - 1).bit_length()


def _table(shapes: Shapes) -> Sequence[int] | None:
    """Shape of listed_blocks, [1 or heads, rows, listed]; None for no table."""
    return list(shapes[4]) if len(shapes) > 4 else None


def _global_rows(known: Mapping[str, Any], attributes: Attributes) -> int:
    """Queries of the blocks that see all, in a text that is not short."""
    return int((known["first_global"] + known["last_global"]) * attributes["block_size"])


def _most_listed(shapes: Shapes, attributes: Attributes) -> int:
    """Blocks that a block of queries sees at most, in a text of any length, unless it sees all."""
    _, _, of_table = _table(shapes) or (1, 0, 0)
    near = max(0, 2 * int(attributes["window"]) + 1) + bool(attributes["first_repeats"])
    return int(attributes["first_global"]) + bool(attributes["last_global"]) + near + int(of_table)


def _scalars(shapes: Shapes, attributes: Attributes, *, block_keys: int = 1) -> dict[str, Any]:
    """Every scalar argument but strides. More blocks than there are is as many, and cannot overflow."""
    tokens = sizes(shapes[0]).tokens
    table_heads, table_rows, table_listed = _table(shapes) or (1, 0, 0)
    block_size, window, dense_tokens = (int(attributes[name]) for name in ("block_size", "window", "dense_tokens"))
    blocks = ceil_div(tokens, block_size)
    first_global, last_global = min(int(attributes["first_global"]), blocks), int(bool(attributes["last_global"]))
    most_listed = min(blocks, _most_listed(shapes, attributes))
    list_ints = 2 + 3 * most_listed
    parts = min(_MOST_SPLITS, ceil_div(tokens, _LEAST_KEYS_OF_PART))
    # Texts that end with the batch are all short or none is.
    is_any_long = bool(attributes["ends_by_row"]) or tokens > dense_tokens
    return {
        "tokens": tokens,
        "blocks": blocks,
        "plan_ints": HEADER_INTS + 2 * blocks + 2 + 3 * blocks + table_heads * blocks * list_ints,
        "list_ints": list_ints,
        "most_listed": most_listed,
        "first_global": first_global,
        "last_global": last_global,
        "window": min(window, blocks),
        "first_repeats": int(attributes["first_repeats"]),
        "dense_tokens": min(dense_tokens, tokens),
        "ends_by_row": int(bool(attributes["ends_by_row"])),
        "table_heads": table_heads,
        "table_rows": table_rows,
        "table_listed": table_listed,
        # Steps without a mask must not reach into the next block.
        "tokens_of_whole": -1 if block_size % block_keys else block_size,
        "splits": parts if parts > 1 and first_global + last_global and is_any_long else 0,
        "scale": attributes["scale"] * LOG2_E,
    }


def _check_attributes(heads: int, table: Sequence[int] | None, attributes: Attributes) -> None:
    block_size = attributes["block_size"]
    if not 1 <= block_size <= _LARGEST_BLOCK:
        raise ValueError(f"block_size is {block_size}; the kernels support blocks of 1 to {_LARGEST_BLOCK} tokens.")
    for name, least, most in (
        ("first_global", 0, _MOST_INT32), ("last_global", 0, 1), ("window", -1, _MOST_INT32),
        ("first_repeats", 0, _MOST_INT32), ("dense_tokens", 0, _MOST_INT32), ("ends_by_row", 0, 1),
    ):  # fmt: skip
        if not least <= attributes[name] <= most:
            raise ValueError(f"{name} is {attributes[name]}; it must be {least} to {most}.")
    if table is not None and (len(table) != 3 or table[0] not in (1, heads) or min(table) < 1):
        raise ValueError(f"listed_blocks is {list(table)}; for {heads} heads it is [1 or {heads}, rows, listed].")
