"""8-bit weights of large models: no calibration, the same outputs in every batch, each weight once in the files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

import hdruntime
from hdexport.build import build
from hdexport.quantize import Int8Options
from hdexport.quantize.dynamic import quantized
from hdexport.verify.grid import Grid
from hdruntime.errors import InputError
from support.tiny_models import VOCAB_SIZE

from ..conftest import save_checkpoint

pytest.importorskip("openvino")


@pytest.mark.parametrize("axis", [0, 1])
def test_weights_are_within_a_step(axis: int) -> None:
    weight = np.random.default_rng(0).normal(size=(40, 30)).astype(np.float32)
    weight[:, 3] = weight[5] = 0
    weight[:, 4] = np.abs(weight[:, 4])  # 0 is among the values of a weight without negative numbers, too
    parts = quantized(weight, axis=axis)
    shape = (30,) if axis == 0 else (40, 1)
    assert {name: (array.dtype.name, array.shape) for name, array in parts.items()} == {
        "values": ("uint8", weight.shape),
        "scale": ("float32", shape),
        "zero_point": ("uint8", shape),
    }
    again = (parts["values"].astype(np.float32) - parts["zero_point"]) * parts["scale"]
    assert (np.abs(again - weight) <= 1.0001 * parts["scale"]).all()
    assert (again[weight == 0] == 0).all()


@pytest.fixture
def every_model_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdexport.quantize.bundle.MIN_PARAMETERS", 1)
    monkeypatch.setattr("hdexport.graph.targets.openvino.target._LARGE_BYTES", 1)
    monkeypatch.setattr("hdexport.quantize.dynamic._MIN_TABLE_ROWS", 1)
    monkeypatch.setattr("hdexport.quantize.dynamic._TABLE_BLOCK", 7)


def test_a_large_model_needs_no_calibration(tmp_path: Path, every_model_is_large: None) -> None:
    options = save_checkpoint(tmp_path, "qwen3", max_len=100, openvino=True)
    manifest = build(dataclasses.replace(options, int8=Int8Options(), verify=Grid.QUICK))
    assert manifest.verification.passed
    assert "openvino_int8.onnx and openvino_unpadded_int8.onnx" in manifest.verification.graphs
    assert (manifest.int8.texts, manifest.int8.min_cosine) == (None, None)
    for name in ("openvino_int8", "openvino_unpadded_int8"):
        graph = ir.load(options.output / f"{name}.onnx").graph
        matrices = {key: value.const_value for key, value in graph.initializers.items() if len(value.shape) == 2}
        stored = {key: value for key, value in matrices.items() if value.dtype is ir.DataType.UINT8}
        assert len(stored) >= manifest.int8.int8_weights
        assert {value.location for value in stored.values()} == {"int8.onnx.data"}
        assert not [key for key in matrices if key.endswith("proj.weight.transposed")]
    size = sum(value.nbytes for value in matrices.values() if value.dtype is ir.DataType.UINT8)
    assert size <= (options.output / "int8.onnx.data").stat().st_size < 1.6 * size + 64 * 1024
    ids = np.random.default_rng(0).integers(5, VOCAB_SIZE, (3, 40))
    with hdruntime.load(options.output, "openvino", precision="int8", threads=1) as session:
        together = session(input_ids=ids, attention_mask=np.ones_like(ids))["last_hidden_state"]
        alone = session(input_ids=ids[1:2], attention_mask=np.ones_like(ids[:1]))["last_hidden_state"]
    assert np.array_equal(together[1:2], alone)


def test_experts_are_quantized_and_the_choice_of_experts_is_not(
    tmp_path: Path, every_model_is_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has each expert's weights by itself, in bfloat16, which the float graphs keep."""
    monkeypatch.setattr("hdexport.model.half_weights.MIN_MODEL_BYTES", 1)
    monkeypatch.setattr("hdexport.model.half_weights._MIN_WEIGHT_BYTES", 2 * 1025)
    options = save_checkpoint(tmp_path, "qwen3_moe", max_len=100, openvino=True)
    file = options.model / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    build(dataclasses.replace(options, int8=Int8Options(), unverified=True))
    of_graph = {
        graph: {
            name: value.dtype
            for name, value in ir.load(options.output / f"{graph}.onnx").graph.initializers.items()
            if ".mlp." in name and len(value.shape) > 1
        }
        for graph in ("model", "openvino_int8")
    }
    for graph, dtype in (("model", ir.DataType.BFLOAT16), ("openvino_int8", ir.DataType.UINT8)):
        experts = [found for name, found in of_graph[graph].items() if ".experts." in name]
        assert experts == [dtype] * (2 * 2 * 5), "two layers of five experts with two weights"
        routers = [found for name, found in of_graph[graph].items() if ".experts." not in name]
        assert len(routers) == 2
        assert ir.DataType.UINT8 not in routers


@pytest.mark.nightly
def test_options_without_effect_are_rejected(tmp_path: Path, every_model_is_large: None) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("A text.\n")
    options = save_checkpoint(tmp_path, "bert", max_len=100, openvino=True)
    with pytest.raises(InputError, match="without calibration"):
        build(dataclasses.replace(options, int8=Int8Options(calibrate=texts)))
    with pytest.raises(InputError, match="are for OpenVINO") as raised:
        build(dataclasses.replace(options, targets=(), int8=Int8Options()))
    assert "targets='openvino'" in str(raised.value)
    assert not options.output.exists()
