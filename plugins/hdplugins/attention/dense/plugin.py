"""Dense attention by the windows' kernel, with its tiles but for a few: a call is one launch, and needs no workspace.

It is no plugin of engines: TensorRT has an attention of its own. Nothing here, the tiles of the kernels included, needs
Triton or PyTorch: a machine that runs compiled kernels has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hdplugins.attention.dense.operator import OPERATOR
from hdplugins.attention.plugin_face import (
    Attributes,
    FieldType,
    PluginFace,
    Shapes,
    Strides,
    sizes,
    stride_names,
)
from hdplugins.attention.window.plugin import FACE as WINDOWS
from hdplugins.attention.window.plugin import WINDOW_HEAD_DIMS
from hdplugins.kernels.aot import Constant
from hdplugins.kernels.attention_tiles import INNER_LOOP, LOG2_E, Tiles, ceil_div, check_sizes, listed_architecture
from hdplugins.kernels.cuda_launch import Launch

_HALF_OTHERWISE = {(120, 96): Tiles(64, 32, 8, 2, 64)}
"""(lowest architecture, head_dim) -> tiles, where those of windows would spill registers, for float16 and bfloat16."""

_FLOAT32_OTHERWISE = dict.fromkeys([(90, 80), (120, 80), (120, 96)], Tiles(32, 16, 8, 2, 64))
"""Likewise for float32."""

_MASK_CHUNK = 1024
"""Tokens whose truths a program reads at a time. To be tuned on a GPU."""

_TIMED_ARCHITECTURES, _TIMED_DTYPE, _TIMED_HEAD_DIM = (90,), "float16", 64
"""Where the kernel was timed beside FlashAttention 2, which ONNX Runtime has: as windows as wide as the text of 4096
tokens it takes 0.75 of the time (docs/gpu.md)."""


class _Face(PluginFace):
    """One kernel, for attention of both sides and for causal attention."""

    OPERATOR = OPERATOR
    FIELDS: ClassVar = {"causal": FieldType.INT, "scale": FieldType.FLOAT}
    INPUT_DTYPES = (None, None, None, "bool")
    POINTERS: ClassVar = {"attend": (*OPERATOR.inputs, "out")}
    SCALARS: ClassVar = {
        "attend": (*stride_names("query", "key", "value", "out"), "tokens", "group", "causal", "scale"),
    }
    CALLED_MODULES = (INNER_LOOP, f"{WINDOWS.OPERATOR.package}.kernel")
    IS_PLUGIN = False

    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        otherwise = _FLOAT32_OTHERWISE if dtype == "float32" else _HALF_OTHERWISE
        listed = listed_architecture(architecture), sizes(shapes[0]).head_dim
        return otherwise.get(listed) or WINDOWS.tiles(shapes, attributes, dtype=dtype, architecture=architecture)

    def better_on(self, shapes: Shapes, attributes: Attributes, *, dtype: str) -> tuple[int, ...] | None:
        is_timed = (dtype, sizes(shapes[0]).head_dim, attributes["causal"]) == (_TIMED_DTYPE, _TIMED_HEAD_DIM, 0)
        return _TIMED_ARCHITECTURES if is_timed else ()

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        return {"attend": {**tiles.constants(sizes(shapes[0]).head_dim), "mask_chunk": _MASK_CHUNK}}

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
        causal, scale = (attributes[name] for name in self.FIELDS)
        check_sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim, scale=scale, head_dims=WINDOW_HEAD_DIMS)
        OPERATOR.check(causal=causal)
        scalars = {
            **self.stride_scalars(shapes, strides),
            "tokens": tokens,
            "group": heads // sizes(shapes[1]).heads,
            "causal": causal,
            "scale": scale * LOG2_E,
        }
        grid = (ceil_div(tokens, constants["attend"]["block_queries"]), heads, batch)
        return (Launch(kernel="attend", grid=grid, scalars=scalars),)


FACE = _Face()
