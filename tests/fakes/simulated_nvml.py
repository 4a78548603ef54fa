"""NVIDIA's management library of a machine whose GPU is as busy and as full as a test says."""

from __future__ import annotations

import os
from types import SimpleNamespace

IDLE_BYTES = 10**9
"""Of the GPU's memory, used before a test's process began."""


class SimulatedNvml:
    """The module ``pynvml`` of a machine with one GPU, of which this process holds a context.

    Attributes:
        busy_percent: of the last sample; None for a GPU that does not say it.
        used_bytes: of the GPU's memory.
        looks: how often the share was asked for.
    """

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.busy_percent: int | None = 0
        self.used_bytes = IDLE_BYTES
        self.looks = 0

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used_bytes, total=80 * 10**9)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=IDLE_BYTES)]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        self.looks += 1
        if self.busy_percent is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy_percent)
