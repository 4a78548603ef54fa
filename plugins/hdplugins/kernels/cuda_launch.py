"""Compiled kernels launched through the CUDA driver: loaded once, then started by `cuLaunchKernel` alone.

The driver is called through cuda-python (the package cuda-bindings), which is imported when a kernel is loaded. Loading
may happen at any time but while a stream is captured into a CUDA graph; starting a kernel allocates nothing, waits for
nothing, and is captured like any launch.
"""

from __future__ import annotations

import ctypes
import importlib
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdplugins.kernels.aot import CompiledKernel, KernelError, read_kernel

FIRST_SINGLE_ARCHITECTURE = 90
"""From here on Triton compiles for one architecture with all its instructions (sm_90a), and others cannot run it."""

_POINTER_ALIGNMENT = 16
"""Bytes; the kernels are compiled for it, and a wider load from another address would break the whole CUDA context."""

_USUAL_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that every launch may have (CUDA C++ Programming Guide); more must be allowed first."""

_THREADS_OF_WARP = 32

_C_TYPES: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""Triton's type of a scalar argument -> how a launch passes it."""

_UNREADABLE_CODE = (200, 209)
"""``CUDA_ERROR_INVALID_IMAGE`` and ``CUDA_ERROR_NO_BINARY_FOR_GPU``."""


class LaunchError(RuntimeError):
    """The CUDA driver rejected a call, or a launch does not fit its kernel."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel to start: on a stream, after the one before it; the grid is CTAs along x, y and z."""

    kernel: str
    grid: tuple[int, int, int]
    scalars: Mapping[str, int | float]


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A kernel that the GPU of a CUDA context has; `function` is the driver's handle."""

    compiled: CompiledKernel
    function: Any
    driver: Any


class PreparedLaunch:
    """A launch whose arguments are packed but for the addresses, which change from call to call.

    The buffers that the driver reads belong to the object: two threads must not start one object at a time.
    """

    def __init__(self, kernel: LoadedKernel, launch: Launch, places: Mapping[str, int]) -> None:
        """Pack the arguments; a LaunchError says that one is missing or out of the range of its type.

        `places` are names of pointer arguments -> their places among the addresses that :meth:`start` gets.
        """
        compiled = kernel.compiled
        self._driver, self._function = kernel.driver, kernel.function
        self._name, self._grid = compiled.function, launch.grid
        self._threads, self._shared_bytes = compiled.num_warps * _THREADS_OF_WARP, compiled.shared_bytes
        self._pointers: list[tuple[ctypes.c_void_p, int]] = []
        self._values = [self._packed(name, kind, launch, places) for name, kind in compiled.arguments]
        # For buffers of Triton's, which these kernels do not use.
        self._values += [ctypes.c_void_p(None) for _ in range(compiled.scratch_pointers)]
        self._parameters = (ctypes.c_void_p * len(self._values))(*map(ctypes.addressof, self._values))
        self._parameters_address = ctypes.addressof(self._parameters)

    def start(self, addresses: Sequence[int], stream: Any) -> None:
        """Start the kernel on a ``CUstream`` of the driver, and return at once.

        The addresses of tensors on the device are in the order of ``places``. A LaunchError says that a tensor is not
        aligned, or that the driver rejects the launch.
        """
        for slot, place in self._pointers:
            address = addresses[place]
            if address % _POINTER_ALIGNMENT or not address:
                raise LaunchError(f"{self._name} got the address {address:#x}; it needs multiples of 16 above 0.")
            slot.value = address
        grid, threads = self._grid, self._threads
        (code,) = self._driver.cuLaunchKernel(
            self._function, *grid, threads, 1, 1, self._shared_bytes, stream, self._parameters_address, 0
        )
        if code:
            raise _error(self._driver, code, f"launching {self._name} with a grid of {grid} and {threads} threads")

    def _packed(self, name: str, kind: str, launch: Launch, places: Mapping[str, int]) -> Any:
        if kind.startswith("*"):
            if name not in places:
                raise LaunchError(f"{self._name} takes a pointer {name}; there are {', '.join(places)}.")
            slot = ctypes.c_void_p()
            self._pointers.append((slot, places[name]))
            return slot
        if kind not in _C_TYPES or name not in launch.scalars:
            raise LaunchError(f"{self._name} takes {name}: {kind}; the launch has {dict(launch.scalars)}.")
        number = launch.scalars[name]
        value = _C_TYPES[kind](number)
        if isinstance(number, int) and value.value != number:
            raise LaunchError(f"{self._name} takes {name} as {kind}, into which {number} does not fit.")
        return value


