"""`PluginSpec` of block-sparse attention: a call indexes the blocks, attends, and combines splits of global queries.

Layers of a graph with one mask, and one table if there is any, share the block index that the first of the layers
computes. This module needs neither Triton nor PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hdplugins.attention.blocks.operator import OPERATOR
from hdplugins.attention.plugin_spec import (
    Attributes,
    BlockIndexSize,
    FieldType,
    KernelCall,
    PluginSpec,
    Shapes,
    sizes,
    stride_names,
)
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.block_config import BlockConfig, block_config_for, ceil_div, listed_architecture
from hdplugins.kernels.cuda_launch import Launch

_MAX_BLOCK_SIZE = 1024
"""Tokens of the largest block: `count_tokens` holds a block in registers."""

_MIN_BLOCK_M = 16
"""Rows of a product on tensor cores."""

_MAX_BLOCK_M = 128

# Found as in `block_config`, with blocks of 16, 32, 64, 84 and 128 tokens.
_HALF_EXCEPTIONS = {
    (80, 80, 32): BlockConfig(32, 32, 2, 2, 64),
    (86, 80, 32): BlockConfig(32, 32, 2, 2, 64),
    **dict.fromkeys([(80, 64, 64), (86, 64, 64), (86, 128, 64)], BlockConfig(64, 64, 8, 3, 64)),
    (90, 96, 32): BlockConfig(32, 32, 2, 2, 64),
    # Timed on an H100: 0.47 ms instead of 0.75 (docs/gpu.md).
    (90, 128, 64): BlockConfig(64, 32, 4, 3, 128),
    (100, 96, 32): BlockConfig(32, 32, 2, 2, 64),
    (100, 96, 128): BlockConfig(128, 32, 8, 3, 64),
    (120, 32, 64): BlockConfig(64, 64, 4, 2, 32),
    (120, 64, 64): BlockConfig(64, 32, 4, 3, 64),
    (120, 96, 32): BlockConfig(32, 32, 4, 2, 64),
    (120, 96, 64): BlockConfig(64, 64, 8, 2, 64),
    (120, 96, 128): BlockConfig(64, 32, 8, 3, 64),
}
"""(lowest architecture, head_dim, tokens of a block rounded up to a power of two) -> block config, for float16,
bfloat16."""

_FLOAT32_EXCEPTIONS = {
    **dict.fromkeys([(80, 32, 128), (86, 32, 128), (100, 64, 128)], BlockConfig(64, 16, 8, 2, 32)),
    **dict.fromkeys([(80, 80, 16), (120, 80, 16)], BlockConfig(16, 16, 8, 2, 64)),
    **dict.fromkeys([
        (80, 80, 32), (86, 80, 32), (86, 80, 64), (86, 80, 128), (86, 96, 64), (86, 96, 128), (90, 80, 64),
        (90, 80, 128), (90, 96, 64), (90, 96, 128), (90, 128, 128), (100, 96, 64), (120, 80, 128),
    ], BlockConfig(32, 32, 4, 2, 64)),
    (86, 32, 16): BlockConfig(16, 16, 1, 2, 32),
    **dict.fromkeys([(100, 64, 32), (120, 64, 32)], BlockConfig(32, 32, 8, 2, 32)),
    (100, 80, 32): BlockConfig(32, 16, 4, 2, 64),
    **dict.fromkeys([(90, 96, 32), (100, 96, 128)], BlockConfig(32, 16, 8, 2, 64)),
}  # fmt: skip
"""(lowest architecture, head_dim, tokens of a block rounded up to a power of two) -> block config, for float32."""

HEADER_INTS = 4
"""int32 values at the start of a sequence's block index: last block, whether the sequence is short, 2 unused."""

_TOKENS_COUNTED = 2048
"""Tokens of one CTA of `count_tokens`, if a block is shorter. To be tuned on a GPU, as are the three below."""

_BLOCKS_LISTED = 256
"""Blocks of keys of one step of `list_blocks`."""

_ENTRIES_READ = 8
"""Entries of the table that `list_blocks` compares with these blocks at a time."""

_ROWS_COMBINED = 4
"""Queries of one CTA of `combine`."""

_MAX_LISTED_IN_SHARED_INDEX = 1024
"""Maximum blocks that a block of queries sees in a shared block index; with more the index is quadratic in tokens."""

_MIN_KEYS_OF_SPLIT = 512
_MAX_SPLITS = 16
"""Maximum splits of the keys of global queries: few, because each split has an accumulator in the workspace."""

