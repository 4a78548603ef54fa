"""The result of a benchmark, as dataclasses that `bench.json` holds.

docs/bench.md describes every field, with its unit and what None means; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SCHEMA_VERSION = 1
"""Version of ``bench.json``; a field that changes its meaning or goes away raises it, an added field does not."""


class Status(str, Enum):
    """How a case ended."""

    OK = "ok"
    OUT_OF_MEMORY = "OOM"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One way to run one model, at all lengths."""

    name: str
    runner: str
    bundle: str
    is_peer: bool
    remark: str | None = None
    unavailable: str | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as long one case took as another of the same run.

    Attributes:
        value: ratio of the medians.
        least: smallest ratio of two rounds of the same number, which ran one after the other.
        most: the largest.
    """

    value: float
    least: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latency of one call with a whole batch, over the runs of all rounds, in milliseconds."""

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
        """How many times as long this took as `other`, a latency of the same run."""
        rounds = [mine / its for mine, its in zip(self.rounds_p50_ms, other.rounds_p50_ms, strict=False)]
        return Ratio(value=self.p50_ms / other.p50_ms, least=min(rounds), most=max(rounds))


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory of one process, the largest over the rounds, in bytes; None where a figure is not known."""

    rss_bytes: int | None
    growth_bytes: int | None
    vram_bytes: int | None = None
    allocator_bytes: int | None = None
    engine_bytes: int | None = None
    vram_is_of_device: bool = False

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the GPU's memory where the case ran on a GPU, else of resident memory."""
        return self.rss_bytes if self.vram_bytes is None else self.vram_bytes


@dataclass(frozen=True, kw_only=True)
class OutputError:
    """How far the outputs are from PyTorch's in float32, the worst over all outputs."""

    max_abs_error: float | None
    min_cosine: float
    passed: bool
    tolerance: str

    @property
    def size(self) -> float:
        """The largest difference; infinity where a value is not finite."""
        return float("inf") if self.max_abs_error is None else self.max_abs_error


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The least work of the model, and the fraction of the machine's best rates that a case reached."""

    flops: int
    dense_flops: int
    moved_bytes: int
    bound_ms: float
    fraction: float


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One series at one batch size and length."""

    series: str
    batch: int
    tokens: int
    status: Status
    reason: str | None = None
    latency: Latency | None = None
    tokens_per_s: float | None = None
    precision: str | None = None
    memory: PeakMemory | None = None
    error: OutputError | None = None
    roofline: Roofline | None = None


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates that the machine reached: the best of the start of the run and of its end."""

    device: str
    dtype: str
    matmul_flops_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch of a length that fits a memory budget."""

    series: str
    tokens: int
    budget_bytes: int
    batch: int
    peak_bytes: int | None
    is_limit: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """One run of `hdexport bench`."""

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
        """Distinct tokens of the cases, rising."""
        return tuple(sorted({case.tokens for case in self.cases}))

    @property
    def batches(self) -> tuple[int, ...]:
        """Distinct batch sizes of the cases, rising."""
        return tuple(sorted({case.batch for case in self.cases}))

    @property
    def first_series(self) -> str | None:
        """The series that others are compared with: the first with a latency; None where none has one."""
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
