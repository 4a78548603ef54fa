"""Relative attention as a TensorRT plugin: a call is one launch, and needs no workspace."""

from __future__ import annotations

__all__ = ["FACE"]

from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.plugin_face import Attributes, FieldType, PluginFace, Shapes
from hdplugins.attention.relative.distances import check_distances
from hdplugins.attention.relative.operator import OPERATOR
from hdplugins.attention.relative.tiles import columns_at_a_time, tiles_for_distances
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import LOG2_E, Tiles, ceil_div, check_sizes
from hdplugins.kernels.cuda_launch import Launch


class _Face(PluginFace):
    """One kernel, with and without segments."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "int32", None, None, None, None)
    SCRATCH: ClassVar = {}
    POINTERS: ClassVar = {"attend": (*OPERATOR.inputs, "out")}
    SCALARS: ClassVar = {
        "attend": (
            "stride_batch", "stride_head", "stride_key_batch", "stride_key_head", "stride_position_head",
            "stride_token", "tokens", "keys", "distances", "causal", "reach", "scale",
        ),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        return tiles_for_distances(architecture, shapes[0][3], dtype)

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        head_dim = shapes[0][3]
        head = {"head": tiles.head, "tail": head_dim - tiles.head, "columns": columns_at_a_time(head_dim, dtype)}
        return {"attend": {**head, "block_queries": tiles.block_queries, "block_keys": tiles.block_keys}}

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        return {}

    def check_shapes(self, shapes: Shapes) -> None:
        most, given = len(OPERATOR.inputs), [list(shape) for shape in shapes]
        if not most - len(OPERATOR.optional_inputs) <= len(given) <= most:
            raise ValueError(f"{OPERATOR.name} has {most - 1} or {most} inputs, not {len(given)}.")
        query, key, _, _, positions, *_ = given
        if len(query) != 4 or len(key) != 4:
            raise ValueError(
                f"query is {query} and key is {key}; both have four axes, [batch, heads, tokens, head_dim], keys "
                "instead of tokens in the second."
            )
        (batch, heads, tokens, head_dim), keys = query, key[2]
        distances = positions[1] if len(positions) == 3 else keys
        state, bias = [batch, heads, keys, head_dim], [heads, head_dim]
        fitting = [
            query, state, state, [batch, keys], [heads, distances, head_dim], bias, bias, [batch, heads, tokens],
        ]  # fmt: skip
        for name, shape, fits in zip(OPERATOR.inputs, given, fitting, strict=False):
            if shape != fits:
                raise ValueError(f"{name} is {shape}; with a query {query} and {keys} keys it is {fits}.")
        if keys < tokens:
            raise ValueError(f"There are {keys} keys for {tokens} tokens; the text's own must be among them.")

    def launches(
        self, shapes: Shapes, attributes: Attributes, *, constants: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Launch, ...]:
        self.check_shapes(shapes)
        (batch, heads, tokens, head_dim), keys, distances = shapes[0], shapes[1][2], shapes[4][1]
        causal, reach, scale = (attributes[name] for name in self.FIELDS)
        for rows in (tokens, keys, distances):
            check_sizes(batch=batch, heads=heads, tokens=rows, head_dim=head_dim, scale=scale)
        check_distances(causal=causal, reach=reach)
        needed = keys if causal else keys + tokens - 1
        if distances < needed:
            raise ValueError(f"positions has {distances} distances; {needed} are needed.")
        scalars = {
            "stride_batch": heads * tokens * head_dim,
            "stride_head": tokens * head_dim,
            "stride_key_batch": heads * keys * head_dim,
            "stride_key_head": keys * head_dim,
            "stride_position_head": distances * head_dim,
            "stride_token": head_dim,
            "tokens": tokens,
            "keys": keys,
            "distances": distances,
            "causal": causal,
            # Farther than all keys is as far as all keys, and cannot overflow.
            "reach": min(reach, keys),
            "scale": scale * LOG2_E,
        }
        grid = (ceil_div(tokens, constants["attend"]["block_queries"]), heads, batch)
        return (Launch(kernel="attend", grid=grid, scalars=scalars),)


FACE = _Face()
