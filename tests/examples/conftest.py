"""The bundle that the tutorial builds; the examples use it as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sample_model import tutorial_bundle


@pytest.fixture(scope="session")
def sample_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tutorial's own command builds. Not to be changed."""
    return tutorial_bundle(tmp_path_factory)
