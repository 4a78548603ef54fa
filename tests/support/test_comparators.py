"""The comparators refuse wrong answers: the tests' comparators, and the one that `verify` decides with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hdexport.verify.comparison import (
    FLOAT32_ATOL,
    FLOAT32_STEPS,
    HALF_COSINE,
    ROUNDING,
    Comparison,
    Rounding,
    compare,
    compare_output,
    compare_scores,
    compare_vectors,
    rounding_loss,
    tolerance_of,
)
from hdruntime.backends.precision import Precision
from support.comparators import (
    assert_as_accurate,
    assert_close,
    assert_nearest,
    assert_rounded_as_pytorch,
    assert_same_directions,
    named_case,
)

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
    "one row of another text": with_row(RIGHT[0, 64]),
    "scaled": RIGHT * 1.1,
    "nan": with_value(np.nan),
    "infinite": with_value(np.inf),
}
COMPARATORS: dict[str, Callable[[np.ndarray], None]] = {
    "assert_close": lambda actual: assert_close(actual, RIGHT, atol=1e-4),
    "assert_same_directions": lambda actual: assert_same_directions(actual, RIGHT, cosine=0.999),
    "assert_as_accurate": lambda actual: assert_as_accurate(
        torch.from_numpy(actual), torch.from_numpy(RIGHT).double(), torch.from_numpy(RIGHT + np.float32(1e-6))
    ),
    "assert_rounded_as_pytorch": lambda actual: assert_rounded_as_pytorch(actual, RIGHT, in_bfloat16(RIGHT)),
}


def in_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


@pytest.mark.parametrize("comparator", COMPARATORS.values(), ids=COMPARATORS)
def test_the_right_answer_passes_and_wrong_ones_and_other_shapes_do_not(
    comparator: Callable[[np.ndarray], None],
) -> None:
    comparator(RIGHT.copy())
    for wrong, actual in WRONG.items():
        with named_case(wrong), pytest.raises(AssertionError):
            comparator(actual)
    for shape in (RIGHT[:1], RIGHT[..., :1], RIGHT[:, :0]):
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


def test_rounding_that_is_larger_than_pytorchs_is_refused_by_its_mean_and_by_its_worst() -> None:
    pytorch = in_bfloat16(RIGHT)
    rounding = pytorch - RIGHT
    for times, passes in ((-1.0, True), (1.4, True), (1.5, False)):
        with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="root mean square"):
            assert_rounded_as_pytorch(RIGHT + np.float32(times) * rounding, RIGHT, pytorch)
    worst = float((np.linalg.norm(rounding, axis=-1) / np.linalg.norm(RIGHT, axis=-1)).max())
    for times, passes in ((1.9, True), (2.1, False)):
        with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match=r"at \(2, 64\)"):
            assert_rounded_as_pytorch(with_row(RIGHT[2, 64] * (1 + times * worst)), RIGHT, pytorch)


def test_a_mistake_below_the_rounding_is_found_by_its_direction() -> None:
    """Each value is off by a third of its rounding, or by as much in the direction of the mistake."""
    pytorch = in_bfloat16(RIGHT)
    mistake = np.roll(pytorch - RIGHT, 1, axis=1) / 3
    wrong = {"another rounding": RIGHT + mistake}
    assert_nearest(pytorch, RIGHT, wrong)
    assert_rounded_as_pytorch(pytorch + mistake, RIGHT, pytorch)
    with pytest.raises(AssertionError, match="of the way from the right answer to that of another rounding"):
        assert_nearest(pytorch + mistake, RIGHT, wrong)
    with pytest.raises(AssertionError, match="changes nothing"):
        assert_nearest(pytorch, RIGHT, {"nothing": RIGHT})


def test_an_empty_answer_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_close(RIGHT[:0], RIGHT[:0], atol=1)


def test_expected_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(AssertionError, match="expected values"):
        assert_close(with_value(np.nan), with_value(np.nan), atol=1)
    with pytest.raises(AssertionError, match="no direction"):
        assert_same_directions(with_row(np.zeros(32)), with_row(np.zeros(32)), cosine=0.999)


@pytest.mark.parametrize("half_precision", [False, True], ids=["float32", "half"])
def test_verify_passes_the_right_answer_and_refuses_wrong_ones(half_precision: bool) -> None:
    found = compare(RIGHT.copy(), RIGHT, half_precision=half_precision)
    assert found.passed
    assert (found.max_abs_error, found.min_cosine) == (0.0, pytest.approx(1.0))
    for wrong, actual in WRONG.items():
        assert not compare(actual, RIGHT, half_precision=half_precision).passed, wrong
        assert not compare(actual * np.float32(1e6), RIGHT * np.float32(1e6), half_precision=half_precision).passed
    for value in (np.nan, np.inf, -np.inf):
        for actual, expected in ((with_value(value), RIGHT), (RIGHT, with_value(value)), (with_value(value),) * 2):
            found = compare(actual, expected, half_precision=half_precision)
            assert (found.passed, found.max_abs_error, found.min_cosine) == (False, np.inf, -1.0)
    with pytest.raises(ValueError, match="differ"):
        compare(RIGHT[:1], RIGHT, half_precision=half_precision)


def test_verify_holds_float32_to_the_absolute_tolerance() -> None:
    assert compare(RIGHT + np.float32(0.9 * FLOAT32_ATOL), RIGHT, half_precision=False).passed
    assert not compare(RIGHT + np.float32(1.2 * FLOAT32_ATOL), RIGHT, half_precision=False).passed


def test_verify_holds_sums_to_a_part_of_their_largest() -> None:
    """Each text's own, and of outputs that may be sums alone; one term of 4096 that is left out is found."""
    sums = np.array([[3000.0, 0.5, 40.0], [4.0, 0.5, 0.0]], np.float32)

    def found(number: tuple[int, int], error: float, name: str = "sparse_embedding") -> Comparison:
        actual = sums.copy()
        actual[number] += np.float32(error)
        given = {"half_precision": False, "precision": Precision.FLOAT32, "of_tokens": True}
        return compare_output(name, actual, sums, **given)  # type: ignore[arg-type]

    for number in ((0, 0), (0, 1), (0, 2)):
        assert found(number, 2.6e-3).passed
        assert not found(number, 3.4e-3).passed
        assert not found(number, -3000 / 4096).passed
    assert str(found((0, 1), 0.0).tolerance) == "abs 0.0001 or 2 ulp or rel 1e-06"
    assert found((1, 1), 0.9 * FLOAT32_ATOL).passed
    assert not found((1, 1), 1.2 * FLOAT32_ATOL).passed
    assert not found((0, 1), 2.6e-3, "sentence_embedding").passed


