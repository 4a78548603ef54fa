"""Baselines of other products run the model of a bundle, and wrong outputs of theirs show."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.baselines import BASELINES, openvino
from hdexport.bench.run.worker import open_case
from hdexport.model.graph_module import GraphModule, graph_inputs
from hdruntime.backends.precision import Precision
from hdruntime.bundle.manifest import Manifest, Task
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendUnavailableError
from hdruntime.optional import require
from support.bench_workshop import assert_right
from support.code_models import save_slopes

NEEDS_OPTIMUM = pytest.mark.skipif(
    shutil.which("optimum-cli") is None,
    reason="optimum-cli is not on the PATH: pipx install 'optimum-onnx[onnxruntime]'",
)


@pytest.fixture
def manifest(workshop: Any) -> Manifest:
    """Of the tiny BERT for feature extraction."""
    return open_bundle(workshop("bert").subject.bundle).manifest


@pytest.mark.parametrize(
    ("baseline", "of_bundle"),
    [
        ("sentence-transformers", ("longformer",)),
        ("sentence-transformers", ("bert", "sentence-similarity")),
        pytest.param("openvino", ("bert", "sentence-similarity"), marks=pytest.mark.nightly),
        pytest.param("openvino", ("qwen3",), marks=pytest.mark.nightly),
        pytest.param("optimum", ("bert",), marks=NEEDS_OPTIMUM),
    ],
)
def test_another_product_is_right_at_every_length(workshop: Any, baseline: str, of_bundle: tuple[str, ...]) -> None:
    assert_right(workshop(*of_bundle), baseline)


def test_openvino_says_what_it_computes_in_and_prints_nothing(
    shallow: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Scales of a few texts serve for so small a model.
    monkeypatch.setattr(openvino, "_TEXTS", 16)
    case = shallow("bert")
    case.prepare_shapes([(3, 65)])
    capfd.readouterr()
    default = Precision(openvino.default_type())
    remarks = {
        "openvino": None,
        "openvino-default": f"computes in {default.value}, its default on this CPU",
        "openvino-int8": f"int8 by NNCF, with scales of 16 texts; the rest computes in {default.value}",
    }
    computes_in = {"openvino": Precision.FLOAT32, "openvino-default": default, "openvino-int8": Precision.INT8}
    for baseline, remark in remarks.items():
        made = case.artefact(baseline)
        assert made.remark == remark
        assert open_case(case.spec(baseline, 3, 65, made.artefact)).precision is computes_in[baseline]
        found = case.error(baseline, 3, 65, made.artefact)
        assert found.passed, found
        assert (found.tolerance == "abs 0.0001 or 2 ulp") == (computes_in[baseline] is Precision.FLOAT32)
        # Float32 would pass for any of them.
        assert (found.size > 1e-4) == (computes_in[baseline] is not Precision.FLOAT32)
    assert capfd.readouterr() == ("", "")
    int8 = (case.folder / "openvino-int8" / openvino.MODEL_FILE).read_text()
    assert 'element_type="i8"' in int8
    assert "FakeQuantize" in int8


def test_openvino_s_inputs_have_the_module_s_names(tmp_path: Path) -> None:
    """A model that takes its mask on as it is left the number of a value of the trace in the place of a name."""
    module = GraphModule(save_slopes(tmp_path), Task.FEATURE_EXTRACTION, inputs=graph_inputs(token_types=0)).eval()
    ids = np.ones((1, 37), np.int64)
    openvino._write_converted(module, tmp_path / "model.xml", {"input_ids": ids, "attention_mask": ids})
    model = require("openvino").Core().read_model(tmp_path / "model.xml")
    assert [value.any_name for value in model.inputs] == ["input_ids", "attention_mask"]


def test_openvino_in_float16_as_on_arm_is_compared_as_half_precision(
    shallow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openvino as installed

    monkeypatch.setattr(installed.Core, "get_property", lambda *_: installed.Type.f16)
    case = shallow("bert")
    case.prepare_shapes([(1, 5)])
    made = case.artefact("openvino-default")
    assert made.remark == "computes in float16, its default on this CPU"
    opened = open_case(case.spec("openvino-default", 1, 5, made.artefact))
    assert (opened.half_precision, opened.precision) == (True, Precision.AUTO)


def test_onnx_runtime_without_a_gpu_is_refused_for_one(workshop: Any) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime runs on NVIDIA GPUs")
    case = workshop("bert")
    for baseline in ("onnx-plain", "optimum"):
        with pytest.raises(
            BackendUnavailableError, match=r"has no CUDAExecutionProvider: .*pip install 'hdexport\[gpu"
        ):
            BASELINES[baseline].prepare(case.subject, case.folder, device="cuda")


def test_sentence_transformers_only_embeds(manifest: Manifest) -> None:
    baseline = BASELINES["sentence-transformers"]
    assert baseline.unavailable(manifest) is None
    fill_mask = dataclasses.replace(manifest, task="fill-mask")
    assert baseline.unavailable(fill_mask) == "it embeds texts, and the bundle's task is fill-mask"
    for model_type in ("led", "bigbird_pegasus"):
        refusal = baseline.unavailable(dataclasses.replace(manifest, model_type=model_type))
        assert refusal == f"it runs the decoder of a {model_type} as well, and the bundle is the encoder"


def test_a_missing_product_comes_with_its_installation(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    gone = ("torch", "openvino", "nncf", "sentence_transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    others = list(BASELINES)[3:]
    assert {name: BASELINES[name].unavailable(manifest) for name in others} == {
        **dict.fromkeys(
            ["openvino", "openvino-default", "openvino-int8"],
            "openvino, torch are not installed: pip install 'hdexport[export,openvino]'",
        ),
        "optimum": "optimum-cli is not on the PATH: pipx install 'optimum-onnx[onnxruntime]'",
        "sentence-transformers": "sentence_transformers is not installed: pip install sentence-transformers",
    }
