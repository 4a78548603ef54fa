"""A machine with a simulated GPU and a bundle for its libraries, batches, and arrays of another library on that GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes.simulated_device import SimulatedDevice
from fakes.simulated_onnxruntime import SimulatedProvider
from fakes.simulated_tensorrt import SimulatedTensorRt, add_engine
from hdruntime.backends.gpu_runner import GpuRunner
from hdruntime.backends.onnxruntime.cuda import OnnxRuntimeCudaRunner
from hdruntime.backends.tensorrt.runner import TensorRtRunner
from hdruntime.bundle.manifest import Backend, ProfileShape
from hdruntime.bundle.reader import Bundle
from hdruntime.gpu.device_arrays import DeviceArray
from hdruntime.gpu.dlpack import CUDA, DlTensor, capsule_of
from hdruntime.gpu.options import GpuOptions
from hdruntime.session import Session
from support.comparators import assert_close
from support.tiny_bundle import NAN_ID, hidden_states, make_bundle

SHORT = ProfileShape(batch=(1, 1, 8), tokens=(1, 32, 32))
LONG = ProfileShape(batch=(2, 2, 4), tokens=(48, 128, 200))
HIDDEN = "last_hidden_state"

Arrays = Mapping[str, np.ndarray]


def new_batch(batch: int, tokens: int, padding: str = "right", seed: int = 0) -> dict[str, np.ndarray]:
    """Random ids and a mask with padding: "none", "right", "left", "holes" or "all"."""
    generator = np.random.default_rng(1000 * batch + tokens + seed)
    ids = generator.integers(0, NAN_ID, (batch, tokens))
    right = (np.arange(tokens) < generator.integers(0, tokens + 1, (batch, 1))).astype(np.int64)
    masks = {
        "none": np.ones_like(ids),
        "right": right,
        "left": np.ascontiguousarray(right[:, ::-1]),
        "holes": generator.integers(0, 2, (batch, tokens)),
        "all": np.zeros_like(ids),
    }
    return {"input_ids": ids, "attention_mask": masks[padding]}


class OnGpu:
    """An array that another library computes on its own stream, some time later.

    Args:
        device: the GPU.
        values: its future content.
    """

    def __init__(self, device: SimulatedDevice, values: np.ndarray) -> None:
        self.device, self.values = device, values
        self.address = device.upload(np.full_like(values, 99))
        self.stream = device.new_stream()
        device.later(self.stream, self.write)

    def write(self) -> None:
        """Compute the values."""
        raw = np.frombuffer(self.values.tobytes(), np.uint8)
        self.device.bytes_at(self.address, raw.size)[:] = raw

    def free(self) -> None:
        """Free the array and its stream."""
        self.device.forget(self.address)
        self.device.cuStreamDestroy(self.stream)


class ByDlpack(OnGpu):
    place = (CUDA, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def described(self) -> DlTensor:
        """The array's description in a capsule."""
        strides = tuple(stride // self.values.itemsize for stride in self.values.strides)
        values = self.values
        return DlTensor(
            address=self.address, shape=values.shape, strides=strides, dtype=values.dtype, device=self.place
        )

    def __dlpack__(self, *, stream: int) -> Any:
        event = self.device.cuEventCreate(2)[1]
        self.device.cuEventRecord(event, self.stream)
        self.device.cuStreamWaitEvent(stream, event, 0)
        self.device.cuEventDestroy(event)
        return capsule_of(self.described(), self)


class ByInterface(OnGpu):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.address, True),
            "version": 3,
            "stream": int(self.stream),
        }


