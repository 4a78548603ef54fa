"""A simulated GPU: host memory with separate addresses, and streams that run late and in random order.

It replaces the module ``cuda.bindings.driver``, like `simulated_cuda` does for launches. Work on a stream runs some
time after it was enqueued: at any call of the driver, a few operations of any streams may run, in a random order that
respects streams, events and synchronisation. So a program that forgets to wait gives a wrong answer or an error for
some seed. Access to memory that is freed or was never allocated is a recorded fault.
"""

# ruff: noqa: N801, N802  (the driver's own names)

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FIRST_ADDRESS = 0x7F0000000000
_GAP = 1 << 20
_NAN_BYTE = 0xFF
_FREED_BYTE = 0xDD
FIRST_CONTEXT = 0xC0
"""The first GPU's primary context; the next ones have the numbers behind it."""


class Code(enum.IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_CONTEXT = 201
    INVALID_HANDLE = 400
    ILLEGAL_ADDRESS = 700
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901


class RefusedError(Exception):
    """Raised inside of a call, which then answers the code."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(eq=False)
class Event:
    """May be recorded repeatedly; a waiter waits for the latest record at the time of its call."""

    recorded: int = 0
    done: int = 0


@dataclass(eq=False)
class Stream:
    """Operations, each with a function that tells whether it may run yet."""

    queue: deque[tuple[Callable[[], None], Callable[[], bool]]] = field(default_factory=deque)
    capture: list[Callable[[], None]] | None = None
    invalid: bool = False


@dataclass(eq=False)
class Graph:
    """A graph that can be launched."""

    operations: tuple[Callable[[], None], ...]
    launched: int = 0


class _Handle(int):
    """The driver's objects are not plain integers."""


def driver(kind: type[SimulatedDevice]) -> type[SimulatedDevice]:
    """Make the class's methods ``cu...`` calls of the driver."""
    for name, function in list(vars(kind).items()):
        if name.startswith("cu") and name != "cuGetErrorString":
            setattr(kind, name, _call(function))
    return kind


def _call(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """A call of the driver: counted, refused if a test requests it, and answered as (code, result...)."""
    name = function.__name__

    @functools.wraps(function)
    def answering(self: SimulatedDevice, *arguments: Any) -> tuple[Any, ...]:
        with self._lock:
            self.calls.append(name)
            try:
                if name in self.failing:
                    raise RefusedError(self.failing[name])
                self._fail_once(name)
                if self.broken is not None:
                    raise RefusedError(self.broken)
                if name not in _WITHOUT_CONTEXT and not self._current():
                    raise RefusedError(Code.INVALID_CONTEXT)
                self._progress()
                if name in self.ignored:
                    return (Code.SUCCESS,)
                result = function(self, *arguments)
            except RefusedError as refused:
                return (refused.code, None)
            return (Code.SUCCESS, *(result if isinstance(result, tuple) else (result,) if result is not None else ()))

    return answering


_WITHOUT_CONTEXT = {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent"}


@driver
class SimulatedDevice:
    """A driver with one GPU, for tests.

    Args:
        seed: of the order in which streams run.
        eagerness: probability that an operation runs at a call of the driver; 0 leaves all to synchronisation.
        number: of the GPU; no two have an address or a handle in common.

    Attributes:
        calls: names of the calls, in order.
        failing: call -> the code that it answers.
        failing_after: a call, and how often it succeeds before it once finds no memory.
        ignored: calls that do nothing, for tests of programs without them.
        broken: the code that every call answers, as after an illegal address.
        free_bytes: memory that may still be allocated, None for any amount.
        free_pinned_bytes: likewise for pinned memory.
        elapsed_ms: time between any two events.
        wrong_replays: launched graphs do nothing.
        faults: errors of programs, in order.
        context: the primary context.
    """

    class CUstreamCaptureMode(enum.IntEnum):
        CU_STREAM_CAPTURE_MODE_GLOBAL = 0
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1

    class CUpointer_attribute(enum.IntEnum):
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9

    def __init__(self, seed: int = 0, *, eagerness: float | None = None, number: int = 0) -> None:
        self.context = FIRST_CONTEXT + number
        self._number = number
        self.calls: list[str] = []
        self.failing: dict[str, Code] = {}
        self.failing_after: tuple[str, int] | None = None
        self.ignored: set[str] = set()
        self.broken: Code | None = None
        self.free_bytes: int | None = None
        self.free_pinned_bytes: int | None = None
        self.elapsed_ms = 1e6
        self.wrong_replays = False
        self.faults: list[str] = []
        self._random = random.Random(seed)
        self._eagerness = self._random.choice([0.0, 0.3, 0.9]) if eagerness is None else eagerness
        self._lock = threading.RLock()
        self._handles = itertools.count(0x100 + (number << 20))
        self._next_address = FIRST_ADDRESS + (number << 40)
        self._memory: dict[int, np.ndarray] = {}
        self._pinned: dict[int, np.ndarray] = {}
        self._freed_pinned: list[np.ndarray] = []
        self._objects: dict[int, Any] = {1: Stream()}  # the legacy default stream
        self._contexts = threading.local()

    # Memory, as operations see it.

    def bytes_at(self, address: int, size: int, *, pinned: bool = False) -> np.ndarray:
        """Memory of the device, or pinned memory, to be read and written; uint8 [size]."""
        for base, block in (self._pinned if pinned else self._memory).items():
            if base <= address and address + size <= base + len(block):
                return block[address - base : address - base + size]
        self.faults.append(
            f"{size} bytes at {int(address):#x} are not {'pinned memory' if pinned else 'device memory'}"
        )
        self.broken = Code.ILLEGAL_ADDRESS
        return np.full(size, _NAN_BYTE, np.uint8)

    def upload(self, values: np.ndarray) -> int:
        """The address of an array that another library has on the GPU; freed by `forget`."""
        with self._lock:
            address = self._allocate(values.nbytes)
            self._memory[address][:] = np.frombuffer(values.tobytes(), np.uint8)
            return address

    def forget(self, address: int) -> None:
        """Free an uploaded array."""
        del self._memory[address]

    def later(self, stream: int, run: Callable[[], None]) -> None:
        """Enqueue an operation, as a kernel launch does."""
        with self._lock:
            self._enqueue(stream, run)

    def new_stream(self) -> int:
        """A stream of another library."""
        return self._new(Stream())

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """The GPU is current, for another library."""
        self.cuCtxPushCurrent(self.context)
        yield
        self.cuCtxPopCurrent()

    def capturing(self, stream: int) -> Stream | None:
        """The stream, if it is being captured."""
        found = self._thing(stream, Stream)
        return None if found.capture is None else found

    def left(self) -> dict[str, int]:
        """Objects and memory that were not freed: the number of each kind."""
        kinds: dict[str, int] = {"device memory": len(self._memory), "pinned memory": len(self._pinned)}
        for handle, thing in self._objects.items():
            if handle != 1:
                kinds[type(thing).__name__] = kinds.get(type(thing).__name__, 0) + 1
        return {kind: count for kind, count in kinds.items() if count}

    # The driver's calls.

    def cuInit(self, flags: int) -> None: ...

    def cuDeviceGet(self, ordinal: int) -> int:
        if ordinal != self._number:
            raise RefusedError(Code.INVALID_VALUE)
        return ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        return self.context

    def cuCtxPushCurrent(self, context: int) -> None:
        self._current().append(context)

    def cuCtxPopCurrent(self) -> int:
        return self._current().pop()

    def cuCtxSynchronize(self) -> None:
        self._refuse_while_capturing()
        self._run_until(lambda: not any(stream.queue for stream in self._streams()))

    def cuStreamCreate(self, flags: int) -> int:
        assert flags == 1, "streams that wait for the default stream serialise everything"
        return self._new(Stream())

    def cuStreamDestroy(self, stream: int) -> None:
        found = self._thing(stream, Stream)
        if found.queue:
            self.faults.append("a stream was destroyed that still had work")
        del self._objects[int(stream)]

    def cuStreamSynchronize(self, stream: int) -> None:
        found = self._thing(stream, Stream)
        if found.capture is not None:
            found.invalid = True
            raise RefusedError(Code.STREAM_CAPTURE_UNSUPPORTED)
        self._run_until(lambda: not found.queue)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        found = self._thing(event, Event)
        awaited = found.recorded
        self._enqueue(stream, lambda: None, ready=lambda: found.done >= awaited)

    def cuEventCreate(self, flags: int) -> int:
        return self._new(Event())

    def cuEventDestroy(self, event: int) -> None:
        self._thing(event, Event)
        del self._objects[int(event)]

    def cuEventRecord(self, event: int, stream: int) -> None:
        found = self._thing(event, Event)
        found.recorded += 1
        number = found.recorded

        def record() -> None:
            found.done = max(found.done, number)

        self._enqueue(stream, record)

    def cuEventSynchronize(self, event: int) -> None:
        found = self._thing(event, Event)
        awaited = found.recorded
        self._run_until(lambda: found.done >= awaited)

    def cuEventElapsedTime(self, start: int, end: int) -> float:
        for event in (start, end):
            found = self._thing(event, Event)
            if not found.recorded or found.done < found.recorded:
                raise RefusedError(Code.INVALID_HANDLE)
        return self.elapsed_ms

    def cuMemAlloc(self, size: int) -> _Handle:
        self._refuse_while_capturing()
        if self.free_bytes is not None and size > self.free_bytes:
            raise RefusedError(Code.OUT_OF_MEMORY)
        return _Handle(self._allocate(size))

    def cuMemFree(self, address: int) -> None:
        self._refuse_while_capturing()
        block = self._memory.pop(int(address), None)
        if block is None:
            raise RefusedError(Code.INVALID_VALUE)
        if self.free_bytes is not None:
            self.free_bytes += len(block)

    def cuMemHostAlloc(self, size: int, flags: int) -> int:
        if self.free_pinned_bytes is not None and size > self.free_pinned_bytes:
            raise RefusedError(Code.OUT_OF_MEMORY)
        if self.free_pinned_bytes is not None:
            self.free_pinned_bytes -= size
        block = np.full(size, _NAN_BYTE, np.uint8)
        self._pinned[block.ctypes.data] = block
        return block.ctypes.data

    def cuMemFreeHost(self, address: int) -> None:
        block = self._pinned.pop(address)
        if self.free_pinned_bytes is not None:
            self.free_pinned_bytes += len(block)
        # It stays mapped, so that a program that reads it gets garbage, and not a signal.
        block.fill(_FREED_BYTE)
        self._freed_pinned.append(block)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        self._copy(target, source, size, stream, source_pinned=True)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> None:
        self._copy(target, source, size, stream, target_pinned=True)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        self._copy(target, source, size, stream)

    def cuMemcpyDtoH(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, self.bytes_at(source, size).tobytes(), size)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:
        self._enqueue(stream, lambda: self.bytes_at(address, size).fill(value))

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> None:
        self._enqueue(stream, lambda: self.bytes_at(address, 4 * count).view(np.uint32).fill(value))

    def cuPointerGetAttribute(self, attribute: int, address: int) -> int:
        assert attribute == self.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        if not any(base <= address < base + len(block) for base, block in self._memory.items()):
            raise RefusedError(Code.INVALID_VALUE)
        return self._number

    def cuStreamBeginCapture(self, stream: int, mode: int) -> None:
        assert mode == self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        found = self._thing(stream, Stream)
        found.capture, found.invalid = [], False

    def cuStreamEndCapture(self, stream: int) -> int:
        found = self._thing(stream, Stream)
        captured, found.capture = found.capture, None
        if captured is None or found.invalid:
            raise RefusedError(Code.STREAM_CAPTURE_INVALIDATED)
        return self._new(captured)

    def cuGraphInstantiate(self, graph: int, flags: int) -> int:
        return self._new(Graph(tuple(self._objects[int(graph)])))

    def cuGraphDestroy(self, graph: int) -> None:
        del self._objects[int(graph)]

    def cuGraphExecDestroy(self, graph: int) -> None:
        if self._objects[int(graph)].launched:
            self.faults.append("a graph was destroyed while it ran")
        del self._objects[int(graph)]

    def cuGraphLaunch(self, graph: int, stream: int) -> None:
        found = self._objects[int(graph)]
        found.launched += 1
        for operation in () if self.wrong_replays else found.operations:
            self._enqueue(stream, operation)

        def end() -> None:
            found.launched -= 1

        self._enqueue(stream, end)

    def cuGetErrorString(self, code: int) -> tuple[Code, bytes]:
        return (Code.SUCCESS, Code(code).name.lower().encode())

    # How calls fail and streams run.

    def _fail_once(self, name: str) -> None:
        if self.failing_after is None or self.failing_after[0] != name:
            return
        left = self.failing_after[1]
        self.failing_after = (name, left - 1) if left else None
        if not left:
            raise RefusedError(Code.OUT_OF_MEMORY)

    def _enqueue(self, stream: int, run: Callable[[], None], *, ready: Callable[[], bool] = lambda: True) -> None:
        found = self._thing(stream, Stream)
        if found.capture is not None:
            found.capture.append(run)
        else:
            found.queue.append((run, ready))

    def _progress(self) -> None:
        while self._random.random() < self._eagerness and self._step():
            pass

    def _run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if not self._step():
                raise AssertionError("streams wait for each other for ever")
        if self.broken is not None:
            raise RefusedError(self.broken)

    def _step(self) -> bool:
        runnable = [stream for stream in self._streams() if stream.queue and stream.queue[0][1]()]
        if not runnable:
            return False
        self._random.choice(runnable).queue.popleft()[0]()
        return True

    def _copy(
        self, target: int, source: int, size: int, stream: int, target_pinned: bool = False, source_pinned: bool = False
    ) -> None:
        def run() -> None:
            # Both are looked up when the copy runs: memory that is freed by then is gone.
            self.bytes_at(target, size, pinned=target_pinned)[:] = self.bytes_at(source, size, pinned=source_pinned)

        self._enqueue(stream, run)

    def _streams(self) -> list[Stream]:
        return [thing for thing in self._objects.values() if isinstance(thing, Stream)]

    def _refuse_while_capturing(self) -> None:
        for stream in self._streams():
            if stream.capture is not None:
                stream.invalid = True
                raise RefusedError(Code.STREAM_CAPTURE_UNSUPPORTED)

    def _allocate(self, size: int) -> int:
        if self.free_bytes is not None:
            self.free_bytes -= size
        address, self._next_address = self._next_address, self._next_address + (size // 512 + 1) * 512 + _GAP
        self._memory[address] = np.full(size, _NAN_BYTE, np.uint8)
        return address

    def _new(self, thing: Any) -> _Handle:
        handle = _Handle(next(self._handles))
        self._objects[int(handle)] = thing
        return handle

    def _thing(self, handle: int, kind: type) -> Any:
        found = self._objects.get(int(handle))
        if not isinstance(found, kind):
            self.faults.append(f"{int(handle):#x} is no {kind.__name__}, or no longer exists")
            raise RefusedError(Code.INVALID_HANDLE)
        return found

    def _current(self) -> list[int]:
        stack: list[int] = vars(self._contexts).setdefault("stack", [])
        return stack
