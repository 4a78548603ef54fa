"""Which reaches attention by distance takes."""

from __future__ import annotations


def check_reach(reach: int) -> None:
    """Refuse a reach that leaves nothing to tell apart.

    Raises:
        ValueError: it is below 1.
    """
    if reach < 1:
        raise ValueError(f"reach is {reach}; it must be 1 or more.")
