"""`PluginSpec` of dense attention: one launch per call of a kernel that shares the loops of sliding windows.

TensorRT engines do not run it, because TensorRT has native attention. This module needs neither Triton nor PyTorch: a
machine that runs compiled kernels has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from hdplugins.attention.dense.operator import OPERATOR
from hdplugins.attention.plugin_spec import Attributes, FieldType, KernelCall, PluginSpec, Shapes, sizes, stride_names
from hdplugins.attention.window.plugin import PLUGIN_SPEC as WINDOWS
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.block_config import ONLINE_SOFTMAX, BlockConfig, listed_architecture
from hdplugins.kernels.cuda_launch import Launch

_HALF_EXCEPTIONS = {(120, 96): BlockConfig(64, 32, 8, 2, 64)}
"""(lowest architecture, head_dim) -> block config, if the config of windows spills registers, for float16 and
bfloat16."""

_FLOAT32_EXCEPTIONS = dict.fromkeys([(90, 80), (120, 80), (120, 96)], BlockConfig(32, 16, 8, 2, 64))
"""(lowest architecture, head_dim) -> block config, if the config of windows spills registers, for float32."""

_MASK_CHUNK = 1024
"""Tokens whose mask a CTA reads at a time. To be tuned on a GPU."""

_TIMED_ARCHITECTURES, _TIMED_DTYPE, _TIMED_HEAD_DIM = (90,), "float16", 64
"""Where the kernel was timed beside FlashAttention 2 of ONNX Runtime: at 4096 tokens it takes 0.75 of the time
(docs/gpu.md)."""


class DensePlugin(PluginSpec):
    """One kernel for bidirectional and causal attention."""

    OPERATOR = OPERATOR
    HEAD_DIMS = WINDOWS.HEAD_DIMS
    FIELDS: ClassVar = {"causal": FieldType.INT, "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "bool")
    POINTERS: ClassVar = {"attend": (*OPERATOR.inputs, "out")}
    SCALARS: ClassVar = {
        "attend": (*stride_names("query", "key", "value", "out"), "tokens", "group", "causal", "scale"),
    }
    CALLED_MODULES = (ONLINE_SOFTMAX, f"{WINDOWS.OPERATOR.package}.kernel")
    IS_PLUGIN = False

    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        exceptions = _FLOAT32_EXCEPTIONS if dtype == "float32" else _HALF_EXCEPTIONS
        listed = listed_architecture(architecture), sizes(shapes[0]).head_dim
        return exceptions.get(listed) or WINDOWS.block_config(
            shapes, attributes, dtype=dtype, architecture=architecture
        )

    def better_on(self, shapes: Shapes, attributes: Attributes, *, dtype: str) -> tuple[int, ...] | None:
        is_timed = (dtype, sizes(shapes[0]).head_dim, attributes["causal"]) == (_TIMED_DTYPE, _TIMED_HEAD_DIM, 0)
        return _TIMED_ARCHITECTURES if is_timed else ()

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, block_config: BlockConfig
    ) -> Mapping[str, Mapping[str, Constant]]:
        return {"attend": {**block_config.constants(sizes(shapes[0]).head_dim), "MASK_CHUNK": _MASK_CHUNK}}

    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        batch, heads, tokens, _ = call.sizes
        scalars = {
            **call.scalars,
            "tokens": tokens,
            "group": heads // sizes(call.shapes[1]).heads,
            "causal": call.attributes["causal"],
        }
        return (self.launch("attend", (call.blocks_of(tokens), heads, batch), scalars),)


PLUGIN_SPEC = DensePlugin()
