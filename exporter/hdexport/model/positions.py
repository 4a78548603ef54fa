"""Position tables longer than the checkpoint's: hierarchical decomposition, tiling, stretching, cutting.

For the checkpoint's rows p_1 .. p_n and 0 < a < 1, hierarchical decomposition (Su Jianlin) defines

::

    u_i = (p_i - a p_1) / (1 - a)
    q_{(i-1) n + j} = a u_i + (1 - a) u_j          i, j = 1 .. n

and thereby n * n positions of which the first n are the checkpoint's own. Putting u into q leaves

::

    q_{(i-1) n + j} = p_j + a / (1 - a) (p_i - p_1)

which this module computes: it is a table of n rows (by j) plus a table of shifts (by i), the shift of
i = 1 is exactly zero, and so the first n rows need no arithmetic and keep every bit.

Interpolation and grouping (Zhu et al., LongEmbed, arXiv 2404.12096) reuse the checkpoint's rows by the length of each
text, which no table can do: `hdexport.model.surgery` computes them in the graph. Only interpolation with a fixed
stretch is a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hdexport.model.limits import MAX_POSITIONS
from hdruntime.bundle.manifest import PositionForm, Scheme
from hdruntime.errors import ExportError, InputError, ModelError, Setting

DEFAULT_ALPHA = 0.4
"""The weight of the coarse position, as in bert4keras' ``hierarchical_position=True``."""

FOLDED_LIMIT_BYTES = 64 * 2**20
"""The largest table, in its stored dtype, that is written out row by row.

A folded table costs one lookup per token, a factored one two and an addition, so folding is preferred while the
table is a small part of a bundle: 64 MiB is below the vocabulary table of a base-size encoder
(30 522 x 768 in float32: 89 MiB). It admits 16 384 positions of width 1024 (a large model) in float32.
"""


TABLES = tuple(scheme for scheme in Scheme if scheme not in (Scheme.INTERPOLATE, Scheme.GROUP))
"""Schemes that a table of `max_len` rows can hold for texts of any length."""


@dataclass(frozen=True, kw_only=True)
class FactoredTable:
    """A position table as a sum: the row of position k (from 0) is ``low[k % base] + high[k // base]``.

    low: [base, width], the checkpoint's usable rows, bit for bit.
    high: [ceil(max_len / base), width], the shift of each run of `base` positions; its first row is exactly
        zero. None where every shift is zero (tiling, or no position past the checkpoint's): nothing to add.

    Rows before `first_row` (a padding row) belong to no position and are in neither; a graph whose padding
    tokens carry such a row's number clamps it to position 0, which no real token can see.
    """

    low: np.ndarray
    high: np.ndarray | None


