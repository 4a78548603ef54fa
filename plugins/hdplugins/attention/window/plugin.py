"""Sliding-window attention as a plugin of engines: a call plans the keys, then attends, with one launch per dilation.

Layers of a graph that see one mask share the plan that the first of the layers makes.

Nothing here, the tiles of the kernels included, needs Triton or PyTorch: a machine that runs compiled kernels has
neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

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
from hdplugins.attention.window.operator import OPERATOR
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import (
    HEAD_DIMS,
    LOG2_E,
    Tiles,
    ceil_div,
    check_head_dim,
    check_sizes,
    listed_architecture,
    tiles_for,
)
from hdplugins.kernels.cuda_launch import Launch

_WIDE = 256
"""Gemma's size of a head."""

WINDOW_HEAD_DIMS = (*HEAD_DIMS, _WIDE)
"""Sizes of a head that the kernel is written for."""

# Found like those of `attention_tiles`.
_WIDE_HALF = Tiles(64, 32, 8, 2, 256)
_WIDE_FLOAT32 = Tiles(32, 16, 8, 2, 128)

_HALF_OTHERWISE = {
    (80, 80): Tiles(128, 32, 8, 3, 64),
    # Timed on an H100 (docs/gpu.md): three programs share a processor, and fewer keys at the window's edges are
    # computed in vain than with the largest tiles that fit.
    (90, 32): Tiles(64, 64, 4, 3, 32, programs=3),
    (90, 64): Tiles(64, 64, 4, 3, 64, programs=3),
    (90, 80): Tiles(64, 64, 4, 3, 64, programs=3),
    (90, 96): Tiles(64, 64, 4, 3, 64),
    (90, 128): Tiles(64, 32, 4, 2, 128, programs=3),
}
"""(lowest architecture, head_dim) -> tiles instead of those of `attention_tiles`, for float16 and bfloat16."""

SUMMARY_INTS = 4
"""int32 values at the start of a text's plan: globals listed, first local token, one past the last, unused."""

PLAN_CHUNK = 256
"""Tokens that one program of `plan_keys` describes. To be tuned on a GPU."""

_BLOCK_GLOBALS = {"float16": 32, "bfloat16": 32, "float32": 16}
"""Dtype -> keys of one step over the global columns; small, for a text has few of them."""


class _Face(PluginFace):
    """`plan_keys` describes the keys of each text; heads of one dilation in a row are one launch of `attend`."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {
        "left": FieldType.INT,
        "right": FieldType.INT,
        "dilation": FieldType.INTS,
        "global_bound": FieldType.INT,
        "scale": FieldType.FLOAT,
    }
    INPUT_DTYPES = (None, None, None, "int32")
    SCRATCH: ClassVar = {"plan": "i32"}
    PLANNED_BY = ("global_bound",)
    POINTERS: ClassVar = {
        "plan_keys": ("token_kind", "plan"),
        "attend": ("query", "key", "value", "token_kind", "plan", "out"),
    }
    SCALARS: ClassVar = {
        "plan_keys": ("tokens", "global_bound"),
        "attend": (
            *stride_names("query", "key", "value", "out"), "tokens", "left", "right", "first_head", "group", "dilation",
            "global_bound", "scale",
        ),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        head_dim = sizes(shapes[0]).head_dim
        check_head_dim(head_dim, WINDOW_HEAD_DIMS)
        # Those of another size refuse what no attention kernel is for.
        tiles = tiles_for(architecture, min(head_dim, HEAD_DIMS[-1]), dtype)
        if dtype == "float32":
            return tiles if head_dim != _WIDE else _WIDE_FLOAT32
        otherwise = _HALF_OTHERWISE | {(listed_architecture(architecture), _WIDE): _WIDE_HALF}
        return otherwise.get((listed_architecture(architecture), head_dim), tiles)

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        return {
            "plan_keys": {"summary_ints": SUMMARY_INTS, "chunk": PLAN_CHUNK},
            "attend": {
                "summary_ints": SUMMARY_INTS,
                **tiles.constants(sizes(shapes[0]).head_dim),
                "block_globals": _BLOCK_GLOBALS[dtype],
            },
        }

    def plan_size(self, shapes: Shapes, attributes: Attributes) -> PlanSize:
        return PlanSize(fixed=SUMMARY_INTS + attributes["global_bound"], per_unit=2, unit=1)

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """The plan is [batch, SUMMARY_INTS + 2 * tokens + global_bound] int32."""
        batch, _, tokens, _ = sizes(shapes[0])
        return {"plan": 4 * batch * (SUMMARY_INTS + 2 * tokens + attributes["global_bound"])}

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
        kv_heads = sizes(shapes[1]).heads
        left, right, dilation, global_bound, scale = (attributes[name] for name in self.FIELDS)
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=scale, head_dims=WINDOW_HEAD_DIMS)
        for name, number in (("left", left), ("right", right), ("global_bound", global_bound)):
            if number < 0:
                raise ValueError(f"{name} is {number}; it must be 0 or more.")
        if len(dilation) not in (1, heads) or min(dilation) < 1:
            raise ValueError(
                f"dilation is {list(dilation)}; it must have 1 value or {heads}, one per head, each 1 or more."
            )
        # Steps as long as the text and longer ones are alike: a query sees no local token but itself.
        of_head = [min(step, tokens) for step in (dilation if len(dilation) == heads else list(dilation) * heads)]
        plan = Launch(
            kernel="plan_keys",
            grid=(ceil_div(tokens, constants["plan_keys"]["chunk"]), batch, 1),
            scalars={"tokens": tokens, "global_bound": global_bound},
        )
        strided = self.stride_scalars(shapes, strides)
        attends = (
            Launch(
                kernel="attend",
                # Each of the `step` residue classes has blocks of its own.
                grid=(step * ceil_div(ceil_div(tokens, step), constants["attend"]["block_queries"]), count, batch),
                scalars={
                    **strided,
                    "tokens": tokens,
                    # Wider than the text is as wide as the text, and cannot overflow.
                    "left": min(left, tokens),
                    "right": min(right, tokens),
                    "first_head": first_head,
                    "group": heads // kv_heads,
                    "dilation": step,
                    "global_bound": global_bound,
                    "scale": scale * LOG2_E,
                },
            )
            for first_head, count, step in _runs(of_head)
        )
        return (plan, *attends)


FACE = _Face()


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, length, value) of each run of equal values."""
    start = 0
    for value, run in itertools.groupby(values):
        length = len(list(run))
        yield start, length, value
        start += length
