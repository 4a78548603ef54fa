"""TensorRT plugins run on the CPU: real plugin objects, a simulated driver, and kernels in Triton's interpreter.

Everything happens in a process of its own, for Triton decides at its import whether it interprets.
"""

from __future__ import annotations

__all__ = ["SimulatedGpu", "plugin_of", "tensor_descriptions"]

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver, write_simulated_kernels
from hdplugins import OPERATORS
from hdplugins.kernels.aot import KernelSource
from hdplugins.kernels.attention_tiles import Tiles
from hdplugins.operators.block_sparse_attention import geometry as block_geometry
from hdplugins.operators.plugin_face import face_of
from hdplugins.operators.sliding_window_attention import geometry as window_geometry
from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugins import PLUGIN_NAMESPACE, plugins_with_kernels
from support.interpreted_kernel import BlockTexts, Texts

_NAMES: dict[type[Texts | BlockTexts], str] = {Texts: "SlidingWindowAttention", BlockTexts: "BlockSparseAttention"}
"""Inputs of an operator -> its name."""

_GUARD = 256
_WORKSPACE_ALIGNMENT = 256
_UNSET_BYTE = 0xFF
"""What workspaces are filled with: NaN as floating-point numbers, -1 as integers."""

_STREAM = 0x57
_FIELD_TYPES = {int: ("INT32", np.int32), tuple: ("INT32", np.int32), float: ("FLOAT32", np.float32)}


class SimulatedGpu:
    """A context manager that owns the process."""

    def __enter__(self) -> SimulatedGpu:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._pool.shutdown()

    def attention(
        self, calls: Sequence[Texts | BlockTexts], folder: Path, *, tiles: Tiles, attributes: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """What one plugin in one execution context answers to calls, in order; outputs and workspaces hold NaN before.

        Args:
            calls: the inputs of each call; they differ in batch and tokens only.
            folder: an empty one, for the kernels.
            tiles: of the kernels.
            attributes: of the plugin.
        """
        return self._pool.submit(_attention, list(calls), folder, tiles, dict(attributes)).result()


def plugin_of(
    trt: Any,
    attributes: Mapping[str, Any],
    kernels: Path | None,
    *,
    operator: str = "SlidingWindowAttention",
    **changes: Any,
) -> Any:
    """A plugin as TensorRT creates it from an engine, before it is attached to an execution context.

    Args:
        trt: the module ``tensorrt_rtx``.
        attributes: name -> an int, a tuple of ints, or a float.
        kernels: the bundle's folder.
        operator: its name.
        changes: attributes that are otherwise; None leaves one out.
    """
    fields = [
        trt.PluginField(name, np.atleast_1d(np.array(value, kind)), getattr(trt.PluginFieldType, type_name))
        for name, value in {**attributes, **changes}.items()
        if value is not None
        for type_name, kind in [_FIELD_TYPES[type(value)]]
    ]
    with plugins_with_kernels(trt, kernels):
        creator = trt.get_plugin_registry().get_creator(operator, "1", PLUGIN_NAMESPACE)
        return creator.create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)


def tensor_descriptions(trt: Any, shape: Sequence[int], dtype: str, *others: Sequence[int]) -> list[Any]:
    """What TensorRT tells of query, key, value and token_kind, for query of that [batch, heads, tokens, head_dim].

    The int32 inputs behind these, if any, have the other shapes.
    """
    types = {"float32": trt.DataType.FLOAT, "float16": trt.DataType.HALF, "bfloat16": trt.DataType.BF16}
    shapes = [*[tuple(shape)] * 3, (shape[0], shape[2]), *map(tuple, others)]
    described = []
    for dims, kind in zip(shapes, [types[dtype]] * 3 + [trt.DataType.INT32] * (1 + len(others)), strict=True):
        tensor = trt.PluginTensorDesc()
        tensor.dims, tensor.type, tensor.format = trt.Dims(dims), kind, trt.TensorFormat.LINEAR
        described.append(tensor)
    return described


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _attention(
    calls: list[Texts | BlockTexts], folder: Path, tiles: Tiles, attributes: dict[str, Any]
) -> list[torch.Tensor]:
    provide_library_link()
    import tensorrt_rtx as trt

    memory: dict[int, torch.Tensor] = {}
    driver = SimulatedDriver(run=lambda launched: _run(launched, memory))
    sys.modules["cuda.bindings.driver"] = driver  # type: ignore[assignment]
    name = _NAMES[type(calls[0])]
    write_simulated_kernels(folder, name, _sources(calls[0], tiles, attributes))
    plugin = plugin_of(trt, attributes, folder, operator=name).attach_to_context(None)
    answers, told = [], None
    for call in calls:
        shapes = [tuple(tensor.shape) for tensor in _inputs(call)]
        described = tensor_descriptions(trt, shapes[0], _dtype(call), *shapes[4:])
        if told != shapes:
            plugin.on_shape_change(described, described[:1])
            told = shapes
        driver.launching_only = True
        answers.append(
            _enqueue(plugin, described, call, face_of(OPERATORS[name]).workspace(shapes, attributes), memory)
        )
        driver.launching_only = False
    return answers


