"""Calls of a plugin as an execution context makes them, and the layers that they are made for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.simulated_cuda import write_simulated_kernels
from fakes.simulated_gpu import tensor_descriptions
from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import plugin_spec_of
from hdplugins.kernels.block_config import BlockConfig
from hdplugins.tensorrt.link import provide_library_link
from support.described_operators import PLUGIN_NODES

provide_library_link()
trt = pytest.importorskip(
    "tensorrt_rtx", reason="the plugin's base classes are TensorRT's; TensorRT-RTX is not installed"
)

BLOCKS, CHUNKS, LSH, WINDOWS = "BlockSparseAttention", "ChunkAttention", "LSHAttention", "SlidingWindowAttention"
RELATIVE, CLIPPED = "RelativeAttention", "ClippedDistanceAttention"
ATTRIBUTES: dict[str, dict[str, Any]] = {name: node.node_attributes for name, node in PLUGIN_NODES.items()}
WINDOW_LAYER, BLOCK_LAYER, CHUNK_LAYER, LSH_LAYER, CLIPPED_LAYER = (
    PLUGIN_NODES[name] for name in (WINDOWS, BLOCKS, CHUNKS, LSH, CLIPPED)
)
WINDOW, BIGBIRD, CIRCLE, REFORMER, DISTANCES, NEZHA = (
    ATTRIBUTES[name] for name in (WINDOWS, BLOCKS, CHUNKS, LSH, RELATIVE, CLIPPED)
)
BLOCK_CONFIG = {
    **dict.fromkeys(ATTRIBUTES, BlockConfig(block_m=16, block_n=16, num_warps=4, num_stages=2, block_d=32)),
    WINDOWS: BlockConfig(block_m=32, block_n=16, num_warps=4, num_stages=2, block_d=32),
    BLOCKS: BlockConfig(block_m=64, block_n=64, num_warps=4, num_stages=2, block_d=32),
}
SHAPE = (2, 70, 2, 32)
STREAM, WORKSPACE = 0x570, 0x9000
ADDRESSES = [0x1000, 0x2000, 0x3000, 0x4000]


def kernels_for(
    folder: Path, *shapes: list[Sequence[int]], operator: str = WINDOWS, architectures: Sequence[int]
) -> Path:
    for given in shapes:
        spec = plugin_spec_of(OPERATORS[operator])
        sources = spec.kernel_sources(given, ATTRIBUTES[operator], dtype="float16", architectures=architectures)
        write_simulated_kernels(folder / "kernels", operator, sources)
    return folder / "kernels"


def shapes_of(query: Sequence[int], *others: Sequence[int], operator: str = WINDOWS) -> list[Sequence[int]]:
    return [*[query] * OPERATORS[operator].states, query[:2], *others]


TABLE = (2, 14, 3)
LISTED, UNLISTED = shapes_of((2, 1000, 2, 64), TABLE), shapes_of((2, 1000, 2, 64))
ROTATED = shapes_of((2, 1000, 2, 32), (2, 32, 2, 3), operator=LSH)


def remembered(tokens: int, keys: int) -> list[Sequence[int]]:
    """The shapes of relative attention without segments."""
    state, bias = (2, keys, 2, 32), (2, 32)
    return [(2, tokens, 2, 32), state, state, (2, keys), (2, keys + tokens, 32), bias, bias]


def set_up(attached: Any, shape: Sequence[int] = SHAPE, *tables: Sequence[int], dtype: str = "float16") -> list[Any]:
    """Pass a plugin its shapes, as an execution context does before a call; its tensors' descriptions."""
    name = attached.operator.name
    described = tensor_descriptions(trt, shapes_of(shape, *tables, operator=name), dtype, operator=name)
    attached.on_shape_change(described, described[:1])
    return described


def enqueue(attached: Any, described: list[Any], out: int = 0x5000, workspace: int = WORKSPACE) -> None:
    addresses = ADDRESSES + [0x6000] * (len(described) - 4)
    attached.enqueue(described, described[:1], addresses, [out], workspace, STREAM)


def run(plugin: Any, shape: Sequence[int] = SHAPE, *tables: Sequence[int], dtype: str = "float16") -> Any:
    """One call, as an execution context makes it; the plugin that was attached to the context."""
    attached = plugin.attach_to_context(None)
    enqueue(attached, set_up(attached, shape, *tables, dtype=dtype))
    return attached
