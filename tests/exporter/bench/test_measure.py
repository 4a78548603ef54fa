"""Timing, warm-up, growth of memory, statistics, and what is said of the machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hdruntime.gpu.driver
from hdexport.bench.measure import calls as measure
from hdexport.bench.measure.calls import WarmUp, environment, latency_of, time_runs, timed, warm_up, with_growth
from hdruntime.gpu.driver import Gpu

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")


def test_a_call_is_timed_by_the_clock_and_by_the_cpu() -> None:
    began = time.perf_counter()
    slept, latency_ms, cpu_ms = timed(lambda: time.sleep(0.05) or "result")
    around_ms = (time.perf_counter() - began) * 1e3
    assert slept == "result"
    assert 50 <= latency_ms <= around_ms
    assert cpu_ms < 40


def test_time_runs_ends_after_the_least_runs_and_the_least_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting(monkeypatch, itertools.repeat(100.0))
    assert time_runs(print, least_runs=10, least_seconds=0.5) == [100.0] * 10
    assert time_runs(print, least_runs=3, least_seconds=0.95) == [100.0] * 10
    assert time_runs(print, least_runs=1, least_seconds=0.0) == [100.0]


@pytest.mark.parametrize(
    ("latencies_ms", "expected"),
    [
        pytest.param([9000, 300, 100, 101, 102, 1], WarmUp(5, True), id="compiles first"),
        pytest.param([100, 104, 104, 1], WarmUp(3, True), id="warm from the start"),
        pytest.param([100, 106, 100, 106, 104, 101, 1], WarmUp(6, True), id="more than 5 percent apart"),
        pytest.param([1.0] * 500, WarmUp(200, True), id="short calls fill the least time"),
        pytest.param([1000.0, 2000.0] * 9, WarmUp(7, False), id="never stable, ended by the time"),
        pytest.param([0.01, 0.02] * 900, WarmUp(1000, False), id="never stable, ended by the runs"),
        pytest.param([60_000.0] * 9, WarmUp(3, True), id="slow and stable"),
        pytest.param([60_000.0, 30_000.0, 20_000.0, 1], WarmUp(3, False), id="slow and not stable"),
    ],
)
def test_warm_up_lasts_until_the_latency_is_stable(
    latencies_ms: Iterable[float], expected: WarmUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(monkeypatch, latencies_ms)
    assert warm_up(print) == expected


def lasting(monkeypatch: pytest.MonkeyPatch, latencies_ms: Iterable[float]) -> None:
    """Calls seem to last that long."""
    clock = iter(latencies_ms)
    monkeypatch.setattr(measure, "timed", lambda call: (None, next(clock), 0.0))


@needs_linux
def test_growth_is_that_of_the_call_and_not_of_what_was_before() -> None:
    code = (
        "import numpy as np\n"
        "from hdexport.bench.measure.calls import with_growth\n"
        "before = np.ones(20_000_000)\n"
        "del before\n"
        "size, growth = with_growth(lambda: np.ones(10_000_000).size)\n"
        "_, nothing = with_growth(lambda: None)\n"
        "print(size, growth, nothing)"
    )
    size, growth, nothing = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert size == 10_000_000
    assert 75e6 < growth < 90e6
    assert nothing < 5e6


def test_growth_is_unknown_where_the_kernel_does_not_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "reset_peak", lambda: False)
    assert with_growth(lambda: "result") == ("result", None)


def test_statistics_are_over_the_runs_of_all_rounds() -> None:
    latency = latency_of(
        [[float(value) for value in range(1, 51)], [float(value) for value in range(51, 101)]], is_stable=True
    )
    assert (latency.p50_ms, latency.mean_ms, latency.min_ms, latency.max_ms) == (50.5, 50.5, 1.0, 100.0)
    # Between the runs of rank 1 + 0.95 * 99 = 95.05 and 1 + 0.99 * 99 = 99.01.
    assert latency.p95_ms == pytest.approx(95.05)
    assert latency.p99_ms == pytest.approx(99.01)
    assert latency.sd_ms == pytest.approx(np.sqrt(100 * 101 / 12))  # of 1 to n, with n - 1 in the denominator
    assert (latency.runs, latency.rounds_p50_ms, latency.is_stable) == (100, (25.5, 75.5), True)
    single = latency_of([[7.0]], is_stable=False)
    assert (single.p50_ms, single.p99_ms, single.sd_ms, single.is_stable) == (7.0, 7.0, 0.0, False)


def test_the_environment_says_what_a_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    found = environment(threads=2)
    assert all(isinstance(value, str) and value for value in found.values())
    assert found.keys() >= {"cpu", "cores", "memory", "system", "python", "hdexport", "numpy", "onnxruntime"}
    assert (found["threads"], found["OMP_NUM_THREADS"]) == ("2", "3")
    assert "MKL_NUM_THREADS" not in found
    assert "threads" not in environment()
    assert found["cores"].startswith(f"{len(os.sched_getaffinity(0))} of ")


def test_the_environment_names_the_gpu_and_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotPermittedError(RuntimeError):
        pass

    def power_limit(handle: object) -> int:
        raise NotPermittedError

    nvml = SimpleNamespace(
        NVMLError=NotPermittedError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: "handle",
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 345, 2: 2619}[kind],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: {1: 1980, 2: 2619}[kind],
        nvmlDeviceGetPowerManagementLimit=power_limit,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        hdruntime.gpu.driver, "gpus", lambda: (Gpu(name="A GPU", architecture="sm90", memory_bytes=80 * 10**9),)
    )
    monkeypatch.setattr(hdruntime.gpu.driver, "driver_version", lambda: "580.65.06")
    found = environment()
    assert (found["gpu"], found["driver"]) == ("A GPU (sm90, 80.0 GB)", "580.65.06")
    assert found["gpu clock"] == "345 MHz at the start, at most 1980 MHz"
    assert found["gpu memory clock"] == "2619 MHz at the start, at most 2619 MHz"
    assert "gpu power limit" not in found


def test_the_commit_is_that_of_the_checkout_that_hdexport_is_run_from(tmp_path: Path) -> None:
    git = git_in(tmp_path)
    source, installed = tmp_path / "source.py", tmp_path / "site-packages.py"
    source.write_text("1")
    installed.write_text("1")
    assert measure._commit(source) is None
    git("init", "-q")
    git("add", "source.py")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "HEAD").strip()[:12]
    assert measure._commit(source) == commit
    assert measure._commit(installed) is None
    source.write_text("2")
    assert measure._commit(source) == f"{commit}+changes"


def git_in(folder: Path) -> Callable[..., str]:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", "-C", str(folder), *identity, *arguments], text=True)

    return git
