"""The checkpoint's own code, compared with the class that a bundle is made of."""

from __future__ import annotations

import dataclasses

from hdexport.checkpoint.model_code import CODE_TOLERANCE, CodeCase, ModelCode
from hdexport.support.check import Check, Comparison
from hdexport.support.progress import Progress
from hdexport.verify.checks import Verification, problem_of
from hdexport.verify.pytorch_reference import Reference
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.bundle.verification import Case, Skip, SkipCause, Tolerance
from hdruntime.errors import ModelError

_TOLERANCE = Tolerance(atol=CODE_TOLERANCE, rtol=CODE_TOLERANCE)


def with_code(
    verification: Verification,
    manifest: Manifest,
    reference: Reference,
    *,
    progress: Progress | None = None,
) -> Verification:
    """Add checks of the checkpoint's own code, where it may run: code that differs is a failed check, and code that
    cannot run is not checked. `with_texts` says which code may not run.

    Args:
        verification: results so far.
        manifest: of the bundle.
        reference: the checkpoint that the bundle was built from.
        progress: takes each outcome.
    """
    checkpoint, task = reference.checkpoint.with_adapter(manifest.adapter), manifest.task
    code = checkpoint.code(task)
    if code is None or not checkpoint.trust.trust_remote_code:
        return verification
    progress = progress or Progress()
    checks: list[Check] = []
    detail = checkpoint.code_uncompared_reason(task)
    if detail is None:
        try:
            checks += [_check(code, case) for case in checkpoint.code_cases(task)]
            detail = None if checks else "it cannot be run here"
        except ModelError as error:
            detail = problem_of(error)
    skipped = () if detail is None else (Skip(cause=SkipCause.LIBRARY, graph=code_name(code), detail=detail),)
    for outcome in (*checks, *skipped):
        progress.check(outcome)
    hints = () if all(check.passed for check in checks) else (code.hint,)
    return dataclasses.replace(
        verification, code=tuple(checks), skipped=(*verification.skipped, *skipped), hints=(*verification.hints, *hints)
    )


def code_name(code: ModelCode) -> str:
    """The name of the checkpoint's own code in a report."""
    return f"code: {code.reference}"


def _check(code: ModelCode, case: CodeCase) -> Check:
    compared = Comparison(
        max_abs_error=case.max_abs_error,
        min_cosine=1.0 if case.passed else -1.0,
        passed=case.passed,
        tolerance=_TOLERANCE,
    )
    return Check(
        graph=code_name(code),
        precision=Precision.FLOAT32,
        case=Case(tokens=max(case.lengths), lengths=case.lengths, padding=case.padding),
        outputs={f"its outputs {case.how} of {code.instead}": compared},
    )
