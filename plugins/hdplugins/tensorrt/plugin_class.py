"""`TensorRTPlugin` implements TensorRT's `IPluginV3` interfaces for an operator's `PluginSpec`.

How TensorRT calls a plugin: it creates one by the creator, from a node's attributes or an engine's fields, clones it,
passes it the shapes (`on_shape_change`) whenever they change, and then calls `enqueue`. Kernels are loaded and launches
are packed when the shapes are known, so that `enqueue` only launches. The bindings turn an exception into
the error code that TensorRT expects, and print it; `take_plugin_errors` returns it for the report of the failure.

On a machine without a GPU TensorRT-RTX 1.7.1 calls everything but `attach_to_context`, `set_tactic`, `on_shape_change`
and `enqueue`. Full TensorRT runs plugins while it builds. Its classes have the same methods (read in the bindings of
11.4 and in their published source); neither TensorRT variant has run plugins on a GPU yet. With
plain base classes in place of TensorRT's, plugins have launched their kernels on an H100, at once and from a graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from hdplugins import ONNX_DOMAIN
from hdplugins.attention.operator import Operator
from hdplugins.attention.plugin_spec import (
    BLOCK_INDEX,
    BLOCK_INDEX_USE,
    BlockIndexUse,
    FieldType,
    PluginSpec,
    plugin_spec_of,
    sizes,
)
from hdplugins.kernels.cuda_launch import LaunchError, LoadedKernel, PreparedLaunch, load_kernels
from hdplugins.tensorrt.plugin_fields import FieldCollection

logger = logging.getLogger(__name__)

PLUGIN_NAMESPACE = ONNX_DOMAIN
"""Namespace of hdexport's creators in TensorRT's registry; nodes name it in their attribute ``plugin_namespace``."""

_DTYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "BOOL": "bool"}
"""TensorRT's name of a dtype -> hdexport's name."""

_WORKSPACE_ALIGNMENT = 256
"""Bytes between the scratch buffers of one call; TensorRT aligns the first of them so."""

_MAX_CALLS = 256
"""Maximum number of shapes whose launches a plugin keeps."""

_errors: deque[str] = deque(maxlen=16)


def take_plugin_errors() -> tuple[str, ...]:
    """Return the errors of this process's plugins, oldest first, and clear them."""
    taken = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(_errors.popleft())
    return tuple(taken)


_Method = TypeVar("_Method", bound=Callable[..., Any])


