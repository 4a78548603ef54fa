"""How a benchmark's figures are written, in every table and chart."""

from __future__ import annotations

import math

from hdexport.bench.results.result import CaseResult, OutputError, Ratio, Status

_DIGITS = 3
"""Least significant digits of a figure; whole numbers keep all."""

_LEAST_PLAIN_ERROR = 1e-3
"""Smaller ones are written with an exponent."""


def number_text(value: float) -> str:
    """``0.0213``, ``3.42``, ``34.2``, ``3,421``: three digits, or the whole number."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def ms_text(value: float) -> str:
    """A latency in milliseconds with its unit."""
    return f"{number_text(value)} ms"


def bytes_text(value: int) -> str:
    """``412 MB``, ``5.31 GB``: powers of ten."""
    unit, name = (1e9, "GB") if value >= 1e9 else (1e6, "MB")
    return f"{number_text(value / unit)} {name}"


def error_text(error: OutputError | None) -> str:
    """The largest absolute difference: ``3.1e-6``, ``0.35``, ``0``, ``not finite``."""
    if error is None:
        return ""
    if error.max_abs_error is None:
        return "not finite"
    if error.max_abs_error == 0 or error.max_abs_error >= _LEAST_PLAIN_ERROR:
        return f"{error.max_abs_error:.2g}"
    digits, _, exponent = f"{error.max_abs_error:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def cosine_text(error: OutputError | None) -> str:
    """Rounded down: 1 is written only where it is 1."""
    if error is None or error.max_abs_error is None:
        return ""
    return f"{math.floor(error.min_cosine * 1e6) / 1e6:g}"


def ratio_text(ratio: Ratio | None) -> str:
    """The ratio of the medians: ``3.0x``."""
    return "" if ratio is None else f"{number_text(ratio.value)}x"


def range_text(ratio: Ratio | None) -> str:
    """The range of the rounds' ratios: ``2.9 to 3.1``."""
    return "" if ratio is None else f"{number_text(ratio.least)} to {number_text(ratio.most)}"


def case_state(case: CaseResult) -> str:
    """``ok``, ``wrong``, or why there are no figures."""
    is_wrong = case.status is Status.OK and case.error is not None and not case.error.passed
    return "wrong" if is_wrong else case.status.value
