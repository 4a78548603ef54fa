"""Relative attention as a plugin of engines: a call is one launch, and needs no workspace.

Nothing here, the tiles of the kernels included, needs Triton or PyTorch: a machine that runs compiled kernels has
neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.plugin_face import (
    Attributes,
    FieldType,
    PluginFace,
    Shapes,
    Strides,
    sizes,
    stride_names,
)
from hdplugins.attention.relative.operator import OPERATOR
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import LOG2_E, Tiles, ceil_div, check_sizes, listed_architecture, tiles_for
from hdplugins.kernels.cuda_launch import Launch

# Found like those of `attention_tiles`, with and without segments. A tile has no more queries than keys: see
# `kernel`.
_HALF = {
    32: Tiles(64, 64, 8, 2, 32),
    64: Tiles(32, 64, 8, 2, 64),
    80: Tiles(32, 32, 4, 2, 64),
    96: Tiles(32, 32, 4, 2, 64),
    128: Tiles(32, 64, 8, 2, 128),
}
"""head_dim -> tiles, for float16 and bfloat16."""

_HALF_OTHERWISE = {
    # Not 64 queries on sm_90: the assembler makes the products of its tensor cores wait for each other (C7511).
    (90, 32): Tiles(32, 32, 4, 2, 32),
    (86, 96): Tiles(32, 32, 8, 2, 64),
    # Timed on an H100: 5.2 ms instead of 7.5 (docs/gpu.md).
    (90, 64): Tiles(32, 32, 4, 2, 64, programs=3),
    (100, 64): Tiles(64, 64, 8, 2, 64),
    (100, 128): Tiles(64, 64, 8, 2, 128),
}
"""(lowest architecture, head_dim) -> tiles instead of these; on sm_100 large enough for the newer tensor cores."""

_FLOAT32 = {
    32: Tiles(32, 64, 8, 2, 32),
    64: Tiles(32, 32, 8, 2, 64),
    80: Tiles(16, 32, 8, 2, 64),
    96: Tiles(16, 16, 8, 2, 64),
    128: Tiles(16, 16, 8, 2, 128),
}
"""Likewise for float32."""

_MOST_COLUMNS = {"float16": 64, "bfloat16": 64, "float32": 16}
"""Dtype -> columns of a head that one product with the positions takes, at most: more would not fit the registers."""


class _Face(PluginFace):
    """One kernel, with and without segments."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "int32", None, None, None, None)
    POINTERS: ClassVar = {"attend": (*OPERATOR.inputs, "out")}
    SCALARS: ClassVar = {
        "attend": (
            *stride_names("query", "key", "value", "out"), "stride_position_head", "tokens", "keys", "distances",
            "causal", "reach", "scale",
        ),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        head_dim = sizes(shapes[0]).head_dim
        tiles_for(architecture, head_dim, dtype)  # refuses what no attention kernel is for
        if dtype == "float32":
            return _FLOAT32[head_dim]
        return _HALF_OTHERWISE.get((listed_architecture(architecture), head_dim), _HALF[head_dim])

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        head_dim = sizes(shapes[0]).head_dim
        # A power of two that divides the head.
        columns = min(head_dim & -head_dim, _MOST_COLUMNS[dtype])
        return {"attend": {**tiles.constants(head_dim), "columns": columns}}

    def check_shapes(self, shapes: Shapes) -> None:
        most, given = len(OPERATOR.inputs), [list(shape) for shape in shapes]
        if not most - len(OPERATOR.optional_inputs) <= len(given) <= most:
            raise ValueError(f"{OPERATOR.name} has {most - 1} or {most} inputs, not {len(given)}.")
        query, key, _, _, positions, *_ = given
        if len(query) != 4 or len(key) != 4:
            raise ValueError(
                f"query is {query} and key is {key}; both have four axes, [batch, tokens, heads, head_dim], keys "
                "instead of tokens in the second."
            )
        (batch, heads, tokens, head_dim), keys = sizes(query), sizes(key).tokens
        distances = positions[1] if len(positions) == 3 else keys
        state, bias = list(query), [heads, head_dim]
        state[sizes(range(4)).tokens] = keys
        fitting = [
            query, state, state, [batch, keys], [heads, distances, head_dim], bias, bias, [batch, tokens, heads],
        ]  # fmt: skip
        for name, shape, fits in zip(OPERATOR.inputs, given, fitting, strict=False):
            if shape != fits:
                raise ValueError(f"{name} is {shape}; with a query {query} and {keys} keys it is {fits}.")
        if keys < tokens:
            raise ValueError(f"There are {keys} keys for {tokens} tokens; the text's own must be among them.")

    def launches(
        self,
        shapes: Shapes,
        attributes: Attributes,
        *,
        constants: Mapping[str, Mapping[str, Any]],
        strides: Strides | None = None,
    ) -> tuple[Launch, ...]:
        self.check_shapes(shapes)
        (batch, heads, tokens, head_dim), keys = sizes(shapes[0]), sizes(shapes[1]).tokens
        distances = shapes[4][1]
        causal, reach, scale = (attributes[name] for name in self.FIELDS)
        for rows in (tokens, keys, distances):
            check_sizes(batch=batch, heads=heads, tokens=rows, head_dim=head_dim, scale=scale)
        OPERATOR.check(causal=causal, reach=reach)
        needed = keys if causal else keys + tokens - 1
        if distances < needed:
            raise ValueError(f"positions has {distances} distances; {needed} are needed.")
        scalars = {
            **self.stride_scalars(shapes, strides),
            "stride_position_head": distances * head_dim,
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
