"""Chunk attention as a TensorRT plugin: a call is one launch."""

from __future__ import annotations

__all__ = ["FACE", "check_circle"]

from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.chunks.neighbours import check_chunks, padded_tokens
from hdplugins.attention.chunks.operator import OPERATOR
from hdplugins.attention.chunks.tiles import tiles_for_chunks
from hdplugins.attention.plugin_face import Attributes, FieldType, PluginFace, Shapes
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import LOG2_E, Tiles, ceil_div, check_sizes
from hdplugins.kernels.cuda_launch import Launch

_MOST_PLACES = 2**29
"""Of tokens and of chunks: sums of three are still an int32."""


class _Face(PluginFace):
    """One kernel, which needs no workspace and serves chunks of every size."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "int32")
    SCRATCH: ClassVar = {}
    POINTERS: ClassVar = {"attend": ("query", "key", "value", "token_mask", "out")}
    SCALARS: ClassVar = {
        "attend": (
            "stride_batch", "stride_head", "stride_token", "tokens", "chunk", "chunks", "before", "after", "causal",
            "scale",
        ),
    }  # fmt: skip

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        return tiles_for_chunks(architecture, shapes[0][3], dtype, attributes["chunk"])

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        head = {"head": tiles.head, "tail": shapes[0][3] - tiles.head}
        return {"attend": {**head, "block_queries": tiles.block_queries, "block_keys": tiles.block_keys}}

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        return {}

    def launches(
        self, shapes: Shapes, attributes: Attributes, *, constants: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Launch, ...]:
        self.check_shapes(shapes)
        batch, heads, tokens, head_dim = shapes[0]
        chunk, before, after, multiple, causal, scale = (attributes[name] for name in self.FIELDS)
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=scale)
        check_circle(tokens, chunk=chunk, before=before, after=after, multiple=multiple, causal=causal)
        tiles = ceil_div(min(chunk, tokens), constants["attend"]["block_queries"])
        scalars = {
            "stride_batch": heads * tokens * head_dim,
            "stride_head": tokens * head_dim,
            "stride_token": head_dim,
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


def check_circle(
    tokens: int, *, chunk: int, before: int, after: int, multiple: int, causal: int, rounds: int = 1
) -> None:
    """Refuse chunks that define nothing, and those whose places the kernels cannot count.

    Args:
        tokens: of a text.
        chunk: see `reference`, as for the others.
        rounds: times that the tokens lie in the circle.

    Raises:
        ValueError: it says what fits.
    """
    check_chunks(chunk=chunk, before=before, after=after, multiple=multiple, causal=causal)
    counted = max(rounds * (tokens + multiple), (before + 1 + after) * min(chunk, tokens))
    if counted > _MOST_PLACES:
        raise ValueError(
            f"{tokens} tokens padded to a multiple of {multiple}, in chunks of {chunk} with {before} before and "
            f"{after} after, are too many for the kernels: they count to {_MOST_PLACES}."
        )
