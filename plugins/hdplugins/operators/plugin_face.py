"""What an operator's face `tensorrt_plugin` holds: all that a TensorRT plugin is made of."""

from __future__ import annotations

__all__ = ["PLUGIN_FACE", "Attributes", "FieldType", "PluginFace", "Shapes", "face_of"]

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, cast

from hdplugins.kernels.aot import CompiledKernel, KernelSource
from hdplugins.kernels.cuda_launch import Launch
from hdplugins.operators.operator import Operator

PLUGIN_FACE = "tensorrt_plugin"
"""Module of an operator's folder."""

Attributes = Mapping[str, Any]
"""An operator's attributes by name: an int, a tuple of ints, or a float each, as `PluginFace.FIELDS` says."""

Shapes = Sequence[Sequence[int]]
"""The shapes of an operator's inputs, in order, as many as a node has: optional ones at the end may be left out."""


class FieldType(str, Enum):
    """Type of an attribute: what TensorRT stores it as in an engine."""

    INT = "int"
    INTS = "ints"
    FLOAT = "float"


class PluginFace(Protocol):
    """The module `tensorrt_plugin` of an operator. It imports neither TensorRT, Triton nor PyTorch.

    A plugin has one output, of the shape and type of the first input.

    Attributes:
        FIELDS: attribute -> its type.
        DTYPES: what the operator's own dtype may be: "float16", "bfloat16", "float32".
        INPUT_DTYPES: of each input, optional ones too; None for the operator's own dtype.
        OUTPUT: the kernels' name of the output. The inputs have the operator's names for them.
        KERNELS: functions of the kernels that a call needs.
    """

    @property
    def FIELDS(self) -> Mapping[str, FieldType]: ...  # noqa: N802
    @property
    def DTYPES(self) -> tuple[str, ...]: ...  # noqa: N802
    @property
    def INPUT_DTYPES(self) -> tuple[str | None, ...]: ...  # noqa: N802
    @property
    def OUTPUT(self) -> str: ...  # noqa: N802
    @property
    def KERNELS(self) -> tuple[str, ...]: ...  # noqa: N802

    def check(self, shapes: Shapes, attributes: Attributes) -> None:
        """Refuse what no kernel is there for.

        Args:
            shapes: axes that vary are 1.
            attributes: of the node.

        Raises:
            ValueError: it says what fits.
        """

    def kernel_sources(
        self, shapes: Shapes, attributes: Attributes, *, dtype: str, architectures: Sequence[int]
    ) -> tuple[KernelSource, ...]:
        """What must be compiled for GPUs of these compute capabilities; sm_90 is 90.

        Raises:
            ValueError: one of them has no kernel.
        """

    def serves(self, kernel: CompiledKernel, shapes: Shapes, attributes: Attributes, *, dtype: str) -> bool:
        """Whether a kernel was compiled for these types, sizes and attributes."""

    def workspace(self, shapes: Shapes, attributes: Attributes) -> Mapping[str, int]:
        """The kernels' name of each scratch buffer -> bytes; at most as many for smaller shapes."""

    def launches(
        self, shapes: Shapes, attributes: Attributes, *, constants: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Launch, ...]:
        """The kernels to start for one call, in order.

        Args:
            shapes: of the call.
            attributes: of the node.
            constants: function -> what its constants were when it was compiled.

        Raises:
            ValueError: a size or an attribute is out of range.
        """


def face_of(operator: Operator) -> PluginFace:
    """An operator's face `tensorrt_plugin`.

    Raises:
        ModuleNotFoundError: it has none.
    """
    return cast(PluginFace, operator.face(PLUGIN_FACE))
