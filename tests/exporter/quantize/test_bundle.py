"""Int8 graphs of tiny bundles: which products, near the float graph, and padding changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import hdruntime
from hdexport.quantize import Int8Options
from hdexport.quantize.bundle import quantize_bundle
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import ExportError, InputError
from support.needs import needs_openvino
from support.tiny_bundle import make_bundle


@pytest.fixture(scope="module")
def quantized(openvino_bundles, tmp_path_factory):
    """Makes int8 copies of tiny bundles, with graphs for OpenVINO, one of each."""
    made: dict[str, Path] = {}

    def make(model_type: str, **options) -> Path:
        name = repr((model_type, options))
        if name not in made:
            path = tmp_path_factory.mktemp("int8") / "bundle"
            shutil.copytree(openvino_bundles(model_type, **options).path, path)
            quantize_bundle(open_bundle(path), Int8Options())
            made[name] = path
        return made[name]

    return make


def int8_weights(bundle: Path, lowering: str = "onnxruntime_cpu") -> set[str]:
    model = ir.load(bundle / f"{lowering}_int8.onnx")
    return {name.removesuffix(".int8") for name in model.graph.initializers if name.endswith(".int8")}


MODELS = [
    pytest.param("bert", {}, id="bert"),
    pytest.param("bert", {"attention": "window:16", "ffn_chunk": 48}, id="windows and loops"),
    pytest.param("t5", {}, id="t5"),
    pytest.param("xlnet", {}, id="xlnet", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("model_type", "options"), MODELS)
def test_answers_are_near_the_float_graphs(quantized, model_type: str, options) -> None:
    path = quantized(model_type, **options)
    record = open_bundle(path).manifest.int8
    assert record is not None
    assert record.int8_weights == len(int8_weights(path))
    assert record.int8_weights + len(record.float_weights) >= 6
    ids = np.random.default_rng(3).integers(5, open_bundle(path).manifest.vocab_size, (3, 40))
    exact = hdruntime.load(path, backend="onnxruntime", threads=1)(input_ids=ids)
    found = hdruntime.load(path, backend="onnxruntime", threads=1, precision="int8")(input_ids=ids)
    for name in exact:
        vectors = [each[name].reshape(-1, each[name].shape[-1]) for each in (exact, found)]
        cosines = (vectors[0] * vectors[1]).sum(1) / np.prod([np.linalg.norm(each, axis=1) for each in vectors], axis=0)
        assert cosines.min() > 0.995
        assert not np.array_equal(*vectors)


def test_only_products_of_layers_are_int8(quantized) -> None:
    weights = int8_weights(quantized("bert", task="fill-mask"))
    assert weights
    assert all(".layer." in name for name in weights)


def test_activations_are_rounded_with_one_scale(quantized) -> None:
    """Where QuantizeLinear has scales of channels, ONNX Runtime rounds value by value, and float32 is faster."""
    model = ir.load(quantized("bert") / "onnxruntime_cpu_int8.onnx")
    scales = [node.inputs[1] for node in model.graph.all_nodes() if node.op_type == "QuantizeLinear"]
    assert scales
    assert {scale.name for scale in scales} == {"int8.one"}
    assert model.graph.initializers["int8.one"].shape == ()


def test_int8_weights_are_stored_once_and_float_ones_are_shared(quantized) -> None:
    path = quantized("bert")
    stored = {file.name for file in path.glob("*.data")}
    assert stored == {"model.onnx.data", "int8.onnx.data"}
    bundle = open_bundle(path)
    assert {"onnxruntime_cpu_int8.onnx", "int8.onnx.data"} <= set(bundle.manifest.files)


@pytest.mark.parametrize("backend", ["onnxruntime", pytest.param("openvino", marks=needs_openvino)])
def test_padding_on_the_right_changes_no_answer(quantized, backend: str) -> None:
    with hdruntime.load(quantized("bert"), backend, threads=1, precision="int8") as session:
        ids = np.random.default_rng(4).integers(5, session.manifest.vocab_size, (3, 40))
        mask = (np.arange(40) < np.array([[3], [17], [40]])).astype(np.int64)
        together = session(input_ids=ids, attention_mask=mask)["last_hidden_state"]
        for row, length in enumerate((3, 17, 40)):
            alone = session(input_ids=ids[row : row + 1, :length])["last_hidden_state"][0]
            np.testing.assert_allclose(together[row, :length], alone, atol=1e-6)
        others = session(input_ids=ids[:, ::-1])["last_hidden_state"]
        assert np.abs(others[2] - together[2]).max() > 1e-2


def test_a_model_without_products_of_layers_is_refused(tmp_path) -> None:
    path = make_bundle(tmp_path / "bundle")
    with pytest.raises(ExportError, match="have no matmul with a weight"):
        quantize_bundle(open_bundle(path), Int8Options())


def test_calibration_texts_that_cannot_be_read_are_refused(tmp_path) -> None:
    (tmp_path / "texts.txt").write_text("\n  \n")
    options = Int8Options(calibrate=tmp_path / "texts.txt")
    with pytest.raises(InputError, match=r"no text that is not blank.\nName another file or folder with calibrate"):
        quantize_bundle(open_bundle(make_bundle(tmp_path / "bundle")), options)
