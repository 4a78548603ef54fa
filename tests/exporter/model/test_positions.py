"""Position tables: what is promised of every table, length, alpha and dtype."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hdexport.model.positions import (
    DEFAULT_ALPHA,
    FOLDED_LIMIT_BYTES,
    check_options,
    choose_form,
    extend_table,
    factor_table,
)
from hdruntime.bundle.manifest import PositionForm, Scheme
from hdruntime.errors import ExportError, InputError, ModelError

ALPHAS = st.floats(0.01, 0.99).filter(lambda alpha: alpha != 0.5)


def tables(dtype: type, *, most: float, min_rows: int = 1) -> st.SearchStrategy[np.ndarray]:
    """Tables of up to 6 x 4; hypothesis draws zeros of both signs and denormals among the elements."""
    shapes = st.tuples(st.integers(min_rows, 6), st.integers(1, 4))
    width = np.dtype(dtype).itemsize * 8
    return shapes.flatmap(lambda shape: arrays.arrays(dtype, shape, elements=st.floats(-most, most, width=width)))


def defined_row(table: np.ndarray, number: int, alpha: float) -> list[Fraction]:
    """Position `number` (from 0), exactly, by the two formulas of the definition with its indices from 1."""
    a = Fraction(alpha)
    p = [[Fraction(float(element)) for element in row] for row in table]
    n = len(p)
    i, j = number // n + 1, number % n + 1

    def u(index: int) -> list[Fraction]:
        return [(element - a * first) / (1 - a) for element, first in zip(p[index - 1], p[0], strict=True)]

    return [a * x + (1 - a) * y for x, y in zip(u(i), u(j), strict=True)]


def farthest(table: np.ndarray, extended: np.ndarray, alpha: float, *, first_row: int = 0) -> float:
    """The largest distance of `extended` from the definition, in units of the rounding that is allowed.

    Allowed are one rounding to the stored dtype and the float64 rounding of the four operations before it.
    """
    scale = float(np.abs(table.astype(np.float64)).max()) * (1 + 2 * alpha / (1 - alpha))
    worst = 0.0
    for number, row in enumerate(extended[first_row:]):
        for got, exact in zip(row, defined_row(table[first_row:], number, alpha), strict=True):
            allowed = abs(float(np.spacing(abs(got)))) / 2 + 8 * 2.0**-53 * scale
            worst = max(worst, float(abs(Fraction(float(got)) - exact)) / allowed)
    return worst


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def random_table(rows: int, width: int = 8, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(rows).normal(0, 0.05, (rows, width)).astype(dtype)


@given(table=tables(np.float32, most=2.0**100), alpha=ALPHAS, data=st.data())
def test_the_checkpoints_rows_keep_every_bit(table: np.ndarray, alpha: float, data: st.DataObject) -> None:
    base = len(table)
    max_len = data.draw(st.integers(1, base * base))
    extended = extend_table(table, max_len, alpha=alpha)
    kept = min(base, max_len)
    assert extended.shape == (max_len, table.shape[1])
    assert same_bits(extended[:kept], table[:kept])
    assert same_bits(factor_table(table, max_len, alpha=alpha).low, table)


@given(table=tables(np.float32, most=100) | tables(np.float16, most=10), alpha=ALPHAS)
def test_every_row_is_the_definitions_in_its_dtype(table: np.ndarray, alpha: float) -> None:
    assert farthest(table, extend_table(table, len(table) ** 2, alpha=alpha), alpha) <= 1


@pytest.mark.parametrize("wrong", ["one row late", "alpha 0.41"])
def test_the_comparison_with_the_definition_refuses_a_wrong_table(wrong: str) -> None:
    table = random_table(5)
    right = extend_table(table, 25)
    tampered = {"one row late": np.vstack([right[:5], right[4:24]]), "alpha 0.41": extend_table(table, 25, alpha=0.41)}[
        wrong
    ]
    assert farthest(table, right, DEFAULT_ALPHA) <= 1
    assert farthest(table, tampered, DEFAULT_ALPHA) > 1000


@pytest.mark.parametrize("scheme", [Scheme.HIERARCHICAL, Scheme.TILE])
def test_a_shorter_table_is_the_start_of_a_longer_one(scheme: Scheme) -> None:
    table = random_table(5)
    longer = extend_table(table, 25, scheme=scheme)
    for max_len in range(1, 26):
        assert same_bits(extend_table(table, max_len, scheme=scheme), longer[:max_len]), max_len


def test_tiling_repeats_the_rows_bit_for_bit() -> None:
    table = random_table(5)
    table[2] = -0.0
    for max_len in (1, 5, 6, 13):
        tiled = extend_table(table, max_len, scheme=Scheme.TILE)
        assert all(same_bits(tiled[k], table[k % 5]) for k in range(max_len)), max_len
        factored = factor_table(table, max_len, scheme=Scheme.TILE)
        assert factored.high is None, max_len
        assert same_bits(factored.low, table), max_len


def test_within_the_checkpoints_rows_nothing_is_added() -> None:
    table = random_table(5)
    for max_len in (1, 4, 5):
        assert same_bits(extend_table(table, max_len, scheme=Scheme.NONE), table[:max_len]), max_len
        assert factor_table(table, max_len).high is None, max_len


@pytest.mark.parametrize("scheme", [Scheme.HIERARCHICAL, Scheme.TILE])
def test_rows_before_the_first_position_are_kept_and_not_decomposed(scheme: Scheme) -> None:
    # RoBERTa: 514 rows, of which the 2 up to padding_idx belong to no position.
    table = random_table(514)
    extended = extend_table(table, 1100, scheme=scheme, first_row=2)
    assert extended.shape == (1102, 8)
    assert same_bits(extended[:514], table)
    assert same_bits(extended[2:], extend_table(table[2:], 1100, scheme=scheme))
    assert same_bits(factor_table(table, 1100, scheme=scheme, first_row=2).low, table[2:])
    assert same_bits(extend_table(table, 10, scheme=scheme, first_row=2), table[:12])


@given(table=tables(np.float32, most=100, min_rows=2), alpha=ALPHAS, data=st.data())
def test_factored_equals_folded_to_rounding(table: np.ndarray, alpha: float, data: st.DataObject) -> None:
    base = len(table)
    max_len = data.draw(st.integers(base + 1, base * base))
    folded = extend_table(table, max_len, alpha=alpha)
    factored = factor_table(table, max_len, alpha=alpha)
    assert factored.high is not None
    assert factored.high.shape == (-(-max_len // base), table.shape[1])
    assert same_bits(factored.high[0], np.zeros_like(table[0]))
    position = np.arange(max_len)
    low, high = factored.low[position % base], factored.high[position // base]
    # Factored rounds the shift and the sum, folded the sum only.
    allowed = np.spacing(np.abs(high)) / 2 + np.spacing(np.abs(folded)) * 1.5
    assert (np.abs((low + high).astype(np.float64) - folded) <= allowed).all()


def test_bfloat16_tables_are_extended_in_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 arrays come from ml_dtypes, which onnx brings")
    table = random_table(6).astype(ml_dtypes.bfloat16)
    extended = extend_table(table, 36)
    assert extended.dtype == ml_dtypes.bfloat16
    assert same_bits(extended[:6], table)
    exact = extend_table(table.astype(np.float64), 36)
    # bfloat16 has 8 significant bits: one rounding is at most 2**-9 of the value's power of two.
    assert (np.abs(extended.astype(np.float64) - exact) <= np.abs(exact) * 2.0**-8).all()


@pytest.mark.parametrize(
    ("max_len", "base", "width", "itemsize", "form"),
    [
        (16384, 512, 1024, 4, PositionForm.FOLDED),
        (16385, 512, 1024, 4, PositionForm.FACTORED),
        (100_000, 100_000, 1024, 4, PositionForm.FOLDED),
    ],
)
def test_the_form_changes_at_the_memory_bound(
    max_len: int, base: int, width: int, itemsize: int, form: PositionForm
) -> None:
    assert choose_form(Scheme.HIERARCHICAL, max_len, base=base, width=width, itemsize=itemsize) is form
    assert FOLDED_LIMIT_BYTES == 16384 * 1024 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.5}, r"alpha=0.5 gives .* the same row.*\nUse a number between 0 and 1 other than 0.5"),
        ({"alpha": 1.0}, r"alpha is 1.0; it must be above 0 and below 1"),
        ({"alpha": float("nan")}, r"alpha is nan; it must be above 0"),
        ({"max_len": 0}, r"max_len is 0; it must be 1 to 16777216"),
        (
            {"max_len": 262145},
            r"above 262144: .* 512 x 512 .*\nUse max_len=262144 or less, or scheme='interpolate'",
        ),
        ({"scheme": Scheme.NONE, "max_len": 513}, r"above the checkpoint's 512 positions.*\nUse max_len=512 or"),
        ({"scheme": Scheme.TILE, "max_len": 10**12}, r"max_len is 1000000000000; it must be 1 to 16777216"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_what_fits(options: dict[str, object], message: str) -> None:
    accepted: dict[str, object] = {"scheme": Scheme.HIERARCHICAL, "alpha": 0.4, "max_len": 4096, "base": 512}
    check_options(**accepted)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        check_options(**{**accepted, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [extend_table, factor_table])
def test_a_row_outside_float16_is_refused_by_position(make: object) -> None:
    # Of the four positions only the last, 60 000 + 2/3 * 60 000, is outside the range.
    table = np.array([[0.0], [60_000.0]], np.float16)
    for signed in (table, -table):
        with pytest.raises(ExportError, match=r"reaches 100000, outside float16's range.\nUse precision='bfloat16'"):
            make(signed, 4)  # type: ignore[operator]
    assert np.isfinite(extend_table(table, 3)).all()


def test_a_damaged_table_is_refused_by_row() -> None:
    table = random_table(5)
    table[3, 1] = np.nan
    with pytest.raises(ModelError, match=r"Row 3 of the checkpoint's position table holds NaN or infinity"):
        extend_table(table, 25)


@pytest.mark.parametrize(("shape", "first_row"), [((5,), 0), ((5, 4), 5)])
def test_a_table_without_usable_rows_is_refused(shape: tuple[int, ...], first_row: int) -> None:
    with pytest.raises(ModelError, match=r"has no usable row"):
        extend_table(np.zeros(shape, np.float32), 3, first_row=first_row)