_MAX_INT32 = 2**31 - 1

_INDEX_SIZES = ("tokens", "blocks", "index_ints")


class BlockSparsePlugin(PluginSpec):
    """Two kernels compute the block index, `attend` attends, and `combine` merges the splits of global queries."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "int32", "int32")
    SCRATCH: ClassVar = {"block_index": "i32", "split_results": "fp32"}
    BLOCK_INDEX_ATTRIBUTES = tuple(name for name in OPERATOR.attributes if name != "scale")
    POINTERS: ClassVar = {
        "count_tokens": ("token_mask", "block_index"),
        "list_blocks": ("listed_blocks", "block_index"),
        "attend": ("query", "key", "value", "token_mask", "block_index", "split_results", "out"),
        "combine": ("token_mask", "block_index", "split_results", "out"),
    }
    SCALARS: ClassVar = {
        "count_tokens": _INDEX_SIZES,
        "list_blocks": (
            *_INDEX_SIZES, "list_ints", "max_listed", "first_global", "last_global", "window", "first_repeats",
            "dense_tokens", "ends_by_row", "table_rows", "table_listed", "tokens_of_full",
        ),
        "attend": (
            *stride_names("query", "key", "value", "out"), *_INDEX_SIZES, "list_ints", "max_listed", "table_heads",
            "first_global", "last_global", "splits", "scale",
        ),
        "combine": (*stride_names("out"), "tokens", "index_ints", "first_global", "last_global", "splits"),
    }  # fmt: skip

    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        """Return the config of `block_config`, limited to the block size, unless registers spill then."""
        head_dim = sizes(shapes[0]).head_dim
        config = block_config_for(architecture, head_dim, dtype)
        block = min(_MAX_BLOCK_M, max(_MIN_BLOCK_M, _power_of_two(attributes["block_size"])))
        exceptions = _FLOAT32_EXCEPTIONS if dtype == "float32" else _HALF_EXCEPTIONS
        if (listed_architecture(architecture), head_dim, block) in exceptions:
            return exceptions[listed_architecture(architecture), head_dim, block]
        block_m = min(config.block_m, block)
        return dataclasses.replace(
            config,
            block_m=block_m,
            block_n=min(config.block_n, block),
            # As many queries per warp as in the table: queries per warp decide the registers of a thread.
            num_warps=max(1, config.num_warps * block_m // config.block_m),
        )

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, block_config: BlockConfig
    ) -> Mapping[str, Mapping[str, Constant]]:
        block_size: int = attributes["block_size"]
        head_dim = sizes(shapes[0]).head_dim
        block_t = _power_of_two(block_size)
        constants = {
            "count_tokens": {"BLOCK_T": block_t, "BLOCKS": max(1, _TOKENS_COUNTED // block_t)},
            "list_blocks": {"CHUNK": _BLOCKS_LISTED, "ENTRIES": _ENTRIES_READ},
            "attend": block_config.constants(head_dim),
            "combine": {
                "BLOCK_D": block_config.block_d,
                "REM_D": head_dim - block_config.block_d,
                "ROWS": _ROWS_COMBINED,
                "MAX_SPLITS": _MAX_SPLITS,
            },
        }
        return {kernel: {"BLOCK_SIZE": block_size, **others} for kernel, others in constants.items()}

    def block_index_size(self, shapes: Shapes, attributes: Attributes) -> BlockIndexSize | None:
        table_heads, _, _ = _table(shapes) or (1, 0, 0)
        listed = _max_listed(shapes, attributes)
        if listed > _MAX_LISTED_IN_SHARED_INDEX:
            return None
        return BlockIndexSize(
            fixed=HEADER_INTS + 2, per_unit=5 + table_heads * (2 + 3 * listed), unit=attributes["block_size"]
        )

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """Return the bytes of the block index, [batch, index_ints] int32, and of the float32 split results."""
        batch, heads, _, head_dim = sizes(shapes[0])
        known = _scalars(shapes, attributes)
        return {
            "block_index": 4 * batch * known["index_ints"],
            "split_results": 4 * batch * heads * known["splits"] * _global_rows(known, attributes) * (head_dim + 2),
        }

    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        (batch, heads, tokens, head_dim), shapes, attributes = call.sizes, call.shapes, call.attributes
        constants = call.constants
        known = {**_scalars(shapes, attributes, block_n=constants["attend"]["BLOCK_N"]), **call.scalars}
        blocks, splits, global_rows = known["blocks"], known["splits"], _global_rows(known, attributes)
        if max(known["index_ints"], splits * global_rows * head_dim) > _MAX_INT32:
            raise ValueError(f"{tokens} tokens in {blocks} blocks with a table of {_table(shapes)} are too many.")
        attend_blocks = (known["first_global"] + known["last_global"]) * splits + blocks
        grids = {
            "count_tokens": (ceil_div(blocks, constants["count_tokens"]["BLOCKS"]), batch, 1),
            "list_blocks": (blocks + 1, known["table_heads"], batch),
            "attend": (attend_blocks * call.blocks_of(attributes["block_size"]), heads, batch),
            "combine": (ceil_div(global_rows, constants["combine"]["ROWS"]), heads, batch),
        }
        return tuple(self.launch(name, grid, known) for name, grid in grids.items() if name != "combine" or splits)

    def check_attributes(self, shapes: Shapes, attributes: Attributes) -> None:
        heads, table, block_size = sizes(shapes[0]).heads, _table(shapes), attributes["block_size"]
        if not 1 <= block_size <= _MAX_BLOCK_SIZE:
            raise ValueError(
                f"block_size is {block_size}; the kernels support blocks of 1 to {_MAX_BLOCK_SIZE} tokens."
            )
        for name, minimum, maximum in (
            ("first_global", 0, _MAX_INT32), ("last_global", 0, 1), ("window", -1, _MAX_INT32),
            ("first_repeats", 0, _MAX_INT32), ("dense_tokens", 0, _MAX_INT32), ("ends_by_row", 0, 1),
        ):  # fmt: skip
            if not minimum <= attributes[name] <= maximum:
                raise ValueError(f"{name} is {attributes[name]}; it must be {minimum} to {maximum}.")
        if table is not None and (len(table) != 3 or table[0] not in (1, heads) or min(table) < 1):
            raise ValueError(f"listed_blocks is {list(table)}; for {heads} heads it is [1 or {heads}, rows, listed].")


PLUGIN_SPEC = BlockSparsePlugin()


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least this number."""
    return 1 << (number - 1).bit_length()


