"""A checkpoint to be changed or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdruntime.bundle.manifest import Task
from support.tiny_models import save_tiny_model


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    """A tiny BERT of 2 layers, of this test alone."""
    save_tiny_model(tmp_path / "tiny-bert", "bert", Task.FEATURE_EXTRACTION)
    return tmp_path / "tiny-bert"
