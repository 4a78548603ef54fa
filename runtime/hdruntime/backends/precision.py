"""Precisions of a session on a CPU, and the precisions that have separate graphs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from hdruntime.errors import Setting


class Precision(StrEnum):
    """The precision of matmuls and additions; inputs and outputs always have the types of the manifest."""

    AUTO = "auto"
    """``bfloat16`` where OpenVINO runs a bundle that is float16 or bfloat16 on a CPU that computes in bfloat16, else
    ``float32``. On a GPU, the precision that the graph or engine was built in."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """bfloat16, where the backend supports it; a backend may keep sums, normalization and softmax in float32."""
    INT8 = "int8"
    """Matmuls with int8 weights, in separate graphs, which ``hdexport build --int8`` adds."""

    @property
    def has_graphs(self) -> bool:
        """Whether separate graphs, whose dtype is the precision, compute in the precision; other graphs compute in the
        other precisions."""
        return self in BUILD_OPTIONS


BUILD_OPTIONS: Mapping[Precision, Setting] = {Precision.INT8: Setting("int8", command="build")}
"""Precision with separate graphs -> option of ``hdexport build`` that adds the graphs."""
