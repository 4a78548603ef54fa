"""`PluginSpec` of bucketed relative position attention: one launch per call, without a workspace.

This module needs neither Triton nor PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

from typing import ClassVar

from hdplugins.attention.distance.operator import OPERATOR
from hdplugins.attention.plugin_spec import Attributes, FieldType, KernelCall, PluginSpec, Shapes, sizes, stride_names
from hdplugins.kernels.block_config import BlockConfig, block_config_for, listed_architecture
from hdplugins.kernels.cuda_launch import Launch

# Found as in `block_config`.
_HALF = {
    32: BlockConfig(128, 64, 8, 3, 32),
    64: BlockConfig(128, 64, 8, 3, 64),
    80: BlockConfig(128, 64, 8, 3, 64),
    96: BlockConfig(128, 64, 8, 3, 64),
    128: BlockConfig(64, 64, 8, 2, 64),
}
"""head_dim -> block config without a value table, for float16 and bfloat16."""

_HALF_EXCEPTIONS = {
    # Timed on an H100: 4.5 ms instead of 5.3 (docs/gpu.md).
    (90, 64): BlockConfig(64, 64, 4, 2, 64, ctas_per_sm=3),
    **dict.fromkeys([(90, 128), (100, 128)], BlockConfig(128, 64, 8, 3, 64)),
    **dict.fromkeys([(80, 96), (86, 96)], BlockConfig(64, 32, 8, 2, 64)),
    **dict.fromkeys([(86, 80), (120, 80), (120, 128)], BlockConfig(32, 64, 8, 2, 64)),
    (120, 96): BlockConfig(32, 32, 4, 2, 64),
}
"""(lowest architecture, head_dim) -> block config that differs."""

_HALF_WITH_VALUES = {
    32: BlockConfig(128, 64, 8, 3, 32),
    64: BlockConfig(128, 64, 8, 3, 64),
    80: BlockConfig(32, 64, 8, 2, 64),
    96: BlockConfig(16, 32, 4, 2, 64),
    128: BlockConfig(32, 64, 8, 2, 64),
}
"""head_dim -> block config with a value table, for float16 and bfloat16."""

_HALF_WITH_VALUES_OTHERWISE = {
    **dict.fromkeys([(80, 32), (86, 32), (90, 32)], BlockConfig(128, 32, 8, 3, 32)),
    # Timed on an H100: 2.4 ms instead of 3.0 at 1024 tokens.
    (90, 64): BlockConfig(64, 32, 4, 2, 64),
    (90, 80): BlockConfig(128, 32, 8, 3, 64),
    (100, 64): BlockConfig(128, 64, 8, 2, 64),
    (100, 96): BlockConfig(128, 64, 8, 3, 64),
    **dict.fromkeys([(100, 80), (90, 128), (100, 128)], BlockConfig(64, 64, 8, 2, 64)),
    (120, 32): BlockConfig(64, 64, 8, 2, 32),
    (120, 80): BlockConfig(32, 16, 4, 2, 64),
    **dict.fromkeys([(80, 64), (86, 64), (120, 64)], BlockConfig(32, 64, 8, 2, 64)),
    (80, 80): BlockConfig(32, 32, 4, 2, 64),
}

_FLOAT32 = {
    32: BlockConfig(32, 32, 8, 2, 32),
    64: BlockConfig(32, 32, 8, 2, 64),
    80: BlockConfig(32, 32, 8, 2, 64),
    96: BlockConfig(32, 32, 8, 2, 64),
    128: BlockConfig(32, 32, 8, 2, 64),
}
"""head_dim -> block config without a value table, for float32."""

_FLOAT32_EXCEPTIONS = {
    (100, 32): BlockConfig(16, 32, 8, 2, 32),
    (100, 128): BlockConfig(16, 32, 8, 2, 64),
    **dict.fromkeys([(86, 96), (86, 128)], BlockConfig(32, 16, 8, 2, 64)),
}

_FLOAT32_WITH_VALUES = {
    32: BlockConfig(32, 32, 8, 2, 32),
    64: BlockConfig(32, 32, 8, 2, 64),
    80: BlockConfig(16, 32, 8, 2, 64),
    96: BlockConfig(16, 32, 8, 2, 64),
    128: BlockConfig(16, 32, 8, 2, 64),
}
"""head_dim -> block config with a value table, for float32."""

_FLOAT32_WITH_VALUES_OTHERWISE = {
    (86, 32): BlockConfig(16, 16, 8, 2, 32),
    (90, 32): BlockConfig(16, 32, 8, 2, 32),
    (100, 64): BlockConfig(16, 32, 8, 2, 64),
    (80, 96): BlockConfig(32, 16, 8, 2, 64),
}

_TABLES = {
    (False, False): (_HALF, _HALF_EXCEPTIONS),
    (False, True): (_HALF_WITH_VALUES, _HALF_WITH_VALUES_OTHERWISE),
    (True, False): (_FLOAT32, _FLOAT32_EXCEPTIONS),
    (True, True): (_FLOAT32_WITH_VALUES, _FLOAT32_WITH_VALUES_OTHERWISE),
}
"""(float32, with a value table) -> block configs, and configs that differ on some architectures."""

_MAX_INT32 = 2**31 - 1


class ClippedDistancePlugin(PluginSpec):
    """One kernel, with and without a value table."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {"reach": FieldType.INT, "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "bool", None, None)
    POINTERS: ClassVar = {"attend": (*OPERATOR.inputs, "out")}
    SCALARS: ClassVar = {
        "attend": (
            *stride_names("query", "key", "value", "out"), "bias_batch", "bias_head", "bias_query", "tokens",
            "reach", "scale",
        ),
    }  # fmt: skip

    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        head_dim, has_values = sizes(shapes[0]).head_dim, len(shapes) == len(OPERATOR.inputs)
        # Raises if no kernel supports the architecture, head_dim or dtype.
        block_config_for(architecture, head_dim, dtype)
        configs, exceptions = _TABLES[dtype == "float32", has_values]
        return exceptions.get((listed_architecture(architecture), head_dim), configs[head_dim])

    def check_shapes(self, shapes: Shapes) -> None:
        inputs, axes = len(OPERATOR.inputs), [list(shape) for shape in shapes]
        if not inputs - 1 <= len(axes) <= inputs:
            raise ValueError(f"{OPERATOR.name} has {inputs - 1} or {inputs} inputs, not {len(axes)}.")
        super().check_shapes(shapes)
        (batch, heads, tokens, head_dim), scores = sizes(axes[0]), axes[4]
        fits_query = len(scores) == 4 and scores[0] in (1, batch) and scores[1] in (1, tokens) and scores[2] == heads
        if not fits_query or scores[3] < 3 or scores[3] % 2 == 0:
            raise ValueError(
                f"scores_by_distance is {scores}; with a query {axes[0]} it is [1 or {batch}, 1 or {tokens}, {heads}, "
                "2 * reach + 1]."
            )
        if axes[5:] not in ([], [[scores[3], head_dim]]):
            raise ValueError(f"values_by_distance is {axes[5]}; with these scores it is {[scores[3], head_dim]}.")

    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        batch, heads, tokens, _ = call.sizes
        batches, queries, _, rows = call.shapes[4]
        scalars = {
            **call.scalars,
            "bias_batch": heads * queries * rows if batches > 1 else 0,
            "bias_head": rows,
            "bias_query": heads * rows if queries > 1 else 0,
            "tokens": tokens,
            "reach": call.attributes["reach"],
        }
        return (self.launch("attend", (call.blocks_of(tokens), heads, batch), scalars),)

    def check_attributes(self, shapes: Shapes, attributes: Attributes) -> None:
        super().check_attributes(shapes, attributes)
        (_, heads, _, head_dim), (_, queries, _, rows) = sizes(shapes[0]), shapes[4]
        reach = attributes["reach"]
        if rows != 2 * reach + 1:
            raise ValueError(f"scores_by_distance has {rows} distances; a reach of {reach} has {2 * reach + 1}.")
        if max(heads * queries, head_dim) * rows > _MAX_INT32:
            raise ValueError(
                f"scores_by_distance {list(shapes[4])} is too large for one launch: the scores of a sequence have at "
                f"most {_MAX_INT32} values, and so have values_by_distance."
            )


PLUGIN_SPEC = ClippedDistancePlugin()
