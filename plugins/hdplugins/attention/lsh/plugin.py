"""`PluginSpec` of LSH attention: a call hashes the tokens, sorts them, and attends once per round."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from typing import ClassVar

from hdplugins.attention.chunks.operator import padded_tokens
from hdplugins.attention.chunks.plugin import PLUGIN_SPEC as CHUNKS
from hdplugins.attention.chunks.plugin import check_circle
from hdplugins.attention.lsh.operator import OPERATOR, check_rotations
from hdplugins.attention.plugin_spec import Attributes, FieldType, KernelCall, PluginSpec, Shapes, sizes, stride_names
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.block_config import ONLINE_SOFTMAX, BlockConfig, ceil_div
from hdplugins.kernels.cuda_launch import Launch

_TOKENS_HASHED = 64
"""Tokens of one CTA of `hash_tokens`. To be tuned on a GPU, as are the numbers below."""

_DIRECTIONS_PER_STEP = 16
_COLUMNS_PER_STEP = 16

_TOKENS_SORTED = 64
"""Tokens of one step of `count` and `scatter`."""

_COUNTS_SCANNED = 1024
"""Counts of one step of `scan`."""

_COUNTS_PER_TOKEN = 4
"""Maximum bucket offsets per token: with many buckets, spans of tokens become longer."""

_MAX_INT32 = 2**31 - 1

_SORTING = ("tokens", "rounds", "buckets", "spans", "span_tokens")


class LSHPlugin(PluginSpec):
    """One launch of `hash_tokens` per factor of the buckets, and one of `attend` per round."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {
        **dict.fromkeys(OPERATOR.attributes, FieldType.INT), "buckets": FieldType.INTS, "scale": FieldType.FLOAT,
    }  # fmt: skip
    INPUT_DTYPES = (None, None, "int32", "float32")
    SCRATCH: ClassVar = {
        "hashes": "i32", "bucket_offsets": "i32", "order": "i32", "factors": "fp32", "round_acc": "fp32",
        "round_ml": "fp32",
    }  # fmt: skip
    POINTERS: ClassVar = {
        "hash_tokens": ("query_key", "token_mask", "rotations", "hashes", "factors"),
        "count": ("hashes", "bucket_offsets"),
        "scan": ("bucket_offsets",),
        "scatter": ("hashes", "bucket_offsets", "order"),
        "attend": ("query_key", "value", "factors", "order", "bucket_offsets", "round_acc", "round_ml", "out"),
    }
    SCALARS: ClassVar = {
        "hash_tokens": (
            *stride_names("query_key"), "tokens", "head_dim", "rounds", "directions", "first_direction", "half", "size",
            "buckets",
        ),
        "count": _SORTING,
        "scan": ("buckets", "spans"),
        "scatter": _SORTING,
        "attend": (
            *stride_names("query_key", "value", "out"), "tokens", "rounds", "buckets", "spans", "chunk", "chunks",
            "multiple", "before", "after", "causal", "ends_by_row", "i_round", "scale",
        ),
    }  # fmt: skip
    CALLED_MODULES = (ONLINE_SOFTMAX, f"{CHUNKS.OPERATOR.package}.kernel")

    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        return CHUNKS.block_config(shapes, attributes, dtype=dtype, architecture=architecture)

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, block_config: BlockConfig
    ) -> Mapping[str, Mapping[str, Constant]]:
        return {
            "hash_tokens": {
                "BLOCK_T": _TOKENS_HASHED, "BLOCK_R": _DIRECTIONS_PER_STEP, "COLUMNS": _COLUMNS_PER_STEP,
            },
            "count": {"BLOCK_T": _TOKENS_SORTED},
            "scan": {"BLOCK_C": _COUNTS_SCANNED},
            "scatter": {"BLOCK_T": _TOKENS_SORTED},
            "attend": block_config.constants(sizes(shapes[0]).head_dim),
        }  # fmt: skip

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """Return bytes per buffer, per token and head 4, and 24 per round; with several rounds 4 * (head_dim + 2) more.

        ``hashes`` and ``order`` are [batch, heads, rounds, tokens] int32, ``bucket_offsets`` is [batch, heads, rounds,
        buckets, spans] int32, ``factors`` is [batch, heads, tokens], ``round_acc`` [batch, heads, tokens, head_dim] and
        ``round_ml`` [batch, heads, tokens, 2] float32. There are at most `_COUNTS_PER_TOKEN` bucket offsets per token,
        or a single span.
        """
        batch, heads, tokens, head_dim = sizes(shapes[0])
        rounds = attributes["rounds"]
        saved_tokens = tokens if rounds > 1 else 0
        values = {
            "hashes": rounds * tokens,
            "bucket_offsets": rounds * _buckets(attributes) * _spans(tokens, attributes),
            "order": rounds * tokens,
            "factors": tokens,
            "round_acc": saved_tokens * head_dim,
            "round_ml": 2 * saved_tokens,
        }
        return {name: 4 * batch * heads * count for name, count in values.items()}

    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        batch, heads, tokens, head_dim = call.sizes
        attributes = call.attributes
        chunk, factors, rounds = (attributes[name] for name in ("chunk", "buckets", "rounds"))
        buckets, spans = _buckets(attributes), _spans(tokens, attributes)
        span_tokens = ceil_div(ceil_div(tokens, _TOKENS_SORTED), spans) * _TOKENS_SORTED
        common = {
            **{name: attributes[name] for name in ("multiple", "before", "after", "causal", "ends_by_row")},
            **call.scalars,
            "tokens": tokens,
            "head_dim": head_dim,
            "rounds": rounds,
            "directions": sum(factors) // 2,
            "buckets": buckets,
            "spans": spans,
            "span_tokens": span_tokens,
            "chunk": chunk,
            "chunks": padded_tokens(tokens, attributes["multiple"]) // chunk,
        }

        def launch(kernel: str, ctas: int, **scalars: int) -> Launch:
            return self.launch(kernel, (ctas, heads, batch), common | scalars)

        group_sizes = itertools.accumulate(factors, operator.mul, initial=1)
        directions = itertools.accumulate((factor // 2 for factor in factors), initial=0)
        return (
            *(
                launch(
                    "hash_tokens", ceil_div(tokens, call.constants["hash_tokens"]["BLOCK_T"]),
                    first_direction=first, half=factor // 2, size=size,
                )
                for factor, size, first in zip(factors, group_sizes, directions, strict=False)
            ),
            launch("count", rounds * spans),
            launch("scan", rounds),
            launch("scatter", rounds * spans),
            *(
                launch("attend", ceil_div(tokens, chunk) * call.blocks_of(min(chunk, tokens)), i_round=i_round)
                for i_round in range(rounds)
            ),
        )  # fmt: skip

    def check_attributes(self, shapes: Shapes, attributes: Attributes) -> None:
        (_, heads, tokens, head_dim), buckets, rounds = sizes(shapes[0]), attributes["buckets"], attributes["rounds"]
        if len(shapes) < len(OPERATOR.inputs):
            raise ValueError("rotations are missing; LSH attention needs them.")
        super().check_attributes(shapes, attributes)
        check_rotations(shapes[3], heads=heads, head_dim=head_dim, buckets=buckets, rounds=rounds)
        check_circle(tokens, attributes)
        counts = _buckets(attributes) * _spans(tokens, attributes)
        if max(counts, head_dim * rounds * sum(buckets)) > _MAX_INT32 // 2:
            raise ValueError(f"buckets is {list(buckets)}: too many for the kernels, which count to {_MAX_INT32 // 2}.")


PLUGIN_SPEC = LSHPlugin()


def _buckets(attributes: Attributes) -> int:
    """Return the number of buckets, including the bucket of padding."""
    return math.prod(attributes["buckets"]) + 1


def _spans(tokens: int, attributes: Attributes) -> int:
    """Return the number of spans of a sequence."""
    return min(ceil_div(tokens, _TOKENS_SORTED), max(1, _COUNTS_PER_TOKEN * tokens // _buckets(attributes)))
