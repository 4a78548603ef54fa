"""The process of one case: open the case, measure it, and compare its outputs with PyTorch's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import hdruntime
from hdexport.bench.baselines.baseline import CaseFigures, CaseSpec, OpenCase
from hdexport.bench.measure.calls import time_runs, warm_up, with_growth
from hdexport.bench.results.result import OutputError, PeakMemory
from hdexport.support.check import Comparison
from hdexport.support.memory import GpuMemoryWatch, peak_resident_bytes
from hdexport.verify.comparison import combined, compare_output, different
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import open_bundle
from hdruntime.bundle.verification import Tolerance
from hdruntime.errors import BackendError, OutOfMemoryError


def measured(spec: CaseSpec) -> CaseFigures:
    """Measure a case in this process, which should have done nothing else before.

    `PeakMemory.rss_bytes` is the peak of the process from its start to the end of the timed runs.
    `PeakMemory.growth_bytes` is the rise of the peak during all calls, warm-up included, above the resident memory of
    the open case. The growth includes memory that a first call keeps, such as arenas and compiled code.
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
        # Compared last, with the outputs of another call, so that neither is measured.
        error = None if spec.expected is None else output_error(spec.expected, case.call(), case)
    # On a GPU, the graph, the engine or the weights determine the precision.
    precision = case.precision if spec.device == "cpu" else Precision.AUTO
    return CaseFigures(
        latencies_ms=tuple(latencies_ms), is_stable=is_stable, memory=memory, error=error, precision=precision
    )


def open_case(spec: CaseSpec) -> OpenCase:
    """Load the backend or the baseline of a case, importing only the packages that it needs."""
    with np.load(spec.inputs) as file:
        inputs = {name: file[name] for name in file.files}
    if spec.baseline is None:
        return _open_backend(spec, inputs)
    manifest = open_bundle(spec.bundle, check_files=False).manifest
    # Baselines run sequences without a memory cache.
    own = {value.name: inputs[value.name] for value in manifest.inputs if value not in manifest.recurrent_states}
    case = spec.baseline.open(spec, manifest, own)
    return dataclasses.replace(case, missing_changes=spec.baseline.missing_changes(manifest))


def output_error(expected: Path, outputs: Mapping[str, FloatArray], case: OpenCase) -> OutputError:
    """Difference between outputs, by the manifest's names, and PyTorch's in float32: the largest over all outputs.

    `expected` is a directory of ``.npy`` files. An output of another shape is wrong; outputs of another shape, and
    outputs that a baseline lacks, are named beside the tolerance.
    """
    references = {file.stem: np.load(file, mmap_mode="r") for file in sorted(expected.iterdir())}
    compared = [
        _comparison(name, outputs[name], values, case) for name, values in references.items() if name in outputs
    ]
    worst = combined(compared or [different(Tolerance())])
    remarks = [f"not compared: {name}" for name in references if name not in outputs]
    remarks += [
        f"{name}: shape {list(values.shape)}, not {list(outputs[name].shape)}"
        for name, values in references.items()
        if name in outputs and outputs[name].shape != values.shape
    ]
    return OutputError(
        max_abs_error=worst.max_abs_error if np.isfinite(worst.max_abs_error) else None,
        min_cosine=worst.min_cosine,
        passed=worst.passed,
        tolerance="; ".join([str(worst.tolerance), *remarks]),
        missing_changes=case.missing_changes,
    )


def _calls(call: Callable[[], object], spec: CaseSpec, watch: GpuMemoryWatch | None) -> tuple[bool, list[float]]:
    is_stable = False
    if spec.min_seconds > 0:
        is_stable = warm_up(call)
        if watch is not None:
            watch.rest()
    return is_stable, time_runs(call, min_runs=spec.min_runs, min_seconds=spec.min_seconds)


def _vram_bytes(watch: GpuMemoryWatch | None) -> int | None:
    if watch is None:
        return None
    watch.look()
    return watch.peak_bytes


def _open_backend(spec: CaseSpec, inputs: Mapping[str, IntArray]) -> OpenCase:
    session = hdruntime.load(spec.bundle, spec.backend, threads=spec.threads, precision=spec.precision)
    rows, tokens = inputs["input_ids"].shape
    if rows > session.max_rows(tokens):
        most = session.max_rows(tokens)
        raise BackendError(
            f"The engine's profiles accept at most {most} sequences of {tokens} tokens; the batch has {rows}."
        )

    def call() -> dict[str, FloatArray]:
        outputs = session(**inputs)
        if rows > session.max_rows(tokens):
            raise OutOfMemoryError("The batch did not fit in memory at once; the session split it.")
        return outputs

    return OpenCase(
        call=call,
        half_precision=session.manifest.dtype != "float32",
        precision=session.precision,
        engine_bytes=lambda: session.engine_bytes,
        close=session.close,
    )


def _comparison(name: str, actual: FloatArray, expected: FloatArray, case: OpenCase) -> Comparison:
    """[batch, tokens, features] by token; [batch, features], and scores without a feature axis, by sequence."""
    if actual.shape != expected.shape:
        return different(Tolerance())
    # Scores without a feature axis, [batch, tokens], are compared as one vector per sequence.
    return compare_output(
        name,
        np.atleast_2d(actual),
        np.atleast_2d(expected),
        half_precision=case.half_precision,
        precision=case.precision,
        of_tokens=actual.ndim > 2,
    )
