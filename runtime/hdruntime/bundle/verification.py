"""The record of a verification in the manifest, and the types of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from hdruntime.bundle.checked_json import Count, LargeCount, Length

Padding = Literal["none", "right", "left"]

Limit = Annotated[float, Meta(ge=0)]


class Status(StrEnum):
    """The outcome of one check, of the checks of one graph, or of a whole verification."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """Not compared."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input of a verification.

    Attributes:
        tokens: length of the padded batch, in tokens.
        lengths: length of each row without padding, in tokens.
        padding: side of the padding.
    """

    tokens: Length
    lengths: tuple[Length, ...]
    padding: Padding = "none"

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def real(self, length: int) -> slice:
        """Slice of the tokens of a row of that length, without its padding."""
        return slice(self.tokens - length, None) if self.padding == "left" else slice(0, length)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits of the difference from PyTorch's outputs; None where a limit does not apply.

    Attributes:
        atol: largest absolute error of a value; a larger error passes within `ulps` or `rtol`.
        ulps: largest error in units in the last place of PyTorch's float32 value.
        rtol: largest error relative to the largest value of the row.
        cosine: smallest cosine of a vector.
        length: largest relative difference of a vector's length; of the mean length where `token_length` is given.
        token_length: largest relative difference of the length of a single token's vector.
        score_spread: largest error of a score relative to the spread of its row, which is the largest score less the
            smallest; the best score is PyTorch's best, or as close to it.
    """

    atol: Limit | None = None
    ulps: Count | None = None
    rtol: Limit | None = None
    cosine: Annotated[float, Meta(ge=-1, le=1)] | None = None
    length: Limit | None = None
    token_length: Limit | None = None
    score_spread: Limit | None = None

    def __or__(self, other: Tolerance) -> Tolerance:
        """The limits of two outputs together, the wider one where both have a limit."""
        limits: dict[str, float] = {}
        for item in fields(self):
            present = [limit for limit in (getattr(self, item.name), getattr(other, item.name)) if limit is not None]
            if present:
                limits[item.name] = min(present) if item.name == "cosine" else max(present)
        return Tolerance(**limits)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The limits in the field's notation: ``abs 0.0001 or 2 ulp``."""
        exact = "exact" if self.atol == 0 else None
        value = [
            exact or (None if self.atol is None else f"abs {self.atol:g}"),
            None if self.ulps is None else f"{self.ulps} ulp",
            None if self.rtol is None else f"rel {self.rtol:g}",
        ]
        length = None if self.length is None else f"length {self.length:.0%}"
        if length is not None and self.token_length is not None:
            length = f"mean {length}, token length {self.token_length:.1%}"
        parts = [
            " or ".join(filter(None, value)),
            None if self.cosine is None else f"cosine {self.cosine:g}",
            length,
            None if self.score_spread is None else f"scores {self.score_spread:.1%} of spread",
        ]
        return ", ".join(filter(None, parts)) or "none"


class SkipCause(StrEnum):
    """Why a case, a graph or a comparison is skipped."""

    MAX_LENGTH = "max_length"
    """Longer than `limit` tokens, the longest that was asked for; the bundle accepts `needed` tokens."""
    OPERATIONS = "operations"
    """The quick grid compares whole sequences up to `limit` tokens; longer ones take a build too long."""
    MEMORY = "memory"
    """Outputs and attention scores take `needed` bytes, more than `limit`."""
    WEIGHTS = "weights"
    """A session's weights take `needed` bytes, more than `limit`."""
    ENGINE_PROFILE = "engine_profile"
    """The engine's profiles end at `limit` tokens."""
    NO_GPU = "no_gpu"
    """The graph or engine of `backend` needs an NVIDIA GPU."""
    BACKEND = "backend"
    """`backend` cannot run it here, as `detail` says."""
    PRECISION = "precision"
    """The command compares in other precisions."""
    NO_KERNEL = "no_kernel"
    """The backend does not compute in the precision on this machine, as `detail` says."""
    NOT_INSTALLED = "not_installed"
    """A package is missing, as `detail` says."""
    HIDDEN_DECISIONS = "hidden_decisions"
    """PyTorch must follow the graph's decisions, such as hashes, which only float32 graphs expose."""
    LEFT_PADDING = "left_padding"
    """PyTorch gives no comparable outputs with padding on the left, as `detail` says."""
    SLOW_IMPORT = "slow_import"
    """Only `hdexport verify` and a build with full verification import sentence-transformers."""
    LIBRARY = "library"
    """The library cannot load or run the checkpoint, as `detail` says."""
    NO_TEXT_FITS = "no_text_fits"
    """No text fits in `limit` tokens beside the special tokens."""
    UNTRUSTED_CODE = "untrusted_code"
    """The checkpoint's own code runs only where the user trusts it."""
    REBUILT = "rebuilt"
    """The file was written again since it was compared."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """What was not compared, and why.

    Attributes:
        graph: name of the graph, engine or library; None for all of them.
        case: input; None for all inputs.
        cause: reason, which says what `needed`, `limit`, `backend` and `detail` are.
    """

    cause: SkipCause
    graph: str | None = None
    case: Case | None = None
    needed: LargeCount | None = None
    limit: LargeCount | None = None
    backend: str | None = None
    detail: str | None = None

    @property
    def status(self) -> Status:
        return Status.SKIP


@dataclass(frozen=True, kw_only=True)
class GraphVerification:
    """The checks of one graph, or of graphs that one session runs, in one precision.

    Attributes:
        status: PASS where all cases passed.
        files: files of the bundle that were compared; none for a comparison with a library or with the checkpoint's
            code.
        precision: precision of the computation.
        checks: number of compared cases.
        passed: number of cases that hold their tolerance.
        max_abs_error: largest absolute error; None where an output is not finite.
        min_cosine: smallest cosine of a vector.
        tokens: lengths of the compared cases, in tokens.
        failed: cases that do not hold their tolerance.
        sampled: cases whose logits were compared at some tokens only, and the input of their projection at all.
        parts: number of parts that a graph was run in, one after another, since memory does not hold all weights in
            that precision; 1 for whole graphs.
    """

    status: Status
    files: tuple[str, ...] = ()
    precision: str = "float32"
    checks: Count = 0
    passed: Count = 0
    max_abs_error: float | None = None
    min_cosine: float | None = None
    tolerance: Tolerance = Tolerance()
    tokens: tuple[Length, ...] = ()
    failed: tuple[Case, ...] = ()
    sampled: tuple[Case, ...] = ()
    parts: Count = 1


@dataclass(frozen=True, kw_only=True)
class VerificationRecord:
    """The outcome of a verification.

    Attributes:
        passed: whether every compared case holds its tolerance, and there is one.
        grid: cases that were asked for.
        graphs: name -> checks.
        skipped: what was not compared.
        information: measured properties of an approximate attention, which no tolerance holds.
    """

    passed: bool = False
    grid: Literal["quick", "full"] | None = None
    graphs: dict[str, GraphVerification] = field(default_factory=dict)
    skipped: tuple[Skip, ...] = ()
    information: tuple[str, ...] = ()
