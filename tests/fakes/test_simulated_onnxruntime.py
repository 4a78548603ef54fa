"""The simulated CUDA provider of ONNX Runtime notices wrong programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from fakes.simulated_device import SimulatedDevice
from fakes.simulated_onnxruntime import SimulatedProvider, SimulatedSession
from hdruntime.backends.onnxruntime.sessions import session_options
from hdruntime.bundle.reader import open_bundle
from support.tiny_bundle import make_bundle

IDS = np.array([[2, 3, 4]])


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """Its streams run at synchronisation alone."""
    device = SimulatedDevice(eagerness=0)
    with device.as_current():
        yield device


class Program:
    """A session on a stream, with a batch in memory of the GPU and none in its output."""

    def __init__(self, device: SimulatedDevice, bundle: Path) -> None:
        self.device, self.stream = device, device.cuStreamCreate(1)[1]
        opened = open_bundle(make_bundle(bundle))
        self.provider = SimulatedProvider(device)
        cuda = ("CUDAExecutionProvider", {"user_compute_stream": str(int(self.stream)), "device_id": "0"})
        self.session: SimulatedSession | None = self.provider.open_session(
            opened, opened.manifest.graphs[0], session_options(1), providers=[cuda, ("CPUExecutionProvider", {})]
        )
        self.ids, self.mask = device.upload(IDS), device.upload(np.ones_like(IDS))
        self.answer = device.upload(np.zeros((1, 3, 4), np.float32))

    def run(self, *, waits: bool) -> None:
        """Run the batch."""
        assert self.session is not None
        binding = self.session.io_binding()
        for name, address in (("input_ids", self.ids), ("attention_mask", self.mask)):
            binding.bind_input(name, "cuda", 0, np.int64, IDS.shape, address)
        binding.bind_output("last_hidden_state", "cuda", 0, np.float32, (1, 3, 4), self.answer)
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", str(int(not waits)))
        self.session.run_with_iobinding(binding, options)

    def values(self) -> np.ndarray:
        """What is in the memory of the answer."""
        return self.device.bytes_at(self.answer, 48).copy().view(np.float32)


@pytest.fixture
def program(device: SimulatedDevice, tmp_path: Path) -> Program:
    return Program(device, tmp_path / "bundle")


def test_a_run_is_computed_when_its_stream_gets_there(program: Program) -> None:
    program.run(waits=False)
    assert not program.values().any()
    program.device.cuStreamSynchronize(program.stream)
    right = program.values()
    assert right.all()
    program.device.bytes_at(program.answer, 48).fill(0)
    program.run(waits=True)
    np.testing.assert_array_equal(program.values(), right)


def test_inputs_outside_of_the_vocabulary_are_a_fault_and_their_answer_is_nan(program: Program) -> None:
    program.device.bytes_at(program.ids, IDS.nbytes).fill(0x7F)
    program.run(waits=True)
    assert np.isnan(program.values()).all()
    assert "the inputs are invalid" in program.device.faults[0]


def test_freed_memory_is_a_fault(program: Program) -> None:
    program.run(waits=False)
    program.device.forget(program.answer)
    program.device.cuStreamSynchronize(program.stream)
    assert "are not device memory" in program.device.faults[0]


def test_two_runs_at_a_time_are_a_fault(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    later = program.device.later

    def meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(program.device, "later", later)
        thread = threading.Thread(target=program.run, kwargs={"waits": False})
        thread.start()
        thread.join()
        later(*arguments)

    monkeypatch.setattr(program.device, "later", meanwhile)
    program.run(waits=False)
    assert program.device.faults == ["two runs of one session at a time share its handles"]


def test_a_session_that_outlives_its_stream_is_a_fault(program: Program) -> None:
    program.device.cuStreamDestroy(program.stream)
    assert program.device.faults == []
    program.session = None
    assert program.device.faults == ["a session outlived the stream that it computes on"]