def _table(shapes: Shapes) -> Sequence[int] | None:
    """Return the shape of listed_blocks, [1 or heads, rows, listed]; None without a table."""
    return list(shapes[4]) if len(shapes) > 4 else None


def _global_rows(known: Mapping[str, Any], attributes: Attributes) -> int:
    """Return the number of queries in global blocks of a sequence that is not short."""
    return int((known["first_global"] + known["last_global"]) * attributes["block_size"])


def _max_listed(shapes: Shapes, attributes: Attributes) -> int:
    """Return the maximum number of blocks that a non-global block of queries sees, at any length."""
    _, _, listed = _table(shapes) or (1, 0, 0)
    near = max(0, 2 * int(attributes["window"]) + 1) + bool(attributes["first_repeats"])
    return int(attributes["first_global"]) + bool(attributes["last_global"]) + near + int(listed)


def _scalars(shapes: Shapes, attributes: Attributes, *, block_n: int = 1) -> dict[str, Any]:
    """Return every scalar argument except strides and scale; block counts are limited so that they cannot overflow."""
    tokens = sizes(shapes[0]).tokens
    table_heads, table_rows, table_listed = _table(shapes) or (1, 0, 0)
    block_size, window, dense_tokens = (int(attributes[name]) for name in ("block_size", "window", "dense_tokens"))
    blocks = ceil_div(tokens, block_size)
    first_global, last_global = min(int(attributes["first_global"]), blocks), int(bool(attributes["last_global"]))
    max_listed = min(blocks, _max_listed(shapes, attributes))
    list_ints = 2 + 3 * max_listed
    splits = min(_MAX_SPLITS, ceil_div(tokens, _MIN_KEYS_OF_SPLIT))
    # Sequences that end with the batch are either all short or all long.
    is_any_long = bool(attributes["ends_by_row"]) or tokens > dense_tokens
    return {
        "tokens": tokens,
        "blocks": blocks,
        "index_ints": HEADER_INTS + 2 * blocks + 2 + 3 * blocks + table_heads * blocks * list_ints,
        "list_ints": list_ints,
        "max_listed": max_listed,
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
        "tokens_of_full": -1 if block_size % block_n else block_size,
        "splits": splits if splits > 1 and first_global + last_global and is_any_long else 0,
    }
