"""Small real bundles, made for one test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hdruntime.backends import onnxruntime_cuda
from support.tiny_bundle import hidden_states, make_bundle

BundleMaker = Callable[..., Path]


@pytest.fixture
def new_bundle(tmp_path: Path) -> BundleMaker:
    """Make a bundle at ``tmp_path / "bundle"``; see :func:`support.tiny_bundle.make_bundle` for the options."""

    def make(name: str = "bundle", **options: object) -> Path:
        return make_bundle(tmp_path / name, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of ONNX Runtime's backend for a GPU, with the CPU as its device."""
    monkeypatch.setattr(onnxruntime_cuda, "_providers", lambda gpu: [("CPUExecutionProvider", {})])
    monkeypatch.setattr(onnxruntime_cuda, "CUDA_PROVIDER", "CPUExecutionProvider")
    monkeypatch.setattr(onnxruntime_cuda, "_DEVICE", "cpu")


@pytest.fixture
def bundle_path(new_bundle: BundleMaker) -> Path:
    """A bundle for feature extraction with external weights."""
    return new_bundle(external_data=True)


@pytest.fixture
def model() -> Callable[..., np.ndarray]:
    """The function of the bundles' model: (input_ids, attention_mask=None, padding=None) -> hidden states."""
    return hidden_states
