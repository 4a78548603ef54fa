"""How many threads OpenMP has, and so PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hdruntime import process_limits
from support.commands import run_here


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
