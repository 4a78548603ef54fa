"""Chunk attention as a plugin of engines: a call is one launch.

The tiles are those of LSH attention, too. Nothing here needs Triton or PyTorch: a machine that runs compiled kernels
has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.chunks.operator import OPERATOR, padded_tokens
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

# Found like those of `attention_tiles`, for both operators alike. None has been timed.
_HALF = {16: (16, 16, 2, 3), 32: (32, 32, 2, 3), 64: (64, 64, 4, 3)}
"""Tokens of a chunk rounded up to a power of two, 64 for more -> tiles without `head`, for float16 and bfloat16."""

_FLOAT32 = {16: (16, 16, 4, 2), 32: (32, 32, 4, 2)}
"""Likewise for float32, 32 for more."""

_HALF_OTHERWISE = {
    **dict.fromkeys(
        [(80, 96, 64), (80, 128, 64), (86, 96, 64), (86, 128, 64), (120, 128, 64), (120, 80, 64)],
        Tiles(64, 32, 4, 3, 64),
    ),
    (120, 96, 64): Tiles(64, 32, 4, 2, 64),
}
"""(lowest architecture, head_dim, the tokens above) -> tiles instead of these, where registers would spill."""

_FLOAT32_OTHERWISE = {
    **{(architecture, 80, 32): Tiles(32, 32, 8, 2, 64) for architecture in (80, 86, 90, 100, 120)},
    **{(architecture, 96, 32): Tiles(32, 32, 8, 2, 64) for architecture in (80, 120)},
    (86, 96, 32): Tiles(32, 16, 8, 2, 64),
    **dict.fromkeys([(90, 96, 32), (100, 96, 32)], Tiles(32, 16, 4, 2, 64)),
    (80, 128, 32): Tiles(32, 16, 8, 2, 64),
    (80, 64, 16): Tiles(16, 16, 4, 2, 64),
}
"""Likewise for float32."""

_MOST_PLACES = 2**29
"""Most tokens, and most chunks: sums of three are still an int32."""


class _Face(PluginFace):
    """One kernel, which needs no workspace and serves chunks of every size."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "int32")
    POINTERS: ClassVar = {"attend": ("query", "key", "value", "token_mask", "out")}
    SCALARS: ClassVar = {
        "attend": (
            *stride_names("query", "key", "value", "out"), "tokens", "chunk", "chunks", "before", "after", "causal",
            "scale",
        ),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        """A chunk of queries and of keys, or a part of one."""
        head_dim, chunk = sizes(shapes[0]).head_dim, attributes["chunk"]
        head = tiles_for(architecture, head_dim, dtype).head
        tiles, otherwise = (_FLOAT32, _FLOAT32_OTHERWISE) if dtype == "float32" else (_HALF, _HALF_OTHERWISE)
        side = next((side for side in tiles if chunk <= side), max(tiles))
        return otherwise.get((listed_architecture(architecture), head_dim, side)) or Tiles(*tiles[side], head=head)

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
        chunk, before, after, multiple, causal, scale = (attributes[name] for name in self.FIELDS)
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=scale)
        OPERATOR.check(**attributes)
        check_circle(tokens, attributes)
        tiles = ceil_div(min(chunk, tokens), constants["attend"]["block_queries"])
        scalars = {
            **self.stride_scalars(shapes, strides),
            "tokens": tokens,
            "chunk": chunk,
            "chunks": padded_tokens(tokens, multiple) // chunk,
            "before": before,
            "after": after,
            "causal": causal,
            "scale": scale * LOG2_E,
        }
        return (Launch(kernel="attend", grid=(ceil_div(tokens, chunk) * tiles, heads, batch), scalars=scalars),)


FACE = _Face()


def check_circle(tokens: int, attributes: Attributes) -> None:
    """Refuse, by a ValueError, chunks whose places the kernels cannot count, in all rounds where there are several."""
    chunk, before, after, multiple = (attributes[name] for name in ("chunk", "before", "after", "multiple"))
    rounds = attributes.get("rounds", 1)
    counted = max(rounds * (tokens + multiple), (before + 1 + after) * min(chunk, tokens))
    if counted > _MOST_PLACES:
        raise ValueError(
            f"{tokens} tokens padded to a multiple of {multiple}, in chunks of {chunk} with {before} before and "
            f"{after} after, are too many for the kernels: they count to {_MOST_PLACES}."
        )
