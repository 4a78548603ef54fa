"""Memory: how much processes take, the peak of this one, and the memory of CUDA's first device."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")

_OUT_OF_MEMORY = (
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "bad_alloc",
    "cannot allocate memory",
    "can't allocate memory",
    "cudaerrormemoryallocation",
    "failed to allocate memory",
    "memoryerror",
    "out of memory",
    "unable to allocate",
)
"""Words of PyTorch, ONNX Runtime, CUDA, NumPy, C++ and the kernel where memory was short, in lower case."""

_POLL_SECONDS = 0.02
"""Between two looks at the GPU's memory."""


def resident_bytes() -> int | None:
    """Resident memory of this process; None outside of Linux, where there is no ``/proc``."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int | None:
    """Peak resident memory of this process since its start or `reset_peak`; None outside of Linux."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Restarts the peak of this process at the present memory; False where the kernel cannot do that."""
    try:
        # proc(5): writing 5 resets the peak resident set size, VmHWM.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident_bytes_of(pids: Iterable[int], *, shared_once: bool = False) -> int:
    """Resident memory of processes together; processes that have ended count nothing. With `shared_once`, pages that
    several processes share, such as a library's, count once and not for each. That count is exact and slow: the kernel
    looks at every page, and the processes wait if they ask for memory meanwhile."""
    return sum(map(_share_bytes if shared_once else _statm_bytes, pids))


def says_out_of_memory(text: str) -> bool:
    """Whether an error's text is from a library, or the kernel, that got no memory."""
    return any(said in text.lower() for said in _OUT_OF_MEMORY)


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _statm_bytes(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _share_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        # The process has ended, or the kernel was built without this file.
        return _statm_bytes(pid)
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


class GpuMemory(NamedTuple):
    """Memory of a GPU, all processes together."""

    used_bytes: int
    total_bytes: int


def gpu_memory() -> GpuMemory | None:
    """The memory of the device now; None if it is unknown, see `first_gpu`."""
    with first_gpu() as opened:
        if opened is None:
            return None
        nvml, device = opened
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
        except nvml.NVMLError:
            return None
        return GpuMemory(used_bytes=memory.used, total_bytes=memory.total)


@contextlib.contextmanager
def first_gpu() -> Iterator[tuple[Any, Any] | None]:
    """NVIDIA's management library and its handle of CUDA's first device, in a block; None without the package
    nvidia-ml-py, without a driver, or without such a device."""
    with contextlib.ExitStack() as stack:
        yield _opened_gpu(stack)


class GpuMemoryWatch:
    """The peak GPU memory of this process while a block runs, as a thread reads it from NVML every 20 ms.

    Memory that is taken and given back between two looks is not seen. The allocators of PyTorch and of the
    backends usually keep the memory that they took, so that one look after a call sees how much the call needed.

    In a container NVML lists processes by ids that are not those inside. Then the peak is the rise of the whole
    device's used memory since the block began, which is right while no other process uses the GPU; `is_of_process` says
    which one it is.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._gpu: tuple[Any, Any] | None = None
        self._own_peak: int | None = None
        self._idle_bytes = 0
        self._device_peak = 0
        self._ended = threading.Event()

    def __enter__(self) -> GpuMemoryWatch:
        self._gpu = self._stack.enter_context(first_gpu())
        if self._gpu is not None:
            nvml, handle = self._gpu
            self._idle_bytes = self._device_peak = nvml.nvmlDeviceGetMemoryInfo(handle).used
            thread = threading.Thread(target=self._poll, name="GPU memory", daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(self._ended.set)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def is_of_process(self) -> bool:
        """Whether the peak is this process', and not the rise of the device's."""
        return self._own_peak is not None

    @property
    def peak_bytes(self) -> int | None:
        """The peak so far; None without NVML."""
        if self._gpu is None:
            return None
        return self._device_peak - self._idle_bytes if self._own_peak is None else self._own_peak

    def rest(self) -> None:
        """Stops the thread: the driver answers it at the cost of the timed call."""
        self._ended.set()

    def look(self) -> None:
        """Looks now, within the block."""
        if self._gpu is None:
            return
        nvml, handle = self._gpu
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            used = nvml.nvmlDeviceGetMemoryInfo(handle).used
        except nvml.NVMLError as error:
            logger.warning("NVML no longer reports the GPU's memory: %s", error)
            self._gpu = None
            return
        self._device_peak = max(self._device_peak, used)
        for process in processes:
            # The driver for Windows' desktops does not know a process's memory: NVML says None there.
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                self._own_peak = max(self._own_peak or 0, process.usedGpuMemory)

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self.look()


def _opened_gpu(stack: contextlib.ExitStack) -> tuple[Any, Any] | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
        stack.callback(nvml.nvmlShutdown)
        return nvml, _first_device(nvml)
    except nvml.NVMLError:
        return None


def _first_device(nvml: Any) -> Any:
    # NVML numbers all devices of the machine; CUDA numbers the devices that this variable names, by number or by UUID.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first) if first.isdecimal() else 0)