def test_verify_holds_large_values_to_units_in_the_last_place() -> None:
    """Where the question is, scores of BigBird's are 1e6 less; float32 has 16 numbers a unit there."""
    for value in (-1e6, 2048.0, -3e38):
        expected, step = with_value(value), np.spacing(np.float32(value))
        for steps, passes in ((-FLOAT32_STEPS, True), (FLOAT32_STEPS, True), (FLOAT32_STEPS + 1, False)):
            found = compare(with_value(value + steps * step), expected, half_precision=False)
            assert found.passed == passes, (value, steps)
            assert str(found.tolerance) == "abs 0.0001 or 2 ulp"
        assert not compare(with_value(0.0), expected, half_precision=False).passed


def test_verify_gives_ordinary_values_no_more_room_beside_a_large_one() -> None:
    expected, wrong = with_value(-1e6), with_value(-1e6)
    wrong[0, 0, 0] += np.float32(1.2 * FLOAT32_ATOL)
    assert not compare(wrong, expected, half_precision=False).passed
    hundreds = np.full((2, 4), 500, np.float32)
    assert compare(hundreds + np.float32(0.9e-4), hundreds, half_precision=False).passed
    assert not compare(hundreds + np.float32(1.3e-4), hundreds, half_precision=False).passed


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


def test_verify_compares_a_single_score_by_its_value() -> None:
    """A reranker's score: the cosine of two positive numbers is 1 whatever they are. Near 0 its sign may change."""
    for actual, expected, passes in ((2.04, 2.0, True), (2.2, 2.0, False), (-2.0, 2.0, False), (1e-4, -1e-4, True)):
        found = compare(np.array([[actual]]), np.array([[expected]]), half_precision=True)
        assert found.passed == passes, actual


def test_verify_calls_two_vectors_of_zeros_equal() -> None:
    zeros = np.zeros((2, 4))
    assert compare(zeros, zeros, half_precision=True).passed
    assert not compare(zeros, zeros + 0.1, half_precision=True).passed


