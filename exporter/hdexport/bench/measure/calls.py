"""Latency and memory growth of a call, and a description of the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import hdexport
from hdexport.bench.results.result import Latency
from hdexport.support.memory import first_gpu, peak_resident_bytes, reset_peak, resident_bytes
from hdruntime.backends.registry import backends
from hdruntime.gpu.driver import driver_version, gpus
from hdruntime.optional import installed_version
from hdruntime.process_limits import cpu_quota, usable_cpus

STABLE_RUNS = 3
"""Number of runs at the end of a warm-up that are compared."""

STABLE_WITHIN = 0.05
"""The latency is stable if the slowest of these runs takes at most this fraction longer than the fastest."""

MIN_WARM_UP_S = 0.2
"""Minimum duration of a warm-up: clocks of GPUs and CPUs rise only under load."""

MAX_WARM_UP_S = 10.0
"""A warm-up ends after this time and `STABLE_RUNS` runs, stable or not."""

MAX_WARM_UP_RUNS = 1000

_PACKAGES = (
    "hdexport", "numpy", "torch", "transformers", "sentence-transformers", "optimum", "optimum-onnx", "nncf", "onnx",
    "triton", "cuda-bindings", "nvidia-ml-py",
)  # fmt: skip
"""Distributions whose versions may change a result, as those of the backends may."""

_VARIABLES = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_AFFINITY",
    "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Environment variables that set the number of threads, how they wait, and which GPUs are used."""

Result = TypeVar("Result")


def timed(call: Callable[[], Result]) -> tuple[Result, float, float]:
    """Result of a call, its latency and its CPU time in milliseconds."""
    began, cpu_began = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - began) * 1e3, (time.process_time() - cpu_began) * 1e3


def with_growth(call: Callable[[], Result]) -> tuple[Result, int | None]:
    """Result of a call, and the rise of peak resident memory above the resident memory before it, in bytes.

    The rise is None outside Linux. The peak of the process is reset.
    """
    can_reset = reset_peak()
    before_bytes = resident_bytes()
    result = call()
    peak_bytes = peak_resident_bytes()
    if not can_reset or before_bytes is None or peak_bytes is None:
        return result, None
    return result, peak_bytes - before_bytes


def warm_up(call: Callable[[], object]) -> bool:
    """Call until the latency is stable, and return whether it is stable.

    The latency is stable if the slowest of three consecutive runs takes at most 5 % longer than the fastest. Then the
    work of first calls, such as compiling and touching pages, is over. On a busy machine the limits end the warm-up.
    """
    latencies_ms: list[float] = []
    while True:
        latencies_ms.append(timed(call)[1])
        runs, seconds = len(latencies_ms), sum(latencies_ms) / 1e3
        last = latencies_ms[-STABLE_RUNS:]
        if runs < STABLE_RUNS:
            continue
        is_stable = max(last) <= min(last) * (1 + STABLE_WITHIN)
        if (is_stable and seconds >= MIN_WARM_UP_S) or seconds >= MAX_WARM_UP_S or runs >= MAX_WARM_UP_RUNS:
            return is_stable


def time_runs(call: Callable[[], object], *, min_runs: int, min_seconds: float) -> list[float]:
    """Latencies of consecutive calls, in milliseconds: at least `min_runs`, and for `min_seconds` in total."""
    latencies_ms: list[float] = []
    while len(latencies_ms) < min_runs or sum(latencies_ms) < min_seconds * 1e3:
        latencies_ms.append(timed(call)[1])
    return latencies_ms


def latency_of(rounds: Sequence[Sequence[float]], *, is_stable: bool) -> Latency:
    """Statistics over the runs of all rounds, each a non-empty sequence of latencies in milliseconds.

    Percentiles are interpolated linearly between the two nearest runs.
    """
    runs = np.array([latency_ms for latencies_ms in rounds for latency_ms in latencies_ms], np.float64)
    p50, p95, p99 = np.percentile(runs, (50, 95, 99))
    return Latency(
        p50_ms=float(p50),
        p95_ms=float(p95),
        p99_ms=float(p99),
        mean_ms=float(runs.mean()),
        sd_ms=float(runs.std(ddof=1)) if runs.size > 1 else 0.0,
        min_ms=float(runs.min()),
        max_ms=float(runs.max()),
        runs=runs.size,
        rounds_p50_ms=tuple(map(statistics.median, rounds)),
        is_stable=is_stable,
    )


def environment(threads: int | None = None) -> dict[str, str]:
    """Conditions of a result besides the model: machine, versions, threads and commit, name -> text.

    Conditions that this machine lacks or does not report are left out.
    """
    conditions = {
        "cpu": _cpu_name(),
        "cores": _cores(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        "system": platform.platform(),
        **dict(_gpu()),
        "python": platform.python_version(),
        **dict(_versions()),
    }
    if threads is not None:
        conditions["threads"] = str(threads)
    conditions |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    commit = _commit(Path(hdexport.__file__))
    return conditions | ({"commit": commit} if commit else {})


def _cores() -> str:
    quota = cpu_quota()
    return f"{len(usable_cpus())} of {os.cpu_count()}" + (f", a quota of {quota:g}" if quota else "")


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> Iterator[tuple[str, str]]:
    installed = gpus()
    if not installed:
        return
    names = [f"{gpu.name} ({gpu.architecture}, {gpu.memory_bytes / 1e9:.1f} GB)" for gpu in installed]
    yield "gpu", "; ".join(names)
    version = driver_version()
    if version:
        yield "driver", version
    with first_gpu() as opened:
        if opened is not None:
            yield from _clocks(*opened)


def _clocks(nvml: Any, handle: Any) -> Iterator[tuple[str, str]]:
    for name, kind in (("gpu clock", nvml.NVML_CLOCK_SM), ("gpu memory clock", nvml.NVML_CLOCK_MEM)):
        with contextlib.suppress(nvml.NVMLError):
            now, most = nvml.nvmlDeviceGetClockInfo(handle, kind), nvml.nvmlDeviceGetMaxClockInfo(handle, kind)
            yield name, f"{now} MHz at the start, at most {most} MHz"
    with contextlib.suppress(nvml.NVMLError):
        yield "gpu power limit", f"{nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3:.0f} W"


def _versions() -> Iterator[tuple[str, str]]:
    of_backends = (name for entry in backends() for name in entry.distributions)
    for name in dict.fromkeys((*_PACKAGES, *of_backends)):
        version = installed_version(name)
        if version is not None:
            yield name, version


def _commit(file: Path) -> str | None:
    """Commit of a file's checkout; an installed copy within another project's checkout has none."""
    if not _git(file, "ls-files", "--error-unmatch", file.name):
        return None
    return _git(file, "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes")


def _git(file: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(file.parent), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
