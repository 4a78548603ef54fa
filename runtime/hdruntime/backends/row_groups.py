"""The rows of a batch whose padding a backend can cut off: by length, those that are padded otherwise apart."""

from __future__ import annotations

__all__ = ["equal_length_groups", "right_padded_rows"]

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


def equal_length_groups(
    attention_mask: npt.NDArray[np.int64],
) -> Iterator[tuple[npt.NDArray[np.intp], int | None]]:
    """Group the rows of a batch whose padding is on the right only by their length.

    Args:
        attention_mask: int64 [batch, tokens], 1 for real tokens, 0 for padding.

    Yields:
        the indices of a group's rows, ascending, and their length; at last, if there are any, the rows whose
        mask is another (padding on the left, holes, nothing but padding) and None.
    """
    lengths = attention_mask.sum(axis=1)
    right_padded = right_padded_rows(attention_mask)
    for length in np.unique(lengths[right_padded]):
        yield np.flatnonzero(right_padded & (lengths == length)), int(length)
    if not right_padded.all():
        yield np.flatnonzero(~right_padded), None


def right_padded_rows(attention_mask: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[batch], which rows have real tokens first, at least one, and padding after them, if any."""
    # The mask never rises along such a row, and starts with a one.
    return (np.diff(attention_mask, axis=1) <= 0).all(axis=1) & (attention_mask[:, 0] == 1)