ROUNDINGS = pytest.mark.parametrize("rounding", ROUNDING.values(), ids=[precision.value for precision in ROUNDING])
ROTATION = np.linalg.qr(np.random.default_rng(1).normal(size=(32, 32)))[0].astype(np.float32)
ROUNDED_WRONG = WRONG | {
    "two tokens exchanged": RIGHT[:, [1, 0, *range(2, 65)]],
    "rotated": RIGHT @ ROTATION,
    "one token scaled by 21 %": with_row(RIGHT[2, 64] * 1.21),
}


def rounded(share: float) -> np.ndarray:
    """`RIGHT`, each vector moved across itself by that share of its length."""
    across = np.random.default_rng(2).normal(size=RIGHT.shape)
    length = np.linalg.norm(RIGHT, axis=-1, keepdims=True)
    across -= RIGHT * (across * RIGHT).sum(-1, keepdims=True) / length**2
    return (RIGHT + across * length / np.linalg.norm(across, axis=-1, keepdims=True) * share).astype(np.float32)


@ROUNDINGS
def test_verify_passes_vectors_rounded_within_the_cosine_and_no_further(rounding: Rounding) -> None:
    angle = np.arccos(rounding.cosine)
    for of_tokens in (True, False):
        for share, passes in ((0, True), (np.tan(angle * 0.98), True), (np.tan(angle * 1.02), False)):
            assert compare_vectors(rounded(share), RIGHT, rounding=rounding, of_tokens=of_tokens).passed == passes
        for scale, passes in ((1 + 0.9 * rounding.length, True), (1 + 1.1 * rounding.length, False)):
            wrong = RIGHT * np.float32(scale)
            assert compare_vectors(wrong, RIGHT, rounding=rounding, of_tokens=of_tokens).passed == passes
        for name, wrong in ROUNDED_WRONG.items():
            assert not compare_vectors(wrong, RIGHT, rounding=rounding, of_tokens=of_tokens).passed, name


def test_a_tokens_length_has_more_room_than_the_average_and_a_texts_has_not() -> None:
    rounding = ROUNDING[Precision.BFLOAT16]
    for scale, passes in ((1.08, True), (1.1, False)):
        wrong = with_row(RIGHT[2, 64] * np.float32(scale))
        assert compare_vectors(wrong, RIGHT, rounding=rounding, of_tokens=True).passed == passes
        assert not compare_vectors(wrong, RIGHT, rounding=rounding, of_tokens=False).passed


SCORES = (3 * RIGHT[0]).astype(np.float32)
"""Scores of 65 tokens and 32 classes; they spread by 12, and the best leads the next by 1 or so."""


def scores_with(row: int, values: dict[int, float]) -> np.ndarray:
    wrong = SCORES.copy()
    for index, value in values.items():
        wrong[row, index] = value
    return wrong


WRONG_SCORES = {
    "two tokens exchanged": SCORES[[1, 0, *range(2, 65)]],
    "shifted": SCORES + 3,
    "one score raised to the best": scores_with(7, {int(SCORES[7].argmin()): float(SCORES[7].max()) + 1}),
    "infinite": scores_with(7, {3: -np.inf}),
}


@ROUNDINGS
def test_verify_passes_scores_rounded_within_their_spread_and_no_further(rounding: Rounding) -> None:
    signs = np.where(np.random.default_rng(3).random(SCORES.shape) < 0.5, -1, 1)
    spread = SCORES.max(axis=-1, keepdims=True) - SCORES.min(axis=-1, keepdims=True)
    for share, passes in ((0.98, True), (1.02, False)):
        # The same for all scores of a token, so that the best stays the best.
        moved = SCORES + np.repeat(spread * rounding.scores * share, 32, axis=1)
        assert compare_scores(moved, SCORES, rounding=rounding).passed == passes
    assert compare_scores(SCORES + signs * spread * rounding.scores * 0.1, SCORES, rounding=rounding).passed
    for name, wrong in WRONG_SCORES.items():
        assert not compare_scores(wrong, SCORES, rounding=rounding).passed, name


