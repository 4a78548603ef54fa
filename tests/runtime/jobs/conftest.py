"""Portions of few rows, so that small jobs have several."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.jobs import portions


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "_PORTION_ROWS", 10)


@pytest.fixture
def bundle(bundle_path: Path, small_portions: None) -> Bundle:
    return open_bundle(bundle_path)
