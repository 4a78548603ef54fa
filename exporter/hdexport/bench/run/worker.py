"""The process of one case: open it, measure it, and compare its answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hdexport.bench.measure.calls import time_runs, warm_up, with_growth
from hdexport.bench.measure.case import CaseFigures, CaseSpec
from hdexport.bench.results.result import PeakMemory
from hdexport.bench.run.opening import open_case, wrong_by
from hdexport.support.gpu_memory import GpuMemoryWatch
from hdexport.support.memory import peak_resident_bytes
from hdruntime.backends.precision import Precision


def measured(spec: CaseSpec) -> CaseFigures:
    """Measure a case in this process, which should have done nothing else before.

    `PeakMemory.rss_bytes` is the peak of the process from its start to the end of the timed runs;
    `PeakMemory.growth_bytes` how far that peak rose during all calls, warm-up included, above the resident memory once
    the case was open. So the growth includes memory that a first call keeps, such as arenas and compiled code. A case
    whose timed runs need not take any time is a probe of memory, and its first call is timed.

    Raises:
        HdexportError: the case cannot be opened or run; a peer's packages may raise their own errors.
    """
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(GpuMemoryWatch()) if spec.device == "cuda" else None
        case = open_case(spec)
        stack.callback(case.close)
        opening_peak_bytes = peak_resident_bytes()
        (is_stable, latencies_ms), growth_bytes = with_growth(lambda: _calls(case.call, spec, watch))
        peak_bytes = peak_resident_bytes()
        memory = PeakMemory(
            rss_bytes=None if peak_bytes is None else max(peak_bytes, opening_peak_bytes or 0),
            growth_bytes=growth_bytes,
            vram_bytes=_vram_bytes(watch),
            vram_is_of_device=watch is not None and watch.peak_bytes is not None and not watch.is_of_process,
            allocator_bytes=case.allocator_bytes(),
            engine_bytes=case.engine_bytes(),
        )
        # Last, and with outputs of a call of its own: the comparison and these outputs are not measured.
        error = None if spec.expected is None else wrong_by(spec.expected, case.call(), case)
    # On a GPU the graph, the engine or the weights say it.
    precision = case.precision if spec.device == "cpu" else Precision.AUTO
    return CaseFigures(
        latencies_ms=tuple(latencies_ms), is_stable=is_stable, memory=memory, error=error, precision=precision
    )


def _calls(call: Callable[[], object], spec: CaseSpec, watch: GpuMemoryWatch | None) -> tuple[bool, list[float]]:
    is_stable = False
    if spec.least_seconds > 0:
        is_stable = warm_up(call)
        if watch is not None:
            watch.rest()
    return is_stable, time_runs(call, least_runs=spec.least_runs, least_seconds=spec.least_seconds)


def _vram_bytes(watch: GpuMemoryWatch | None) -> int | None:
    if watch is None:
        return None
    watch.look()
    return watch.peak_bytes
