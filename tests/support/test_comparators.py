"""The comparators refuse wrong answers: those of the tests, and the one that `verify` decides with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hdexport.verify.comparison import FLOAT32_ATOL, FLOAT32_STEPS, HALF_COSINE, compare
from support.comparators import assert_as_accurate, assert_close, assert_same_directions, named_case

RIGHT = np.random.default_rng(0).normal(size=(3, 65, 32)).astype(np.float32)


def with_value(value: float) -> np.ndarray:
    wrong = RIGHT.copy()
    wrong[1, 64, 5] = value
    return wrong


def with_row(row: np.ndarray) -> np.ndarray:
    wrong = RIGHT.copy()
    wrong[2, 64] = row
    return wrong


WRONG = {
    "off by one row": np.roll(RIGHT, 1, axis=1),
    "off by one feature": np.roll(RIGHT, 1, axis=2),
    "one row of another text": with_row(RIGHT[0, 64]),
    "scaled": RIGHT * 1.1,
    "scaled down": RIGHT * 0.9,
    "shifted": RIGHT + 0.2,
    "negated": -RIGHT,
    "one token 0": with_row(np.zeros(32, np.float32)),
    "all 0": np.zeros_like(RIGHT),
    "nan": with_value(np.nan),
    "infinite": with_value(np.inf),
    "one large value": with_value(30.0),
}
COMPARATORS: dict[str, Callable[[np.ndarray], None]] = {
    "assert_close": lambda actual: assert_close(actual, RIGHT, atol=1e-4),
    "assert_same_directions": lambda actual: assert_same_directions(actual, RIGHT, cosine=0.999),
    "assert_as_accurate": lambda actual: assert_as_accurate(
        torch.from_numpy(actual), torch.from_numpy(RIGHT).double(), torch.from_numpy(RIGHT + np.float32(1e-6))
    ),
}


@pytest.mark.parametrize("comparator", COMPARATORS.values(), ids=COMPARATORS)
def test_the_right_answer_passes(comparator: Callable[[np.ndarray], None]) -> None:
    comparator(RIGHT.copy())


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("comparator", COMPARATORS.values(), ids=COMPARATORS)
def test_a_wrong_answer_is_refused(comparator: Callable[[np.ndarray], None], wrong: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        comparator(wrong)


@pytest.mark.parametrize("comparator", COMPARATORS.values(), ids=COMPARATORS)
def test_another_shape_is_refused_even_if_it_broadcasts(comparator: Callable[[np.ndarray], None]) -> None:
    for shape in (RIGHT[:1], RIGHT[:, :1], RIGHT[..., :1], RIGHT[:, :0]):
        with pytest.raises(AssertionError, match="shape"):
            comparator(shape)


def test_an_error_just_above_twice_that_of_pytorch_is_refused_and_so_is_a_zero_row_that_is_not_0() -> None:
    right = torch.from_numpy(with_row(np.zeros(32, np.float32))).double()
    pytorch = (right + 1e-3).float()
    zeros = (right == 0).all(-1, keepdim=True)
    for times, passes in ((1.9, True), (2.1, False)):
        actual = torch.where(zeros, 0.0, right + times * 1e-3).float()
        with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="error"):
            assert_as_accurate(actual, right, pytorch)
    with pytest.raises(AssertionError, match="is not 0"):
        assert_as_accurate(pytorch, right, pytorch)


def test_an_empty_answer_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close(RIGHT[:0], RIGHT[:0], atol=1)


def test_expected_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(AssertionError, match="expected values"):
        assert_close(with_value(np.nan), with_value(np.nan), atol=1)
    with pytest.raises(AssertionError, match="no direction"):
        assert_same_directions(with_row(np.zeros(32)), with_row(np.zeros(32)), cosine=0.999)


@pytest.mark.parametrize("half_precision", [False, True], ids=["float32", "half"])
def test_verify_passes_the_right_answer(half_precision: bool) -> None:
    found = compare(RIGHT.copy(), RIGHT, half_precision=half_precision)
    assert found.passed
    assert (found.max_abs_error, found.min_cosine) == (0.0, pytest.approx(1.0))
    assert compare(RIGHT.astype(np.float16), RIGHT, half_precision=True).passed


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("half_precision", [False, True], ids=["float32", "half"])
def test_verify_refuses_a_wrong_answer(half_precision: bool, wrong: np.ndarray) -> None:
    assert not compare(wrong, RIGHT, half_precision=half_precision).passed


@pytest.mark.parametrize("half_precision", [False, True], ids=["float32", "half"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_verify_refuses_values_that_are_not_finite_on_either_side(value: float, half_precision: bool) -> None:
    for actual, expected in ((with_value(value), RIGHT), (RIGHT, with_value(value)), (with_value(value),) * 2):
        found = compare(actual, expected, half_precision=half_precision)
        assert not found.passed
        assert (found.max_abs_error, found.min_cosine) == (np.inf, -1.0)


def test_verify_holds_float32_to_the_absolute_tolerance() -> None:
    assert compare(RIGHT + np.float32(0.9 * FLOAT32_ATOL), RIGHT, half_precision=False).passed
    assert not compare(RIGHT + np.float32(1.2 * FLOAT32_ATOL), RIGHT, half_precision=False).passed


@pytest.mark.parametrize("value", [1e6, -1e6, 2048.0, -3e38])
def test_verify_holds_large_values_to_units_in_the_last_place(value: float) -> None:
    """Where the question is, scores of BigBird's are 1e6 less; float32 has 16 numbers a unit there."""
    expected = with_value(value)
    for steps, passes in ((-FLOAT32_STEPS, True), (FLOAT32_STEPS, True), (FLOAT32_STEPS + 1, False), (-8, False)):
        found = compare(with_value(value + steps * np.spacing(np.float32(value))), expected, half_precision=False)
        assert found.passed == passes
        assert found.tolerance == "max abs error <= 0.0001, or 2 units in the last place of large values"
    assert not compare(with_value(value * 1.001), expected, half_precision=False).passed
    assert not compare(with_value(0.0), expected, half_precision=False).passed


