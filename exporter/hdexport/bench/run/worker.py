"""The process that measures one case, ``python -m hdexport.bench.run.worker SPEC.json``, and who runs it."""

from __future__ import annotations

__all__ = ["main", "measured", "run_case"]

import contextlib
import dataclasses
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hdexport.bench.measure.calls import WarmUp, time_runs, warm_up, with_growth
from hdexport.bench.measure.case import CaseFigures, CaseSpec
from hdexport.bench.measure.processes import Outcome, own_output, run_process
from hdexport.bench.results.result import PeakMemory, Status
from hdexport.bench.run.opening import open_case, wrong_by
from hdexport.support.gpu_memory import GpuMemoryWatch
from hdexport.support.memory import peak_resident_bytes, says_out_of_memory
from hdruntime.bundle.checked_json import from_values
from hdruntime.errors import HdexportError, OutOfMemoryError

logger = logging.getLogger(__name__)

_REASON_LINES = 2
_REASON_CHARACTERS = 500
"""Of a line."""


def run_case(
    spec: CaseSpec, *, time_limit_s: float, memory_limit_bytes: int | None = None
) -> tuple[Outcome, CaseFigures | None]:
    """Measure a case in a process of its own.

    Args:
        spec: the case.
        time_limit_s: of the process; see `hdexport.bench.measure.processes.run_process`.
        memory_limit_bytes: likewise.

    Returns:
        how the process ended, and what it measured if that is ``ok``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        path.write_text(json.dumps(dataclasses.asdict(spec)), encoding="utf-8")
        arguments = ["-m", "hdexport.bench.run.worker", str(path)]
        outcome = run_process(arguments, time_limit_s=time_limit_s, memory_limit_bytes=memory_limit_bytes)
    if outcome.status is not Status.OK:
        return outcome, None
    assert outcome.output is not None
    return outcome, from_values(outcome.output, CaseFigures, name="case")


def measured(spec: CaseSpec) -> CaseFigures:
    """Measure a case in this process, of which nothing else should have been asked before.

    `PeakMemory.rss_bytes` is the peak of the process from its start to the end of the timed runs;
    `PeakMemory.growth_bytes` how far that peak rose during all calls, warm-up included, above what was resident once
    the case was open. So the growth has what a first call takes for good, such as arenas and compiled code. A case
    whose timed runs need not take any time is a probe of memory, and its first call is timed.

    Args:
        spec: the case.

    Raises:
        HdexportError: it cannot be opened or run; so do the errors of a peer's packages.
    """
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(GpuMemoryWatch()) if spec.device == "cuda" else None
        case = open_case(spec)
        stack.callback(case.close)
        opening_peak_bytes = peak_resident_bytes()
        (warmth, latencies_ms), growth_bytes = with_growth(lambda: _calls(case.call, spec, watch))
        peak_bytes = peak_resident_bytes()
        memory = PeakMemory(
            rss_bytes=None if peak_bytes is None else max(peak_bytes, opening_peak_bytes or 0),
            growth_bytes=growth_bytes,
            vram_bytes=_vram_bytes(watch),
            vram_is_of_device=watch is not None and watch.peak_bytes is not None and not watch.is_of_process,
            allocator_bytes=case.allocator_bytes(),
            engine_bytes=case.engine_bytes(),
        )
        # Last, and with outputs of a call of its own: neither they nor the comparison are part of what was measured.
        error = None if spec.expected is None else wrong_by(spec, case.call(), case.half_precision)
    return CaseFigures(latencies_ms=tuple(latencies_ms), is_stable=warmth.is_stable, memory=memory, error=error)


def main(arguments: Sequence[str]) -> int:
    """Measure the case that a file describes, and print what was found, or what went wrong, as a line of JSON."""
    with own_output() as output:
        spec = CaseSpec(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
        print(json.dumps(_answer(spec)), file=output)
    return 0


def _answer(spec: CaseSpec) -> dict[str, Any]:
    try:
        return dataclasses.asdict(measured(spec))
    except Exception as error:  # whatever a framework raises is a result, and no other case's concern
        logger.warning("%s on %s failed", spec.runner, spec.bundle, exc_info=True)
        status = Status.OUT_OF_MEMORY if _is_out_of_memory(error) else Status.FAILED
        return {"status": status, "reason": _reason(error)}


def _calls(call: Callable[[], object], spec: CaseSpec, watch: GpuMemoryWatch | None) -> tuple[WarmUp, list[float]]:
    warmth = WarmUp(runs=0, is_stable=False)
    if spec.least_seconds > 0:
        warmth = warm_up(call)
        if watch is not None:
            watch.rest()
    return warmth, time_runs(call, least_runs=spec.least_runs, least_seconds=spec.least_seconds)


def _vram_bytes(watch: GpuMemoryWatch | None) -> int | None:
    if watch is None:
        return None
    watch.look()
    return watch.peak_bytes


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Also where it is the cause of another error."""
    if error is None:
        return False
    if isinstance(error, (MemoryError, OutOfMemoryError)) or says_out_of_memory(f"{type(error).__name__}: {error}"):
        return True
    return _is_out_of_memory(error.__cause__)


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, HdexportError) else f"{type(error).__name__}: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(line[:_REASON_CHARACTERS] for line in lines[:_REASON_LINES])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # What was found is out. What frameworks do when Python ends takes time, and has been seen to crash.
    os._exit(code)
