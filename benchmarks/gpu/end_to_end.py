"""The steps that run whole models at every length: checked first, then latency and peak GPU memory."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.job import Job, StepFailedError
from benchmarks.gpu.kernels import LENGTHS
from benchmarks.gpu.models import Sizes, expected, prepare, sizes_of
from benchmarks.roofline.ceilings import times_ms
from hdexport.bench.measure.calls import latency_of, time_runs
from hdexport.support.memory import GpuMemoryWatch, says_out_of_memory
from hdexport.verify.comparison import Comparison, compare

_BATCHES = (1, 8)
_CHECKED_TOKENS = 700
"""More than a window, and no multiple of a block."""

_REHEARSED_TOKENS = 21
_TRIED_SHAPES = ((1, 512), (8, 2048))
_WARM_UP_RUNS = 3
_LEAST_RUNS = 5
_LEAST_SECONDS = 0.3
"""Of timed runs together; a rehearsal, which times nothing, makes one run of each kind."""


def measure(job: Job, model: str, variant: str, *, shapes: Iterable[tuple[int, int]] | None = None) -> None:
    """Check one way to run a model, then run it at every length and batch, or at `shapes`, (batch, tokens) each: once
    as it is, then as a CUDA graph. A rehearsal has a short text of its own.

    A row tells the latency with all that Python and PyTorch do to start the kernels; the row of the graph tells what
    the GPU alone takes. Running out of memory is a result. What cannot be captured ends the graphs, not the step.
    """
    import torch

    sizes = sizes_of(rehearsal=job.rehearsal)
    about = {"model": model, "variant": variant}
    with torch.inference_mode():
        found = _checked(job, model, variant, sizes)
        job.write(case="answers", **about, **asdict(found))
        if not found.passed:
            raise StepFailedError(f"a wrong answer: cosine {found.min_cosine:.4f}; {found.tolerance}")
        prepared = prepare(model, variant, sizes=sizes, device=job.device)
        is_capturable = True
        for batch, tokens in _shapes(job, variant) if shapes is None or job.rehearsal else shapes:
            shape = {"batch": batch, "tokens": tokens}
            call = functools.partial(prepared, _ids(batch, tokens, sizes.vocab_size, job.device))
            job.write(case="latency", **about, **shape, **_latency(call, job))
            if is_capturable:
                row = _graph_latency(call, job)
                job.write(case="graph", **about, **shape, **row)
                is_capturable = row["status"] != "failed"


def _checked(job: Job, model: str, variant: str, sizes: Sizes) -> Comparison:
    """A single layer's answers: after many random ones all tokens are alike, whatever each of them saw."""
    one_layer = dataclasses.replace(sizes, layers=1)
    ids = _ids(2, _REHEARSED_TOKENS if job.rehearsal else _CHECKED_TOKENS, sizes.vocab_size, job.device)
    # Before the variant replaces the attention of this process.
    right = expected(model, variant, ids, sizes=one_layer, device=job.device)
    found = prepare(model, variant, sizes=one_layer, device=job.device)(ids)
    return compare(found.float().cpu().numpy(), right.cpu().numpy(), half_precision=True)


def _shapes(job: Job, variant: str) -> Iterator[tuple[int, int]]:
    if job.rehearsal:
        yield 1, _REHEARSED_TOKENS
        return
    if job.trial and not variant.startswith(("FlexAttention", "torch.compile")):  # which compile for every shape
        yield from _TRIED_SHAPES
        return
    for tokens, batch in itertools.product(LENGTHS, _BATCHES):
        yield batch, tokens


def _latency(call: Callable[[], object], job: Job) -> dict[str, Any]:
    finished = _finished(call, job.device)
    return _or_out_of_memory(lambda: _timed(finished, GpuMemoryWatch(), job), job.device)


def _timed(call: Callable[[], object], watch: GpuMemoryWatch, job: Job) -> dict[str, Any]:
    warm_up_runs, least_runs, least_s = (
        (1, 1, 0.0) if job.times_nothing else (_WARM_UP_RUNS, _LEAST_RUNS, _LEAST_SECONDS)
    )
    for _ in range(warm_up_runs):
        call()
    with watch:
        peaks = _peaks(call, job.device)
        times = time_runs(call, min_runs=least_runs, min_seconds=least_s)
        watch.look()
    latency = latency_of([times], is_stable=True)
    figures = {"p50_ms": latency.p50_ms, "p95_ms": latency.p95_ms, "min_ms": latency.min_ms, "runs": latency.runs}
    return {"status": "ok", **figures, **peaks, "vram_bytes": watch.peak_bytes}


def _graph_latency(call: Callable[[], object], job: Job) -> dict[str, Any]:
    some = {"least_s": 0.0} if job.times_nothing else {}

    def replayed() -> dict[str, Any]:
        latency = latency_of([times_ms(call, device=job.device, **some)], is_stable=True)
        return {"status": "ok", "p50_ms": latency.p50_ms, "min_ms": latency.min_ms, "runs": latency.runs}

    try:
        return _or_out_of_memory(replayed, job.device)
    except RuntimeError as error:
        return {"status": "failed", "reason": str(error)[:500]}


def _or_out_of_memory(measured: Callable[[], dict[str, Any]], device: str) -> dict[str, Any]:
    import torch

    try:
        return measured()
    except RuntimeError as error:
        if not says_out_of_memory(str(error)):
            raise
        return {"status": "OOM", "reason": str(error)[:300]}
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def _peaks(call: Callable[[], object], device: str) -> dict[str, int | None]:
    """Peaks of PyTorch's allocator, in use and taken from the driver."""
    import torch

    if device == "cpu":
        call()
        return {"allocated_bytes": None, "reserved_bytes": None}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _finished(call: Callable[[], object], device: str) -> Callable[[], object]:
    """The call, which then returns when the GPU is done."""
    import torch

    def finished() -> object:
        outputs = call()
        if device == "cuda":
            torch.cuda.synchronize()
        return outputs

    return finished


def _ids(batch: int, tokens: int, vocab_size: int, device: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(5, vocab_size, (batch, tokens), generator=generator).to(device)
