"""A driver that is simulated, and kernels for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver
from hdplugins.tensorrt.plugin_class import take_plugin_errors


@pytest.fixture
def no_old_errors() -> None:
    take_plugin_errors()


@pytest.fixture
def launched() -> list[LaunchedKernel]:
    """The launches that the driver received."""
    return []


@pytest.fixture
def driver(launched: list[LaunchedKernel], monkeypatch: pytest.MonkeyPatch) -> SimulatedDriver:
    """In place of cuda-python's."""
    driver = SimulatedDriver(run=launched.append)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Kernels of float16 and heads of 32 and 64, for two generations of GPUs."""
    from support.plugin_calls import kernels_for, shapes_of

    return kernels_for(
        tmp_path, *(shapes_of((1, 1, 1, head_dim)) for head_dim in (32, 64)), architectures=[80, 86, 120]
    )