@dataclass
class Machine:
    """A simulated GPU, and a bundle with an engine for it.

    Attributes:
        bundle: with an engine of the profiles SHORT and LONG, unless requested otherwise.
        device: the GPU.
        trt: its `SimulatedTensorRt`.
        opened: runners to close and check at the end.
        uploaded: arrays on the GPU to free at the end.
    """

    bundle: Bundle
    device: SimulatedDevice
    trt: Any
    opened: list[Any] = field(default_factory=list)
    uploaded: list[OnGpu] = field(default_factory=list)

    def runner(self, backend: Backend | None = None, **options: Any) -> Any:
        """A runner of the bundle's engine."""
        engine, gpu = self.bundle.manifest.engines[0], GpuOptions(**options)
        self.opened.append(TensorRtRunner(self.bundle, engine, backend=backend or Backend(engine.variant), gpu=gpu))
        return self.opened[-1]

    def session(self, **options: Any) -> Session:
        """A session of the bundle."""
        return Session(self.bundle, self.runner(**options))

    def with_manifest(self, **changes: Any) -> None:
        """Change the manifest of the bundle, and none of its files."""
        self.bundle = Bundle(self.bundle.path, dataclasses.replace(self.bundle.manifest, **changes))

    def check(self, inputs: Arrays, results: Mapping[str, np.ndarray | DeviceArray]) -> None:
        """Assert that results are float32 and equal the model's hidden states, 0 at padding."""
        mask, padding = inputs["attention_mask"], self.bundle.manifest.padding
        found = results[HIDDEN]
        found = found.to_numpy() if isinstance(found, DeviceArray) else found
        assert found.dtype == np.float32
        expected = np.where(mask[..., np.newaxis] == 1, hidden_states(inputs["input_ids"], mask, padding), 0)
        assert_close(found, expected, atol=1e-5)

    def run(self, runner: GpuRunner[Any], inputs: Arrays) -> None:
        """Run a batch and check its results."""
        self.check(inputs, runner.start(inputs, [HIDDEN])())

    def in_flight(self, runner: GpuRunner[Any], batches: Iterable[Arrays], most: int | None = None) -> None:
        """Keep the runner's number of batches in flight, and check their results."""
        started: list[tuple[Arrays, Callable[[], Arrays]]] = []
        for batch in batches:
            started.append((batch, runner.start(batch, [HIDDEN])))
            if len(started) == (most or runner.max_in_flight):
                inputs, results = started.pop(0)
                self.check(inputs, results())
        for inputs, results in started:
            self.check(inputs, results())

    def on_gpu(self, batch: Arrays, kind: type[OnGpu] = ByDlpack, dtype: type = np.int64) -> dict[str, Any]:
        """Put a batch on the GPU, its integers as `dtype`."""
        arrays = {
            name: kind(self.device, np.ascontiguousarray(values, dtype if values.dtype.kind == "i" else values.dtype))
            for name, values in batch.items()
        }
        self.uploaded.extend(arrays.values())
        return arrays

    def start_on_device(self, runner: GpuRunner[Any], batch: Arrays, *kind_and_dtype: type) -> dict[str, DeviceArray]:
        """Put a batch on the GPU and start it there, for its hidden states."""
        return runner.start_on_device(self.on_gpu(batch, *kind_and_dtype), [HIDDEN])

    def close(self) -> None:
        """Free everything, and assert that no program was wrong and nothing is left."""
        with self.device.as_current():
            if self.uploaded:
                self.device.cuCtxSynchronize()
            for array in self.uploaded:
                array.free()
        for runner in self.opened:
            runner.close()
        assert self.device.faults == [], self.device.faults
        if self.device.broken is None:
            assert self.device.left() == {}
            assert not self.trt.living


MachineMaker = Callable[..., Machine]


class SessionMachine(Machine):
    """A simulated GPU, whose ONNX Runtime runs the bundle's graph.

    Attributes:
        trt: its `SimulatedProvider`.
    """

    def runner(self, backend: Backend | None = None, **options: Any) -> Any:
        """A runner of the bundle's graph."""
        self.opened.append(OnnxRuntimeCudaRunner(self.bundle, gpu=GpuOptions(**options)))
        return self.opened[-1]


def new_machines(patch: pytest.MonkeyPatch, folder: Path, library: str) -> Iterator[MachineMaker]:
    """For a fixture, which makes a machine: (seed=0, profiles=..., variant=..., backend module=..., **the bundle's and
    the engine's options). The library is tensorrt or onnxruntime, which makes no difference to the bundle."""
    if library == "tensorrt" and importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("our plugins need TensorRT-RTX's base classes: pip install 'hdexport[rtx]'")
    machines: list[Machine] = []
    patch.setenv("XDG_CACHE_HOME", "relative paths are ignored, and nothing is written elsewhere")

    def make(
        seed: int = 0,
        *,
        profiles: Sequence[ProfileShape] = (SHORT, LONG),
        variant: str = "tensorrt",
        module: str | None = None,
        eagerness: float | None = None,
        made_by: Callable[[Path], Path] | None = None,
        **options: Any,
    ) -> Machine:
        device = SimulatedDevice(seed, eagerness=eagerness)
        path = folder / f"bundle-{len(machines)}"
        of_bundle, types = (
            {name: options.pop(name) for name in names if name in options}
            for names in (("task", "token_types", "padding"), ("input_type", "output_type"))
        )
        make_bundle(path, **of_bundle) if made_by is None else made_by(path)
        bundle = add_engine(path, profiles, variant=variant, types=types, **options)
        if library == "onnxruntime":
            provider = SimulatedProvider(device)
            provider.install(patch)
            machines.append(SessionMachine(bundle, device, provider))
        else:
            trt = SimulatedTensorRt(device, module or variant)
            patch.setitem(sys.modules, "cuda.bindings.driver", device)  # type: ignore[misc]
            patch.setitem(sys.modules, module or variant, trt)
            machines.append(Machine(bundle, device, trt))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


on_engines = pytest.mark.parametrize("new_machine", ["tensorrt"], indirect=True)
"""For what is engines' alone, in a test of all libraries."""
