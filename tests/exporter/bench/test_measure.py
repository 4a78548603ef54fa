"""Timing, warm-up, growth of memory, statistics, and the description of the machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from hdexport.bench.measure import calls as measure
from hdexport.bench.measure.calls import environment, latency_of, time_runs, warm_up

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")


def test_time_runs_ends_after_the_minimum_of_runs_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    lasting(monkeypatch, itertools.repeat(100.0))
    assert time_runs(print, min_runs=10, min_seconds=0.5) == [100.0] * 10
    assert time_runs(print, min_runs=3, min_seconds=0.95) == [100.0] * 10
    assert time_runs(print, min_runs=1, min_seconds=0.0) == [100.0]


@pytest.mark.parametrize(
    ("latencies_ms", "runs", "is_stable"),
    [
        pytest.param([9000, 300, 100, 101, 102, 1], 5, True, id="compiles first"),
        pytest.param([100, 106, 100, 106, 104, 101, 1], 6, True, id="more than 5 percent apart"),
        pytest.param([1.0] * 500, 200, True, id="short calls fill the least time"),
        pytest.param([1000.0, 2000.0] * 9, 7, False, id="never stable, ended by the time"),
        pytest.param([60_000.0, 30_000.0, 20_000.0, 1], 3, False, id="slow and not stable"),
    ],
)
def test_warm_up_lasts_until_the_latency_is_stable(
    latencies_ms: list[float], runs: int, is_stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(latencies_ms)
    lasting(monkeypatch, left)
    assert warm_up(print) is is_stable
    assert len(latencies_ms) - len(list(left)) == runs


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
