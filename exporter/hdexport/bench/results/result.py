"""Dataclasses of `bench.json`.

docs/bench.md describes every field, its unit and the meaning of None; a test compares the page with the dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SCHEMA_VERSION = 2
"""Version of ``bench.json``. A field that changes its meaning or is removed raises it; a new field does not."""


class RunStatus(StrEnum):
    """How the processes of a case ended."""

    OK = "ok"
    OUT_OF_MEMORY = "OOM"
    TIMEOUT = "timeout"
    FAILED = "failed"


class ModelChange(StrEnum):
    """A change of the model that a build was asked for and that a baseline runs without."""

    ATTENTION = "attention"
    POSITIONS = "positions"
    ROPE = "RoPE scaling"
    ADAPTER = "adapter"


class CaseState(StrEnum):
    """The outcome of a case: whether it ran, and whether its outputs are right."""

    OK = "ok"
    DIFFERS = "differs"
    WRONG = "wrong"
    OUT_OF_MEMORY = "OOM"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One way to run one model, at every length: a backend with a bundle, or a baseline."""

    name: str
    runner: str
    bundle: str
    is_baseline: bool
    remark: str | None = None
    unavailable: str | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Latency of one case divided by the latency of another case of the same run.

    Attributes:
        value: ratio of the medians.
        min: smallest ratio of two rounds with the same number, which ran one after the other.
        max: largest ratio of two rounds with the same number.
    """

    value: float
    min: float
    max: float


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
        """Divide this latency by `other`, a latency of the same run."""
        rounds = [own / base for own, base in zip(self.rounds_p50_ms, other.rounds_p50_ms, strict=False)]
        return Ratio(value=self.p50_ms / other.p50_ms, min=min(rounds), max=max(rounds))


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory of one process in bytes, the largest over the rounds; None where a figure is not known."""

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
    """Difference between a case's outputs and PyTorch's in float32, the largest over all outputs.

    Attributes:
        missing_changes: requested changes of the model that a baseline runs without; its outputs differ by them.
    """

    max_abs_error: float | None
    min_cosine: float
    passed: bool
    tolerance: str
    missing_changes: tuple[ModelChange, ...] = ()

    @property
    def size(self) -> float:
        """Largest absolute difference; infinity where an output is not finite."""
        return float("inf") if self.max_abs_error is None else self.max_abs_error


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One series at one batch size and length."""

    series: str
    batch: int
    tokens: int
    status: RunStatus
    reason: str | None = None
    latency: Latency | None = None
    tokens_per_s: float | None = None
    precision: str | None = None
    memory: PeakMemory | None = None
    error: OutputError | None = None

    @property
    def state(self) -> CaseState:
        """RunStatus of the case; for a case with figures, whether its outputs are within the tolerance."""
        if self.status is not RunStatus.OK or self.error is None or self.error.passed:
            return CaseState(self.status.value)
        return CaseState.DIFFERS if self.error.missing_changes else CaseState.WRONG


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
    notes: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Distinct lengths of the cases in tokens, ascending."""
        return tuple(sorted({case.tokens for case in self.cases}))

    @property
    def batches(self) -> tuple[int, ...]:
        """Distinct batch sizes of the cases, ascending."""
        return tuple(sorted({case.batch for case in self.cases}))

    @property
    def first_series(self) -> str | None:
        """Series that ratios refer to: the first series with a latency; None if no series has a latency."""
        measured = {case.series for case in self.cases if case.latency is not None}
        return next((series.name for series in self.series if series.name in measured), None)

    def case(self, series: str, batch: int, tokens: int) -> CaseResult | None:
        """One case; None if the case was not run."""
        wanted = (series, batch, tokens)
        return next((case for case in self.cases if (case.series, case.batch, case.tokens) == wanted), None)

    def ratio_to_first(self, case: CaseResult) -> Ratio | None:
        """Latency of a case divided by the latency of `first_series` at the same batch size and length, or None."""
        first = None if self.first_series is None else self.case(self.first_series, case.batch, case.tokens)
        if first is None or first.latency is None or case.latency is None:
            return None
        return case.latency.over(first.latency)
