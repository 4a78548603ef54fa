"""Machines with a simulated GPU and a simulated TensorRT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.machine import Machine, MachineMaker, new_machines


@pytest.fixture
def new_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MachineMaker]:
    """See `new_machines`."""
    yield from new_machines(monkeypatch, tmp_path, "tensorrt")


@pytest.fixture
def machine(new_machine: MachineMaker) -> Machine:
    """A machine without options."""
    return new_machine()