def test_verify_gives_ordinary_values_no_more_room_beside_a_large_one() -> None:
    expected, wrong = with_value(-1e6), with_value(-1e6)
    wrong[0, 0, 0] += np.float32(1.2 * FLOAT32_ATOL)
    assert not compare(wrong, expected, half_precision=False).passed
    hundreds = np.full((2, 4), 500, np.float32)
    assert compare(hundreds + np.float32(0.9e-4), hundreds, half_precision=False).tolerance == "max abs error <= 0.0001"
    assert not compare(hundreds + np.float32(1.3e-4), hundreds, half_precision=False).passed


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_verify_refuses_a_wrong_answer_of_large_values(wrong: np.ndarray) -> None:
    assert not compare(wrong * np.float32(1e6), RIGHT * np.float32(1e6), half_precision=False).passed


def test_verify_holds_half_precision_to_the_cosine_of_each_token() -> None:
    # A step across the token's vector, of the length that gives a cosine just above or below the tolerance.
    token = RIGHT[1, 7]
    across = np.roll(token, 1)
    across -= token * (across @ token) / (token @ token)
    across *= np.linalg.norm(token) / np.linalg.norm(across)
    for wanted, passes in ((HALF_COSINE + 1e-5, True), (HALF_COSINE - 1e-5, False)):
        actual = RIGHT.copy()
        actual[1, 7] = token * wanted + across * np.sqrt(1 - wanted**2)
        found = compare(actual, RIGHT, half_precision=True)
        assert found.min_cosine == pytest.approx(wanted, abs=1e-6)
        assert found.passed == passes


@pytest.mark.parametrize(("actual", "passes"), [(2.04, True), (2.2, False), (1.8, False), (-2.0, False)])
def test_verify_compares_a_single_score_by_its_value(actual: float, passes: bool) -> None:
    """A reranker's score: the cosine of two positive numbers is 1 whatever they are."""
    found = compare(np.array([[actual]]), np.array([[2.0]]), half_precision=True)
    assert found.passed == passes


def test_verify_does_not_hold_a_score_near_0_to_its_sign() -> None:
    assert compare(np.array([[1e-4]]), np.array([[-1e-4]]), half_precision=True).passed


def test_verify_calls_two_vectors_of_zeros_equal() -> None:
    zeros = np.zeros((2, 4))
    assert compare(zeros, zeros, half_precision=True).passed
    assert not compare(zeros, zeros + 0.1, half_precision=True).passed


def test_verify_of_different_shapes_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="differ"):
        compare(RIGHT[:1], RIGHT, half_precision=False)


def test_a_case_that_fails_fails_by_its_name() -> None:
    message = r"^65 tokens, no padding: 1, not 0, at \(0,\): 1 > 0.1$"
    with pytest.raises(AssertionError, match=message), named_case("65 tokens", "no padding"):
        assert_close(np.ones(1), np.zeros(1), atol=0.1)
    with pytest.raises(ZeroDivisionError), named_case("65 tokens"):
        raise ZeroDivisionError
