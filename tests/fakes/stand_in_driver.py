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
from fakes.simulated_device import SimulatedDevice

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
        memory: answers the calls besides launches.
    """

    def __init__(self, library: Path, *, context: int = 0xC0) -> None:
        self.memory = SimulatedDevice()
        super().__init__(run=self._interpret, context=context)
        self._of_thread = threading.local()
        self.loaded, self.launched_in = Counter[int](), Counter[int]()
        # glibc finds a library that is loaded by its name, wherever another one opens it.
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._launched = _LAUNCHED(self._launch)
        self._library.stand_in_launched(self._launched)
        self.launches: list[str] = []
        self._context_of: dict[int, int] = {}
        self._lock = threading.Lock()
        self.enter(context)
        sys.modules["cuda.bindings.driver"] = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        """Calls besides launches: memory, streams and events."""
        return getattr(vars(self)["memory"], name)

    def enter(self, context: int, *, of_thread: bool = False) -> None:
        """Make a context the current one: of this thread, or of all that have none of their own."""
        if of_thread:
            self._of_thread.context = context
        else:
            self._context = context
        self._library.stand_in_context(ctypes.c_uint64(context), of_thread)

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
        return getattr(self._of_thread, "context", self._context)

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
            kernel[launched.grid](**arguments, **launched.source["constants"])


def _tensor_at(address: int, kind: str) -> Any:
    """A tensor of one value there: kernels find the others by its address."""
    dtype = _DTYPES[kind]
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)
