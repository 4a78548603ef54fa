"""Shards of few rows, so that small jobs have several."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.tasks import text_inference


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 10)


@pytest.fixture
def bundle(bundle_path: Path, small_shards: None) -> Bundle:
    return open_bundle(bundle_path)
