"""LSH attention as a plugin of engines: a call hashes, sorts, and attends once per round."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.chunks.operator import padded_tokens
from hdplugins.attention.chunks.plugin import FACE as CHUNKS
from hdplugins.attention.chunks.plugin import check_circle
from hdplugins.attention.lsh.operator import OPERATOR, check_rotations
from hdplugins.attention.plugin_face import (
    Attributes,
    FieldType,
    PluginFace,
    Shapes,
    Strides,
    sizes,
    stride_names,
)
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import INNER_LOOP, LOG2_E, Tiles, ceil_div, check_sizes
from hdplugins.kernels.cuda_launch import Launch

_TOKENS_HASHED = 64
"""Tokens of one program of `hash_tokens`. To be tuned on a GPU, as are the numbers below."""

_DIRECTIONS_AT_A_TIME = 16
_COLUMNS_AT_A_TIME = 16

_TOKENS_SORTED = 64
"""Tokens that `count` and `place` take at a time."""

_COUNTS_SCANNED = 1024
"""Counts that `scan` takes at a time."""

_COUNTS_PER_TOKEN = 4
"""Most places per token, where there are many buckets: spans of tokens are as long as that takes."""

_MOST_INT32 = 2**31 - 1

_SORTING = ("tokens", "rounds", "buckets", "spans", "span_tokens")


class _Face(PluginFace):
    """One launch of `hash_tokens` per factor of the buckets, and one of `attend` per round."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {
        **dict.fromkeys(OPERATOR.attributes, FieldType.INT), "buckets": FieldType.INTS, "scale": FieldType.FLOAT,
    }  # fmt: skip
    INPUT_DTYPES = (None, None, "int32", "float32")
    SCRATCH: ClassVar = {
        "hashes": "i32", "places": "i32", "order": "i32", "factors": "fp32", "sums": "fp32", "weights": "fp32",
    }  # fmt: skip
    POINTERS: ClassVar = {
        "hash_tokens": ("query_key", "token_mask", "rotations", "hashes", "factors"),
        "count": ("hashes", "places"),
        "scan": ("places",),
        "place": ("hashes", "places", "order"),
        "attend": ("query_key", "value", "factors", "order", "places", "sums", "weights", "out"),
    }
    SCALARS: ClassVar = {
        "hash_tokens": (
            *stride_names("query_key"), "tokens", "head_dim", "rounds", "directions", "first_direction", "half", "size",
            "buckets",
        ),
        "count": _SORTING,
        "scan": ("buckets", "spans"),
        "place": _SORTING,
        "attend": (
            *stride_names("query_key", "value", "out"), "tokens", "rounds", "buckets", "spans", "chunk", "chunks",
            "multiple", "before", "after", "causal", "ends_by_row", "this_round", "scale",
        ),
    }  # fmt: skip
    CALLED_MODULES = (INNER_LOOP, f"{CHUNKS.OPERATOR.package}.kernel")

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        return CHUNKS.tiles(shapes, attributes, dtype=dtype, architecture=architecture)

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        return {
            "hash_tokens": {
                "rows": _TOKENS_HASHED, "lanes": _DIRECTIONS_AT_A_TIME, "columns": _COLUMNS_AT_A_TIME,
            },
            "count": {"lanes": _TOKENS_SORTED},
            "scan": {"lanes": _COUNTS_SCANNED},
            "place": {"lanes": _TOKENS_SORTED},
            "attend": tiles.constants(sizes(shapes[0]).head_dim),
        }  # fmt: skip

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """Linear in tokens: per token and head 4 bytes and 24 per round; with several rounds 4 * (head_dim + 2) more.

        ``hashes`` and ``order`` are [batch, heads, rounds, tokens] int32, ``places`` is [batch, heads, rounds, buckets,
        spans] int32, ``factors`` is [batch, heads, tokens], ``sums`` [batch, heads, tokens, head_dim] and ``weights``
        [batch, heads, tokens, 2] float32. There are at most `_COUNTS_PER_TOKEN` places per token, or a
        single span.
        """
        batch, heads, tokens, head_dim = sizes(shapes[0])
        texts, rounds = batch * heads, attributes["rounds"]
        kept = tokens if rounds > 1 else 0
        values = {
            "hashes": rounds * tokens,
            "places": rounds * _buckets(attributes) * _most_spans(tokens, attributes),
            "order": rounds * tokens,
            "factors": tokens,
            "sums": kept * head_dim,
            "weights": 2 * kept,
        }
        return {name: 4 * texts * count for name, count in values.items()}

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
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=attributes["scale"])
        _check_attributes(shapes, attributes)
        chunk, factors, rounds = (attributes[name] for name in ("chunk", "buckets", "rounds"))
        buckets, spans = _buckets(attributes), _most_spans(tokens, attributes)
        span_tokens = ceil_div(ceil_div(tokens, _TOKENS_SORTED), spans) * _TOKENS_SORTED
        known = {
            **{name: attributes[name] for name in ("multiple", "before", "after", "causal", "ends_by_row")},
            **self.stride_scalars(shapes, strides),
            "tokens": tokens,
            "head_dim": head_dim,
            "rounds": rounds,
            "directions": sum(factors) // 2,
            "buckets": buckets,
            "spans": spans,
            "span_tokens": span_tokens,
            "chunk": chunk,
            "chunks": padded_tokens(tokens, attributes["multiple"]) // chunk,
            "scale": attributes["scale"] * LOG2_E,
        }

        def start(kernel: str, programs: int, **own: int) -> Launch:
            given = known | own
            scalars = {name: given[name] for name in self.SCALARS[kernel]}
            return Launch(kernel=kernel, grid=(programs, heads, batch), scalars=scalars)

        tiles = ceil_div(min(chunk, tokens), constants["attend"]["block_queries"])
        group_sizes = itertools.accumulate(factors, operator.mul, initial=1)
        directions = itertools.accumulate((factor // 2 for factor in factors), initial=0)
        return (
            *(
                start(
                    "hash_tokens", ceil_div(tokens, constants["hash_tokens"]["rows"]),
                    first_direction=first, half=factor // 2, size=size,
                )
                for factor, size, first in zip(factors, group_sizes, directions, strict=False)
            ),
            start("count", rounds * spans),
            start("scan", rounds),
            start("place", rounds * spans),
            *(start("attend", ceil_div(tokens, chunk) * tiles, this_round=number) for number in range(rounds)),
        )  # fmt: skip


FACE = _Face()


def _buckets(attributes: Attributes) -> int:
    """The number of buckets, with the one for padding."""
    return math.prod(attributes["buckets"]) + 1


def _most_spans(tokens: int, attributes: Attributes) -> int:
    """The spans that a text is cut into."""
    return min(ceil_div(tokens, _TOKENS_SORTED), max(1, _COUNTS_PER_TOKEN * tokens // _buckets(attributes)))


def _check_attributes(shapes: Shapes, attributes: Attributes) -> None:
    (_, heads, tokens, head_dim), buckets, rounds = sizes(shapes[0]), attributes["buckets"], attributes["rounds"]
    if len(shapes) < len(OPERATOR.inputs):
        raise ValueError("rotations are missing; LSH attention needs them.")
    OPERATOR.check(**attributes)
    check_rotations(shapes[3], heads=heads, head_dim=head_dim, buckets=buckets, rounds=rounds)
    check_circle(tokens, attributes)
    counts = _buckets(attributes) * _most_spans(tokens, attributes)
    if max(counts, head_dim * rounds * sum(buckets)) > _MOST_INT32 // 2:
        raise ValueError(f"buckets is {list(buckets)}: too many for the kernels, which count to {_MOST_INT32 // 2}.")