def extend_table(
    table: np.ndarray,
    max_len: int,
    *,
    scheme: Scheme = Scheme.HIERARCHICAL,
    alpha: float = DEFAULT_ALPHA,
    first_row: int = 0,
) -> np.ndarray:
    """The position table for `max_len` positions, one row per position.

    Args:
        table: [first_row + base, width], floating point (ml_dtypes' bfloat16 included), the checkpoint's.
        max_len: positions wanted; fewer than `base` cuts the table.
        scheme: where rows past the checkpoint's come from.
        alpha: weight of the coarse position in the hierarchical scheme; the others do not read it.
        first_row: the row of the first position (RoBERTa: ``padding_idx + 1``). Rows before it are kept as
            they are and take no part in the decomposition.

    Returns:
        [first_row + max_len, width], of the table's type. Its first ``first_row + min(base, max_len)`` rows are the
        table's, bit for bit, unless the scheme stretches them; new rows are computed in float64 and rounded once.

    Raises:
        InputError: the options do not fit, see `check_options`, or no table can hold the scheme, see `TABLES`.
        ModelError: the table cannot be a position table, or holds NaN or infinity.
        ExportError: a row lies outside the range of the table's type.
    """
    base = _check_table(table, first_row)
    check_options(scheme=scheme, alpha=alpha, max_len=max_len, base=base)
    rows = table[first_row:]
    exact = rows.astype(np.float64)
    result = np.empty((first_row + max_len, table.shape[1]), table.dtype)
    result[:first_row] = table[:first_row]
    if max_len > base and scheme not in TABLES:
        raise InputError(
            Setting("scheme", scheme),
            " chooses rows by the length of each text, which no table can do.",
            hint=(
                "Use ",
                Setting("scheme", Scheme.INTERPOLATE_STATIC),
                ", tile or hierarchical; hdexport build takes all of them.",
            ),
        )
    # One run of `base` positions at a time: the float64 copy stays as small as the checkpoint's table.
    for run in range(-(-max_len // base)):
        start = run * base
        stop = min(start + base, max_len)
        part = rows[: stop - start]
        if max_len > base and scheme == Scheme.INTERPOLATE_STATIC:
            part = _stretched(exact, np.arange(start, stop), max_len)
        elif run > 0 and scheme == Scheme.HIERARCHICAL:
            part = exact[: stop - start] + _shifts(exact[run], exact[0], alpha)
        result[first_row + start : first_row + stop] = _cast(part, result.dtype, "position", start)
    return result


def factor_table(
    table: np.ndarray,
    max_len: int,
    *,
    scheme: Scheme = Scheme.HIERARCHICAL,
    alpha: float = DEFAULT_ALPHA,
    first_row: int = 0,
) -> FactoredTable:
    """The same positions as `extend_table`'s, to the rounding of its type, in about ``2 * base`` rows.

    Arguments and errors are `extend_table`'s; the scheme is hierarchical or tiling.
    """
    base = _check_table(table, first_row)
    check_options(scheme=scheme, alpha=alpha, max_len=max_len, base=base)
    low, dtype = table[first_row:], table.dtype
    if scheme != Scheme.HIERARCHICAL or max_len <= base:
        return FactoredTable(low=low, high=None)
    exact = low.astype(np.float64)
    high = _cast(_shifts(exact[: -(-max_len // base)], exact[0], alpha), dtype, "shift", 0)
    # The graph adds in `dtype`, so the sums must fit as well; each column's extremes stand for all its rows.
    for extreme in (low.max(axis=0), low.min(axis=0)):
        _cast(high.astype(np.float64) + extreme.astype(np.float64), dtype, "a position of run", 0)
    return FactoredTable(low=low, high=high)


def choose_form(scheme: Scheme, max_len: int, *, base: int, width: int, itemsize: int) -> PositionForm:
    """Folded while the table is at most `FOLDED_LIMIT_BYTES`, or where it cannot be smaller; no table by each length.

    Args:
        scheme: where rows past the checkpoint's come from.
        max_len: positions served.
        base: usable rows of the checkpoint's table.
        width: size of a row: the embedding size, which is not ALBERT's hidden size.
        itemsize: bytes of an element in the stored dtype.
    """
    if max_len > base and scheme not in TABLES:
        return PositionForm.BY_LENGTH
    if max_len <= base or scheme == Scheme.INTERPOLATE_STATIC or max_len * width * itemsize <= FOLDED_LIMIT_BYTES:
        return PositionForm.FOLDED
    return PositionForm.FACTORED


def check_options(*, scheme: Scheme, alpha: float, max_len: int, base: int) -> None:
    """Reject options for which no table can be made.

    Args:
        scheme, alpha, max_len: see `extend_table`; only the hierarchical scheme reads `alpha`.
        base: usable rows of the checkpoint's table.

    Raises:
        InputError: its message says which number arrived, which fits and the option to type.
    """
    if max_len < 1:
        raise InputError(parameter="max_len", value=max_len, accepted=f"1 to {MAX_POSITIONS}")
    if scheme == Scheme.HIERARCHICAL:
        _check_alpha(alpha)
        if max_len > base * base:
            raise InputError(
                Setting("max_len", max_len),
                f" is above {base * base}: hierarchical positions make at most {base} x {base} from a checkpoint with "
                f"{base}.",
                hint=(
                    "Use ",
                    Setting("max_len", base * base),
                    " or less, or ",
                    Setting("scheme", Scheme.INTERPOLATE),
                    ".",
                ),
            )
    if scheme == Scheme.NONE and max_len > base:
        raise InputError(
            Setting("max_len", max_len),
            f" is above the checkpoint's {base} positions; ",
            Setting("scheme", Scheme.NONE),
            " adds none.",
            hint=(
                "Use ",
                Setting("max_len", base),
                " or less, or ",
                Setting("scheme", Scheme.HIERARCHICAL),
                " (or tile, interpolate, group).",
            ),
        )
    if max_len > MAX_POSITIONS:
        raise InputError(parameter="max_len", value=max_len, accepted=f"1 to {MAX_POSITIONS}")


def _check_alpha(alpha: float) -> None:
    if alpha == 0.5:
        raise InputError(
            Setting("alpha", alpha),
            " gives positions (i, j) and (j, i) the same row: nothing tells them apart.",
            hint="Use a number between 0 and 1 other than 0.5, or auto.",
        )
    if not 0 < alpha < 1:
        raise InputError(parameter="alpha", value=alpha, accepted="above 0 and below 1, and not 0.5, or auto")


def _check_table(table: np.ndarray, first_row: int) -> int:
    """The number of usable rows, `base`, of a table that can be extended."""
    if table.ndim != 2 or 0 in table.shape or not 0 <= first_row < len(table):
        raise ModelError(
            f"A position table of shape {list(table.shape)} whose first position is row {first_row} has no "
            "usable row; [rows, width] with at least one row from there on is needed.",
            hint="Check that the checkpoint's config.json belongs to its weights.",
        )
    finite = np.isfinite(table).all(axis=1)
    if not finite.all():
        raise ModelError(
            f"Row {int(np.argmin(finite))} of the checkpoint's position table holds NaN or infinity: the "
            "file is damaged, or its training diverged.",
            hint="Use another checkpoint.",
        )
    return len(table) - first_row


def _shifts(rows: np.ndarray, first: np.ndarray, alpha: float) -> np.ndarray:
    """Like `rows`, float64: the terms of hierarchical decomposition for each position of the runs 0, 1, ..."""
    return float(alpha) / (1.0 - float(alpha)) * (rows - first)


def _stretched(rows: np.ndarray, positions: np.ndarray, length: int) -> np.ndarray:
    """[positions, width], float64: between `rows`, [base, width], where positions of a text of `length` tokens fall."""
    row, past = np.divmod(positions * len(rows), length)
    weight = (past / length)[:, None]
    return (1 - weight) * rows[row] + weight * rows[np.minimum(row + 1, len(rows) - 1)]


def _cast(rows: np.ndarray, dtype: np.dtype, what: str, number: int) -> np.ndarray:
    """`rows`, finite, in `dtype`; the first of them is named ``<what> <number>`` if it does not fit."""
    with np.errstate(over="ignore"):
        result = rows.astype(dtype)
    fits = np.isfinite(result).all(axis=1)
    if not fits.all():
        row = int(np.argmin(fits))
        largest = np.abs(rows[row].astype(np.float64)).max()
        raise ExportError(
            f"The embedding of {what} {number + row} reaches {largest:g}, outside {dtype.name}'s range.",
            hint=(
                "Use ",
                Setting("precision", "bfloat16", command="build"),
                " or float32; an ",
                Setting("alpha"),
                " nearer to 0 makes new rows smaller.",
            ),
        )
    return result
