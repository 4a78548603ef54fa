"""A simulated CUDA provider of ONNX Runtime: real graphs, run by the provider of the CPU in a simulated GPU's memory.

A run is an operation of the stream that the session was given, so that a program that forgets to wait gives a wrong
answer. It refuses what ONNX Runtime or CUDA forbids. Values are NaN where nothing was computed.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fakes.simulated_device import SimulatedDevice
from hdruntime.backends.onnxruntime import cuda as onnxruntime_cuda
from hdruntime.backends.onnxruntime import sessions

_BUFFERS_OF_A_RUN = 3
"""Pinned buffers that a run's kernels copy their arguments from."""


class SimulatedProvider:
    """The provider on one GPU.

    Args:
        device: the GPU.
        driver: its driver, if that answers more calls.

    Attributes:
        trouble: the error of every run.
        bound_on_cpu: inputs that nodes on the CPU read: they are copied when they are bound.
        at_once: a run computes before it returns, and its error is that of its nodes, as of nodes that CUDA's driver
            refuses to start.
        waits_inside: runs wait for the GPU before they return, as for the condition of an ``If``.
        held_buffers: pinned buffers that runs have not given back.
        most_held_buffers: the most at any time.
        outputs_run: names of the outputs of each run, in order.
        shapes_run: the shape of the first input of each run, in order.
        waited_runs: runs that waited for their end.
    """

    def __init__(self, device: SimulatedDevice, driver: Any = None) -> None:
        self.device, self._driver = device, driver or device
        self.trouble: str | None = None
        self.bound_on_cpu: set[str] = set()
        self.waits_inside = self.at_once = False
        self.held_buffers = self.most_held_buffers = 0
        self.outputs_run: list[list[str]] = []
        self.shapes_run: list[tuple[int, ...]] = []
        self.waited_runs = 0
        self.living: weakref.WeakSet[SimulatedSession] = weakref.WeakSet()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let the backend for a GPU find it."""
        patch.setitem(sys.modules, "cuda.bindings.driver", self._driver)  # type: ignore[misc]
        patch.setattr(onnxruntime_cuda, "open_session", self.open_session)

    def open_session(
        self, *graph_and_options: Any, providers: Sequence[tuple[str, Mapping[str, str]]]
    ) -> SimulatedSession:
        """As `hdruntime.backends.onnxruntime.sessions.open_session`."""
        (name, options), on_cpu = providers
        real = sessions.open_session(*graph_and_options, providers=[on_cpu])
        return SimulatedSession(self, real, name, options)


class SimulatedSession:
    """An ``InferenceSession``."""

    def __init__(self, provider: SimulatedProvider, real: Any, name: str, options: Mapping[str, str]) -> None:
        self.provider, self.real, self._name = provider, real, name
        self._stream, self.number = int(options["user_compute_stream"]), int(options["device_id"])
        self._running = threading.Lock()
        provider.living.add(self)
        weakref.finalize(self, _check_stream, provider.device, self._stream).atexit = False

    def get_providers(self) -> list[str]:
        return [self._name, "CPUExecutionProvider"]

    def get_modelmeta(self) -> Any:
        return self.real.get_modelmeta()

    def io_binding(self) -> SimulatedBinding:
        return SimulatedBinding(self)

    def run_with_iobinding(self, binding: SimulatedBinding, run_options: Any) -> None:
        provider, device = self.provider, self.provider.device
        with self._alone():
            if provider.trouble is not None:
                raise RuntimeError(provider.trouble)
            assert set(binding.inputs) == {item.name for item in self.real.get_inputs()}
            provider.outputs_run.append(list(binding.outputs))
            provider.shapes_run.append(binding.shape)
            provider.held_buffers += _BUFFERS_OF_A_RUN
            provider.most_held_buffers = max(provider.held_buffers, provider.most_held_buffers)
            if provider.at_once:
                with device.as_current():
                    device.cuStreamSynchronize(self._stream)
                _write(device, binding, _answers(device, self.real, binding))
                return
            device.later(self._stream, lambda: _compute(device, self.real, binding))
            waits = not _is_without_wait(run_options)
            if waits:
                provider.held_buffers = 0
                provider.waited_runs += 1
            if waits or provider.waits_inside:
                with device.as_current():
                    code, *_ = device.cuStreamSynchronize(self._stream)
                if code:
                    raise RuntimeError(f"CUDA failure {int(code)}: {code.name.lower()}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        is_alone = self._running.acquire(blocking=False)
        if not is_alone:
            self.provider.device.faults.append("two runs of one session at a time share its handles")
        try:
            yield
        finally:
            if is_alone:
                self._running.release()


class SimulatedBinding:
    """An ``IOBinding`` of addresses on the GPU."""

    def __init__(self, session: SimulatedSession) -> None:
        self._session = session
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.outputs: dict[str, tuple[Any, ...]] = {}
        self.shape: tuple[int, ...] = ()

    def bind_input(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        self.inputs[name] = self._checked(device, number, dtype, shape, address)
        self.shape = self.shape or tuple(shape)
        provider = self._session.provider
        if name in provider.bound_on_cpu:
            self.inputs[name] = (_values(provider.device, *self.inputs[name]),)

    def bind_output(self, name: str, device: str, number: int, dtype: Any, shape: Any, address: int) -> None:
        self.outputs[name] = self._checked(device, number, dtype, shape, address)

    def _checked(self, device: str, number: int, dtype: Any, shape: Any, address: int) -> tuple[Any, ...]:
        assert (device, number) == ("cuda", self._session.number)
        assert address, "Pointer to data memory is not valid"
        return np.dtype(dtype), tuple(shape), address


def _values(device: SimulatedDevice, dtype: Any, shape: tuple[int, ...], address: int) -> np.ndarray:
    return device.bytes_at(address, math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape).copy()


def _compute(device: SimulatedDevice, real: Any, binding: SimulatedBinding) -> None:
    try:
        answers = _answers(device, real, binding)
    except Exception as error:  # ids from memory without content are outside the vocabulary
        device.faults.append(f"the inputs are invalid: {str(error)[:80]}")
        answers = [np.full(shape, np.nan, dtype) for dtype, shape, _ in binding.outputs.values()]
    _write(device, binding, answers)


def _answers(device: SimulatedDevice, real: Any, binding: SimulatedBinding) -> list[Any]:
    feed = {name: bound[0] if len(bound) == 1 else _values(device, *bound) for name, bound in binding.inputs.items()}
    return list(real.run(list(binding.outputs), feed)) if binding.outputs else []


def _write(device: SimulatedDevice, binding: SimulatedBinding, answers: list[Any]) -> None:
    for values, (dtype, shape, address) in zip(answers, binding.outputs.values(), strict=True):
        assert (values.dtype, values.shape) == (dtype, shape)
        device.bytes_at(address, values.nbytes)[:] = np.frombuffer(values.tobytes(), np.uint8)


def _is_without_wait(run_options: Any) -> bool:
    key = "disable_synchronize_execution_providers"
    return run_options is not None and run_options.get_run_config_entry(key) == "1"


def _check_stream(device: SimulatedDevice, stream: int) -> None:
    if stream not in device._objects:
        device.faults.append("a session outlived the stream that it computes on")
