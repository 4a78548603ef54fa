"""Which cases of a grid every run tries."""

from __future__ import annotations

__all__ = ["nightly_unless"]

from typing import Any

import pytest


def nightly_unless(every_run: bool, *values: Any) -> Any:
    """A case that every run tries, or one that repeats the claim of those and waits for `make test-all`."""
    return pytest.param(*values, marks=() if every_run else pytest.mark.nightly)
