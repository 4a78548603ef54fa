"""What a benchmark found, as dataclasses; `bench.json` holds them, and docs/bench.md describes each field."""

from __future__ import annotations

__all__ = [
    "SCHEMA_VERSION",
    "BenchResult",
    "CaseResult",
    "Ceilings",
    "LargestBatch",
    "Latency",
    "OutputError",
    "PeakMemory",
    "Ratio",
    "Roofline",
    "Series",
    "Status",
]

from dataclasses import dataclass
from enum import Enum

SCHEMA_VERSION = 1
"""Of ``bench.json``; a field that changes its meaning or goes away raises it, one that is added does not."""


class Status(str, Enum):
    """How a case ended."""

    OK = "ok"
    OUT_OF_MEMORY = "OOM"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One way to run one model, at all lengths.

    Attributes:
        name: what tables and plots call it; unique.
        runner: a backend of the runtime (``onnxruntime``, ...) or a peer (``torch``, ...).
        bundle: the bundle's directory; of a peer, the bundle whose model it runs.
        is_peer: whether it is another library's way to run the model.
        remark: what a reader has to know ("knows no windows: its attention is dense"), else None.
        unavailable: why it could not run here, with the command that installs it; None where it ran.
        model: the model's name; None in results that do not record it.
    """

    name: str
    runner: str
    bundle: str
    is_peer: bool
    remark: str | None = None
    unavailable: str | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as long one case took as another, in one run.

    Attributes:
        value: of the medians.
        least: the smallest of the rounds' ratios; rounds of the same number ran one after the other.
        most: the largest.
    """

    value: float
    least: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Of one call with a whole batch, over the runs of all rounds, in milliseconds.

    Attributes:
        sd_ms: sample standard deviation; 0 for a single run.
        runs: how many were timed.
        rounds_p50_ms: the median of each round, which is a process of its own: how much processes differ.
        is_stable: whether every round's warm-up ended because the latency no longer changed.
    """

    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    sd_ms: float
    min_ms: float
    max_ms: float
    runs: int
    rounds_p50_ms: tuple[float, ...]
    is_stable: bool

    def over(self, other: Latency) -> Ratio:
        """How many times as long this took as another of the same run."""
        rounds = [mine / its for mine, its in zip(self.rounds_p50_ms, other.rounds_p50_ms, strict=False)]
        return Ratio(value=self.p50_ms / other.p50_ms, least=min(rounds), most=max(rounds))


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Of one process, the largest over the rounds, in bytes; None where there is no such figure.

    Attributes:
        rss_bytes: peak resident memory of the process, libraries and weights included.
        growth_bytes: how far the peak of resident memory rose during all calls, warm-up included, above what was
            resident once the model was open.
        vram_bytes: peak GPU memory of the process, as NVML sees it: contexts and libraries included.
        vram_is_of_device: `vram_bytes` is the rise of the whole device's memory, since NVML does not list the process,
            as in containers.
        allocator_bytes: peak of PyTorch's allocator on the GPU.
        engine_bytes: what TensorRT says its engine and execution contexts take on the GPU.
    """

    rss_bytes: int | None
    growth_bytes: int | None
    vram_bytes: int | None = None
    allocator_bytes: int | None = None
    engine_bytes: int | None = None
    vram_is_of_device: bool = False

    @property
    def peak_bytes(self) -> int | None:
        """What the case needs of the memory that is scarce: the GPU's where it ran on one, else resident memory."""
        return self.rss_bytes if self.vram_bytes is None else self.vram_bytes


