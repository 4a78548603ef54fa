"""The outcome of a verification: each case for each graph, as lines and as the manifest records it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from hdexport.graph.vocabulary_head import HEAD_INPUT
from hdexport.verify.comparison import NOT_FINITE, Comparison, compare_output, joined
from hdexport.verify.expected import samples_of_row
from hdexport.verify.graph_sets import GraphSet
from hdexport.verify.grid import Case, Grid
from hdexport.verify.pytorch_reference import compared_tokens
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Check:
    """The outcome of one case for one graph, or for graphs of which a session runs one for each batch.

    Attributes:
        graph: see `GraphSet.name`.
        precision: the precision that it computed in.
        case: the input.
        outputs: name of each output -> its comparison.
        samples: tokens of the batch whose logits were compared; None where all were.
        wrong_decisions: decisions of the graph that rounding does not explain, a sentence each.
        text: name of the answered text; None where the case was given as ids.
    """

    graph: str
    precision: Precision
    case: Case
    outputs: dict[str, Comparison]
    samples: int | None = None
    wrong_decisions: tuple[str, ...] = ()
    text: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every output holds its tolerance, and every decision is one that rounding allows."""
        return all(found.passed for found in self.outputs.values()) and not self.wrong_decisions

    @property
    def max_abs_error(self) -> float:
        """Largest absolute difference over the outputs."""
        return max(found.max_abs_error for found in self.outputs.values())

    @property
    def min_cosine(self) -> float:
        """Smallest cosine over the outputs."""
        return min(found.min_cosine for found in self.outputs.values())

    @property
    def tolerance(self) -> str:
        """The tolerance, in words."""
        return next(iter(self.outputs.values())).tolerance

    def record(self) -> dict[str, object]:
        """The outcome for JSON."""
        return {
            "graph": self.graph,
            "precision": self.precision.value,
            "case": asdict(self.case),
            "passed": self.passed,
            "max_abs_error": _json_number(self.max_abs_error),
            "min_cosine": self.min_cosine,
            "tolerance": self.tolerance,
            "samples": self.samples,
            "wrong_decisions": list(self.wrong_decisions),
            "text": self.text,
        }

    def line(self) -> str:
        """The outcome in one line."""
        failed = [name for name, found in self.outputs.items() if not found.passed] + list(self.wrong_decisions)
        given = case_text(self.case) if self.text is None else f"{self.text}, tokens {self.case.tokens}"
        return (
            f"-[{'x' if self.passed else ' '}] {self.graph}: {given}: "
            f"max abs error {self.max_abs_error:.2e}, cosine {self.min_cosine:.6f} ({self.tolerance})"
            + ("" if self.samples is None else f"; logits at {self.samples} tokens, their input at all of them")
            + (f" FAILED: {', '.join(failed)}" if failed else "")
        )


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All outcomes of a verification.

    Attributes:
        grid: the grid of the cases.
        checks: checks of the graphs' answers to ids.
        texts: checks of the bundle's answers to texts.
        code: checks of the checkpoint's own code.
        not_checked: outputs that were not compared, one sentence each; a graph's begins with its file and ": ".
        information: lines on how good the attention is, which nothing is measured by.
    """

    grid: Grid
    checks: tuple[Check, ...]
    not_checked: tuple[str, ...]
    information: tuple[str, ...] = ()
    texts: tuple[Check, ...] = ()
    code: tuple[Check, ...] = ()

    @property
    def all_checks(self) -> tuple[Check, ...]:
        """Checks of ids, of texts, and of the checkpoint's own code."""
        return (*self.checks, *self.texts, *self.code)

    @property
    def passed(self) -> bool:
        """Whether the bundle is right wherever it was looked at."""
        return bool(self.checks) and all(check.passed for check in self.all_checks)

    def summary(self) -> list[str]:
        """The failed checks, a line per graph, and the outputs that were not checked."""
        graphs = list(dict.fromkeys(check.graph for check in self.all_checks))
        # The cases of such a graph that were left out are in its line.
        others = [what for what in self.not_checked if not what.startswith(tuple(f"{graph}: " for graph in graphs))]
        return [
            *(check.line() for check in self.all_checks if not check.passed),
            *map(self._graph_line, graphs),
            *(f"-[-] {what}" for what in others),
            *self.information,
        ]

    def _graph_line(self, graph: str) -> str:
        checks = [check for check in self.all_checks if check.graph == graph]
        passed = sum(check.passed for check in checks)
        left_out = [what.removeprefix(f"{graph}: ") for what in self.not_checked if what.startswith(f"{graph}: ")]
        if len(left_out) > 1:
            left_out = [f"{len(left_out)} cases not checked, which -v lists"]
        worst = max(check.max_abs_error for check in checks)
        cosine = min(check.min_cosine for check in checks)
        figures = (
            f"{passed} of {len(checks)} checks passed, max abs error {worst:.2e}, cosine {cosine:.6f} "
            f"({_tolerance(checks)})"
        )
        return f"-[{'x' if passed == len(checks) else ' '}] {graph}: {'; '.join([figures, *left_out])}"

    def record(self) -> dict[str, object]:
        """The manifest's record of it."""
        return {
            "passed": self.passed,
            "grid": self.grid.value,
            "graphs": {
                graph: _graph_record([check for check in self.all_checks if check.graph == graph])
                for graph in sorted({check.graph for check in self.all_checks})
            },
            "not_checked": list(self.not_checked),
            "information": list(self.information),
        }


