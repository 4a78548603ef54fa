"""The driver's library as the launcher in C opens it, on a simulated driver whose kernels Triton interprets.

It is for a process in which Triton interprets: `support.interpreted_kernel.Interpreter`.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fakes.simulated_cuda import LaunchedKernel, SimulatedDriver
from fakes.simulated_device import FIRST_CONTEXT, Code, SimulatedDevice
from hdplugins.kernels.aot_worker import with_tuples

_SOURCE = Path(__file__).with_suffix(".c")
_LAUNCHED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, *[ctypes.c_uint] * 5, ctypes.c_uint64, ctypes.c_uint64)
_DTYPES = {
    "*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16, "*i32": torch.int32, "*i1": torch.bool,
}  # fmt: skip

_INVALID_HANDLE = 400
"""CUDA_ERROR_INVALID_HANDLE: of a function of another context."""


def build_stand_in(folder: Path) -> Path:
    """The library, by the machine's C compiler."""
    library = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(["cc", *flags, str(_SOURCE)], check=True)
    return library


class StandInDriver(SimulatedDriver):
    """The driver of this process from now on, for Python and for C.

    Attributes:
        launches: names of the kernels that were started, in order.
        loaded: context -> the kernels that were loaded into it.
        launched_in: context -> the launches.
        memories: answer the calls besides launches, one for each GPU.
    """

    def __init__(self, library: Path, *, context: int = FIRST_CONTEXT, gpus: int = 1) -> None:
        self.memories = [SimulatedDevice(number=number) for number in range(gpus)]
        super().__init__(run=self._interpret, context=context)
        self._of_thread = threading.local()
        self.loaded, self.launched_in = Counter[int](), Counter[int]()
        # glibc finds a library that is loaded by its name, wherever another one opens it.
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._launched = _LAUNCHED(self._launch)
        self._library.stand_in_launched(self._launched)
        self._library.stand_in_refuses(0)
        self.launches: list[str] = []
        self._context_of: dict[int, int] = {}
        self._lock = threading.Lock()
        self.enter(context)
        sys.modules["cuda.bindings.driver"] = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Calls besides launches: memory, streams and events of the current GPU."""
        return getattr(self._memory_of(self._current), name)

    def refuse(self, call: str, code: int) -> None:
        """Let a call fail from now on; 0 for no more."""
        self.failing = {call: code} if code else {}
        self._library.stand_in_refuses(self.failing.get("cuCtxGetCurrent", 0))

    def enter(self, context: int | None, *, of_thread: bool = False) -> None:
        """Make a context the current one: of this thread, or of all that have none of their own."""
        if of_thread:
            self._of_thread.context = context
        else:
            self._context = context
        self._library.stand_in_context(ctypes.c_uint64(context or 0), of_thread)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:  # noqa: N802
        if ordinal >= len(self.memories):
            return (Code.INVALID_VALUE, None)
        return self.memories[ordinal].cuDeviceGet(ordinal)  # type: ignore[return-value]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        return self.memories[device].cuDevicePrimaryCtxRetain(device)  # type: ignore[return-value]

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:  # noqa: N802
        self._outer.append(vars(self._of_thread).get("context"))
        self.enter(context, of_thread=True)
        return self._memory_of(context).cuCtxPushCurrent(context)  # type: ignore[return-value, func-returns-value]

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        answer = self._memory_of(self._current).cuCtxPopCurrent()
        self.enter(self._outer.pop(), of_thread=True)
        return answer  # type: ignore[return-value]

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuCtxGetCurrent", self._current)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        with self._lock:
            code, function = super().cuModuleGetFunction(module, name)
            self._context_of[function] = self._current
            self.loaded[self._current] += 1
        return code, function

    @property
    def _current(self) -> int:
        return vars(self._of_thread).get("context") or self._context

    @property
    def _outer(self) -> list[int | None]:
        """The contexts of this thread before those that were pushed."""
        outer: list[int | None] = vars(self._of_thread).setdefault("outer", [])
        return outer

    def _memory_of(self, context: int) -> SimulatedDevice:
        """The first one's for a context that is no GPU's."""
        memories: list[SimulatedDevice] = vars(self)["memories"]
        return next((memory for memory in memories if memory.context == context), memories[0])

    def _launch(
        self, function: int, x: int, y: int, z: int, threads: int, shared_bytes: int, stream: int, parameters: int
    ) -> int:
        if self._context_of[function] != self._current:
            return _INVALID_HANDLE
        try:
            return int(
                self.cuLaunchKernel(
                    function, x, y, z, threads, 1, 1, shared_bytes, self.CUstream(stream), parameters, 0
                )[0]
            )
        except Exception as error:
            print(f"the stand-in failed: {error!r}", file=sys.stderr)
            return 999

    def _interpret(self, launched: LaunchedKernel) -> None:
        kinds = dict(launched.source["signature"])
        arguments = {
            name: _tensor_at(int(value), kinds[name]) if kinds[name][0] == "*" else value
            for name, value in launched.arguments.items()
        }
        kernel = getattr(importlib.import_module(launched.source["module"]), launched.source["function"])
        with self._lock:  # the interpreter is one for all threads
            self.launches.append(launched.source["function"])
            self.launched_in[self._current] += 1
            kernel[launched.grid](**with_tuples(arguments), **launched.source["constants"])


def _tensor_at(address: int, kind: str) -> Any:
    """A tensor of one value there: kernels find the others by its address."""
    dtype = _DTYPES[kind]
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)
