"""Comparisons that tests assert with; test_comparators.py has the answers that each must refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pytest
import torch

LENGTH_RTOL = 0.05
"""A cosine does not see a scale, so lengths are held to this besides."""


def assert_close(actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating], *, atol: float) -> None:
    """Every element of `actual` is finite and within `atol` of `expected`, which has the same shape."""
    got, want = _finite_pair(actual, expected)
    error = np.abs(got - want)
    worst = np.unravel_index(int(error.argmax()), error.shape)
    where = tuple(map(int, worst))
    assert error[worst] <= atol, f"{got[worst]:.8g}, not {want[worst]:.8g}, at {where}: {error[worst]:.3g} > {atol:g}"


def assert_same_directions(
    actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating], *, cosine: float
) -> None:
    """Every vector along the last axis is finite, has that cosine with the expected one, and about its length."""
    got, want = _finite_pair(actual, expected)
    lengths, wanted_lengths = np.linalg.norm(got, axis=-1), np.linalg.norm(want, axis=-1)
    assert (wanted_lengths > 0).all(), "a vector of zeros has no direction to compare with"
    assert (np.abs(lengths / wanted_lengths - 1) <= LENGTH_RTOL).all(), f"lengths {lengths}, not {wanted_lengths}"
    cosines = (got * want).sum(axis=-1) / (lengths * wanted_lengths)
    worst = float(cosines.min())
    assert worst >= cosine, f"cosine {worst:.6f} < {cosine} at {np.unravel_index(int(cosines.argmin()), cosines.shape)}"


def assert_as_accurate(actual: torch.Tensor, right: torch.Tensor, pytorch: torch.Tensor) -> None:
    """Every error is at most twice PyTorch's largest and a rounding of the dtype, and values defined as 0 are 0."""
    assert actual.shape == right.shape, f"shape {tuple(actual.shape)}, not {tuple(right.shape)}"
    assert actual.dtype == pytorch.dtype
    assert torch.isfinite(actual).all(), f"{int((~torch.isfinite(actual)).sum())} values are not finite"
    zeros = (right == 0).all(-1)
    assert (actual[zeros] == 0).all(), "a row that sees no key is not 0"
    rounding = torch.finfo(actual.dtype).eps * float(right.abs().max())
    allowed = 2 * float((pytorch.double() - right).abs().max()) + rounding
    error = float((actual.double() - right).abs().max())
    assert error <= allowed, f"error {error:.3g} > {allowed:.3g}"


ROUNDINGS = 2
"""How many roundings another processor may make for each of PyTorch's; see `assert_rounded_as_pytorch`."""


def assert_rounded_as_pytorch(
    actual: npt.NDArray[np.floating], right: npt.NDArray[np.floating], pytorch: npt.NDArray[np.floating]
) -> None:
    """Vectors along the last axis are about as near the right ones as PyTorch's of the same half precision.

    The bound holds on every processor, because PyTorch's own error on the same inputs is measured beside it:

    * bfloat16 has 8 significant bits. A rounding moves a value by at most 2**-8 of itself; the root mean square over
      all mantissas is 2**-7 / sqrt(12) * 0.74 = 0.17 %. Weights are rounded and so are activations, r times in sequence
      in each layer of the residual path, and independent roundings add as a root: sqrt(layers * r) of one, which is
      0.6 to 0.8 % for 2 layers with r from 7 to 12. Models that amplify little show that (NeoMME 0.6 %, GTE 0.8 %).
    * Norms and sharp scores amplify it (EmbeddingGemma 1.9 %, some tokens 6 %), as the model and the text decide. That
      is in PyTorch's error as well, so no number for it is needed here.
    * Right implementations differ in how often they round. Kernels that keep sums in registers round less
      than PyTorch; a graph each of whose values is rounded, norms and activations included, rounds up to twice as
      often. So the root mean square over all vectors, a mean whose own spread is small, is at most sqrt(2) times
      PyTorch's.
    * The worst of N vectors is one draw of a tail, by a third larger in one right implementation than in another. It is
      at most twice PyTorch's: sqrt(2) for the roundings, and as much again for the draw.

    Args:
        actual: the answer, [..., width].
        right: in float32.
        pytorch: PyTorch's in half precision, of the same weights and inputs.
    """
    errors, allowed = _relative_errors(actual, right), _relative_errors(pytorch, right)
    mean, most = (float(np.sqrt((each**2).mean())) for each in (errors, allowed))
    most *= ROUNDINGS**0.5
    assert mean <= most, f"root mean square of errors {mean:.4g} of a vector's length > {most:.4g}"
    worst, most = float(errors.max()), ROUNDINGS * float(allowed.max())
    where = np.unravel_index(int(errors.argmax()), errors.shape)
    assert worst <= most, f"error {worst:.4g} of the vector's length > {most:.4g} at {tuple(map(int, where))}"


def assert_nearest(
    actual: npt.NDArray[np.floating],
    right: npt.NDArray[np.floating],
    wrong: Mapping[str, npt.NDArray[np.floating]],
) -> None:
    """`actual` is nearest the right answer, and not to a wrong one, relative to each vector's length.

    This finds mistakes smaller than the rounding of a single vector, because rounding does not point towards one:
    over N values, its part in that direction is a 1 / sqrt(N) of it.
    """
    got, want = _finite_pair(actual, right)
    lengths = np.linalg.norm(want, axis=-1, keepdims=True)
    for name, answer in wrong.items():
        mistake, error = (answer - want) / lengths, (got - want) / lengths
        assert mistake.any(), f"{name} changes nothing"
        share = float((mistake * error).sum() / (mistake**2).sum())
        assert share < 0.5, f"{share:.2f} of the way from the right answer to that of {name}"


@contextlib.contextmanager
def named_case(*parts: object) -> Iterator[None]:
    """An assertion or `pytest.raises` of the block that fails says which of a test's cases it was."""
    try:
        yield
    except (AssertionError, pytest.fail.Exception) as error:
        raise AssertionError(f"{', '.join(map(str, parts))}: {error}") from error


def _relative_errors(actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Error of each vector along the last axis, by the length of the expected one."""
    got, want = _finite_pair(actual, expected)
    lengths = np.linalg.norm(want, axis=-1)
    assert (lengths > 0).all(), "a vector of zeros has no length to compare with"
    return np.asarray(np.linalg.norm(got - want, axis=-1) / lengths, np.float64)


def _finite_pair(
    actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    assert actual.shape == expected.shape, f"shape {actual.shape}, not {expected.shape}"
    assert actual.size > 0, "nothing to compare"
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(want).all(), "the expected values are not finite"
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} values are not finite"
    return got, want
