"""Sliding-window attention as a TensorRT plugin: a call plans the keys, then attends, one launch a dilation."""

from __future__ import annotations

__all__ = [
    "DTYPES",
    "FIELDS",
    "INPUT_DTYPES",
    "KERNELS",
    "OUTPUT",
    "check",
    "kernel_sources",
    "launches",
    "serves",
    "workspace",
]

from collections.abc import Mapping, Sequence
from typing import Any

from hdplugins.kernels.aot import CompiledKernel, KernelSource
from hdplugins.kernels.attention_tiles import TRITON_TYPE, cubin_architecture
from hdplugins.kernels.cuda_launch import Launch
from hdplugins.operators.plugin_face import Attributes, FieldType, Shapes
from hdplugins.operators.sliding_window_attention import geometry

FIELDS = {
    "left": FieldType.INT,
    "right": FieldType.INT,
    "dilation": FieldType.INTS,
    "global_bound": FieldType.INT,
    "scale": FieldType.FLOAT,
}
DTYPES = ("float16", "bfloat16", "float32")
INPUT_DTYPES = (None, None, None, "int32")
OUTPUT = "out"
KERNELS = ("plan_keys", "attend")

_PLAN = "plan"
_NOMINAL = {"plan_keys": {"chunk": geometry.PLAN_CHUNK}, "attend": {"block_queries": 64}}
"""Constants for a check that launches nothing."""


def check(shapes: Shapes, attributes: Attributes) -> None:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    launches(shapes, attributes, constants=_NOMINAL)


def kernel_sources(
    shapes: Shapes, attributes: Attributes, *, dtype: str, architectures: Sequence[int]
) -> tuple[KernelSource, ...]:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    compiled_for = dict.fromkeys(cubin_architecture(architecture) for architecture in architectures)
    return geometry.kernel_sources(head_dim=shapes[0][3], dtype=dtype, architectures=list(compiled_for))


def serves(kernel: CompiledKernel, shapes: Shapes, attributes: Attributes, *, dtype: str) -> bool:
    """See `hdplugins.operators.plugin_face.PluginFace`; `plan_keys` serves all."""
    if kernel.function == "plan_keys":
        return True
    head_dim = int(kernel.constants["head"]) + int(kernel.constants["tail"])
    return dict(kernel.arguments)["query"] == f"*{TRITON_TYPE[dtype]}" and head_dim == shapes[0][3]


def workspace(shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    batch, _, tokens, _ = shapes[0]
    return {_PLAN: geometry.workspace_bytes(batch, tokens, attributes["global_bound"])}


def launches(
    shapes: Shapes, attributes: Attributes, *, constants: Mapping[str, Mapping[str, Any]]
) -> tuple[Launch, ...]:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    query, key, value, token_kind = (list(shape) for shape in shapes)
    if len(query) != 4 or not query == key == value or token_kind != [query[0], query[2]]:
        raise ValueError(
            f"query, key and value are {query}, {key}, {value} and token_kind is {token_kind}; the first three are "
            "alike, [batch, heads, tokens, head_dim], and the last is [batch, tokens]."
        )
    batch, heads, tokens, head_dim = query
    return geometry.launches(
        batch=batch,
        heads=heads,
        tokens=tokens,
        head_dim=head_dim,
        block_queries=constants["attend"]["block_queries"],
        plan_chunk=constants["plan_keys"]["chunk"],
        **attributes,
    )
