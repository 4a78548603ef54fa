"""A simulated CUDA driver with only the calls that a launch needs.

It replaces the module ``cuda.bindings.driver``. Its "machine code" is JSON that names a Triton kernel; the caller
supplies the function that runs it, see `simulated_gpu`.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hdplugins.kernels.aot import KernelSource

_MAGIC = b"simulated cubin "
_SCRATCH_POINTERS = 2
_SHARED_BYTES = {"attend": 60 * 1024}
"""More than a launch may use unless the function's attribute allows it."""

_USUAL_SHARED_BYTES = 48 * 1024
_contexts = itertools.count(0xC0)
_C_TYPES = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}


@dataclass(frozen=True, kw_only=True)
class LaunchedKernel:
    """One launch, as the driver saw it.

    Attributes:
        source: the content of the machine code: function, signature, constants, num_warps.
        grid: programs along x, y and z.
        arguments: name -> value; pointers are addresses.
        stream: its handle.
    """

    source: dict[str, Any]
    grid: tuple[int, int, int]
    arguments: dict[str, int | float]
    stream: int


class _Code(enum.IntEnum):
    SUCCESS = 0
    INVALID_VALUE = 1
    INVALID_IMAGE = 200
    LAUNCH_FAILED = 719


class SimulatedDriver:
    """The calls of the driver's Python module, each answering (code, result...).

    Attributes:
        calls: names of the calls, in order.
        failing: call -> the code that it answers.
        launching_only: refuse all calls but launches, as during TensorRT's enqueueing.
    """

    class CUdevice_attribute(enum.IntEnum):  # noqa: N801
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76

    class CUfunction_attribute(enum.IntEnum):  # noqa: N801
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    class CUstream(int):
        pass

    def __init__(
        self,
        *,
        architecture: int = 86,
        context: int | None = None,
        run: Callable[[LaunchedKernel], None] = lambda launched: None,
    ) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        self.launching_only = False
        # By default a new context, without the modules of other tests.
        self._context = next(_contexts) if context is None else context
        self._architecture, self._run = architecture, run
        self._modules: list[dict[str, Any]] = []
        self._functions: list[dict[str, Any]] = []

    def cuInit(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuInit")

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuCtxGetCurrent", self._context)

    def cuCtxGetDevice(self) -> tuple[Any, ...]:  # noqa: N802
        return self._answer("cuCtxGetDevice", 0)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:  # noqa: N802
        major = self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        digits = divmod(self._architecture, 10)
        return self._answer("cuDeviceGetAttribute", digits[0] if attribute == major else digits[1])

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:  # noqa: N802
        if not image.startswith(_MAGIC):
            return (_Code.INVALID_IMAGE, None)
        self._modules.append(json.loads(image[len(_MAGIC) :]))
        return self._answer("cuModuleLoadData", len(self._modules))

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        source = self._modules[module - 1]
        assert name.decode() == source["function"]
        self._functions.append({**source, "allowed_bytes": _USUAL_SHARED_BYTES})
        return self._answer("cuModuleGetFunction", len(self._functions))

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> tuple[Any, ...]:  # noqa: N802
        assert attribute == self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._functions[function - 1]["allowed_bytes"] = value
        return self._answer("cuFuncSetAttribute")

    def cuGetErrorString(self, code: int) -> tuple[Any, ...]:  # noqa: N802
        return (_Code.SUCCESS, f"the reason for {int(code)}".encode())

    def cuLaunchKernel(  # noqa: N802
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared_bytes: int, stream: Any, parameters: int, extra: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.calls.append("cuLaunchKernel")
        if "cuLaunchKernel" in self.failing:
            return (self.failing["cuLaunchKernel"],)
        source = self._functions[function - 1]
        assert (bx, by, bz, extra) == (32 * source["num_warps"], 1, 1, 0)
        assert type(stream) is self.CUstream
        if not gx or not gy or not gz:
            return (_Code.INVALID_VALUE,)
        wanted_bytes = _SHARED_BYTES.get(source["function"], 0)
        if shared_bytes != wanted_bytes or shared_bytes > source["allowed_bytes"]:
            return (_Code.LAUNCH_FAILED,)
        arguments = _read_arguments(parameters, source["signature"])
        self._run(LaunchedKernel(source=source, grid=(gx, gy, gz), arguments=arguments, stream=int(stream)))
        return (_Code.SUCCESS,)

    def _answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        assert not self.launching_only, f"{name} was called while enqueueing"
        self.calls.append(name)
        code = self.failing.get(name, _Code.SUCCESS)
        return (code, *(None if code else value for value in values))


def write_simulated_kernels(folder: Path, operator: str, sources: Sequence[KernelSource]) -> None:
    """Write the files of `hdexport.graph.targets.tensorrt.kernels.write_kernels`, compiled for the simulated driver."""
    folder.mkdir(exist_ok=True)
    for source in sources:
        # Pairs, because the order matters.
        code = {**asdict(source), "signature": list(source.signature.items())}
        cubin = folder / f"{operator}-{source.function}-sm{source.architecture}-{len(list(folder.iterdir()))}.cubin"
        cubin.write_bytes(_MAGIC + json.dumps(code).encode())
        described = {
            "name": source.function,
            "function": source.function,
            "architecture": source.architecture,
            "arguments": list(source.signature.items()),
            "scratch_pointers": _SCRATCH_POINTERS,
            "constants": dict(source.constants),
            "num_warps": source.num_warps,
            "shared_bytes": _SHARED_BYTES.get(source.function, 0),
            "registers": 32,
            "spilled_bytes": 0,
            "sha256": hashlib.sha256(cubin.read_bytes()).hexdigest(),
            "triton": "simulated",
        }
        cubin.with_suffix(".json").write_text(json.dumps(described))


def _read_arguments(parameters: int, signature: Sequence[Sequence[str]]) -> dict[str, int | float]:
    """The values behind an array of their addresses, as a GPU would read them."""
    count = len(signature) + _SCRATCH_POINTERS
    places = (ctypes.c_void_p * count).from_address(parameters)
    for place in places[len(signature) :]:
        assert ctypes.c_void_p.from_address(place).value is None, "Triton's scratch pointers are null"
    return {
        name: _C_TYPES.get(kind, ctypes.c_void_p).from_address(place).value
        for place, (name, kind) in zip(places, signature, strict=False)
    }
