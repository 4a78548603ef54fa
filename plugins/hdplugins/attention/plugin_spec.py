"""`PluginSpec`, the module `plugin` of an operator: how the operator's kernels are compiled, found and launched."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, NamedTuple, cast

from hdplugins.attention.operator import Operator
from hdplugins.kernels.aot import CompiledKernel, Constant, KernelSource
from hdplugins.kernels.block_config import (
    HEAD_DIMS,
    LOG2_E,
    ONLINE_SOFTMAX,
    TRITON_TYPE,
    BlockConfig,
    check_sizes,
    check_strides,
    cubin_architecture,
)
from hdplugins.kernels.cuda_launch import Launch

PLUGIN = "plugin"
"""Module of an operator's folder whose `PLUGIN_SPEC` is a `PluginSpec`."""

BLOCK_INDEX = "block_index"
"""The kernels' name of a scratch buffer that plugins of one graph can share: the keys that each block of queries sees,
like FlexAttention's BlockMask. Few operators have one."""

BLOCK_INDEX_USE = "block_index_use"
"""The attribute of a plugin's node that holds its `BlockIndexUse`; absent for `BlockIndexUse.PRIVATE`."""

Attributes = Mapping[str, Any]
"""An operator's attributes by name: an int, a tuple of ints, or a float each, as `PluginSpec.FIELDS` says."""

Shapes = Sequence[Sequence[int]]
"""The shapes of an operator's inputs, in order; optional inputs at the end may be left out."""

Strides = Mapping[str, Sequence[int]]
"""The (batch, head, token) strides of states and of the output by name, in elements; contiguous if left out."""

_NOMINAL = BlockConfig(block_m=64, block_n=64, num_warps=4, num_stages=3, block_d=32)
"""Block config for a check that launches nothing."""

_TRITON_TYPE = {**TRITON_TYPE, "int32": "i32", "bool": "i1"}

_NUMBERS = {2: "two", 3: "three"}


class Sizes(NamedTuple):
    """The sizes of the axes of a state, or of the output."""

    batch: int
    heads: int
    tokens: int
    head_dim: int


class FieldType(StrEnum):
    """Type of an attribute in an engine."""

    INT = "int"
    INTS = "ints"
    FLOAT = "float"


class BlockIndexUse(IntEnum):
    """Where a plugin's kernels find their block index.

    Attributes:
        PRIVATE: the plugin computes the block index in its workspace.
        OUTPUT: the plugin computes the block index as a second output, for later plugins.
        INPUT: the plugin's last input is the block index of an earlier plugin.
    """

    PRIVATE = 0
    OUTPUT = 1
    INPUT = 2

    @property
    def suffix(self) -> str:
        """Suffix of the node's type in ONNX Runtime, where a type has a fixed number of outputs."""
        return "" if self is BlockIndexUse.PRIVATE else f"_{BLOCK_INDEX}_{self.name.lower()}"


