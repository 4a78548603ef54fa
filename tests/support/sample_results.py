"""A benchmark's result as a machine might give it: wrong answers, missing figures, a baseline that is not installed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from hdexport.bench.results.result import (
    SCHEMA_VERSION,
    BenchResult,
    CaseResult,
    Latency,
    ModelChange,
    OutputError,
    PeakMemory,
    RunStatus,
    Series,
)

LENGTHS = (512, 1024, 2048, 4096, 8192)
BATCHES = (1, 8)

OURS = "longformer-8192 (onnxruntime)"
TORCH = "torch"
COMPILED = "torch-compile"
PLAIN = "onnx-plain"
OPTIMUM = "optimum"
SENTENCE = "sentence-transformers"

MEASURED = (OURS, TORCH, COMPILED, PLAIN, OPTIMUM)

_MS_PER_TOKEN = {OURS: 0.155, TORCH: 0.62, COMPILED: 0.41, PLAIN: 0.36, OPTIMUM: 0.35}
_QUADRATIC_MS = {OURS: 0.0, TORCH: 4e-6, COMPILED: 3e-6, PLAIN: 3.2e-5, OPTIMUM: 3e-5}
"""Milliseconds of a pair of tokens."""

_LIBRARY_BYTES = {
    OURS: 310_000_000,
    TORCH: 690_000_000,
    COMPILED: 930_000_000,
    PLAIN: 520_000_000,
    OPTIMUM: 560_000_000,
}
_BYTES_PER_TOKEN = {OURS: 58_000, TORCH: 160_000, COMPILED: 120_000, PLAIN: 130_000, OPTIMUM: 128_000}
_ERROR = {OURS: 3.1e-6, TORCH: 0.0, COMPILED: 1.4e-6, PLAIN: 2.2e-6, OPTIMUM: 2.4e-6}

_FAILURES = {
    (PLAIN, 8, 8192): (RunStatus.OUT_OF_MEMORY, "its processes took 61.2 GB, of which 60.0 GB were free"),
    (OPTIMUM, 8, 8192): (RunStatus.OUT_OF_MEMORY, "its processes took 60.4 GB, of which 60.0 GB were free"),
    (TORCH, 8, 8192): (RunStatus.TIMEOUT, "not done after 600 s; allow more with --time-limit S"),
    (COMPILED, 1, 512): (RunStatus.FAILED, "torch._inductor.exc.InductorError: CppCompileError: no C++ compiler"),
}


def sample_result(
    *, seed: int = 0, rounds: int = 3, noise: float = 0.02, lengths: tuple[int, ...] = LENGTHS
) -> BenchResult:
    """One run.

    Args:
        seed: of the noise.
        rounds: processes of a case.
        noise: standard deviation of the logarithm of a round's median.
        lengths: the measured ones; some cases of 512 and 8192 tokens fail.
    """
    generator = np.random.default_rng(seed)
    return BenchResult(
        schema_version=SCHEMA_VERSION,
        date="2026-11-21T10:24:07+00:00",
        command="hdexport bench longformer-8192 --batch 1,8 -o results",
        environment={
            "cpu": "AMD EPYC 7B13",
            "cores": "2",
            "memory": "64.0 GB",
            "threads": "2",
            "python": "3.11.2",
            "hdexport": "0.1.0",
            "torch": "2.13.0+cpu",
            "transformers": "5.23.1",
            "onnxruntime": "1.31.1",
            "commit": "a0d0643",
        },
        rounds=rounds,
        series=_series(),
        cases=tuple(
            _case(series, batch, tokens, generator, rounds, noise)
            for batch in BATCHES
            for tokens in lengths
            for series in MEASURED
        ),
    )


def with_cases(result: BenchResult, change: Callable[[CaseResult], CaseResult]) -> BenchResult:
    """The result with every case changed."""
    return dataclasses.replace(result, cases=tuple(map(change, result.cases)))


def slower(result: BenchResult, factor: float, *series: str, lengths: tuple[int, ...] = LENGTHS) -> BenchResult:
    """Some series take longer, at some lengths."""

    def change(case: CaseResult) -> CaseResult:
        if case.latency is None or case.series not in series or case.tokens not in lengths:
            return case
        rounds = tuple(factor * p50_ms for p50_ms in case.latency.rounds_p50_ms)
        latency = dataclasses.replace(case.latency, p50_ms=factor * case.latency.p50_ms, rounds_p50_ms=rounds)
        return dataclasses.replace(case, latency=latency)

    return with_cases(result, change)


def without_change(result: BenchResult, change: ModelChange, *series: str) -> BenchResult:
    """Outputs of some series are those of the model without a requested change."""

    def differing(case: CaseResult) -> CaseResult:
        if case.error is None or case.series not in series:
            return case
        error = OutputError(
            max_abs_error=0.35, min_cosine=0.81, passed=False, tolerance="abs 0.0001 or 2 ulp",
            missing_changes=(change,),
        )  # fmt: skip
        return dataclasses.replace(case, error=error)

    return with_cases(result, differing)


def _series() -> tuple[Series, ...]:
    bundle = "bundles/longformer-8192"
    remark = "Its graph was traced at one length; it is known to be wrong at others."
    missing = "sentence-transformers is not installed. Install it with: pip install sentence-transformers"
    return (
        Series(name=OURS, runner="onnxruntime", bundle=bundle, is_baseline=False),
        Series(name=TORCH, runner="torch", bundle=bundle, is_baseline=True),
        Series(name=COMPILED, runner="torch-compile", bundle=bundle, is_baseline=True),
        Series(name=PLAIN, runner="onnx-plain", bundle=bundle, is_baseline=True),
        Series(name=OPTIMUM, runner="optimum", bundle=bundle, is_baseline=True, remark=remark),
        Series(name=SENTENCE, runner="sentence-transformers", bundle=bundle, is_baseline=True, unavailable=missing),
    )


def _case(
    series: str, batch: int, tokens: int, generator: np.random.Generator, rounds: int, noise: float
) -> CaseResult:
    shifts = generator.normal(0, noise, rounds)
    if (series, batch, tokens) in _FAILURES:
        status, reason = _FAILURES[series, batch, tokens]
        return CaseResult(series=series, batch=batch, tokens=tokens, status=status, reason=reason)
    expected_ms = batch * tokens * (_MS_PER_TOKEN[series] + _QUADRATIC_MS[series] * tokens)
    latency = _latency([expected_ms * math.exp(shift) for shift in shifts], is_stable=(series, tokens) != (TORCH, 512))
    return CaseResult(
        series=series,
        batch=batch,
        tokens=tokens,
        status=RunStatus.OK,
        latency=latency,
        tokens_per_s=batch * tokens / latency.p50_ms * 1e3,
        memory=_memory(series, batch, tokens),
        error=_error(series, tokens),
    )


def _latency(rounds_p50_ms: list[float], *, is_stable: bool) -> Latency:
    p50 = float(np.median(rounds_p50_ms))
    return Latency(
        p50_ms=p50,
        p95_ms=p50 * 1.07,
        p99_ms=p50 * 1.12,
        mean_ms=p50 * 1.01,
        sd_ms=p50 * 0.03,
        min_ms=p50 * 0.97,
        max_ms=p50 * 1.15,
        runs=10 * len(rounds_p50_ms),
        rounds_p50_ms=tuple(rounds_p50_ms),
        is_stable=is_stable,
    )


def _memory(series: str, batch: int, tokens: int) -> PeakMemory:
    growth = batch * tokens * (_BYTES_PER_TOKEN[series] + (40 * tokens if series in (PLAIN, OPTIMUM) else 0))
    return PeakMemory(rss_bytes=_LIBRARY_BYTES[series] + growth, growth_bytes=growth)


def _error(series: str, tokens: int) -> OutputError:
    is_wrong = series == OPTIMUM and tokens > 512
    error = 0.3 + tokens / 40_000 if is_wrong else _ERROR[series] * (1 + tokens / 8192)
    return OutputError(
        max_abs_error=error,
        min_cosine=0.62 if is_wrong else 0.9999999,
        passed=not is_wrong,
        tolerance="abs 0.0001 or 2 ulp",
    )
