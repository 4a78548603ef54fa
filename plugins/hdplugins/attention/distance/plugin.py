"""Attention by clipped distance as a TensorRT plugin: a call is one launch, and needs no workspace."""

from __future__ import annotations

__all__ = ["FACE"]

from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.distance.operator import OPERATOR
from hdplugins.attention.distance.tiles import tiles_by_distance
from hdplugins.attention.plugin_face import Attributes, FieldType, PluginFace, Shapes
from hdplugins.attention.reach import check_reach
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import LOG2_E, Tiles, ceil_div, check_sizes
from hdplugins.kernels.cuda_launch import Launch

_MOST_INT32 = 2**31 - 1


class _Face(PluginFace):
    """One kernel, with and without values by distance."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {"reach": FieldType.INT, "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "bool", None, None)
    SCRATCH: ClassVar = {}
    POINTERS: ClassVar = {"attend": (*OPERATOR.inputs, "out")}
    SCALARS: ClassVar = {
        "attend": (
            "stride_batch", "stride_head", "stride_token", "table_batch", "table_head", "table_query", "tokens",
            "reach", "scale",
        ),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        return tiles_by_distance(architecture, shapes[0][3], dtype, values=len(shapes) == len(OPERATOR.inputs))

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        head = {"head": tiles.head, "tail": shapes[0][3] - tiles.head}
        return {"attend": {**head, "block_queries": tiles.block_queries, "block_keys": tiles.block_keys}}

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        return {}

    def check_shapes(self, shapes: Shapes) -> None:
        most, given = len(OPERATOR.inputs), [list(shape) for shape in shapes]
        if not most - 1 <= len(given) <= most:
            raise ValueError(f"{OPERATOR.name} has {most - 1} or {most} inputs, not {len(given)}.")
        super().check_shapes(shapes)
        (batch, heads, tokens, head_dim), scores = given[0], given[4]
        fits_query = len(scores) == 4 and scores[0] in (1, batch) and scores[1] == heads and scores[2] in (1, tokens)
        if not fits_query or scores[3] < 3 or scores[3] % 2 == 0:
            raise ValueError(
                f"scores_by_distance is {scores}; with a query {given[0]} it is [1 or {batch}, {heads}, 1 or {tokens}, "
                "2 * reach + 1]."
            )
        if given[5:] not in ([], [[scores[3], head_dim]]):
            raise ValueError(f"values_by_distance is {given[5]}; with these scores it is {[scores[3], head_dim]}.")

    def launches(
        self, shapes: Shapes, attributes: Attributes, *, constants: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Launch, ...]:
        self.check_shapes(shapes)
        (batch, heads, tokens, head_dim), (batches, _, queries, rows) = shapes[0], shapes[4]
        reach, scale = (attributes[name] for name in self.FIELDS)
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=scale)
        check_reach(reach)
        if rows != 2 * reach + 1:
            raise ValueError(f"scores_by_distance has {rows} distances; a reach of {reach} has {2 * reach + 1}.")
        if max(heads * queries, head_dim) * rows > _MOST_INT32:
            raise ValueError(
                f"scores_by_distance {list(shapes[4])} is too large for one launch: that of a text has at most "
                f"{_MOST_INT32} values, as have values_by_distance."
            )
        scalars = {
            "stride_batch": heads * tokens * head_dim,
            "stride_head": tokens * head_dim,
            "stride_token": head_dim,
            "table_batch": heads * queries * rows if batches > 1 else 0,
            "table_head": queries * rows,
            "table_query": rows if queries > 1 else 0,
            "tokens": tokens,
            "reach": reach,
            "scale": scale * LOG2_E,
        }
        grid = (ceil_div(tokens, constants["attend"]["block_queries"]), heads, batch)
        return (Launch(kernel="attend", grid=grid, scalars=scalars),)


FACE = _Face()