def reported(method: _Method) -> _Method:
    """Keep a method's exception for `take_plugin_errors`: TensorRT learns of a failure, but not of the reason."""

    @functools.wraps(method)
    def reporting(self: Any, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as error:
            message = f"{self.operator.name}: {error}"
            _errors.append(message)
            logger.error("%s", message)
            raise

    return cast(_Method, reporting)


@dataclass(frozen=True, kw_only=True)
class _PackedCall:
    """The packed launches of one call, for one set of shapes.

    Attributes:
        shapes: shapes of the states.
        launches: launches in order.
        offsets: offsets of the scratch buffers in the workspace, in bytes.
        stream_type: the driver's ``CUstream``.
    """

    shapes: tuple[tuple[int, ...], ...]
    launches: tuple[PreparedLaunch, ...]
    offsets: tuple[int, ...]
    stream_type: Any


class TensorRTPlugin:
    """An operator's plugin. `plugin_class` adds the interfaces of a TensorRT variant as further bases."""

    trt: Any
    operator: Operator
    spec: PluginSpec
    interfaces: tuple[Any, ...]

    def __init__(self, attributes: Mapping[str, Any], kernels: Path | None) -> None:
        for interface in self.interfaces:
            interface.__init__(self)
        self.plugin_name, self.plugin_version = self.operator.name, str(self.operator.version)
        self.attributes, self.kernels = dict(attributes), kernels
        self.block_index_use = BlockIndexUse(self.attributes.pop(BLOCK_INDEX_USE, BlockIndexUse.PRIVATE))
        self.plugin_namespace = PLUGIN_NAMESPACE
        self.num_outputs = 2 if self.block_index_use is BlockIndexUse.OUTPUT else 1
        self._loaded: dict[str, LoadedKernel] = {}
        self._calls: dict[Any, _PackedCall] = {}
        self._call: _PackedCall | None = None
        self._serialized: FieldCollection | None = None
        # The bindings delete an object twice when TensorRT deletes it while Python holds it nowhere else, as at a build
        # that fails: the heap is corrupted and the process dies (seen in TensorRT-RTX 1.7.1). A reference that is never
        # given back prevents it. They leak some themselves; `destroy` releases what is large.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def destroy(self) -> None:
        self._call = None
        self._calls.clear()
        self._loaded.clear()

    def get_capability_interface(self, kind: Any) -> TensorRTPlugin:
        # One object has all three capabilities: core, build and runtime.
        return self

    def clone(self) -> TensorRTPlugin:
        # Launches hold buffers of their own, so that two execution contexts never share them.
        return type(self)({**self.attributes, **self._block_index_field()}, self.kernels)

    def attach_to_context(self, context: Any) -> TensorRTPlugin:
        return self.clone()

    def get_fields_to_serialize(self) -> Any:
        # TensorRT reads the fields after this returns, from memory that Python owns.
        block_index = self._block_index_field()
        types = {**self.spec.FIELDS, **dict.fromkeys(block_index, FieldType.INT)}
        self._serialized = FieldCollection(self.trt, types, {**self.attributes, **block_index})
        return self._serialized.collection

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        return [input_types[0], self.trt.DataType.INT32][: self.num_outputs]

    @reported
    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        result = self.trt.DimsExprs(inputs[0])
        return [result] if self.num_outputs == 1 else [result, self._block_index_shape(inputs, builder)]

    def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
        described = tensors[position].desc
        if described.format != self.trt.TensorFormat.LINEAR:
            return False
        own = num_inputs - (self.block_index_use is BlockIndexUse.INPUT)
        inputs = [*self.spec.INPUT_DTYPES[:own], "int32"][:num_inputs]
        expected = (*inputs, None, "int32")[position]
        if expected is not None:
            return _DTYPES.get(described.type.name) == expected
        return _DTYPES.get(described.type.name) in self.spec.DTYPES and described.type == tensors[0].desc.type

    @reported
    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.spec.check([tuple(tensor.max) for tensor in self._operator_inputs(inputs)], self.attributes)

    @reported
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return self._workspace([tuple(tensor.max) for tensor in self._operator_inputs(inputs)])[1]

    def get_valid_tactics(self) -> list[int]:
        # TensorRT's default only: the GPU decides the kernel, when the shapes are known.
        return []

    def set_tactic(self, tactic: int) -> None:
        pass

    @reported
    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._call = None
        if self.kernels is None:
            return  # a build that runs nothing; `enqueue` raises an error
        shapes = tuple(tuple(tensor.dims) for tensor in self._operator_inputs(inputs))
        dtype = _DTYPES[inputs[0].type.name]
        if (shapes, dtype) not in self._calls:
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[shapes, dtype] = self._prepared(shapes, dtype, self.kernels)
        self._call = self._calls[shapes, dtype]

    @reported
    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        call = self._call
        if call is None:
            raise LaunchError(
                "there are no kernels to launch: the plugin was created without a bundle's folder of kernels, or its "
                "shapes were rejected. Deserialise the engine within hdplugins.tensorrt.plugins.plugins_with_kernels."
            )
        shapes = tuple(tuple(tensor.dims) for tensor in input_desc[: len(call.shapes)])
        if shapes != call.shapes:
            raise LaunchError(f"the plugin was set up for shapes {call.shapes}, but got {shapes}.")
        addresses = (*inputs, *outputs, *(workspace + offset for offset in call.offsets))
        cuda_stream = call.stream_type(stream)
        for launch in call.launches:
            launch.start(addresses, cuda_stream)

    def _operator_inputs(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the operator's inputs, without a block index after them."""
        return inputs[:-1] if self.block_index_use is BlockIndexUse.INPUT else inputs

    def _block_index_field(self) -> dict[str, int]:
        return {} if self.block_index_use is BlockIndexUse.PRIVATE else {BLOCK_INDEX_USE: int(self.block_index_use)}

    def _block_index_shape(self, inputs: Sequence[Any], builder: Any) -> Any:
        """Return the dimensions of the block index, [batch, values]."""
        operations, dims = self.trt.DimensionOperation, self.trt.DimsExprs(2)
        # Of the mask, whose axes vary, nothing is read; a table has constant axes.
        shapes = [[axis.get_constant_value() if axis.is_constant() else 1 for axis in shape] for shape in inputs]
        size = self.spec.block_index_size(shapes, self.attributes)
        assert size is not None, "graphs share no block index that has no size"
        batch, _, tokens, _ = sizes(inputs[0])
        units = builder.operation(operations.CEIL_DIV, tokens, builder.constant(size.unit))
        varying = builder.operation(operations.PROD, units, builder.constant(size.per_unit))
        dims[0], dims[1] = batch, builder.operation(operations.SUM, varying, builder.constant(size.fixed))
        return dims

    def _prepared(self, shapes: tuple[tuple[int, ...], ...], dtype: str, kernels: Path) -> _PackedCall:
        spec = self.spec

        def serves(kernel: Any) -> bool:
            return spec.serves(kernel, shapes, self.attributes, dtype=dtype)

        if not self._loaded or not all(serves(kernel.compiled) for kernel in self._loaded.values()):
            self._loaded = load_kernels(kernels, f"{self.operator.name}-", spec.kernels, serves=serves)
        constants = {name: kernel.compiled.constants for name, kernel in self._loaded.items()}
        offsets, _ = self._workspace(shapes)
        inputs = self.operator.inputs[: len(shapes)]
        takes, gives = (self.block_index_use is use for use in (BlockIndexUse.INPUT, BlockIndexUse.OUTPUT))
        # In the order of the addresses: inputs, outputs, the workspace.
        names = (*inputs, *[BLOCK_INDEX] * takes, spec.OUTPUT, *[BLOCK_INDEX] * gives, *offsets)
        places = {name: place for place, name in enumerate(names)}
        left_out = spec.block_index_kernels if takes else ()
        return _PackedCall(
            shapes=shapes[: self.operator.states],
            launches=tuple(
                PreparedLaunch(self._loaded[launch.kernel], launch, places)
                for launch in spec.launches(shapes, self.attributes, constants=constants)
                if launch.kernel not in left_out
            ),
            offsets=tuple(offsets.values()),
            stream_type=next(iter(self._loaded.values())).driver.CUstream,
        )

    def _workspace(self, shapes: Sequence[Sequence[int]]) -> tuple[dict[str, int], int]:
        """Return the offset of each scratch buffer, and the size of the workspace in bytes."""
        parts = dict(self.spec.workspace(shapes, self.attributes))
        if self.block_index_use is not BlockIndexUse.PRIVATE:
            del parts[BLOCK_INDEX]
        # An empty buffer needs an address, too, and TensorRT gives none where the workspace is empty.
        sizes = [-(-max(1, size) // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT for size in parts.values()]
        ends = list(itertools.accumulate(sizes, initial=0))
        return dict(zip(parts, ends, strict=False)), ends[-1]


@functools.cache
def plugin_class(trt: ModuleType, operator: Operator) -> type[TensorRTPlugin]:
    """Return the plugin class of an operator for a TensorRT variant.

    Args:
        trt: the module ``tensorrt`` or ``tensorrt_rtx``.
        operator: an operator with a `PluginSpec`.
    """
    interfaces = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)
    members = {"trt": trt, "operator": operator, "spec": plugin_spec_of(operator), "interfaces": interfaces}
    return type(f"{operator.name}Plugin", (TensorRTPlugin, *interfaces), members)