@dataclass(frozen=True, kw_only=True)
class OutputError:
    """How far the outputs are from PyTorch's in float32, the worst over all outputs.

    Attributes:
        max_abs_error: largest absolute difference; None where an output is not finite.
        min_cosine: smallest cosine of a token's, or a text's, vector with PyTorch's.
        passed: whether `tolerance` holds; a result that does not pass is a wrong answer.
        tolerance: in words.
    """

    max_abs_error: float | None
    min_cosine: float
    passed: bool
    tolerance: str


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What the model must at least do, and what this machine could have done in the time.

    Attributes:
        flops: floating-point operations of the matrix products of the whole batch; of windowed attention those inside
            windows only.
        dense_flops: the same, were every attention dense.
        moved_bytes: the least that must cross the memory bus: weights, inputs and outputs once.
        bound_ms: the larger of `flops` at the measured product rate and `moved_bytes` at the measured bandwidth.
        fraction: `bound_ms` over the median latency: 1 would be the machine's limit.
    """

    flops: int
    dense_flops: int
    moved_bytes: int
    bound_ms: float
    fraction: float


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One series at one batch size and length.

    Attributes:
        series: the name of the series.
        batch: texts.
        tokens: of each text; there is no padding.
        status: ``ok``, or why there are no figures.
        reason: what happened where the status is not ``ok``.
        latency: None unless ``ok``; so with the other figures.
        tokens_per_s: batch x tokens over the median latency.
    """

    series: str
    batch: int
    tokens: int
    status: Status
    reason: str | None = None
    latency: Latency | None = None
    tokens_per_s: float | None = None
    memory: PeakMemory | None = None
    error: OutputError | None = None
    roofline: Roofline | None = None


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the machine reached: the best of the start of the run and of its end.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: of the matrix product.
        matmul_flops_per_s: of the fastest of some large matrix products, by PyTorch or, on a CPU, ONNX Runtime.
        copy_bytes_per_s: of the fastest of some large copies, bytes read and bytes written both counted.
    """

    device: str
    dtype: str
    matmul_flops_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch of a length that fits a memory budget.

    Attributes:
        series: the name of the series.
        tokens: of each text.
        budget_bytes: of resident memory on a CPU, of GPU memory on a GPU.
        batch: the largest that was seen to fit; 0 where a single text does not.
        peak_bytes: what that batch took; None where `batch` is 0.
        is_limit: whether the next larger one, from 40 texts on one at most 5 % larger, was seen not to fit; otherwise
            the search stopped at `reason`.
        reason: what stopped it: the batch that did not fit, a time limit, a failure.
    """

    series: str
    tokens: int
    budget_bytes: int
    batch: int
    peak_bytes: int | None
    is_limit: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One run of `hdexport bench`.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the hdexport that wrote it.
        date: of the start, ISO 8601, UTC.
        command: the command line.
        environment: name -> what was measured on: CPU, GPU, driver, clocks, versions, threads, commit.
        rounds: processes that every case was given.
        ceilings: one a dtype that was measured.
        largest_batches: () unless a memory budget was given.
        notes: what a reader has to know of the run: what was not compared and why, that it was interrupted.
    """

    schema_version: int
    date: str
    command: str
    environment: dict[str, str]
    rounds: int
    series: tuple[Series, ...]
    cases: tuple[CaseResult, ...]
    ceilings: tuple[Ceilings, ...]
    largest_batches: tuple[LargestBatch, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the cases, rising."""
        return tuple(sorted({case.tokens for case in self.cases}))

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of the cases, rising."""
        return tuple(sorted({case.batch for case in self.cases}))

    @property
    def first_series(self) -> str | None:
        """The series that others are compared with: the first that has a latency; None where none has."""
        measured = {case.series for case in self.cases if case.latency is not None}
        return next((series.name for series in self.series if series.name in measured), None)

    def case(self, series: str, batch: int, tokens: int) -> CaseResult | None:
        """One case; None where it was not run."""
        wanted = (series, batch, tokens)
        return next((case for case in self.cases if (case.series, case.batch, case.tokens) == wanted), None)

    def ratio_to_first(self, case: CaseResult) -> Ratio | None:
        """A case's latency over that of `first_series` at its batch size and length; None where one is missing."""
        first = None if self.first_series is None else self.case(self.first_series, case.batch, case.tokens)
        if first is None or first.latency is None or case.latency is None:
            return None
        return case.latency.over(first.latency)
