"""The face `plugin` of an operator: how the operator's kernels are compiled, found and launched."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, ClassVar, NamedTuple, cast

from hdplugins.attention.operator import Operator
from hdplugins.kernels.aot import CompiledKernel, Constant, KernelSource
from hdplugins.kernels.attention_tiles import INNER_LOOP, TRITON_TYPE, Tiles, check_strides, cubin_architecture
from hdplugins.kernels.cuda_launch import Launch

PLUGIN_FACE = "plugin"
"""Module of an operator's folder; its `FACE` is a `PluginFace`."""

PLAN = "plan"
"""The kernels' name of a scratch buffer that plugins of one graph can share; few operators have one."""

PLAN_USE = "plan_use"
"""The attribute of a plugin's node that holds its `PlanUse`, where that is not `PlanUse.OWN`."""

Attributes = Mapping[str, Any]
"""An operator's attributes by name: an int, a tuple of ints, or a float each, as `PluginFace.FIELDS` says."""

Shapes = Sequence[Sequence[int]]
"""The shapes of an operator's inputs, in order, as many as a node has: optional ones at the end may be left out."""

Strides = Mapping[str, Sequence[int]]
"""The (batch, head, token) strides of states and of the output by name, in elements; contiguous where left out."""

_NOMINAL = Tiles(block_queries=64, block_keys=64, num_warps=4, num_stages=3, head=32)
"""Tiles for a check that launches nothing."""

_TRITON_TYPE = {**TRITON_TYPE, "int32": "i32", "bool": "i1"}

_NUMBERS = {2: "two", 3: "three"}


class Sizes(NamedTuple):
    """The sizes of the axes of a state, or of the output."""

    batch: int
    heads: int
    tokens: int
    head_dim: int


class FieldType(str, Enum):
    """Type of an attribute: what an engine stores it as."""

    INT = "int"
    INTS = "ints"
    FLOAT = "float"


class PlanUse(IntEnum):
    """Where a plugin's kernels find their plan.

    Attributes:
        OWN: the plugin makes the plan in its workspace.
        GIVES: the plugin makes the plan as a second output, for plugins behind it.
        TAKES: the plugin's last input is the plan of a plugin before it.
    """

    OWN = 0
    GIVES = 1
    TAKES = 2

    @property
    def ending(self) -> str:
        """How the type of such a node ends in ONNX Runtime, where a type has one number of outputs."""
        return "" if self is PlanUse.OWN else f"_{self.name.lower()}_plan"


@dataclass(frozen=True, kw_only=True)
class PlanSize:
    """The int32 values of a text's plan, at most: `fixed`, and `per_unit` for every `unit` tokens that are begun."""

    fixed: int
    per_unit: int
    unit: int


