"""A machine with a simulated GPU and a simulated TensorRT, and batches for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.arrays_on_gpu import OnGpu, current
from fakes.simulated_device import SimulatedDevice
from fakes.simulated_tensorrt import SimulatedTensorRt, add_engine
from hdruntime.backends.tensorrt import TensorRtRunner
from hdruntime.bundle.manifest import PaddingRule, ProfileShape
from hdruntime.bundle.reader import Bundle
from support.comparators import assert_close
from support.recurrent_bundle import make_recurrent_bundle

SHORT = ProfileShape(batch=(1, 1, 8), tokens=(1, 32, 32))
LONG = ProfileShape(batch=(2, 2, 4), tokens=(48, 128, 200))
HIDDEN = "last_hidden_state"
VOCABULARY = 9
"""Ids below have finite vectors in the tiny model."""


@dataclass
class Machine:
    """What a test holds.

    Attributes:
        bundle: with an engine of the profiles SHORT and LONG, unless asked for others.
        device: the GPU.
        trt: its TensorRT.
        model: what the tiny model computes.
        opened: runners, to be closed and looked at in the end.
    """

    bundle: Bundle
    device: SimulatedDevice
    trt: SimulatedTensorRt
    model: Callable[..., np.ndarray]
    opened: list[TensorRtRunner] = field(default_factory=list)

    def runner(self, **options: Any) -> TensorRtRunner:
        """A runner of the bundle's engine."""
        self.opened.append(TensorRtRunner(self.bundle, self.bundle.manifest.engines[0], **options))
        return self.opened[-1]

    def expected(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Hidden states, 0 where there is padding."""
        mask, padding = inputs["attention_mask"], self.bundle.manifest.padding
        return np.where(mask[..., np.newaxis] == 1, self.model(inputs["input_ids"], mask, padding), 0)

    def check(self, inputs: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]) -> None:
        """Assert that results are the model's, and float32."""
        assert results[HIDDEN].dtype == np.float32
        assert_close(results[HIDDEN], self.expected(inputs), atol=1e-5)

    def run(self, runner: TensorRtRunner, inputs: Mapping[str, np.ndarray]) -> None:
        """Run a batch and check its results."""
        self.check(inputs, runner.start(inputs, [HIDDEN])())


MachineMaker = Callable[..., Machine]


@pytest.fixture
def new_machine(
    new_bundle: Callable[..., Path],
    model: Callable[..., np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Any:
    """Make a machine: (seed=0, profiles=..., flavour=..., backend module=..., **bundle's and engine's options)."""
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
        task: str = "feature-extraction",
        token_types: bool = False,
        padding: PaddingRule | None = None,
        recurrent: bool = False,
        **options: Any,
    ) -> Machine:
        device = SimulatedDevice(seed, eagerness=eagerness)
        trt = SimulatedTensorRt(device, module or flavour)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", device)  # type: ignore[misc]
        monkeypatch.setitem(sys.modules, module or flavour, trt)
        name = f"bundle-{len(machines)}"
        if recurrent:
            path = make_recurrent_bundle(tmp_path / name)
        else:
            path = new_bundle(name, task=task, token_types=token_types, padding=padding)
        machines.append(Machine(add_engine(path, profiles, flavour=flavour, **options), device, trt, model))
        return machines[-1]

    yield make
    for machine in machines:
        for runner in machine.opened:
            runner.close()
        assert machine.device.faults == []
        if machine.device.broken is None:
            assert machine.device.left() == {}
            assert machine.trt.contexts == 0


@pytest.fixture
def machine(new_machine: MachineMaker) -> Machine:
    """The usual one."""
    return new_machine()


def _mask(kind: str, batch: int, tokens: int, generator: np.random.Generator) -> np.ndarray:
    if kind == "none":
        return np.ones((batch, tokens), np.int64)
    if kind == "all":
        return np.zeros((batch, tokens), np.int64)
    if kind == "holes":
        return generator.integers(0, 2, (batch, tokens))
    right = (np.arange(tokens) < generator.integers(0, tokens + 1, (batch, 1))).astype(np.int64)
    return right if kind == "right" else np.ascontiguousarray(right[:, ::-1])


@pytest.fixture
def new_batch() -> Callable[..., dict[str, np.ndarray]]:
    """Make a batch: (batch, tokens, padding="none" | "right" | "left" | "holes" | "all", seed=0)."""

    def make(batch: int, tokens: int, padding: str = "right", seed: int = 0) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(1000 * batch + tokens + seed)
        ids = generator.integers(0, VOCABULARY, (batch, tokens))
        return {"input_ids": ids, "attention_mask": _mask(padding, batch, tokens, generator)}

    return make


@pytest.fixture
def on_gpu() -> Any:
    """Put a batch on the GPU: (machine, batch, kind, dtype of integers)."""
    made: list[OnGpu] = []

    def put(machine: Any, batch: dict[str, np.ndarray], kind: type[OnGpu], dtype: type = np.int64) -> dict[str, Any]:
        arrays = {
            name: kind(machine, np.ascontiguousarray(values, dtype if values.dtype.kind == "i" else values.dtype))
            for name, values in batch.items()
        }
        made.extend(arrays.values())
        return arrays

    yield put
    for array in made:
        with current(array.device):
            array.device.cuCtxSynchronize()
            array.free()