def _sources(call: Texts | BlockTexts, tiles: Tiles, attributes: Mapping[str, Any]) -> Sequence[KernelSource]:
    compiled: dict[str, Any] = {
        "head_dim": call.query.shape[3], "dtype": _dtype(call), "architectures": [86], "tiles": tiles,
    }  # fmt: skip
    if isinstance(call, Texts):
        return window_geometry.kernel_sources(**compiled)
    has_table = call.listed_blocks is not None
    return block_geometry.kernel_sources(**compiled, block_size=attributes["block_size"], has_table=has_table)


def _inputs(call: Texts | BlockTexts) -> list[torch.Tensor]:
    return [tensor for tensor in vars(call).values() if tensor is not None]


def _dtype(call: Texts | BlockTexts) -> str:
    return str(call.query.dtype).removeprefix("torch.")


def _enqueue(
    plugin: Any,
    described: list[Any],
    call: Texts | BlockTexts,
    workspace_sizes: Mapping[str, int],
    memory: dict[int, torch.Tensor],
) -> torch.Tensor:
    guarded_out = torch.full((call.query.numel() + 2 * _GUARD,), torch.nan, dtype=call.query.dtype)
    out = guarded_out[_GUARD:-_GUARD].view(call.query.shape)
    places, size = {}, 0
    for name, needed in workspace_sizes.items():
        places[name] = size
        size += -(-needed // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    guarded_workspace = torch.full((size + 2 * _GUARD,), _UNSET_BYTE, dtype=torch.uint8)
    workspace = guarded_workspace[_GUARD:-_GUARD]
    tensors = [tensor.clone() for tensor in _inputs(call)]
    memory.clear()
    memory.update({tensor.data_ptr(): tensor for tensor in (*tensors, out)})
    memory.update({workspace.data_ptr() + place: workspace[place:] for place in places.values()})
    plugin.enqueue(
        described, described[:1], [tensor.data_ptr() for tensor in tensors], [out.data_ptr()], workspace.data_ptr(),
        _STREAM,
    )  # fmt: skip
    for guard in (guarded_out[:_GUARD], guarded_out[-_GUARD:]):
        assert torch.isnan(guard).all(), "a kernel wrote outside its output"
    for guard in (guarded_workspace[:_GUARD], guarded_workspace[-_GUARD:]):
        assert (guard == _UNSET_BYTE).all(), "a kernel wrote outside its workspace"
    return out.clone()


def _run(launched: LaunchedKernel, memory: Mapping[int, torch.Tensor]) -> None:
    assert launched.stream == _STREAM
    kinds = dict(launched.source["signature"])
    # An address that is no tensor's start is a KeyError here, and would be a wrong answer on a GPU.
    arguments = {
        name: _typed(memory[int(value)], kinds[name]) if kinds[name].startswith("*") else value
        for name, value in launched.arguments.items()
    }
    kernel = getattr(importlib.import_module(launched.source["module"]), launched.source["function"])
    kernel[launched.grid](**arguments, **launched.source["constants"])


def _typed(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Scratch memory as what a kernel takes it for."""
    if tensor.dtype != torch.uint8:
        return tensor
    return tensor.view({"*i32": torch.int32, "*fp32": torch.float32}[kind])
