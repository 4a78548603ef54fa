"""The checkpoint's own code, compared with the class that a bundle is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hdexport.checkpoint.model_code import CODE_TOLERANCE, CodeCase, ModelCode
from hdexport.verify.checks import Check, Verification
from hdexport.verify.comparison import Comparison
from hdexport.verify.grid import Case
from hdexport.verify.pytorch_reference import Reference
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest
from hdruntime.errors import ModelError

_TOLERANCE = f"{CODE_TOLERANCE:g}, absolute or of the largest value"


def with_code(
    found: Verification,
    manifest: Manifest,
    reference: Reference,
    *,
    report: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Add checks of the checkpoint's own code, where it may run: code that differs is a failed check, and code that
    cannot run is not checked. `with_texts` says which code may not run.

    Args:
        found: results so far.
        manifest: of the bundle.
        reference: the checkpoint that the bundle was built from.
        report: called with one line per check, with the hint of a failed one, and with why there are none.
    """
    checkpoint, task = reference.checkpoint.with_adapter(manifest.adapter), manifest.task
    code = checkpoint.code(task)
    if code is None or not checkpoint.trust.code:
        return found
    checks: list[Check] = []
    reason = checkpoint.code_uncompared_reason(task)
    if reason is None:
        try:
            checks += [_check(code, case) for case in checkpoint.code_cases(task)]
            reason = None if checks else "it cannot be run here"
        except ModelError as error:
            reason = str(error).splitlines()[0]
    for check in checks:
        report(check.line())
    if any(not check.passed for check in checks):
        report(code.hint)
    left_out = [] if reason is None else [f"{_name(code)}: not checked: {reason}"]
    for line in left_out:
        report(f"-[-] {line}")
    return dataclasses.replace(found, code=tuple(checks), not_checked=(*found.not_checked, *left_out))


def _name(code: ModelCode) -> str:
    return f"the checkpoint's own code, {code.reference}"


def _check(code: ModelCode, case: CodeCase) -> Check:
    compared = Comparison(
        max_abs_error=case.max_abs_error,
        min_cosine=1.0 if case.passed else -1.0,
        passed=case.passed,
        tolerance=_TOLERANCE,
    )
    return Check(
        graph=_name(code),
        precision=Precision.FLOAT32,
        case=Case(tokens=max(case.lengths), lengths=case.lengths, padding=case.padding),
        outputs={f"its answers {case.how} of {code.instead}": compared},
    )
