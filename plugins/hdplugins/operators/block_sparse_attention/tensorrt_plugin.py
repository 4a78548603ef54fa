"""Block-sparse attention as a TensorRT plugin: a call plans, attends, and sums up what global queries saw."""

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
from hdplugins.kernels.attention_tiles import TRITON_TYPE, Tiles, cubin_architecture
from hdplugins.kernels.cuda_launch import Launch
from hdplugins.operators.block_sparse_attention import OPERATOR, geometry
from hdplugins.operators.plugin_face import Attributes, FieldType, Shapes

FIELDS = {**dict.fromkeys(OPERATOR.attributes, FieldType.INT), "scale": FieldType.FLOAT}
DTYPES = ("float16", "bfloat16", "float32")
INPUT_DTYPES = (None, None, None, "int32", "int32")
OUTPUT = "out"
KERNELS = geometry.KERNELS

_NOMINAL = Tiles(block_queries=64, block_keys=64, num_warps=4, num_stages=3, head=32)
"""Tiles for a check that launches nothing."""


def check(shapes: Shapes, attributes: Attributes) -> None:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    query, table = _query_and_table(shapes)
    constants = geometry.constants_of(_NOMINAL, head_dim=query[3], block_size=attributes["block_size"])
    geometry.launches(query, table, constants=constants, **attributes)


def kernel_sources(
    shapes: Shapes, attributes: Attributes, *, dtype: str, architectures: Sequence[int]
) -> tuple[KernelSource, ...]:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    query, table = _query_and_table(shapes)
    return geometry.kernel_sources(
        head_dim=query[3],
        block_size=attributes["block_size"],
        has_table=table is not None,
        dtype=dtype,
        architectures=list(dict.fromkeys(cubin_architecture(architecture) for architecture in architectures)),
    )


def serves(kernel: CompiledKernel, shapes: Shapes, attributes: Attributes, *, dtype: str) -> bool:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    query, table = _query_and_table(shapes)
    constants, arguments = kernel.constants, dict(kernel.arguments)
    if constants["block_size"] != attributes["block_size"]:
        return False
    if kernel.function == "list_blocks":
        return ("listed_blocks" in arguments) == (table is not None)
    if kernel.function == "count_tokens":
        return True
    head_dim = int(constants["head"]) + int(constants["tail"])
    return arguments["out"] == f"*{TRITON_TYPE[dtype]}" and head_dim == query[3]


def workspace(shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    return geometry.workspace_bytes(*_query_and_table(shapes), **attributes)


def launches(
    shapes: Shapes, attributes: Attributes, *, constants: Mapping[str, Mapping[str, Any]]
) -> tuple[Launch, ...]:
    """See `hdplugins.operators.plugin_face.PluginFace`."""
    return geometry.launches(*_query_and_table(shapes), constants=constants, **attributes)


def _query_and_table(shapes: Shapes) -> tuple[list[int], list[int] | None]:
    """The shapes that all else follows from."""
    query, key, value, token_mask, *tables = (list(shape) for shape in shapes)
    if len(query) != 4 or not query == key == value or token_mask != [query[0], query[2]] or len(tables) > 1:
        raise ValueError(
            f"query, key and value are {query}, {key}, {value} and token_mask is {token_mask}; the first three are "
            "alike, [batch, heads, tokens, head_dim], and the last is [batch, tokens]."
        )
    return query, tables[0] if tables else None
