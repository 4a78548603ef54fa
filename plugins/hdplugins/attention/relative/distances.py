"""Which distances a query of relative attention sees."""

from __future__ import annotations


def check_distances(*, causal: int, reach: int) -> None:
    """Refuse attributes that define nothing.

    Raises:
        ValueError: one is out of its range.
    """
    if causal not in (0, 1):
        raise ValueError(f"causal is {causal}; it must be 0 or 1.")
    if reach < 0:
        raise ValueError(f"reach is {reach}; it must be 0 or more.")
