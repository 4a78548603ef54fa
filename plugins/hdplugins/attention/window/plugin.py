"""`PluginSpec` of sliding-window attention: a call indexes the keys, then attends, with one launch per dilation.

Layers of a graph with one mask share the block index that the first of the layers computes.

This module needs neither Triton nor PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

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
from hdplugins.attention.window.operator import OPERATOR
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.block_config import (
    HEAD_DIMS,
    BlockConfig,
    block_config_for,
    ceil_div,
    check_head_dim,
    listed_architecture,
)
from hdplugins.kernels.cuda_launch import Launch

_GEMMA_HEAD_DIM = 256

WINDOW_HEAD_DIMS = (*HEAD_DIMS, _GEMMA_HEAD_DIM)
"""Values of head_dim that the kernel supports."""

# Found as in `block_config`.
_GEMMA_HALF = BlockConfig(64, 32, 8, 2, 256)
_GEMMA_FLOAT32 = BlockConfig(32, 16, 8, 2, 128)

_HALF_EXCEPTIONS = {
    (80, 80): BlockConfig(128, 32, 8, 3, 64),
    # Timed on an H100 (docs/gpu.md): three CTAs share a multiprocessor, and fewer masked keys at the window's edges are
    # computed than with the largest blocks that fit.
    (90, 32): BlockConfig(64, 64, 4, 3, 32, ctas_per_sm=3),
    (90, 64): BlockConfig(64, 64, 4, 3, 64, ctas_per_sm=3),
    (90, 80): BlockConfig(64, 64, 4, 3, 64, ctas_per_sm=3),
    (90, 96): BlockConfig(64, 64, 4, 3, 64),
    (90, 128): BlockConfig(64, 32, 4, 2, 128, ctas_per_sm=3),
}
"""(lowest architecture, head_dim) -> block config that differs from `block_config`, for float16 and bfloat16."""

HEADER_INTS = 4
"""int32 values at the start of a sequence's block index: number of globals, first local token, index after the
last local token, unused."""

INDEX_CHUNK = 256
"""Tokens that one CTA of `index_keys` indexes. To be tuned on a GPU."""

_BLOCK_GLOBALS = {"float16": 32, "bfloat16": 32, "float32": 16}
"""Dtype -> keys of one step over the globals; small, because a sequence has few globals."""


class SlidingWindowPlugin(PluginSpec):
    """`index_keys` computes the block index; consecutive heads of one dilation are one launch of `attend`."""

    OPERATOR = OPERATOR
    HEAD_DIMS = WINDOW_HEAD_DIMS
    FIELDS: ClassVar = {
        "left": FieldType.INT,
        "right": FieldType.INT,
        "dilation": FieldType.INTS,
        "global_bound": FieldType.INT,
        "scale": FieldType.FLOAT,
    }
    INPUT_DTYPES = (None, None, None, "int32")
    SCRATCH: ClassVar = {"block_index": "i32"}
    BLOCK_INDEX_ATTRIBUTES = ("global_bound",)
    POINTERS: ClassVar = {
        "index_keys": ("token_kind", "block_index"),
        "attend": ("query", "key", "value", "token_kind", "block_index", "out"),
    }
    SCALARS: ClassVar = {
        "index_keys": ("tokens", "global_bound"),
        "attend": (
            *stride_names("query", "key", "value", "out"), "tokens", "left", "right", "first_head", "group", "dilation",
            "global_bound", "scale",
        ),
    }  # fmt: skip

    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        head_dim = sizes(shapes[0]).head_dim
        check_head_dim(head_dim, self.HEAD_DIMS)
        # Also raises if no kernel supports the architecture or the dtype.
        config = block_config_for(architecture, min(head_dim, HEAD_DIMS[-1]), dtype)
        if dtype == "float32":
            return config if head_dim != _GEMMA_HEAD_DIM else _GEMMA_FLOAT32
        exceptions = _HALF_EXCEPTIONS | {(listed_architecture(architecture), _GEMMA_HEAD_DIM): _GEMMA_HALF}
        return exceptions.get((listed_architecture(architecture), head_dim), config)

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, block_config: BlockConfig
    ) -> Mapping[str, Mapping[str, Constant]]:
        return {
            "index_keys": {"HEADER": HEADER_INTS, "CHUNK": INDEX_CHUNK},
            "attend": {
                "HEADER": HEADER_INTS,
                **block_config.constants(sizes(shapes[0]).head_dim),
                "BLOCK_GLOBALS": _BLOCK_GLOBALS[dtype],
            },
        }

    def block_index_size(self, shapes: Shapes, attributes: Attributes) -> BlockIndexSize:
        return BlockIndexSize(fixed=HEADER_INTS + attributes["global_bound"], per_unit=2, unit=1)

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """Return the bytes of the block index, [batch, HEADER_INTS + 2 * tokens + global_bound] int32."""
        batch, _, tokens, _ = sizes(shapes[0])
        return {"block_index": 4 * batch * (HEADER_INTS + 2 * tokens + attributes["global_bound"])}

    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        batch, heads, tokens, _ = call.sizes
        left, right, dilation, global_bound, _ = (call.attributes[name] for name in self.FIELDS)
        # A dilation of the sequence's length or more: a query sees no other local token.
        of_head = [min(step, tokens) for step in (dilation if len(dilation) == heads else list(dilation) * heads)]
        common = {
            **call.scalars,
            "tokens": tokens,
            # A window wider than the sequence equals the sequence, and cannot overflow.
            "left": min(left, tokens),
            "right": min(right, tokens),
            "group": heads // sizes(call.shapes[1]).heads,
            "global_bound": global_bound,
        }
        index_ctas = ceil_div(tokens, call.constants["index_keys"]["CHUNK"])
        return (
            self.launch("index_keys", (index_ctas, batch, 1), common),
            *(
                # Each of the `step` residue classes has its own blocks.
                self.launch(
                    "attend",
                    (step * call.blocks_of(ceil_div(tokens, step)), count, batch),
                    common | {"first_head": first_head, "dilation": step},
                )
                for first_head, count, step in _runs(of_head)
            ),
        )

    def check_attributes(self, shapes: Shapes, attributes: Attributes) -> None:
        super().check_attributes(shapes, attributes)
        heads, dilation = sizes(shapes[0]).heads, attributes["dilation"]
        left, right, global_bound = (attributes[name] for name in ("left", "right", "global_bound"))
        for name, number in (("left", left), ("right", right), ("global_bound", global_bound)):
            if number < 0:
                raise ValueError(f"{name} is {number}; it must be 0 or more.")
        if len(dilation) not in (1, heads) or min(dilation) < 1:
            raise ValueError(
                f"dilation is {list(dilation)}; it must have 1 value or {heads}, one per head, each 1 or more."
            )


PLUGIN_SPEC = SlidingWindowPlugin()


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, value) of each run of equal values."""
    start = 0
    for value, run in itertools.groupby(values):
        length = len(list(run))
        yield start, length, value
        start += length
