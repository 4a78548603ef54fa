"""TensorRT plugins run on the CPU: real plugin objects, a simulated driver, and kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver, write_simulated_kernels
from hdplugins import OPERATORS
from hdplugins.attention.plugin_spec import BlockIndexUse, PluginSpec, plugin_spec_of
from hdplugins.kernels.aot_worker import with_tuples
from hdplugins.kernels.block_config import BlockConfig
from hdplugins.tensorrt.link import provide_library_link
from hdplugins.tensorrt.plugins import PLUGIN_NAMESPACE, plugins_with_kernels
from support.interpreted_kernel import Inputs, guarded

_ALIGNMENT = 256
_STREAM = 0x57
_DATA_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "bool": "BOOL"}
_FIELD_TYPES = {int: ("INT32", np.int32), tuple: ("INT32", np.int32), float: ("FLOAT32", np.float32)}


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
        changes: changed attributes; None leaves one out.
    """
    fields = [
        trt.PluginField(name, np.atleast_1d(np.array(value, kind)), getattr(trt.PluginFieldType, type_name))
        for name, value in {**attributes, **changes}.items()
        if value is not None
        for type_name, kind in [_FIELD_TYPES[type(value)]]
    ]
    with plugins_with_kernels(trt, kernels):
        creator = trt.get_plugin_registry().get_creator(operator, str(OPERATORS[operator].version), PLUGIN_NAMESPACE)
        return creator.create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.RUNTIME)


def tensor_descriptions(
    trt: Any, shapes: Sequence[Sequence[int]], dtype: str, *, operator: str = "SlidingWindowAttention"
) -> list[Any]:
    """TensorRT's descriptions of an operator's inputs, and of a block index behind them."""
    described, dtypes = [], plugin_spec_of(OPERATORS[operator]).INPUT_DTYPES[: len(shapes)]
    for dims, own in itertools.zip_longest(shapes, dtypes, fillvalue="int32"):
        tensor = trt.PluginTensorDesc()
        tensor.dims, tensor.format = trt.Dims(tuple(dims)), trt.TensorFormat.LINEAR
        tensor.type = getattr(trt.DataType, _DATA_TYPES[own or dtype])
        described.append(tensor)
    return described


def plugin_answers(
    operator: str,
    calls: Sequence[Inputs],
    folder: Path,
    block_config: BlockConfig,
    attributes: dict[str, Any],
    uses: Sequence[BlockIndexUse] = (BlockIndexUse.PRIVATE,),
) -> list[torch.Tensor]:
    """The answers of plugins in one execution context to calls, in order; for `Interpreter.run`.

    Args:
        operator: its name.
        calls: the inputs of each call; they have one dtype, number of heads and head_dim.
        folder: an empty one, for the kernels.
        tiles: of the kernels.
        attributes: of the plugins.
        uses: of each plugin; those that take a block index take the one that a plugin before them gave.
    """
    provide_library_link()
    import tensorrt_rtx as trt

    memory: dict[int, torch.Tensor] = {}
    driver = SimulatedDriver(run=lambda launched: _run(launched, memory))
    sys.modules["cuda.bindings.driver"] = driver  # type: ignore[assignment]
    spec = plugin_spec_of(OPERATORS[operator])
    dtype = str(next(iter(calls[0].values())).dtype).removeprefix("torch.")
    shapes = [tuple(tensor.shape) for tensor in calls[0].values()]
    sources = spec.kernel_sources(shapes, attributes, dtype=dtype, architectures=[86], block_config=block_config)
    write_simulated_kernels(folder, operator, sources)
    plugins = [
        plugin_of(trt, attributes, folder, operator=operator, block_index_use=int(use) or None).attach_to_context(None)
        for use in uses
    ]
    answers: list[torch.Tensor] = []
    told: dict[Any, list[tuple[int, ...]]] = {}
    block_index: torch.Tensor | None = None
    for inputs, (use, plugin) in itertools.product(calls, zip(uses, plugins, strict=True)):
        sizes = dict(spec.workspace([tuple(tensor.shape) for tensor in inputs.values()], attributes))
        given = dict(inputs)
        if use is BlockIndexUse.INPUT:
            assert block_index is not None
            given["block_index"] = block_index
        shapes = [tuple(tensor.shape) for tensor in given.values()]
        described = tensor_descriptions(trt, shapes, dtype, operator=operator)
        if told.get(plugin) != shapes:
            plugin.on_shape_change(described, described[:1])
            told[plugin] = shapes
        if use is not BlockIndexUse.PRIVATE:
            del sizes["block_index"]
        block_index_shape = _block_index_shape(spec, inputs, attributes) if use is BlockIndexUse.OUTPUT else None
        driver.launching_only = True
        answer, made = _enqueue(plugin, described, given, sizes, memory, block_index_shape)
        block_index = block_index if made is None else made
        answers.append(answer)
        driver.launching_only = False
    return answers


def _block_index_shape(spec: PluginSpec, inputs: Inputs, attributes: Mapping[str, Any]) -> tuple[int, int]:
    """[batch, values]"""
    batch, tokens, _, _ = next(iter(inputs.values())).shape
    size = spec.block_index_size([tuple(tensor.shape) for tensor in inputs.values()], attributes)
    assert size is not None
    return batch, size.fixed + size.per_unit * -(-tokens // size.unit)


def _enqueue(
    plugin: Any,
    described: list[Any],
    inputs: Inputs,
    sizes: Mapping[str, int],
    memory: dict[int, torch.Tensor],
    block_index_shape: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The answer, and the block index if one is given."""
    aligned = (-(-max(1, size) // _ALIGNMENT) * _ALIGNMENT for size in sizes.values())
    *places, size = itertools.accumulate(aligned, initial=0)
    tensors = {name: tensor.clone() for name, tensor in inputs.items()}

    def run(out: torch.Tensor, workspace: torch.Tensor, **outputs: torch.Tensor) -> None:
        memory.clear()
        memory.update({tensor.data_ptr(): tensor for tensor in (*tensors.values(), out, *outputs.values())})
        memory.update({workspace.data_ptr() + place: workspace[place:] for place in places})
        addresses, made = ([tensor.data_ptr() for tensor in group] for group in (tensors.values(), outputs.values()))
        plugin.enqueue(described, described[:1], addresses, [out.data_ptr(), *made], workspace.data_ptr(), _STREAM)

    outputs = {} if block_index_shape is None else {"block_index": 4 * math.prod(block_index_shape)}
    out, buffers = guarded(run, tensors, {"workspace": size, **outputs})
    return out, buffers["block_index"].view(torch.int32).reshape(block_index_shape) if block_index_shape else None


def _run(launched: LaunchedKernel, memory: Mapping[int, torch.Tensor]) -> None:
    assert launched.stream == _STREAM
    kinds = dict(launched.source["signature"])
    # An address that is not a tensor's start is a KeyError here, and would be a wrong answer on a GPU.
    arguments = {
        name: _typed(memory[int(value)], kinds[name]) if kinds[name].startswith("*") else value
        for name, value in launched.arguments.items()
    }
    kernel = getattr(importlib.import_module(launched.source["module"]), launched.source["function"])
    kernel[launched.grid](**with_tuples(arguments), **launched.source["constants"])


def _typed(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Scratch memory with the kernel's type."""
    if tensor.dtype != torch.uint8:
        return tensor
    return tensor.view({"*i32": torch.int32, "*fp32": torch.float32}[kind])
