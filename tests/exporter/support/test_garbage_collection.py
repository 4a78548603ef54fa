"""Rare garbage collection: rarer, not off, and over when it is over."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest

from hdexport.support.garbage_collection import rare_garbage_collection


@pytest.fixture(autouse=True)
def same_thresholds_afterwards() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("before", "meanwhile"), [(700, 50_000), (100_000, 100_000), (0, 0)])
def test_collections_are_rarer_until_the_end(before: int, meanwhile: int) -> None:
    gc.set_threshold(before, 11, 12)
    with contextlib.suppress(ZeroDivisionError), rare_garbage_collection():
        assert gc.get_threshold()[0] == meanwhile
        raise ZeroDivisionError
    assert gc.get_threshold()[0] == before
