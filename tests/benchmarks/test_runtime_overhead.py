"""The benchmark of the runtime: a tiny run of the whole script, and verdicts that can be bad."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.cpu import runtime_overhead


@pytest.mark.nightly
@pytest.mark.usefixtures("tiny_sentence_model")
def test_the_script_measures_every_case(rehearse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    monkeypatch.setattr(runtime_overhead, "_CALL_TOKENS", 512)
    monkeypatch.setattr(runtime_overhead, "with_growth", lambda call: (call(), 2))
    options = "--texts 40 --longest 60 --positions 1030 --threads 1"
    result, _ = rehearse(runtime_overhead, options)
    assert set(result["cases"]) == set(runtime_overhead.CASES)
    assert result["cases"]["load"]["growth_bytes"] > 1e6
    chosen = result["sentence_transformers"]
    assert chosen["batch_size"] in runtime_overhead._BATCH_SIZES
    assert set(chosen["batch_size_latency_ms"]) == {str(size) for size in runtime_overhead._BATCH_SIZES}
    assert len(result["ratios"]) == 4


def call_of(seconds: float, value: float = 1.0) -> Callable[[], dict[str, np.ndarray]]:
    def call() -> dict[str, np.ndarray]:
        time.sleep(seconds)
        return {"vector": np.full(3, value, np.float32)}

    return call


@pytest.fixture
def only_sleep_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))


@pytest.mark.usefixtures("only_sleep_takes_time")
def test_an_overhead_is_how_many_times_as_long_a_call_takes() -> None:
    measured = runtime_overhead._interleaved(call_of(0.03), call_of(0.02), times=5)
    assert measured["overhead"] == pytest.approx(1.5)
    assert measured["latency_ms"] == pytest.approx(30)


@pytest.mark.parametrize("value", [1 + 2**-20, float("nan")])
def test_a_call_that_answers_otherwise_is_not_measured(value: float) -> None:
    with pytest.raises(SystemExit, match="not the bare call"):
        runtime_overhead._interleaved(call_of(0, value), call_of(0), times=1)
