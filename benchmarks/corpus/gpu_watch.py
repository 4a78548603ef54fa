"""How busy a GPU is, and how much of its memory is used, while another process runs."""

from __future__ import annotations

import statistics
import time

from hdexport.support.memory import GpuMemoryWatch

_SAMPLE_SECONDS = 1.0
"""NVML's share is of the last sixth of a second to the last second, depending on the GPU."""


class GpuWatch(GpuMemoryWatch):
    """The peak GPU memory of a process that this one waits for, and the share of time in which the GPU computed.

    The thread is in the waiting process, so that it takes nothing from the measured one. The memory is the rise of the
    whole device's, which is right while no other process uses the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shares: list[tuple[float, float]] = []

    @property
    def peak_bytes(self) -> int | None:
        """The peak so far; None without NVML."""
        # This process may hold memory of the GPU, too, which is not what is measured.
        return None if self._gpu is None else self._device_peak - self._idle_bytes

    def look(self) -> None:
        """Looks now, within the block."""
        super().look()
        if self._gpu is None:
            return
        nvml, handle = self._gpu
        try:
            busy_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except nvml.NVMLError:
            # A part of a GPU (MIG) has memory of its own, and no such share.
            return
        self._shares.append((time.monotonic(), busy_percent / 100))

    def busy_share(self, began: float, ended: float) -> float | None:
        """The share of the time between two readings of `time.monotonic`, which all processes share, in which a kernel
        ran, 0 to 1. None where it is unknown: without NVML, or if that time is shorter than what NVML reports on."""
        shares = [share for looked_at, share in self._shares if began + _SAMPLE_SECONDS <= looked_at <= ended]
        return statistics.mean(shares) if shares else None
