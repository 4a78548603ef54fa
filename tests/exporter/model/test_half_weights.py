"""A model in half precision is built and verified with its weights as they are, and its bundle is equal to the bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

import hdruntime
from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.model.half_weights import UpcastWeights, VirtualWeights
from hdexport.verify.grid import Grid
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ExportError, OutOfMemoryError
from support.grids import nightly_unless
from support.tiny_models import VOCAB_SIZE

from ..conftest import save_checkpoint

MAX_LEN = 100


@pytest.fixture
def every_weight_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdexport.model.half_weights.MIN_MODEL_BYTES", 1)
    # More values than those of constants that a trace folds or merges.
    monkeypatch.setattr("hdexport.model.half_weights._MIN_WEIGHT_BYTES", 2 * 1025)


def saved(directory: Path, *arguments: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> BuildOptions:
    """A tiny checkpoint whose weights are in half precision."""
    made = save_checkpoint(directory, *arguments, max_len=MAX_LEN, **options)
    file = Path(made.model) / "model.safetensors"
    weights = {
        name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return made


def stored_types(bundle: Path) -> dict[str, ir.DataType | None]:
    """Name -> dtype of each matrix of the portable graph."""
    initializers = ir.load(bundle / "model.onnx").graph.initializers
    return {name: value.dtype for name, value in initializers.items() if len(value.shape or ()) == 2}


def outputs(bundle: Path, backend: str, tokens: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(tokens).integers(5, VOCAB_SIZE, (2, tokens))
    mask = np.ones_like(ids)
    mask[1, tokens // 2 + 1 :] = 0
    with hdruntime.load(bundle, backend, precision="float32", threads=1) as session:
        feeds = {"input_ids": ids, "attention_mask": mask}
        others = {spec.name: np.zeros_like(ids) for spec in session.manifest.inputs if spec.name not in feeds}
        return session(**feeds, **others)


@pytest.mark.parametrize(
    ("model_type", "task", "dtype"),
    [
        nightly_unless(model_type == "qwen3" and task == "feature-extraction", model_type, task, dtype)
        for model_type, task, dtype in (
            ("qwen3", "feature-extraction", torch.bfloat16),
            ("qwen3", "text-classification", torch.bfloat16),
            ("bert", "fill-mask", torch.float16),
            ("gemma3_text", "feature-extraction", torch.bfloat16),
            ("modernbert", "sentence-similarity", torch.bfloat16),
            ("t5", "feature-extraction", torch.bfloat16),
            ("performer", "feature-extraction", torch.float16),
            ("qwen3_moe", "feature-extraction", torch.bfloat16),
        )
    ],
)
def test_outputs_are_those_of_float32_weights(
    tmp_path: Path, every_weight_is_large: None, model_type: str, task: str, dtype: torch.dtype
) -> None:
    options = saved(tmp_path, model_type, task, dtype=dtype, openvino=True)
    # In bfloat16 a token near a tie goes to another expert, so a random mixture's bfloat16 is not PyTorch's float32.
    chooses = model_type == "qwen3_moe"
    options = dataclasses.replace(options, unverified=chooses)
    half = dataclasses.replace(options, output=tmp_path / "half", verify=None if chooses else Grid.QUICK)
    full = dataclasses.replace(options, output=tmp_path / "full", fp32_weights=True)
    verification = build(half).verification
    assert verification is None if chooses else verification.passed
    build(full)
    stored = ir.DataType.BFLOAT16 if dtype is torch.bfloat16 else ir.DataType.FLOAT16
    types = stored_types(half.output)
    assert list(types.values()).count(stored) >= 4
    assert set(stored_types(full.output).values()) == {ir.DataType.FLOAT}
    assert (half.output / "model.onnx.data").stat().st_size < 0.9 * (full.output / "model.onnx.data").stat().st_size
    for backend in ("onnxruntime", "openvino"):
        for tokens in (1, 50, MAX_LEN):
            wanted, got = outputs(full.output, backend, tokens), outputs(half.output, backend, tokens)
            assert {name: array.tobytes() for name, array in got.items()} == {
                name: array.tobytes() for name, array in wanted.items()
            }


def test_a_small_model_gets_fp32_weights(tmp_path: Path) -> None:
    options = saved(tmp_path, "qwen3")
    build(options)
    assert set(stored_types(options.output).values()) == {ir.DataType.FLOAT}


def test_buffers_and_tables_of_positions_are_float32(tmp_path: Path, every_weight_is_large: None) -> None:
    options = saved(tmp_path, "performer")
    model = find_checkpoint(options.model).load(Task.FEATURE_EXTRACTION, keeps_half=True)
    plain = find_checkpoint(options.model).load(Task.FEATURE_EXTRACTION)
    wanted = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert torch.equal(value.float(), wanted[name].float())
    assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {torch.float32}


def test_a_trace_that_computes_with_values_of_weights_is_rejected(
    tmp_path: Path, every_weight_is_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdexport.model.half_weights._MIN_WEIGHT_BYTES", 1)
    options = saved(tmp_path, "mpnet")  # folds its small table of relative positions
    with pytest.raises(ExportError, match="with weights in half precision") as raised:
        build(options)
    assert "fp32_weights" in str(raised.value)
    build(dataclasses.replace(options, fp32_weights=True))


def test_half_precision_is_upcast_where_it_is_used() -> None:
    layer, table = torch.nn.Linear(8, 4).bfloat16(), torch.nn.Embedding(5, 8).bfloat16()
    stack, ids = torch.ones(3, 4, 8).bfloat16(), torch.tensor([[1, 2]])
    with UpcastWeights(), torch.inference_mode():
        rows = table(ids)
        used = [rows, layer(rows), rows @ layer.weight.T, layer.weight + 1, torch.cat([layer.weight, layer.weight])]
        used.append(rows @ stack[1].T)
        part = stack[1]
        assert layer.weight.dtype is torch.float32
        assert layer.weight.shape == (4, 8)
    assert {tensor.dtype for tensor in used} == {torch.float32}
    wanted = torch.nn.functional.linear(table.weight[ids].float(), layer.weight.float(), layer.bias.float())
    assert torch.equal(used[1], wanted)
    assert layer.weight.dtype is torch.bfloat16
    assert part.data_ptr() == stack[1].data_ptr(), "no copy of the weights of all experts"


def test_views_of_virtual_weights_are_views_of_the_stored_ones() -> None:
    layer = torch.nn.Linear(8, 4, bias=False).bfloat16()
    stored = layer.weight
    virtual = VirtualWeights(layer)
    assert layer.weight.dtype is torch.float32
    traced = layer.weight.detach().numpy()
    assert torch.equal(virtual.half_of(traced), stored)
    assert torch.equal(virtual.half_of(traced.T), stored.T)
    assert virtual.half_of(traced.copy()) is None


def test_copies_of_weights_that_do_not_fit_are_rejected_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = saved(tmp_path, "bert")
    read: list[Path] = []
    monkeypatch.setattr("hdexport.checkpoint.loading.read_weights", read.append)
    monkeypatch.setattr("hdexport.checkpoint.weight_sizes.free_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"GB in float32, and 0\.0 GB are free"):
        find_checkpoint(options.model).load(Task.FEATURE_EXTRACTION)
    assert not read
    assert not options.output.exists()


@pytest.mark.usefixtures("every_weight_is_large")
def test_weights_that_stay_in_the_file_need_no_memory_for_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = saved(tmp_path, "bert")
    size = 2 * (Path(options.model) / "model.safetensors").stat().st_size
    for module in ("weight_sizes", "agreement"):
        monkeypatch.setattr(f"hdexport.checkpoint.{module}.free_bytes", lambda: size // 2, raising=False)
    checkpoint = find_checkpoint(options.model)
    with pytest.raises(OutOfMemoryError):
        checkpoint.load(Task.FEATURE_EXTRACTION)
    model = checkpoint.load(Task.FEATURE_EXTRACTION, keeps_half=True)
    assert model.get_input_embeddings().weight.dtype is torch.bfloat16
