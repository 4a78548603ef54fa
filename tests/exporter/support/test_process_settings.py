"""A process that traces looks for cycles rarely, and its threads heed a quota and sleep."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hdexport.support.process_settings import rare_garbage_collection
from hdruntime import process_limits
from support.commands import run_here


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


@pytest.mark.parametrize(
    ("quota", "asked", "expected"), [("50000", None, "1"), ("50000", "3", "3"), ("max", None, None)]
)
def test_openmp_has_no_more_threads_than_the_quota(
    quota: str, asked: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr(process_limits, "_groups", lambda controller, root: [(2, tmp_path)])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    run_here("inspect", tmp_path / "none")
    assert os.environ.get("OMP_NUM_THREADS") == expected
