"""Block-sparse attention as a TensorRT plugin: a call plans, attends, and sums up what global queries saw."""

from __future__ import annotations

__all__ = ["FACE", "HEADER_INTS"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import LOG2_E, Tiles, ceil_div, check_sizes
from hdplugins.kernels.cuda_launch import Launch
from hdplugins.operators.block_sparse_attention import OPERATOR
from hdplugins.operators.block_sparse_attention.tiles import check_block_size, power_of_two, tiles_for_blocks
from hdplugins.operators.plugin_face import Attributes, FieldType, PluginFace, Shapes

HEADER_INTS = 4
"""int32 values at the start of a text's plan: its last block, whether it is short, 2 unused."""

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

_PLANNED = ("tokens", "blocks", "plan_ints")
_STRIDES = ("stride_batch", "stride_head", "stride_token")


class _Face(PluginFace):
    """Two kernels plan, `attend` attends, and `combine` runs where the keys of global queries are split."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "int32", "int32")
    SCRATCH: ClassVar = {"plan": "i32", "partials": "fp32"}
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
            *_STRIDES, *_PLANNED, "list_ints", "most_listed", "table_heads", "first_global", "last_global", "splits",
            "scale",
        ),
        "combine": (*_STRIDES, "tokens", "plan_ints", "first_global", "last_global", "splits"),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        return tiles_for_blocks(architecture, shapes[0][3], dtype, attributes["block_size"])

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        block_size: int = attributes["block_size"]
        lanes = power_of_two(block_size)
        head = {"block_size": block_size, "head": tiles.head, "tail": shapes[0][3] - tiles.head}
        return {
            "count_tokens": {"block_size": block_size, "lanes": lanes, "chunk": max(1, _TOKENS_COUNTED // lanes)},
            "list_blocks": {"block_size": block_size, "chunk": _BLOCKS_LISTED, "entries": _ENTRIES_READ},
            "attend": {**head, "block_queries": tiles.block_queries, "block_keys": tiles.block_keys},
            "combine": {**head, "rows": _ROWS_COMBINED, "most_splits": _MOST_SPLITS},
        }

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """The plan is [batch, plan_ints] int32, `partials` is float32; see `triton_kernel`."""
        batch, heads, _, head_dim = shapes[0]
        sizes = _sizes(shapes, **attributes)
        return {
            "plan": 4 * batch * sizes.plan_ints,
            "partials": 4 * batch * heads * sizes.splits * sizes.global_rows * (head_dim + 2),
        }

    def launches(
        self, shapes: Shapes, attributes: Attributes, *, constants: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Launch, ...]:
        self.check_shapes(shapes)
        batch, heads, tokens, head_dim = shapes[0]
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=attributes["scale"])
        _check_attributes(heads, _table(shapes), attributes)
        sizes = _sizes(shapes, **attributes)
        if max(sizes.plan_ints, sizes.splits * sizes.global_rows * head_dim) > _MOST_INT32:
            table = _table(shapes)
            raise ValueError(f"{tokens} tokens in {sizes.blocks} blocks with a table of {table} are too many.")
        known = _scalars(shapes, sizes, constants["attend"]["block_keys"], attributes)
        tiles_of_block = ceil_div(sizes.block_size, constants["attend"]["block_queries"])
        programs = (sizes.global_blocks * sizes.splits + sizes.blocks) * tiles_of_block
        grids = {
            "count_tokens": (ceil_div(sizes.blocks, constants["count_tokens"]["chunk"]), batch, 1),
            "list_blocks": (sizes.blocks + 1, known["table_heads"], batch),
            "attend": (programs, heads, batch),
            "combine": (ceil_div(sizes.global_rows, constants["combine"]["rows"]), heads, batch),
        }
        return tuple(
            Launch(kernel=name, grid=grids[name], scalars={scalar: known[scalar] for scalar in scalars})
            for name, scalars in self.SCALARS.items()
            if name != "combine" or sizes.splits
        )


FACE = _Face()


def _table(shapes: Shapes) -> Sequence[int] | None:
    """Shape of listed_blocks, [1 or heads, rows, listed]; None for no table."""
    return list(shapes[4]) if len(shapes) > 4 else None


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
    shapes: Shapes,
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
    tokens, table = shapes[0][2], _table(shapes)
    blocks = ceil_div(tokens, block_size)
    table_heads, _, listed = table or (1, 0, 0)
    global_blocks = min(first_global, blocks) + bool(last_global)
    most_listed = min(blocks, global_blocks + max(0, 2 * window + 1) + bool(first_repeats) + listed)
    list_ints = 2 + 3 * most_listed
    parts = min(_MOST_SPLITS, ceil_div(tokens, _LEAST_KEYS_OF_PART))
    # Texts that end with the batch are all short or none is.
    is_any_long = bool(ends_by_row) or tokens > dense_tokens
    return _Sizes(
        block_size=block_size,
        blocks=blocks,
        global_blocks=global_blocks,
        most_listed=most_listed,
        list_ints=list_ints,
        plan_ints=HEADER_INTS + 2 * blocks + 2 + 3 * blocks + table_heads * blocks * list_ints,
        splits=parts if parts > 1 and global_blocks and is_any_long else 0,
    )


def _scalars(shapes: Shapes, sizes: _Sizes, block_keys: int, attributes: Attributes) -> dict[str, Any]:
    """Every scalar argument of any kernel. More blocks than there are is as many, and cannot overflow."""
    _, heads, tokens, head_dim = shapes[0]
    table_heads, table_rows, table_listed = _table(shapes) or (1, 0, 0)
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


def _check_attributes(heads: int, table: Sequence[int] | None, attributes: Attributes) -> None:
    check_block_size(attributes["block_size"])
    for name, least, most in (
        ("first_global", 0, _MOST_INT32), ("last_global", 0, 1), ("window", -1, _MOST_INT32),
        ("first_repeats", 0, _MOST_INT32), ("dense_tokens", 0, _MOST_INT32), ("ends_by_row", 0, 1),
    ):  # fmt: skip
        if not least <= attributes[name] <= most:
            raise ValueError(f"{name} is {attributes[name]}; it is {least} to {most}.")
    if table is not None and (len(table) != 3 or table[0] not in (1, heads) or min(table) < 1):
        raise ValueError(f"listed_blocks is {list(table)}; for {heads} heads it is [1 or {heads}, rows, listed].")
