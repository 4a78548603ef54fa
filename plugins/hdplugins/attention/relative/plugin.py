"""`PluginSpec` of relative attention: one launch per call, without a workspace.

This module needs neither Triton nor PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hdplugins.attention.plugin_spec import Attributes, FieldType, KernelCall, PluginSpec, Shapes, sizes, stride_names
from hdplugins.attention.relative.operator import OPERATOR
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.block_config import BlockConfig, block_config_for, check_sizes, listed_architecture
from hdplugins.kernels.cuda_launch import Launch

# Found as in `block_config`, with and without segments. BLOCK_M is at most BLOCK_N: see `kernel`.
_HALF = {
    32: BlockConfig(64, 64, 8, 2, 32),
    64: BlockConfig(32, 64, 8, 2, 64),
    80: BlockConfig(32, 32, 4, 2, 64),
    96: BlockConfig(32, 32, 4, 2, 64),
    128: BlockConfig(32, 64, 8, 2, 128),
}
"""head_dim -> block config, for float16 and bfloat16."""

_HALF_EXCEPTIONS = {
    # Not 64 queries on sm_90: the assembler serializes the products of the tensor cores (C7511).
    (90, 32): BlockConfig(32, 32, 4, 2, 32),
    (86, 96): BlockConfig(32, 32, 8, 2, 64),
    # Timed on an H100: 5.2 ms instead of 7.5 (docs/gpu.md).
    (90, 64): BlockConfig(32, 32, 4, 2, 64, ctas_per_sm=3),
    (100, 64): BlockConfig(64, 64, 8, 2, 64),
    (100, 128): BlockConfig(64, 64, 8, 2, 128),
}
"""(lowest architecture, head_dim) -> block config that differs; on sm_100 large enough for the newer tensor cores."""

_FLOAT32 = {
    32: BlockConfig(32, 64, 8, 2, 32),
    64: BlockConfig(32, 32, 8, 2, 64),
    80: BlockConfig(16, 32, 8, 2, 64),
    96: BlockConfig(16, 16, 8, 2, 64),
    128: BlockConfig(16, 16, 8, 2, 128),
}
"""head_dim -> block config, for float32."""

_MAX_COLUMNS = {"float16": 64, "bfloat16": 64, "float32": 16}
"""Dtype -> maximum columns of a head in one product with the positions: more would not fit into registers."""


class RelativePlugin(PluginSpec):
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

    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        head_dim = sizes(shapes[0]).head_dim
        # Raises if no kernel supports the architecture, head_dim or dtype.
        block_config_for(architecture, head_dim, dtype)
        if dtype == "float32":
            return _FLOAT32[head_dim]
        return _HALF_EXCEPTIONS.get((listed_architecture(architecture), head_dim), _HALF[head_dim])

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, block_config: BlockConfig
    ) -> Mapping[str, Mapping[str, Constant]]:
        head_dim = sizes(shapes[0]).head_dim
        # The largest power of two that divides head_dim.
        columns = min(head_dim & -head_dim, _MAX_COLUMNS[dtype])
        return {"attend": {**block_config.constants(head_dim), "COLUMNS": columns}}

    def check_shapes(self, shapes: Shapes) -> None:
        inputs, axes = len(OPERATOR.inputs), [list(shape) for shape in shapes]
        if not inputs - len(OPERATOR.optional_inputs) <= len(axes) <= inputs:
            raise ValueError(f"{OPERATOR.name} has {inputs - 1} or {inputs} inputs, not {len(axes)}.")
        query, key, _, _, positions, *_ = axes
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
        for name, shape, fits in zip(OPERATOR.inputs, axes, fitting, strict=False):
            if shape != fits:
                raise ValueError(f"{name} is {shape}; with a query {query} and {keys} keys it is {fits}.")
        if keys < tokens:
            raise ValueError(
                f"There are {keys} keys for {tokens} tokens; keys must include the tokens of the sequence."
            )

    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        batch, heads, tokens, head_dim = call.sizes
        keys, distances = sizes(call.shapes[1]).tokens, call.shapes[4][1]
        scalars = {
            **call.scalars,
            "stride_position_head": distances * head_dim,
            "tokens": tokens,
            "keys": keys,
            "distances": distances,
            "causal": call.attributes["causal"],
            # A reach beyond all keys equals their number, and cannot overflow.
            "reach": min(call.attributes["reach"], keys),
        }
        return (self.launch("attend", (call.blocks_of(tokens), heads, batch), scalars),)

    def check_attributes(self, shapes: Shapes, attributes: Attributes) -> None:
        of_query, keys, distances = sizes(shapes[0]), sizes(shapes[1]).tokens, shapes[4][1]
        for rows in (keys, distances):
            check_sizes(**of_query._replace(tokens=rows)._asdict(), scale=attributes["scale"])
        super().check_attributes(shapes, attributes)
        needed = keys if attributes["causal"] else keys + of_query.tokens - 1
        if distances < needed:
            raise ValueError(f"positions has {distances} distances; {needed} are needed.")


PLUGIN_SPEC = RelativePlugin()