def _graph_record(checks: Sequence[Check]) -> dict[str, object]:
    return {
        "precision": checks[0].precision.value,
        "checks": len(checks),
        "passed": sum(check.passed for check in checks),
        "tolerance": _tolerance(checks),
        "max_abs_error": _json_number(max(check.max_abs_error for check in checks)),
        "min_cosine": min(check.min_cosine for check in checks),
        "tokens": sorted({check.case.tokens for check in checks}),
        "failed": [_case_record(check.case) for check in checks if not check.passed],
        "sampled": [
            _case_record(check.case) | {"samples": check.samples} for check in checks if check.samples is not None
        ],
    }  # fmt: skip


def _case_record(case: Case) -> dict[str, object]:
    """A case for JSON."""
    return asdict(case) | {"lengths": list(case.lengths)}


def _tolerance(checks: Sequence[Check]) -> str:
    """The tolerance of all checks of a graph: the longest text also names the tolerance of larger values."""
    return max((check.tolerance for check in checks), key=len)


def case_text(case: Case) -> str:
    """A case in a report's words."""
    return f"batch {case.batch}, tokens {case.tokens}, padding {case.padding}"


def compare_case(
    graphs: GraphSet,
    case: Case,
    manifest: Manifest,
    expected: Sequence[Mapping[str, FloatArray]],
    got: Mapping[str, FloatArray],
    samples: IntArray | None,
    wrong_decisions: Sequence[str] = (),
) -> Check:
    """Compares the real tokens of each row.

    Args:
        expected: of each row, PyTorch's outputs: name -> [real tokens or samples, ...], without the batch axis.
        got: the graph's outputs: name -> [batch, tokens or samples, ...].
        samples: the tokens of the batch whose logits were computed; None for all.
    """
    has_tokens = {spec.name: "tokens" in spec.shape for spec in manifest.outputs}
    left = {spec.fed_from: spec for spec in manifest.memories}
    if samples is not None:
        has_tokens[HEAD_INPUT] = True
    outputs = {}
    for name, is_by_token in has_tokens.items():
        found = []
        for row, length in enumerate(case.lengths):
            actual = got[name][row]
            wanted = expected[row][name]
            if name in left:
                is_there = compared_tokens(left[name], expected[row])
                actual, wanted = actual[is_there], wanted[is_there]
            elif samples is not None and name != HEAD_INPUT:
                actual = actual[samples_of_row(case, length, samples)]
            elif is_by_token:
                actual = actual[case.real(length)]
            if actual.size:
                # Scores without a feature axis ([batch, tokens]) are compared as one vector per row.
                pair = np.atleast_2d(actual), np.atleast_2d(wanted)
                found.append(
                    compare_output(
                        name,
                        *pair,
                        half_precision=manifest.dtype != "float32",
                        precision=graphs.precision,
                        of_tokens=actual.ndim > 1,
                    )
                )
        if found:
            outputs[name] = joined(found)
    return Check(
        graph=graphs.name,
        precision=graphs.precision,
        case=case,
        outputs=outputs,
        samples=None if samples is None else len(samples),
        wrong_decisions=tuple(wrong_decisions),
    )


def not_finite(graphs: GraphSet, case: Case, manifest: Manifest) -> Check:
    """The outcome where the runtime refused values of the graph that are not finite."""
    outputs = {spec.name: NOT_FINITE for spec in manifest.outputs}
    return Check(graph=graphs.name, precision=graphs.precision, case=case, outputs=outputs)


def _json_number(value: float) -> float | None:
    """None for infinity, which JSON lacks: an output that was not finite has no error."""
    return value if math.isfinite(value) else None
