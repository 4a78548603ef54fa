"""The errors of rows without a result, which name the row and the remedy."""

from __future__ import annotations

__all__ = ["non_finite_error", "raise_failures"]

from collections.abc import Sequence

from hdruntime.bundle.reader import Bundle
from hdruntime.errors import NonFiniteOutputError
from hdruntime.inference.scheduling import BatchResult, non_finite_rows


def non_finite_error(bundle: Bundle, name: str, rows: Sequence[int]) -> NonFiniteOutputError:
    """The error of an output with NaN or infinity in these rows; none are named if ``rows`` is empty."""
    shown = ", ".join(map(str, rows[:10])) + (", ..." if len(rows) > 10 else "")
    where = f" in rows {shown}" if rows else ""
    advice = (
        "float16 may overflow in this model: rebuild with --bf16, or without --fp16."
        if bundle.manifest.dtype == "float16"
        else f"Compare the bundle with its checkpoint: hdexport verify {bundle.path}"
    )
    return NonFiniteOutputError(f"The output {name} holds NaN or infinity{where}.\n{advice}")


def raise_failures(bundle: Bundle, result: BatchResult, numbers: Sequence[int]) -> None:
    """Raise for a batch with failed rows, named by the caller's numbers if there is more than one row.

    Args:
        bundle: the bundle that ran.
        result: of the batch.
        numbers: the caller's number of each row of the call, ascending.

    Raises:
        NonFiniteOutputError: a result is NaN or infinite.
        HdexportError: another error of a row.
    """
    if not result.errors:
        return
    for name, wrong in non_finite_rows(result.outputs).items():
        named = sorted({numbers[result.rows[index]] for index in wrong}) if numbers[-1] > 0 else []
        raise non_finite_error(bundle, name, named)
    raise next(iter(result.errors.values()))
