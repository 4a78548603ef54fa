"""Machines with a simulated GPU and a simulated TensorRT."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.machine import LONG, SHORT, Machine, MachineMaker
from fakes.simulated_device import SimulatedDevice
from fakes.simulated_tensorrt import SimulatedTensorRt, add_engine
from hdruntime.bundle.manifest import ProfileShape
from support.tiny_bundle import make_bundle


@pytest.fixture
def new_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MachineMaker]:
    """Make a machine: (seed=0, profiles=..., flavour=..., backend module=..., **the bundle's and engine's options)."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("our plugins need TensorRT-RTX's base classes: pip install 'hdexport[rtx]'")
    machines: list[Machine] = []
    monkeypatch.setenv("XDG_CACHE_HOME", "relative paths are ignored, and nothing is written elsewhere")

    def make(
        seed: int = 0,
        *,
        profiles: Sequence[ProfileShape] = (SHORT, LONG),
        flavour: str = "tensorrt",
        module: str | None = None,
        eagerness: float | None = None,
        made_by: Callable[[Path], Path] | None = None,
        **options: Any,
    ) -> Machine:
        device = SimulatedDevice(seed, eagerness=eagerness)
        trt = SimulatedTensorRt(device, module or flavour)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", device)  # type: ignore[misc]
        monkeypatch.setitem(sys.modules, module or flavour, trt)
        path = tmp_path / f"bundle-{len(machines)}"
        of_bundle, types = (
            {name: options.pop(name) for name in names if name in options}
            for names in (("task", "token_types", "padding"), ("input_type", "output_type"))
        )
        make_bundle(path, **of_bundle) if made_by is None else made_by(path)
        machines.append(Machine(add_engine(path, profiles, flavour=flavour, types=types, **options), device, trt))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


@pytest.fixture
def machine(new_machine: MachineMaker) -> Machine:
    """A machine without options."""
    return new_machine()
