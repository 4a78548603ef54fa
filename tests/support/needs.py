"""What tests need that not every machine has."""

from __future__ import annotations

import importlib.util

import pytest

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None or importlib.util.find_spec("polygraphy") is None,
    reason="TensorRT-RTX (which builds engines without a GPU) or Polygraphy is not installed",
)
