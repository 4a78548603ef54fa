"""Windows of few rows, so that small jobs have several."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.jobs import windows


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_WINDOW_ROWS", 10)


@pytest.fixture
def bundle(bundle_path: Path, small_windows: None) -> Bundle:
    return open_bundle(bundle_path)
