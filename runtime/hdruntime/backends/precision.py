"""Precisions of a session on a CPU, and the precisions that have graphs of their own."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Precision(StrEnum):
    """The numbers of a session's products and additions; inputs and outputs are of the manifest's types always."""

    AUTO = "auto"
    """``bfloat16`` where the CPU computes in it, the bundle is of half precision and the backend has it, else
    ``float32``. On a GPU, a session computes in the precision that its graph or engine was built in."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """bfloat16, where a backend has it; sums, normalisation and softmax stay in float32 where the backend says so."""
    INT8 = "int8"
    """Products with weights in 8 bits, by graphs of its own: ``hdexport build --int8``."""

    @property
    def has_graphs(self) -> bool:
        """Whether graphs of its own compute in it, whose dtype is its name; any other graph computes in the others."""
        return self in OPTION_OF_GRAPHS


OPTION_OF_GRAPHS: Mapping[Precision, str] = {Precision.INT8: "--int8"}
"""Precision with graphs of its own -> option of ``hdexport build`` that adds them."""
