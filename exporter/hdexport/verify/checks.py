"""The outcome of a verification: each case for each graph, and the manifest's record of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from hdexport.graph.vocabulary_head import HEAD_INPUT
from hdexport.support.check import Check, json_number
from hdexport.verify.comparison import combined, compare_output, different, rounding_loss, tolerance_of
from hdexport.verify.expected import samples_of_row
from hdexport.verify.graph_sets import GraphSet
from hdexport.verify.grid import Grid
from hdexport.verify.pytorch_reference import compared_tokens
from hdruntime.arrays import FloatArray, IntArray
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.verification import Case, GraphVerification, Skip, Status, VerificationRecord
from hdruntime.errors import HdexportError, Message, write

Losses = Mapping[str, float]
"""Name of an output -> `rounding_loss`."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """All outcomes of a verification.

    Attributes:
        grid: grid of the cases.
        checks: checks of the graphs' outputs for ids.
        skipped: what was not compared.
        information: measured properties of an approximate attention, a sentence each, which no tolerance holds.
        texts: checks of the bundle's outputs for texts.
        code: checks of the checkpoint's own code.
        hints: what to do about failed checks, a sentence each.
    """

    grid: Grid
    checks: tuple[Check, ...] = ()
    skipped: tuple[Skip, ...] = ()
    information: tuple[str, ...] = ()
    texts: tuple[Check, ...] = ()
    code: tuple[Check, ...] = ()
    hints: tuple[Message, ...] = ()

    @property
    def all_checks(self) -> tuple[Check, ...]:
        """Checks of ids, of texts, and of the checkpoint's own code."""
        return (*self.checks, *self.texts, *self.code)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.all_checks if not check.passed)

    @property
    def passed(self) -> bool:
        """Whether graphs were compared, and no check failed."""
        return bool(self.checks) and not self.failed

    def record(self) -> VerificationRecord:
        """The manifest's record of it."""
        graphs: dict[str, list[Check]] = {}
        for check in self.all_checks:
            graphs.setdefault(check.graph, []).append(check)
        return VerificationRecord(
            passed=self.passed,
            grid=self.grid.value,
            graphs={graph: _graph_record(checks) for graph, checks in graphs.items()},
            skipped=self.skipped,
            information=self.information,
        )


def _graph_record(checks: Sequence[Check]) -> GraphVerification:
    return GraphVerification(
        status=Status.PASS if all(check.passed for check in checks) else Status.FAIL,
        files=checks[0].files,
        precision=checks[0].precision.value,
        checks=len(checks),
        passed=sum(check.passed for check in checks),
        max_abs_error=json_number(max(check.max_abs_error for check in checks)),
        min_cosine=min(check.min_cosine for check in checks),
        tolerance=functools.reduce(operator.or_, (check.tolerance for check in checks)),
        tokens=tuple(sorted({check.case.tokens for check in checks})),
        failed=tuple(check.case for check in checks if not check.passed),
        sampled=tuple(check.case for check in checks if check.samples is not None),
        parts=max(check.parts for check in checks),
    )


def compare_case(
    graphs: GraphSet,
    case: Case,
    manifest: Manifest,
    expected: Sequence[Mapping[str, FloatArray]],
    got: Mapping[str, FloatArray],
    samples: IntArray | None,
    wrong_decisions: Sequence[str] = (),
    own_losses: Losses = MappingProxyType({}),
) -> Check:
    """Compares the real tokens of each row.

    Args:
        expected: of each row, PyTorch's outputs: name -> [real tokens or samples, ...], without the batch axis.
        got: the graph's outputs: name -> [batch, tokens or samples, ...].
        samples: the tokens of the batch whose logits were computed; None for all.
        own_losses: of PyTorch in bfloat16, in the same case; none where the tolerances do not depend on the model.
    """
    precision = Precision.BFLOAT16 if own_losses else graphs.precision
    has_tokens = {spec.name: "tokens" in spec.shape for spec in manifest.outputs}
    left = {spec.fed_from: spec for spec in manifest.recurrent_states}
    if samples is not None:
        has_tokens[HEAD_INPUT] = True
    outputs = {}
    for name, is_by_token in has_tokens.items():
        comparisons = []
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
                comparisons.append(
                    compare_output(
                        name,
                        *pair,
                        half_precision=manifest.dtype != "float32",
                        precision=precision,
                        of_tokens=actual.ndim > 1,
                        own_loss=own_losses.get(name, 0.0),
                    )
                )
        if comparisons:
            outputs[name] = combined(comparisons)
    return Check(
        graph=graphs.name,
        precision=graphs.precision,
        case=case,
        outputs=outputs,
        files=graphs.files,
        samples=None if samples is None else len(samples),
        wrong_decisions=tuple(wrong_decisions),
    )


def own_losses_of(
    manifest: Manifest, expected: Sequence[Mapping[str, FloatArray]], rounded: Sequence[Mapping[str, FloatArray]]
) -> Losses:
    """The cosine that PyTorch's outputs lose when it computes in bfloat16.

    Args:
        expected: of each row, PyTorch's outputs in float32, as for `compare_case`.
        rounded: the same in bfloat16.
    """
    left = {spec.fed_from: spec for spec in manifest.recurrent_states}
    losses: dict[str, float] = {}
    for exact, inexact in zip(expected, rounded, strict=True):
        for name, values in exact.items():
            is_there = compared_tokens(left[name], exact) if name in left else slice(None)
            pair = np.atleast_2d(inexact[name][is_there]), np.atleast_2d(values[is_there])
            if pair[0].size:
                losses[name] = max(losses.get(name, 0.0), rounding_loss(name, *pair))
    return losses


def problem_of(error: Exception) -> str:
    """The problem that an error states, without its hint; of another library's error, the first line of its message."""
    if isinstance(error, HdexportError):
        return write(error.problem)
    return next(iter(str(error).splitlines()), type(error).__name__)


def not_compared(graphs: GraphSet, case: Case, manifest: Manifest, error: str | None = None) -> Check:
    """The failed check where a graph's run raised an `error`, or gave values that are not finite."""
    outputs = {
        spec.name: different(
            tolerance_of(
                spec.name,
                half_precision=manifest.dtype != "float32",
                precision=graphs.precision,
                of_tokens="tokens" in spec.shape,
            )
        )
        for spec in manifest.outputs
    }
    return Check(
        graph=graphs.name, precision=graphs.precision, case=case, outputs=outputs, files=graphs.files, error=error
    )