class PluginFace(ABC):
    """An attention operator's kernels and plugin. It imports no library of GPUs, and no PyTorch.

    Kernels read the states, and write the output, by their strides, except along head_dim; other arrays are contiguous.
    A plugin has one output, of the shape and type of the first input, and may have its plan as a second one, int32
    [batch, `PlanSize`]. Of the kernels `attend` is the large one, whose warps and pipeline the tiles decide.

    Attributes:
        OPERATOR: the operator.
        FIELDS: attribute -> its type.
        DTYPES: what the operator's own dtype may be.
        INPUT_DTYPES: of each input, optional ones too; None for the operator's own dtype.
        OUTPUT: the kernels' name of the output. The inputs have the operator's names for them.
        SCRATCH: the kernels' name of each scratch buffer -> Triton's type of its values.
        PLANNED_BY: the attributes that decide the plan, beside the inputs that its kernels read.
        POINTERS: kernel -> its pointers, in the function's order; the kernels in the order in which they run.
        SCALARS: kernel -> its scalar arguments, which follow; all are int32 but `scale`.
        CALLED_MODULES: import paths of the modules whose functions the kernels call beside their own.
        IS_PLUGIN: whether engines run the kernels, by a plugin, rather than what TensorRT has.
    """

    OPERATOR: ClassVar[Operator]
    FIELDS: ClassVar[Mapping[str, FieldType]]
    DTYPES: ClassVar[tuple[str, ...]] = tuple(TRITON_TYPE)
    INPUT_DTYPES: ClassVar[tuple[str | None, ...]]
    OUTPUT: ClassVar[str] = "out"
    SCRATCH: ClassVar[Mapping[str, str]] = {}
    PLANNED_BY: ClassVar[tuple[str, ...]] = ()
    POINTERS: ClassVar[Mapping[str, tuple[str, ...]]]
    SCALARS: ClassVar[Mapping[str, tuple[str, ...]]]
    CALLED_MODULES: ClassVar[tuple[str, ...]] = (INNER_LOOP,)
    IS_PLUGIN: ClassVar[bool] = True

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that a call may need, in the order in which they run."""
        return tuple(self.POINTERS)

    @property
    def optional_fields(self) -> Mapping[str, FieldType]:
        """Attribute -> its type, for the attributes that a plugin may have beside its operator's."""
        return {PLAN_USE: FieldType.INT} if PLAN in self.SCRATCH else {}

    @property
    def planning_kernels(self) -> tuple[str, ...]:
        """The kernels that make the plan."""
        return tuple(
            name for name, pointers in self.POINTERS.items() if PLAN in pointers and self.OUTPUT not in pointers
        )

    @property
    def planned_inputs(self) -> frozenset[str]:
        """The inputs that the kernels of the plan read."""
        return frozenset(itertools.chain.from_iterable(self.POINTERS[name] for name in self.planning_kernels)) & {
            *self.OPERATOR.inputs
        }

    def plan_size(self, shapes: Shapes, attributes: Attributes) -> PlanSize | None:
        """The size of a text's plan; None where plugins cannot share a plan, or one would not be linear in tokens."""
        return None

    @abstractmethod
    def tiles(self, shapes: Shapes, attributes: Attributes, *, dtype: str, architecture: int) -> Tiles:
        """The tiles of `attend` for GPUs of a compute capability, sm_90 is 90; a ValueError says that there is no
        kernel for the GPU, a size or the dtype."""

    def better_on(self, shapes: Shapes, attributes: Attributes, *, dtype: str) -> tuple[int, ...] | None:
        """The architectures of GPUs on which the kernels are known to be faster than what ONNX Runtime has, sm_90 is
        90; None for all, as where it has bodies alone."""
        return None

    def constants(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, tiles: Tiles
    ) -> Mapping[str, Mapping[str, Constant]]:
        """Kernel -> the constants that it is compiled with; by default, of one kernel that needs no others."""
        return {"attend": tiles.constants(sizes(shapes[0]).head_dim)}

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """Scratch buffer -> bytes, which need not be set; at most as many for smaller shapes."""
        return {}

    @abstractmethod
    def launches(
        self,
        shapes: Shapes,
        attributes: Attributes,
        *,
        constants: Mapping[str, Mapping[str, Any]],
        strides: Strides | None = None,
    ) -> tuple[Launch, ...]:
        """The kernels to start for one call, in order; a ValueError says that a size, a stride or an attribute is out
        of range. `constants` are each kernel's when it was compiled."""

    def stride_scalars(self, shapes: Shapes, strides: Strides | None) -> dict[str, int]:
        """The kernels' scalars that say where the rows of states and output lie; a ValueError says that the kernels
        cannot read or write such rows."""
        shape_of = {**dict(zip(self.OPERATOR.state_names, shapes, strict=False)), self.OUTPUT: shapes[0]}
        given, scalars = strides or {}, dict[str, int]()
        if not shape_of.keys() >= given.keys():
            raise ValueError(
                f"There are strides of {', '.join(given)}; the arrays with strides are {', '.join(shape_of)}."
            )
        for name, shape in shape_of.items():
            own, of_axes = sizes(shape), given.get(name, _contiguous(shape))
            # An axis of one entry has any stride.
            used = [stride if size > 1 else 0 for size, stride in zip(own[:3], of_axes, strict=True)]
            check_strides(name, used, tokens=own.tokens)
            scalars |= dict(zip(stride_names(name), used, strict=True))
        return scalars

    def check(self, shapes: Shapes, attributes: Attributes) -> None:
        """Refuse what has no kernel, by a ValueError that says what fits; axes of the shapes that vary are 1."""
        self.check_shapes(shapes)
        constants = self.constants(shapes, attributes, dtype=self.DTYPES[0], tiles=_NOMINAL)
        self.launches(shapes, attributes, constants=constants)

    def check_shapes(self, shapes: Shapes) -> None:
        """Refuse shapes that do not belong together, by a ValueError that says what fits: here of states that are
        alike, and of a mask of their tokens.

        Where the operator groups heads, those after the first may have fewer.
        """
        operator, given = self.OPERATOR, [list(shape) for shape in shapes]
        states, mask = given[: operator.states], given[operator.states]
        is_fit = len(given) <= len(operator.inputs) and all(len(state) == 4 for state in states)
        if is_fit:
            first, *behind = map(sizes, states)
            kv_heads, is_grouped = behind[-1].heads, operator.groups_heads
            alike = first._replace(heads=kv_heads) if is_grouped and kv_heads and not first.heads % kv_heads else first
            is_fit = behind == [alike] * len(behind) and mask == [first.batch, first.tokens]
        if not is_fit:
            *others, last = operator.state_names
            raise ValueError(
                f"{', '.join(others)} and {last} are {', '.join(map(str, states))} and {operator.mask} is {mask}; the "
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
        tiles: Tiles | None = None,
    ) -> tuple[KernelSource, ...]:
        """What must be compiled for GPUs of these compute capabilities, of which those that run the same machine code
        are one; sm_90 is 90. A ValueError says that one has no kernel. Axes of the shapes that vary are 1, and `tiles`
        take the place of the table's.
        """
        self.check_shapes(shapes)
        absent = dict.fromkeys(self.OPERATOR.inputs[len(shapes) :])
        sources = []
        for architecture in dict.fromkeys(map(cubin_architecture, architectures)):
            of_gpu = tiles or self.tiles(shapes, attributes, dtype=dtype, architecture=architecture)
            for function, constants in self.constants(shapes, attributes, dtype=dtype, tiles=of_gpu).items():
                signature = self._signature(function, shapes, dtype)
                source = KernelSource(
                    module=f"{self.OPERATOR.package}.kernel",
                    called_modules=self.CALLED_MODULES,
                    function=function,
                    architecture=architecture,
                    signature=signature,
                    constants={name: None for name in self.POINTERS[function] if name in absent} | dict(constants),
                    # `check_strides` refuses other strides, and head_dim divides those that it does not look at.
                    aligned=tuple(name for name, kind in signature.items() if kind[0] == "*" or name[:6] == "stride"),
                    **self.compiled_with(function, of_gpu),
                )
                sources.append(source)
        return tuple(sources)

    @staticmethod
    def compiled_with(function: str, tiles: Tiles) -> dict[str, Any]:
        """Triton's options of a kernel, as it is shipped and as it is timed; those of tiles are for ``attend``."""
        if function != "attend":
            return {"num_warps": 4, "num_stages": 1, "maxnreg": None}
        return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "maxnreg": tiles.most_registers}

    def serves(self, kernel: CompiledKernel, shapes: Shapes, attributes: Attributes, *, dtype: str) -> bool:
        """Whether a kernel was compiled for these types, sizes and attributes."""
        constants, head_dim = kernel.constants, sizes(shapes[0]).head_dim
        return (
            dict(kernel.arguments) == self._signature(kernel.function, shapes, dtype)
            and constants.get("head", head_dim) + constants.get("tail", 0) == head_dim
            and constants.get("block_size") in (None, attributes.get("block_size"))
        )

    def _signature(self, function: str, shapes: Shapes, dtype: str) -> dict[str, str]:
        """Argument -> Triton's type, without the pointers to inputs that a node leaves out."""
        inputs = dict(zip(self.OPERATOR.inputs[: len(shapes)], self.INPUT_DTYPES, strict=False))
        types = {name: _TRITON_TYPE[kind or dtype] for name, kind in inputs.items()}
        types |= {**self.SCRATCH, self.OUTPUT: TRITON_TYPE[dtype]}
        return {
            **{name: f"*{types[name]}" for name in self.POINTERS[function] if name in types},
            **{name: "fp32" if name == "scale" else "i32" for name in self.SCALARS[function]},
        }


def sizes(axes: Sequence[int]) -> Sizes:
    """The sizes of a state of that shape, or its strides: here alone it is decided which axis is which."""
    batch, tokens, heads, head_dim = axes
    return Sizes(batch=batch, heads=heads, tokens=tokens, head_dim=head_dim)


def stride_names(*arrays: str) -> tuple[str, ...]:
    """The kernels' names of the strides of states, or of the output."""
    return tuple(f"stride_{name}_{axis}" for name in arrays for axis in ("batch", "head", "token"))


def face_of(operator: Operator) -> PluginFace:
    """The face of an operator's module `plugin`; a ModuleNotFoundError says that it has none."""
    return cast(PluginFace, operator.face(PLUGIN_FACE).FACE)


def _contiguous(shape: Sequence[int]) -> tuple[int, int, int]:
    """The (batch, head, token) strides of a contiguous state of that shape."""
    batch, heads, tokens, _ = sizes([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
    return batch, heads, tokens
