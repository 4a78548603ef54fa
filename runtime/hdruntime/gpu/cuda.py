"""The CUDA driver for one GPU: calls through cuda-python, with errors translated once."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hdruntime.errors import BackendError, BackendUnavailableError, OutOfMemoryError, Setting

_OUT_OF_MEMORY = 2
"""``CUDA_ERROR_OUT_OF_MEMORY``, for device memory and pinned host memory."""

_devices: dict[tuple[Any, int], Device] = {}
_devices_lock = threading.Lock()


def open_device(ordinal: int) -> Device:
    """The GPU of this number among those that CUDA offers this process, in its primary context.

    PyTorch and engines use the same context. It is kept until the process ends: kernels of plugins are loaded into
    it once. Without cuda-python, driver or GPU it is a BackendUnavailableError.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"Running on a GPU needs the package 'cuda-bindings', which is not installed ({error}).",
            hint="Install it with: pip install cuda-bindings",
        ) from None
    with _devices_lock:
        key = (driver, ordinal)
        if key not in _devices:
            _devices[key] = Device(driver, ordinal)
        return _devices[key]


class Device:
    """A GPU, by its number and the module ``cuda.bindings.driver``. Calls need its context: make them within
    :meth:`current`."""

    def __init__(self, driver: Any, ordinal: int) -> None:
        self.driver, self.ordinal = driver, ordinal
        self._garbage: deque[Callable[[], None]] = deque()
        # Held while memory is freed. Reentrant: a finalizer may run inside.
        self._freeing = threading.RLock()
        self._captures = 0
        try:
            self.call("cuInit", 0)
            self._context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", ordinal))
        except Exception as error:  # without a driver cuda-python raises what its loader raises
            raise BackendUnavailableError(
                f"CUDA does not offer GPU {ordinal} here: {error}",
                hint="Check it with nvidia-smi, or use the backend onnxruntime.",
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver: its results after the error code, None, a value, or a tuple of values. An
        error may be that of earlier work."""
        code, *values = getattr(self.driver, name)(*arguments)
        if code:
            raise self._error(code, name)
        return values[0] if len(values) == 1 else tuple(values) or None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this GPU current for the calling thread; restore the previous one afterwards."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            self._free_garbage()
            yield
        finally:
            self.call("cuCtxPopCurrent")

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Defer the frees of :meth:`discard`, in whichever thread: they wait for the context, which breaks a capture.

        Several threads may capture at a time.
        """
        with self._freeing:
            self._captures += 1
        try:
            yield
        finally:
            with self._freeing:
                self._captures -= 1

    def discard(self, free: Callable[[], None]) -> None:
        """Call ``free`` as soon as possible; for finalizers, which run at any time and in any thread."""
        self._garbage.append(free)
        with self.current():
            pass  # this frees it, except during a capture

    def _free_garbage(self) -> None:
        # Whoever is freeing already frees this, too; a finalizer must not wait for it.
        if not self._freeing.acquire(blocking=False):
            return
        try:
            while self._garbage and not self._captures:
                self._garbage.popleft()()
        finally:
            self._freeing.release()

    def _error(self, code: Any, name: str) -> BackendError:
        status, text = self.driver.cuGetErrorString(code)
        explained = "no explanation" if status or not text else text.decode()
        if int(code) == _OUT_OF_MEMORY:
            return OutOfMemoryError(
                f"The GPU has too little free memory ({name}: {explained}).",
                hint=("Use smaller batches: lower ", Setting("batch_tokens"), "."),
            )
        return BackendError(
            f"CUDA error {int(code)} at {name}: {explained}.",
            hint="If the error persists, start a new process: after some errors every CUDA call of a process fails.",
        )
