"""The cases of the attention kernels: one file per operator, and the registry of them all."""

from __future__ import annotations

__all__ = ["DTYPES", "FAMILIES", "HIDDEN_SIZE", "Case"]

from benchmarks.gpu.cases.blocks import BlockCase
from benchmarks.gpu.cases.case import Case
from benchmarks.gpu.cases.chunks import ChunkCase
from benchmarks.gpu.cases.distances import DistanceCase
from benchmarks.gpu.cases.lsh import LshCase
from benchmarks.gpu.cases.relative import RelativeCase
from benchmarks.gpu.cases.window import WindowCase

DTYPES = ("float16", "bfloat16", "float32")
HIDDEN_SIZE = 1024
"""Of the cases that are timed; they all have the same number of tokens."""

FAMILIES: dict[str, type[Case]] = {
    "window": WindowCase, "blocks": BlockCase, "chunks": ChunkCase, "lsh": LshCase, "distances": DistanceCase,
    "relative": RelativeCase,
}  # fmt: skip
