"""Comparisons that tests assert with; what each must refuse is in test_comparators.py."""

from __future__ import annotations

__all__ = ["assert_as_accurate", "assert_close", "assert_same_directions", "named_case"]

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
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
    """Every error is at most twice PyTorch's largest and a rounding of the dtype, and what is defined as 0 is 0."""
    assert actual.shape == right.shape, f"shape {tuple(actual.shape)}, not {tuple(right.shape)}"
    assert actual.dtype == pytorch.dtype
    assert torch.isfinite(actual).all(), f"{int((~torch.isfinite(actual)).sum())} values are not finite"
    zeros = (right == 0).all(-1)
    assert (actual[zeros] == 0).all(), "a row that sees no key is not 0"
    rounding = torch.finfo(actual.dtype).eps * float(right.abs().max())
    allowed = 2 * float((pytorch.double() - right).abs().max()) + rounding
    error = float((actual.double() - right).abs().max())
    assert error <= allowed, f"error {error:.3g} > {allowed:.3g}"


@contextlib.contextmanager
def named_case(*parts: object) -> Iterator[None]:
    """An assertion of the block that fails says which of a test's cases it was."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{', '.join(map(str, parts))}: {error}") from error


def _finite_pair(
    actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    assert actual.shape == expected.shape, f"shape {actual.shape}, not {expected.shape}"
    assert actual.size > 0, "nothing to compare"
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(want).all(), "the expected values are not finite"
    assert np.isfinite(got).all(), f"{np.count_nonzero(~np.isfinite(got))} values are not finite"
    return got, want
