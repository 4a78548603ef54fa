"""`PluginSpec` of chunk attention: one launch per call.

LSH attention uses these block configs, too. This module needs neither Triton nor PyTorch: a machine that runs compiled
kernels has neither.
"""

from __future__ import annotations

from typing import ClassVar

from hdplugins.attention.chunks.operator import OPERATOR, padded_tokens
from hdplugins.attention.plugin_spec import Attributes, FieldType, KernelCall, PluginSpec, Shapes, sizes, stride_names
from hdplugins.kernels.block_config import BlockConfig, block_config_for, ceil_div, listed_architecture
from hdplugins.kernels.cuda_launch import Launch

# Found as in `block_config`, for both operators alike. No config has been timed.
_HALF = {16: (16, 16, 2, 3), 32: (32, 32, 2, 3), 64: (64, 64, 4, 3)}
"""Tokens of a chunk rounded up to a power of two, 64 for more -> block config without `block_d`, for float16,
bfloat16."""

_FLOAT32 = {16: (16, 16, 4, 2), 32: (32, 32, 4, 2)}
"""Tokens of a chunk rounded up to a power of two, 32 for more -> block config without `block_d`, for float32."""

_HALF_EXCEPTIONS = {
    **dict.fromkeys(
        [(80, 96, 64), (80, 128, 64), (86, 96, 64), (86, 128, 64), (120, 128, 64), (120, 80, 64)],
        BlockConfig(64, 32, 4, 3, 64),
    ),
    (120, 96, 64): BlockConfig(64, 32, 4, 2, 64),
}
"""(lowest architecture, head_dim, the tokens above) -> block config, if registers would spill."""

_FLOAT32_EXCEPTIONS = {
    **{(architecture, 80, 32): BlockConfig(32, 32, 8, 2, 64) for architecture in (80, 86, 90, 100, 120)},
    **{(architecture, 96, 32): BlockConfig(32, 32, 8, 2, 64) for architecture in (80, 120)},
    (86, 96, 32): BlockConfig(32, 16, 8, 2, 64),
    **dict.fromkeys([(90, 96, 32), (100, 96, 32)], BlockConfig(32, 16, 4, 2, 64)),
    (80, 128, 32): BlockConfig(32, 16, 8, 2, 64),
    (80, 64, 16): BlockConfig(16, 16, 4, 2, 64),
}
"""(lowest architecture, head_dim, the tokens above) -> block config for float32, if registers would spill."""

_MAX_INDEX = 2**29
"""Maximum number of tokens and of chunks: sums of three are still an int32."""


class ChunkPlugin(PluginSpec):
    """One kernel without a workspace, for chunks of every size."""

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

    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        """Return the config whose blocks are a chunk of queries and keys, or a part of a chunk."""
        head_dim, chunk = sizes(shapes[0]).head_dim, attributes["chunk"]
        block_d = block_config_for(architecture, head_dim, dtype).block_d
        configs, exceptions = (_FLOAT32, _FLOAT32_EXCEPTIONS) if dtype == "float32" else (_HALF, _HALF_EXCEPTIONS)
        side = next((side for side in configs if chunk <= side), max(configs))
        exception = exceptions.get((listed_architecture(architecture), head_dim, side))
        return exception or BlockConfig(*configs[side], block_d=block_d)

    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        batch, heads, tokens, _ = call.sizes
        chunk = call.attributes["chunk"]
        scalars = {
            **call.attributes,
            **call.scalars,
            "tokens": tokens,
            "chunks": padded_tokens(tokens, call.attributes["multiple"]) // chunk,
        }
        ctas = ceil_div(tokens, chunk) * call.blocks_of(min(chunk, tokens))
        return (self.launch("attend", (ctas, heads, batch), scalars),)

    def check_attributes(self, shapes: Shapes, attributes: Attributes) -> None:
        super().check_attributes(shapes, attributes)
        check_circle(sizes(shapes[0]).tokens, attributes)


PLUGIN_SPEC = ChunkPlugin()


def check_circle(tokens: int, attributes: Attributes) -> None:
    """Raise a ValueError if there are too many chunks, in all rounds, for the kernels' indices."""
    chunk, before, after, multiple = (attributes[name] for name in ("chunk", "before", "after", "multiple"))
    rounds = attributes.get("rounds", 1)
    counted = max(rounds * (tokens + multiple), (before + 1 + after) * min(chunk, tokens))
    if counted > _MAX_INDEX:
        raise ValueError(
            f"{tokens} tokens padded to a multiple of {multiple}, in chunks of {chunk} with {before} before and "
            f"{after} after, are too many for the kernels: they count to {_MAX_INDEX}."
        )
