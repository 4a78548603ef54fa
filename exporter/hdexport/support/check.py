"""One comparison of a bundle's outputs with PyTorch's."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import asdict, dataclass

from hdruntime.backends.precision import Precision
from hdruntime.bundle.verification import Case, Status, Tolerance


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        max_abs_error: largest absolute difference; infinite where a value is not finite.
        min_cosine: smallest cosine over the vectors along the last axis; 1.0 where both are zero.
        passed: whether the tolerance holds.
        tolerance: limits of the difference.
    """

    max_abs_error: float
    min_cosine: float
    passed: bool
    tolerance: Tolerance


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one case for one graph, or for graphs that one session runs.

    Attributes:
        graph: name of the graph, engine or library; see `GraphSet.name`.
        precision: precision of the computation.
        case: input.
        outputs: name of each output -> its comparison.
        files: files of the bundle that were compared.
        samples: number of tokens whose logits were compared; None where all were.
        wrong_decisions: decisions of the graph that rounding does not explain, a sentence each.
        error: message of the error that the graph's run raised.
        text: name of the text; None where the case is given as ids.
        parts: number of parts that each graph was run in, one after another.
    """

    graph: str
    precision: Precision
    case: Case
    outputs: dict[str, Comparison]
    files: tuple[str, ...] = ()
    samples: int | None = None
    wrong_decisions: tuple[str, ...] = ()
    error: str | None = None
    text: str | None = None
    parts: int = 1

    @property
    def passed(self) -> bool:
        """Whether every output holds its tolerance, and every decision is one that rounding allows."""
        return not (self.failed_outputs or self.wrong_decisions or self.error is not None)

    @property
    def status(self) -> Status:
        """PASS or FAIL."""
        return Status.PASS if self.passed else Status.FAIL

    @property
    def failed_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that do not hold their tolerance."""
        return tuple(name for name, found in self.outputs.items() if not found.passed)

    @property
    def max_abs_error(self) -> float:
        """Largest absolute difference over the outputs; infinite where an output is not finite."""
        return max(found.max_abs_error for found in self.outputs.values())

    @property
    def min_cosine(self) -> float:
        """Smallest cosine over the outputs."""
        return min(found.min_cosine for found in self.outputs.values())

    @property
    def tolerance(self) -> Tolerance:
        """The limits of all outputs together."""
        return functools.reduce(operator.or_, (found.tolerance for found in self.outputs.values()))

    def record(self) -> dict[str, object]:
        """The outcome for JSON."""
        return {
            "status": self.status.value,
            "graph": self.graph,
            "precision": self.precision.value,
            "case": asdict(self.case),
            "max_abs_error": json_number(self.max_abs_error),
            "min_cosine": self.min_cosine,
            "tolerance": asdict(self.tolerance),
            "failed_outputs": list(self.failed_outputs),
            "samples": self.samples,
            "wrong_decisions": list(self.wrong_decisions),
            "error": self.error,
            "text": self.text,
            "parts": self.parts,
        }


def json_number(value: float) -> float | None:
    """None for infinity, which JSON lacks: an output that was not finite has no error."""
    return value if math.isfinite(value) else None