@ROUNDINGS
def test_verify_holds_the_best_score_to_pytorchs_unless_that_is_as_close(rounding: Rounding) -> None:
    """Two scores may move towards each other by less than their tolerance, and change places."""
    step = rounding.scores * 10
    wanted = np.array([[10.0, 10.0 - 1.5 * step, 0.0]])
    exchanged = wanted + np.array([[-0.9 * step, 0.9 * step, 0.0]])
    assert (exchanged.argmax(), float(np.abs(exchanged - wanted).max()) < step) == (1, True)
    assert not compare_scores(exchanged, wanted, rounding=rounding).passed
    close = np.array([[10.0, 10.0 - 0.5 * step, 0.0]])
    assert compare_scores(close[:, [1, 0, 2]], close, rounding=rounding).passed


@ROUNDINGS
def test_masked_scores_give_ordinary_ones_no_more_room(rounding: Rounding) -> None:
    """BigBird's scores of answers within the question are 1e6 less than the others."""
    wanted = np.array([[-1e6, -1e6, 4.0, 2.0, -6.0]])
    assert compare_scores(wanted + np.array([[50, -50, 0.2, -0.2, 0.2]]), wanted, rounding=rounding).passed
    assert not compare_scores(wanted + np.array([[0, 0, 0, 2.0, 0]]), wanted, rounding=rounding).passed
    assert not compare_scores(np.array([[-1e6, 0.0, 4.0, 2.0, -6.0]]), wanted, rounding=rounding).passed


@ROUNDINGS
def test_undecided_and_single_scores_are_held_to_their_values(rounding: Rounding) -> None:
    wanted = np.array([[0.001, -0.001]])
    assert compare_scores(-wanted, wanted, rounding=rounding).passed
    assert not compare_scores(wanted + np.array([[0, 1.1 * rounding.scores]]), wanted, rounding=rounding).passed
    wanted = np.array([[8.0]])
    assert compare_scores(wanted + 7 * rounding.scores, wanted, rounding=rounding).passed
    assert not compare_scores(wanted + 9 * rounding.scores, wanted, rounding=rounding).passed
    assert not compare_scores(-wanted, wanted, rounding=rounding).passed


def test_scores_of_half_precision_are_held_to_their_spread_and_no_cosine() -> None:
    """Undecided logits and logits that differ from them by little may have a cosine of -1."""
    undecided, decided = np.array([[0.003, -0.001]]), np.array([[4.0, -4.0]])
    given: dict[str, Any] = {"half_precision": True, "precision": Precision.FLOAT32, "of_tokens": False}
    for wanted in (undecided, decided):
        for error, passes in ((0.02, True), (0.4, False)):
            found = compare_output("logits", wanted + np.array([-error, error]), wanted, **given)
            assert found.passed == passes
            assert found.tolerance == tolerance_of("logits", **given)
        assert not compare_output("embedding", wanted + np.array([-0.4, 0.4]), wanted, **given).passed
    assert not compare_output("logits", -decided, decided, **given).passed


@pytest.mark.parametrize("name", ["logits", "last_hidden_state"])
def test_what_pytorch_loses_widens_the_tolerance_of_bfloat16_and_never_narrows_it(name: str) -> None:
    generator = np.random.default_rng(5)
    wanted, noise = (4 * generator.normal(size=(3, 40, 64)), generator.normal(size=(3, 40, 64)))
    given: dict[str, Any] = {"half_precision": True, "precision": Precision.BFLOAT16, "of_tokens": True}
    # Noise of PyTorch's that is beyond the usual tolerance.
    part = 0.26 if name == "logits" else 0.24
    loss = rounding_loss(name, wanted + part * noise, wanted)
    assert 0.001 < loss < 0.0033

    def passes(factor: float, own_loss: float) -> bool:
        actual = wanted - factor * part * noise
        return compare_output(name, actual, wanted, **given, own_loss=own_loss).passed

    assert not passes(1, 0)
    assert passes(1, loss)
    assert not passes(1.3, loss)
    assert passes(0.5, 0)
    assert passes(0.5, 1e-6)
    assert not passes(3, 1)
    # A NaN of PyTorch's allows nothing.
    assert not passes(1, rounding_loss(name, wanted * np.nan, wanted))


def test_a_case_that_fails_fails_by_its_name() -> None:
    message = r"^65 tokens, no padding: 1, not 0, at \(0,\): 1 > 0.1$"
    with pytest.raises(AssertionError, match=message), named_case("65 tokens", "no padding"):
        assert_close(np.ones(1), np.zeros(1), atol=0.1)