@dataclass(frozen=True, kw_only=True)
class BlockIndexSize:
    """The maximum number of int32 values of a sequence's block index: fixed + per_unit * ceil(tokens / unit)."""

    fixed: int
    per_unit: int
    unit: int


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One call of an operator whose shapes and strides the kernels support.

    Attributes:
        shapes: shapes of the inputs.
        attributes: attributes of the operator.
        constants: constants of each kernel when it was compiled.
        sizes: sizes of the first state.
        scalars: strides of the states and the output, and the scale, as the kernels take them.
    """

    shapes: Shapes
    attributes: Attributes
    constants: Mapping[str, Mapping[str, Any]]
    sizes: Sizes
    scalars: Mapping[str, int | float]

    def blocks_of(self, tokens: int) -> int:
        """Return the number of query blocks of `attend` for that many tokens."""
        return -(-tokens // int(self.constants["attend"]["BLOCK_M"]))


class PluginSpec(ABC):
    """An attention operator's kernels and plugin. A spec imports neither GPU libraries nor PyTorch.

    Kernels read the states, and write the output, by their strides, except along head_dim; other arrays are contiguous.
    A plugin has one output, of the shape and type of the first input, and may have its block index as a second one,
    int32 [batch, `BlockIndexSize`]. `attend` is the main kernel: the block config sets its warps and pipeline.

    Attributes:
        OPERATOR: the operator.
        FIELDS: attribute -> its type.
        DTYPES: supported dtypes of the operator.
        HEAD_DIMS: supported values of head_dim.
        INPUT_DTYPES: dtype of each input, including optional ones; None for the operator's dtype.
        OUTPUT: the kernels' name of the output. The kernels' inputs are named as the operator's.
        SCRATCH: the kernels' name of each scratch buffer -> Triton's type of its values.
        BLOCK_INDEX_ATTRIBUTES: the attributes that decide the block index, beside the inputs that its kernels read.
        POINTERS: kernel -> its pointers, in the function's order; the kernels in the order in which they run.
        SCALARS: kernel -> its scalar arguments, which follow the pointers; all are int32 except `scale`.
        CALLED_MODULES: import paths of further modules whose functions the kernels call.
        IS_PLUGIN: whether TensorRT engines run the kernels, as a plugin, instead of TensorRT's native attention.
    """

    OPERATOR: ClassVar[Operator]
    FIELDS: ClassVar[Mapping[str, FieldType]]
    DTYPES: ClassVar[tuple[str, ...]] = tuple(TRITON_TYPE)
    HEAD_DIMS: ClassVar[tuple[int, ...]] = HEAD_DIMS
    INPUT_DTYPES: ClassVar[tuple[str | None, ...]]
    OUTPUT: ClassVar[str] = "out"
    SCRATCH: ClassVar[Mapping[str, str]] = {}
    BLOCK_INDEX_ATTRIBUTES: ClassVar[tuple[str, ...]] = ()
    POINTERS: ClassVar[Mapping[str, tuple[str, ...]]]
    SCALARS: ClassVar[Mapping[str, tuple[str, ...]]]
    CALLED_MODULES: ClassVar[tuple[str, ...]] = (ONLINE_SOFTMAX,)
    IS_PLUGIN: ClassVar[bool] = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that a call may need, in the order in which they run."""
        return tuple(self.POINTERS)

    @property
    def optional_fields(self) -> Mapping[str, FieldType]:
        """Attribute -> its type, for attributes that a plugin may have beside its operator's attributes."""
        return {BLOCK_INDEX_USE: FieldType.INT} if BLOCK_INDEX in self.SCRATCH else {}

    @property
    def block_index_kernels(self) -> tuple[str, ...]:
        return tuple(
            name for name, pointers in self.POINTERS.items() if BLOCK_INDEX in pointers and self.OUTPUT not in pointers
        )

    @property
    def block_index_inputs(self) -> frozenset[str]:
        """The inputs that the kernels of the block index read."""
        return frozenset(itertools.chain.from_iterable(self.POINTERS[name] for name in self.block_index_kernels)) & {
            *self.OPERATOR.inputs
        }

    def block_index_size(self, shapes: Shapes, attributes: Attributes) -> BlockIndexSize | None:
        """Return the size of a sequence's block index; None if it cannot be shared, or is not linear in tokens."""
        return None

    @abstractmethod
    def block_config(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> BlockConfig:
        """Return the block config of `attend` for GPUs of a compute capability (90 for sm_90).

        Raises:
            ValueError: no kernel supports the GPU, a size or the dtype.
        """

    def better_on(self, shapes: Shapes, attributes: Attributes, *, dtype: str) -> tuple[int, ...] | None:
        """Return the architectures on which the kernels are known to be faster than ONNX Runtime's native attention.

        sm_90 is 90. None stands for all architectures, also if ONNX Runtime has only the function body.
        """
        return None

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, block_config: BlockConfig
    ) -> Mapping[str, Mapping[str, Constant]]:
        """Return the constants of each kernel; by default, of a single kernel without further constants."""
        return {"attend": block_config.constants(sizes(shapes[0]).head_dim)}

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """Return the bytes of each uninitialized scratch buffer; at most as many for smaller shapes."""
        return {}

    def launches(
        self,
        shapes: Shapes,
        attributes: Attributes,
        *,
        constants: Mapping[str, Mapping[str, Any]],
        strides: Strides | None = None,
    ) -> tuple[Launch, ...]:
        """Return the kernels to launch for one call, in order.

        Args:
            constants: constants of each kernel when it was compiled.

        Raises:
            ValueError: a size, a stride or an attribute is out of range.
        """
        self.check_shapes(shapes)
        of_query, scale = sizes(shapes[0]), attributes["scale"]
        check_sizes(**of_query._asdict(), scale=scale, head_dims=self.HEAD_DIMS)
        self.check_attributes(shapes, attributes)
        call = KernelCall(
            shapes=shapes,
            attributes=attributes,
            constants=constants,
            sizes=of_query,
            scalars={**self.stride_scalars(shapes, strides), "scale": scale * LOG2_E},
        )
        return self.launches_of(call)

    def check_attributes(self, shapes: Shapes, attributes: Attributes) -> None:
        """Raise a ValueError if an attribute is out of range, or does not fit the shapes."""
        self.OPERATOR.check(**attributes)

    @abstractmethod
    def launches_of(self, call: KernelCall) -> tuple[Launch, ...]:
        """Return the kernels to launch for a call whose shapes, strides and attributes were checked."""

    def launch(self, kernel: str, grid: tuple[int, int, int], scalars: Mapping[str, int | float]) -> Launch:
        """Return a launch of a kernel with the kernel's part of the scalars."""
        return Launch(kernel=kernel, grid=grid, scalars={name: scalars[name] for name in self.SCALARS[kernel]})

    def stride_scalars(self, shapes: Shapes, strides: Strides | None) -> dict[str, int]:
        """Return the kernels' scalars for the strides of states and output.

        Raises:
            ValueError: the kernels do not support the strides.
        """
        shape_of = {**dict(zip(self.OPERATOR.state_names, shapes, strict=False)), self.OUTPUT: shapes[0]}
        known, scalars = strides or {}, dict[str, int]()
        if not shape_of.keys() >= known.keys():
            raise ValueError(
                f"There are strides of {', '.join(known)}; the arrays with strides are {', '.join(shape_of)}."
            )
        for name, shape in shape_of.items():
            state, of_axes = sizes(shape), known.get(name, _contiguous(shape))
            # An axis of size 1 may have any stride.
            used = [stride if size > 1 else 0 for size, stride in zip(state[:3], of_axes, strict=True)]
            check_strides(name, used, tokens=state.tokens)
            scalars |= dict(zip(stride_names(name), used, strict=True))
        return scalars

    def check(self, shapes: Shapes, attributes: Attributes) -> None:
        """Raise a ValueError if there is no kernel for these shapes and attributes; axes that vary are 1."""
        self.check_shapes(shapes)
        constants = self.constants(shapes, attributes, dtype=self.DTYPES[0], block_config=_NOMINAL)
        self.launches(shapes, attributes, constants=constants)

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise a ValueError if the shapes do not fit each other.

        By default all states have one shape, and the mask is [batch, tokens]. If the operator groups heads, states
        after the first may have fewer heads.
        """
        operator, axes = self.OPERATOR, [list(shape) for shape in shapes]
        states, mask = axes[: operator.states], axes[operator.states]
        is_fit = len(axes) <= len(operator.inputs) and all(len(state) == 4 for state in states)
        if is_fit:
            first, *others = map(sizes, states)
            kv_heads, is_grouped = others[-1].heads, operator.groups_heads
            alike = first._replace(heads=kv_heads) if is_grouped and kv_heads and not first.heads % kv_heads else first
            is_fit = others == [alike] * len(others) and mask == [first.batch, first.tokens]
        if not is_fit:
            *names, last = operator.state_names
            raise ValueError(
                f"{', '.join(names)} and {last} are {', '.join(map(str, states))} and {operator.mask} is {mask}; the "
                f"first {_NUMBERS[operator.states]} are alike, [batch, tokens, heads, head_dim], and the last is "
                "[batch, tokens]." + (" Heads may be a multiple of the others'." if operator.groups_heads else "")
            )

    def kernel_sources(
        self,
        shapes: Shapes,
        attributes: Attributes,
        *,
        dtype: str,
        architectures: Sequence[int],
        block_config: BlockConfig | None = None,
    ) -> tuple[KernelSource, ...]:
        """Return the kernels to compile for GPUs of these compute capabilities (90 for sm_90).

        Architectures that run one cubin are compiled once.

        Args:
            shapes: shapes of the inputs; axes that vary are 1.
            block_config: block config to use instead of the table's.

        Raises:
            ValueError: an architecture has no kernel.
        """
        self.check_shapes(shapes)
        absent = dict.fromkeys(self.OPERATOR.inputs[len(shapes) :])
        sources = []
        for architecture in dict.fromkeys(map(cubin_architecture, architectures)):
            config = block_config or self.block_config(shapes, attributes, dtype=dtype, architecture=architecture)
            for function, constants in self.constants(shapes, attributes, dtype=dtype, block_config=config).items():
                signature = self._signature(function, shapes, dtype)
                source = KernelSource(
                    module=f"{self.OPERATOR.package}.kernel",
                    called_modules=self.CALLED_MODULES,
                    function=function,
                    architecture=architecture,
                    signature=signature,
                    constants={name: None for name in self.POINTERS[function] if name in absent} | dict(constants),
                    # `check_strides` raises for other strides, and head_dim divides the strides that it does not check.
                    aligned=tuple(name for name, kind in signature.items() if kind[0] == "*" or "stride" in name),
                    **self.compiled_with(function, config),
                )
                sources.append(source)
        return tuple(sources)

    @staticmethod
    def compiled_with(function: str, block_config: BlockConfig) -> dict[str, Any]:
        """Return Triton's options of a kernel, both shipped and timed; the block config is for ``attend``."""
        if function != "attend":
            return {"num_warps": 4, "num_stages": 1, "maxnreg": None}
        return {
            "num_warps": block_config.num_warps,
            "num_stages": block_config.num_stages,
            "maxnreg": block_config.max_registers,
        }

    def serves(self, kernel: CompiledKernel, shapes: Shapes, attributes: Attributes, *, dtype: str) -> bool:
        """Return whether a kernel was compiled for these types, sizes and attributes."""
        constants, head_dim = kernel.constants, sizes(shapes[0]).head_dim
        return (
            dict(kernel.arguments) == self._signature(kernel.function, shapes, dtype)
            and constants.get("BLOCK_D", head_dim) + constants.get("REM_D", 0) == head_dim
            and constants.get("BLOCK_SIZE") in (None, attributes.get("block_size"))
        )

    def _signature(self, function: str, shapes: Shapes, dtype: str) -> dict[str, str]:
        """Return Triton's type of each argument, without pointers to inputs that a node leaves out."""
        inputs = dict(zip(self.OPERATOR.inputs[: len(shapes)], self.INPUT_DTYPES, strict=False))
        types = {name: _TRITON_TYPE[kind or dtype] for name, kind in inputs.items()}
        types |= {**self.SCRATCH, self.OUTPUT: TRITON_TYPE[dtype]}
        return {
            **{name: f"*{types[name]}" for name in self.POINTERS[function] if name in types},
            **{name: "fp32" if name == "scale" else "i32" for name in self.SCALARS[function]},
        }


def sizes(axes: Sequence[int]) -> Sizes:
    """Return the sizes of a state of that shape, or its strides; no other function decides the order of axes."""
    batch, tokens, heads, head_dim = axes
    return Sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim)


def stride_names(*arrays: str) -> tuple[str, ...]:
    """Return the names of the scalars that form the kernels' tuples of strides; see `KernelSource.signature`."""
    return tuple(f"{name}_strides.{axis}" for name in arrays for axis in ("batch", "head", "token"))


def plugin_spec_of(operator: Operator) -> PluginSpec:
    """Return the spec in an operator's module `plugin`; a ModuleNotFoundError says that there is no such module."""
    return cast(PluginSpec, operator.implementation(PLUGIN).PLUGIN_SPEC)


def _contiguous(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the (batch, head, token) strides of a contiguous state of that shape."""
    batch, heads, tokens, _ = sizes([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
    return batch, heads, tokens
