"""Attention by clipped distance as a plugin of engines: a call is one launch, and needs no workspace.

Nothing here, the tiles of the kernels included, needs Triton or PyTorch: a machine that runs compiled kernels has
neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.distance.operator import OPERATOR
from hdplugins.attention.plugin_face import (
    Attributes,
    FieldType,
    PluginFace,
    Shapes,
    Strides,
    sizes,
    stride_names,
)
from hdplugins.kernels.attention_tiles import LOG2_E, Tiles, ceil_div, check_sizes, listed_architecture, tiles_for
from hdplugins.kernels.cuda_launch import Launch

# Found like those of `attention_tiles`.
_HALF = {
    32: Tiles(128, 64, 8, 3, 32),
    64: Tiles(128, 64, 8, 3, 64),
    80: Tiles(128, 64, 8, 3, 64),
    96: Tiles(128, 64, 8, 3, 64),
    128: Tiles(64, 64, 8, 2, 64),
}
"""head_dim -> tiles without values by distance, for float16 and bfloat16."""

_HALF_OTHERWISE = {
    # Timed on an H100: 4.5 ms instead of 5.3 (docs/gpu.md).
    (90, 64): Tiles(64, 64, 4, 2, 64, programs=3),
    **dict.fromkeys([(90, 128), (100, 128)], Tiles(128, 64, 8, 3, 64)),
    **dict.fromkeys([(80, 96), (86, 96)], Tiles(64, 32, 8, 2, 64)),
    **dict.fromkeys([(86, 80), (120, 80), (120, 128)], Tiles(32, 64, 8, 2, 64)),
    (120, 96): Tiles(32, 32, 4, 2, 64),
}
"""(lowest architecture, head_dim) -> tiles instead of these."""

_HALF_WITH_VALUES = {
    32: Tiles(128, 64, 8, 3, 32),
    64: Tiles(128, 64, 8, 3, 64),
    80: Tiles(32, 64, 8, 2, 64),
    96: Tiles(16, 32, 4, 2, 64),
    128: Tiles(32, 64, 8, 2, 64),
}
"""head_dim -> tiles with values by distance, likewise."""

_HALF_WITH_VALUES_OTHERWISE = {
    **dict.fromkeys([(80, 32), (86, 32), (90, 32)], Tiles(128, 32, 8, 3, 32)),
    # Timed likewise: 2.4 ms instead of 3.0 at 1024 tokens.
    (90, 64): Tiles(64, 32, 4, 2, 64),
    (90, 80): Tiles(128, 32, 8, 3, 64),
    (100, 64): Tiles(128, 64, 8, 2, 64),
    (100, 96): Tiles(128, 64, 8, 3, 64),
    **dict.fromkeys([(100, 80), (90, 128), (100, 128)], Tiles(64, 64, 8, 2, 64)),
    (120, 32): Tiles(64, 64, 8, 2, 32),
    (120, 80): Tiles(32, 16, 4, 2, 64),
    **dict.fromkeys([(80, 64), (86, 64), (120, 64)], Tiles(32, 64, 8, 2, 64)),
    (80, 80): Tiles(32, 32, 4, 2, 64),
}

_FLOAT32 = {
    32: Tiles(32, 32, 8, 2, 32),
    64: Tiles(32, 32, 8, 2, 64),
    80: Tiles(32, 32, 8, 2, 64),
    96: Tiles(32, 32, 8, 2, 64),
    128: Tiles(32, 32, 8, 2, 64),
}
"""Likewise for float32, without values."""

_FLOAT32_OTHERWISE = {
    (100, 32): Tiles(16, 32, 8, 2, 32),
    (100, 128): Tiles(16, 32, 8, 2, 64),
    **dict.fromkeys([(86, 96), (86, 128)], Tiles(32, 16, 8, 2, 64)),
}

_FLOAT32_WITH_VALUES = {
    32: Tiles(32, 32, 8, 2, 32),
    64: Tiles(32, 32, 8, 2, 64),
    80: Tiles(16, 32, 8, 2, 64),
    96: Tiles(16, 32, 8, 2, 64),
    128: Tiles(16, 32, 8, 2, 64),
}
"""Likewise for float32, with values."""

_FLOAT32_WITH_VALUES_OTHERWISE = {
    (86, 32): Tiles(16, 16, 8, 2, 32),
    (90, 32): Tiles(16, 32, 8, 2, 32),
    (100, 64): Tiles(16, 32, 8, 2, 64),
    (80, 96): Tiles(32, 16, 8, 2, 64),
}

_TABLES = {
    (False, False): (_HALF, _HALF_OTHERWISE),
    (False, True): (_HALF_WITH_VALUES, _HALF_WITH_VALUES_OTHERWISE),
    (True, False): (_FLOAT32, _FLOAT32_OTHERWISE),
    (True, True): (_FLOAT32_WITH_VALUES, _FLOAT32_WITH_VALUES_OTHERWISE),
}
"""(float32, with values) -> tables."""

_MOST_INT32 = 2**31 - 1


class _Face(PluginFace):
    """One kernel, with and without values by distance."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {"reach": FieldType.INT, "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "bool", None, None)
    POINTERS: ClassVar = {"attend": (*OPERATOR.inputs, "out")}
    SCALARS: ClassVar = {
        "attend": (
            *stride_names("query", "key", "value", "out"), "table_batch", "table_head", "table_query", "tokens",
            "reach", "scale",
        ),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        head_dim, has_values = sizes(shapes[0]).head_dim, len(shapes) == len(OPERATOR.inputs)
        tiles_for(architecture, head_dim, dtype)  # refuses what no attention kernel is for
        tiles, otherwise = _TABLES[dtype == "float32", has_values]
        return otherwise.get((listed_architecture(architecture), head_dim), tiles[head_dim])

    def check_shapes(self, shapes: Shapes) -> None:
        most, given = len(OPERATOR.inputs), [list(shape) for shape in shapes]
        if not most - 1 <= len(given) <= most:
            raise ValueError(f"{OPERATOR.name} has {most - 1} or {most} inputs, not {len(given)}.")
        super().check_shapes(shapes)
        (batch, heads, tokens, head_dim), scores = sizes(given[0]), given[4]
        fits_query = len(scores) == 4 and scores[0] in (1, batch) and scores[1] in (1, tokens) and scores[2] == heads
        if not fits_query or scores[3] < 3 or scores[3] % 2 == 0:
            raise ValueError(
                f"scores_by_distance is {scores}; with a query {given[0]} it is [1 or {batch}, 1 or {tokens}, {heads}, "
                "2 * reach + 1]."
            )
        if given[5:] not in ([], [[scores[3], head_dim]]):
            raise ValueError(f"values_by_distance is {given[5]}; with these scores it is {[scores[3], head_dim]}.")

    def launches(
        self,
        shapes: Shapes,
        attributes: Attributes,
        *,
        constants: Mapping[str, Mapping[str, Any]],
        strides: Strides | None = None,
    ) -> tuple[Launch, ...]:
        self.check_shapes(shapes)
        (batch, heads, tokens, head_dim), (batches, queries, _, rows) = sizes(shapes[0]), shapes[4]
        reach, scale = (attributes[name] for name in self.FIELDS)
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=scale)
        OPERATOR.check(reach=reach)
        if rows != 2 * reach + 1:
            raise ValueError(f"scores_by_distance has {rows} distances; a reach of {reach} has {2 * reach + 1}.")
        if max(heads * queries, head_dim) * rows > _MOST_INT32:
            raise ValueError(
                f"scores_by_distance {list(shapes[4])} is too large for one launch: that of a text has at most "
                f"{_MOST_INT32} values, as have values_by_distance."
            )
        scalars = {
            **self.stride_scalars(shapes, strides),
            "table_batch": heads * queries * rows if batches > 1 else 0,
            "table_head": rows,
            "table_query": heads * rows if queries > 1 else 0,
            "tokens": tokens,
            "reach": reach,
            "scale": scale * LOG2_E,
        }
        grid = (ceil_div(tokens, constants["attend"]["block_queries"]), heads, batch)
        return (Launch(kernel="attend", grid=grid, scalars=scalars),)


FACE = _Face()
