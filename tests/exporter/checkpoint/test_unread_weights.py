"""Weights beside a checkpoint's model that a bundle lacks are named; other files of the same weights are not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hdexport.build import BuildOptions, build
from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.ignored_keys import ignored_keys
from hdexport.extend import ExtendOptions, extend
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError, write
from support.comparators import named_case
from support.hub_server import served_hub
from support.tiny_models import change_json, save_sentence_modules, save_tiny_model

HEADS = ("colbert_linear.pt", "sparse_linear.pt")


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    """A tiny embedder in the layout of BAAI/bge-m3, without its heads."""
    path = tmp_path / "embedder"
    save_tiny_model(path, "xlm-roberta", Task.FEATURE_EXTRACTION)
    save_sentence_modules(path, "Normalize", pooling={"pooling_mode_cls_token": True})
    assert lines(path) == []
    return path


def lines(path: Path, task: Task = Task.SENTENCE_SIMILARITY) -> list[str]:
    return [write(line) for line in ignored_keys(find_checkpoint(path), task)]


def save_heads(path: Path) -> None:
    for name, width in zip(HEADS, (32, 1), strict=True):
        torch.save(torch.nn.Linear(32, width).half().state_dict(), path / name)


def save_layer(file: Path) -> None:
    file.parent.mkdir(exist_ok=True, parents=True)
    if file.suffix == ".safetensors":
        save_file(torch.nn.Linear(32, 8).state_dict(), file)
    elif file.suffix == ".npy":
        np.save(file, np.eye(32))
    else:
        torch.save(torch.nn.Linear(32, 8).state_dict(), file)


def test_bge_m3s_heads_are_named_with_what_computes_them(embedder: Path) -> None:
    save_heads(embedder)
    (line,) = lines(embedder)
    assert all(name in line for name in HEADS)
    assert "hybrid-similarity" in line
    assert lines(embedder, Task.HYBRID_SIMILARITY) == []


@pytest.mark.parametrize("task", [Task.SPARSE_SIMILARITY, Task.TOKEN_SIMILARITY])
@pytest.mark.parametrize("has_modules", [True, False])
def test_no_task_gets_another_head_than_bge_m3s(embedder: Path, tmp_path: Path, task: Task, has_modules: bool) -> None:
    if not has_modules:
        # Its masked language model's head would give other sparse vectors.
        shutil.rmtree(embedder)
        save_tiny_model(embedder, "xlm-roberta", Task.FILL_MASK)
    save_heads(embedder)
    file = "sparse_linear.pt" if task is Task.SPARSE_SIMILARITY else "colbert_linear.pt"
    with pytest.raises(
        ModelError, match=rf"its head for {task.value} in {file}, beside two others(.|\n)*hybrid-similarity"
    ):
        build(BuildOptions(model=embedder, output=tmp_path / "bundle", max_len=32, task=task, verify=None))


UNREAD = (
    "linear.pt",
    "mlp.pt",
    "head.bin",
    "whitening.npy",
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "projection.safetensors",
)


@pytest.mark.parametrize("name", UNREAD)
def test_a_layer_that_no_module_names_is_named(embedder: Path, name: str) -> None:
    save_layer(embedder / name)
    (line,) = lines(embedder)
    assert name in line
    assert "are not read" in line


def test_many_layers_are_one_line(embedder: Path) -> None:
    for name in UNREAD:
        save_layer(embedder / name)
    (line,) = lines(embedder)
    # The two files of 2_Dense have the same weights.
    assert line.count("2_Dense") == 1
    assert "and " not in line.partition(": files")[0]


def test_setfits_classifier_is_named(embedder: Path) -> None:
    (embedder / "model_head.pkl").write_bytes(b"")
    (line,) = lines(embedder)
    assert "model_head.pkl is left out: a bundle gives the embeddings that the classifier takes" in line


def test_other_files_of_the_same_weights_are_not_named(embedder: Path) -> None:
    weights = load_file(embedder / "model.safetensors")
    half = {name: weight.half() for name, weight in weights.items()}
    for name in ("model.fp16.safetensors", "weights-in-half.safetensors", "model-00001-of-00002.safetensors"):
        save_file(half, embedder / name)
    for name in (
        "pytorch_model.bin",
        "pytorch_model.fp16.bin",
        "pytorch_model-00001-of-00002.bin",
        "consolidated.00.pth",
    ):
        torch.save(half, embedder / name)
    for name in ("tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx", "openvino_model.bin"):
        (embedder / name).write_bytes(b"")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth", "rng_state_0.pth", "vocab.bin"):
        torch.save({}, embedder / name)
    for name in ("onnx/model_quantized.bin", "openvino/openvino_model.bin", ".cache/head.pt"):
        save_layer(embedder / name)
    save_tiny_model(embedder / "checkpoint-500", "bert", Task.FEATURE_EXTRACTION)
    torch.save({}, embedder / "checkpoint-500" / "optimizer.pt")
    (embedder / "lora").mkdir()
    save_layer(embedder / "lora" / "adapter_model.safetensors")
    change_json(embedder / "lora" / "adapter_config.json", peft_type="LORA")
    assert lines(embedder) == []


def test_a_modules_own_weights_are_not_named_and_those_of_its_other_sizes_are(embedder: Path) -> None:
    """As in stella: a folder for each width, of which modules.json names one."""
    for width in (16, 24):
        folder = embedder / f"2_Dense_{width}"
        folder.mkdir()
        save_file(torch.nn.Linear(32, width).state_dict(prefix="linear."), folder / "model.safetensors")
        change_json(folder / "config.json", in_features=32, out_features=width, bias=True)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense_16": "Dense"}
    modules = [{"path": folder, "type": f"sentence_transformers.models.{kind}"} for folder, kind in kinds.items()]
    (embedder / "modules.json").write_text(json.dumps(modules))
    (line,) = lines(embedder)
    assert "2_Dense_24/model.safetensors" in line
    assert "2_Dense_16" not in line


def test_damaged_files_beside_the_model_are_named_and_stop_nothing(embedder: Path) -> None:
    save_layer(embedder / "notes" / "head.pt")
    (embedder / "notes" / "config.json").write_text("not JSON")
    (embedder / "extra.safetensors").write_bytes(b"\x00" * 20)
    (line,) = lines(embedder)
    assert "extra.safetensors, notes/head.pt" in line


def test_weights_that_an_extended_checkpoint_does_not_hold_are_named(
    embedder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_heads(embedder)
    save_layer(embedder / "linear.pt")
    extend(ExtendOptions(model=embedder, output=tmp_path / "extended", max_len=100))
    assert all(name in caplog.text for name in (*HEADS, "linear.pt"))
    assert caplog.text.count("The extended checkpoint does not hold them.") == 2


def test_heads_on_the_hub_are_downloaded_and_named(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_heads(embedder)
    with served_hub(tmp_path, monkeypatch) as hub:
        hub.push("someone/bge-m3", embedder)
        found = find_checkpoint("someone/bge-m3")
        for name in HEADS:
            with named_case(name):
                assert any(name in write(line) for line in ignored_keys(found, Task.SENTENCE_SIMILARITY))
