"""Processes in which Triton interprets kernels; each takes seconds to start, so that all tests share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes.simulated_gpu import SimulatedGpu
from support.interpreted_kernel import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def gpu() -> Iterator[SimulatedGpu]:
    with SimulatedGpu() as gpu:
        yield gpu