def find_kernels(
    folder: Path,
    prefix: str,
    functions: Sequence[str],
    *,
    architecture: int,
    serves: Callable[[CompiledKernel], bool],
) -> dict[str, CompiledKernel]:
    """The kernels for a GPU of a compute capability, sm_90 is 90, among the cubins and their JSON files of a folder.

    Files' names begin with the prefix, the kernels are named by `functions`, and `serves` judges types and constants. A
    KernelError says that no kernel is for that GPU, or that a file is missing or damaged.
    """
    kernels = [read_kernel(path) for path in sorted(folder.glob(f"{prefix}*.json"))]
    kernel_of: dict[str, CompiledKernel] = {}
    for function in functions:
        fitting = [kernel for kernel in kernels if kernel.function == function and serves(kernel)]
        running = [kernel for kernel in fitting if _runs_on(kernel.architecture, architecture)]
        if not running:
            has = ", ".join(f"sm_{number}" for number in sorted({kernel.architecture for kernel in fitting})) or "none"
            raise KernelError(
                f"This GPU is an sm_{architecture}; in {folder} the kernel {function} of these types and sizes is for "
                f"{has}.\nCompile it for this GPU: "
                f"hdexport rebuild {shlex.quote(str(folder.parent))} --target onnx --sm {architecture}"
            )
        kernel_of[function] = max(running, key=lambda kernel: kernel.architecture)
    return kernel_of


def load_kernels(
    folder: Path, prefix: str, functions: Sequence[str], *, serves: Callable[[CompiledKernel], bool]
) -> dict[str, LoadedKernel]:
    """The kernels for the GPU of the current CUDA context, each loaded once per context and process; see
    :func:`find_kernels`.

    A KernelError also says that cuda-python is not installed, a LaunchError, that there is no CUDA context, or that the
    driver rejects a kernel.
    """
    driver = _driver()
    _call(driver, "cuInit", 0)
    context = _call(driver, "cuCtxGetCurrent")
    if not int(context):
        raise LaunchError("This thread has no CUDA context to load kernels into.")
    compiled = find_kernels(folder, prefix, functions, architecture=_architecture(driver), serves=serves)
    return {function: _loaded(driver, int(context), kernel) for function, kernel in compiled.items()}


_kernels: dict[tuple[Any, int, str], LoadedKernel] = {}
"""(driver, CUDA context, SHA-256 of the cubin) -> what was loaded. Kept: a process has few."""

_kernels_lock = threading.Lock()


def _loaded(driver: Any, context: int, kernel: CompiledKernel) -> LoadedKernel:
    with _kernels_lock:
        key = (driver, context, kernel.sha256)
        if key not in _kernels:
            _kernels[key] = LoadedKernel(compiled=kernel, function=_load(driver, kernel), driver=driver)
        return _kernels[key]


def _load(driver: Any, kernel: CompiledKernel) -> Any:
    code, module = driver.cuModuleLoadData(kernel.cubin.read_bytes())
    if code:
        # The file is the one that was compiled: its checksum was compared.
        hint = "\nUpdate NVIDIA's driver: it may be too old for this file." if int(code) in _UNREADABLE_CODE else ""
        raise _error(driver, code, f"cuModuleLoadData of {kernel.cubin}", hint)
    function = _call(driver, "cuModuleGetFunction", module, kernel.name.encode())
    if kernel.shared_bytes > _USUAL_SHARED_BYTES:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _call(driver, "cuFuncSetAttribute", function, attribute, kernel.shared_bytes)
    return function


def _driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError as error:
        raise KernelError(
            f"Launching GPU kernels needs the package 'cuda-bindings', which is not installed ({error}).\n"
            "Install it with: pip install cuda-bindings"
        ) from None


def _architecture(driver: Any) -> int:
    device = _call(driver, "cuCtxGetDevice")
    names = driver.CUdevice_attribute
    major = _call(driver, "cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = _call(driver, "cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return int(major) * 10 + int(minor)


def _runs_on(compiled_for: int, architecture: int) -> bool:
    # CUDA runs a cubin on the same major and a higher minor (Programming Guide, binary compatibility), unless it was
    # compiled for one architecture alone.
    if architecture >= FIRST_SINGLE_ARCHITECTURE or compiled_for > architecture:
        return compiled_for == architecture
    return compiled_for // 10 == architecture // 10


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    code, *values = getattr(driver, name)(*arguments)
    if code:
        raise _error(driver, code, name)
    return values[0] if values else None


def _error(driver: Any, code: Any, doing: str, hint: str = "") -> LaunchError:
    failure, text = driver.cuGetErrorString(code)
    explained = "no explanation" if failure or not text else text.decode()
    return LaunchError(f"CUDA error {int(code)} at {doing}: {explained}.{hint}")
