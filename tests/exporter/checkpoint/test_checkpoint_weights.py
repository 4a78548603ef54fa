"""Every weight of a checkpoint is used or named as not needed, and sizes are those of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.trust import UNTRUSTED, Trust
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.grids import nightly_unless
from support.tiny_models import change_json, pickle_weights, save_tiny_model

Weights = dict[str, torch.Tensor]


def change_weights(directory: Path, change: Callable[[Weights], Weights]) -> None:
    weights = change(load_file(directory / "model.safetensors"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def refusal(directory: Path, task: Task = Task.FEATURE_EXTRACTION, *, trust: Trust = UNTRUSTED) -> str:
    with pytest.raises(ModelError) as caught:
        find_checkpoint(directory, trust=trust).load(task)
    return str(caught.value)


def left_out(directory: Path, task: Task) -> list[str]:
    lines: list[str] = []
    find_checkpoint(directory).load(task, report=lines.append)
    return lines


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        nightly_unless(
            model_type == "bert" or (model_type, more) in (("distilbert", 1), ("modernbert", -1)), model_type, more
        )
        for model_type in SUPPORTED_MODEL_TYPES
        for more in (-1, 1)
        if model_type != "albert"
    ],
)
def test_another_number_of_layers_than_the_weights_have_is_refused(model_type: str, more: int, tmp_path: Path) -> None:
    """ALBERT has the weights of one layer for any number of layers."""
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION)
    key = CONFIG_MAPPING[model_type].attribute_map.get("num_hidden_layers", "num_hidden_layers")
    layers = json.loads((tmp_path / "config.json").read_text())[key]
    asked = layers + more
    change_json(tmp_path / "config.json", **{key: asked})
    if "layer_types" in json.loads((tmp_path / "config.json").read_text()):
        change_json(tmp_path / "config.json", layer_types=["full_attention"] * asked, per_layer_config=None)
    expected = (
        f"has {key} {asked}, and the weights are of the layers 0 to {layers - 1}.\nSet {key} to {layers}, or download"
    )
    assert expected in refusal(tmp_path)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_weight_within_the_encoder_that_nothing_uses_is_refused(tiny_bert: Path, prefix: str) -> None:
    name = "encoder.layer.0.adapter.weight"
    change_weights(
        tiny_bert, lambda weights: {prefix + key: value for key, value in (weights | {name: torch.ones(3)}).items()}
    )
    message = refusal(tiny_bert)
    assert f"within the encoder that the model of config.json does not use: {prefix}{name}.\n" in message
    assert "Check that config.json belongs to the weights" in message


def test_a_projection_that_the_configuration_leaves_out_is_refused(tmp_path: Path) -> None:
    """Its shape fits no less without the projection: nothing but the name tells."""
    save_tiny_model(tmp_path, "electra", Task.FEATURE_EXTRACTION, embedding_size=32)
    change_weights(tmp_path, lambda weights: weights | {"embeddings_project.weight": torch.eye(32)})
    assert "does not use: embeddings_project.weight" in refusal(tmp_path)


def test_one_weight_by_two_names_is_refused(tiny_bert: Path) -> None:
    name = "embeddings.word_embeddings.weight"
    change_weights(tiny_bert, lambda weights: weights | {f"bert.{name}": weights[name] + 1})
    assert f"holds one weight by two names, 'bert.{name}' and '{name}'" in refusal(tiny_bert)


@pytest.mark.parametrize(
    ("model_type", "made_for", "task", "groups"),
    [
        ("bert", Task.FEATURE_EXTRACTION, Task.FEATURE_EXTRACTION, "pooler (2 weights)"),
        ("bert", Task.TEXT_CLASSIFICATION, Task.TEXT_CLASSIFICATION, None),
        ("bert", Task.TEXT_CLASSIFICATION, Task.FEATURE_EXTRACTION, "classifier (2 weights), pooler (2 weights)"),
        ("roberta", Task.FILL_MASK, Task.FILL_MASK, None),
        ("modernbert", Task.FILL_MASK, Task.FEATURE_EXTRACTION, "decoder (1 weight), head (2 weights)"),
        ("led", Task.FEATURE_EXTRACTION, Task.FEATURE_EXTRACTION, "decoder (29 weights)"),
    ],
)
def test_what_the_task_does_not_need_is_named(
    model_type: str, made_for: Task, task: Task, groups: str | None, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, model_type, made_for)
    expected = [] if groups is None else [f"Left out of the bundle, because {task} does not use them: {groups}"]
    assert left_out(tmp_path, task) == expected


def test_buffers_that_old_files_hold_are_named_and_no_weights(tiny_bert: Path) -> None:
    ids = {"embeddings.position_ids": torch.arange(64)[None], "embeddings.token_type_ids": torch.zeros(1, 64).long()}
    change_weights(tiny_bert, lambda weights: weights | ids)
    (line,) = left_out(tiny_bert, Task.FEATURE_EXTRACTION)
    assert line.endswith("use them: pooler (2 weights), position_ids (1 weight), token_type_ids (1 weight)")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tiny_bert: Path, dtype: torch.dtype) -> None:
    name = "encoder.layer.1.output.dense.weight"
    change_weights(tiny_bert, lambda weights: weights | {name: weights[name].to(dtype)})
    message = refusal(tiny_bert)
    assert f": {name}. Such a model is quantised" in message
    assert "Build the checkpoint that was quantised; precision='float16' or" in message


def test_a_configuration_of_quantised_weights_is_refused(tiny_bert: Path) -> None:
    change_json(tiny_bert / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "has a quantization_config: the weights are integers" in refusal(tiny_bert)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_labels": 10**9}, "num_labels 1000000000; the maximum is 1048576"),
        ({"hidden_size": 10**9}, "(hidden_size 1000000000).\nSet hidden_size to 32"),
        ({"vocab_size": 10**12}, "[120, 32] in the file, [1000000000000, 32] by config.json (vocab_size"),
        ({"vocab_size": 10**30}, "No bert can be made of"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_of_them_is_made(
    tiny_bert: Path, changes: dict[str, object], message: str
) -> None:
    """They would take terabytes, or years."""
    change_json(tiny_bert / "config.json", **changes)
    assert message in refusal(tiny_bert)


@pytest.mark.parametrize(
    ("index", "file"),
    [
        ("model.safetensors.index.json", "weights.bin"),
        ("model.safetensors.index.json", "model.safetensors.bin"),
        ("pytorch_model.bin.index.json", "weights.bin"),
    ],
)
def test_a_pickle_in_an_index_is_refused_unless_allowed(tiny_bert: Path, index: str, file: str) -> None:
    weights = load_file(tiny_bert / "model.safetensors")
    torch.save(weights, tiny_bert / file)
    (tiny_bert / "model.safetensors").unlink()
    (tiny_bert / index).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, file)}))
    assert "as a pickle (.bin)" in refusal(tiny_bert)
    assert "use allow_pickle=True" in refusal(tiny_bert)
    model = find_checkpoint(tiny_bert, trust=Trust(allow_pickle=True)).load(Task.FEATURE_EXTRACTION)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("file", ["weights.pt", "weights"])
def test_an_index_of_other_files_is_refused_even_where_pickles_are_allowed(tiny_bert: Path, file: str) -> None:
    weights = load_file(tiny_bert / "model.safetensors")
    torch.save(weights, tiny_bert / file)
    (tiny_bert / "model.safetensors").unlink()
    (tiny_bert / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, file)}))
    assert f"names '{file}'; weights are read from .safetensors files" in refusal(
        tiny_bert, trust=Trust(allow_pickle=True)
    )


def test_a_pickle_with_the_suffix_of_safetensors_is_not_unpickled(tiny_bert: Path) -> None:
    torch.save(load_file(tiny_bert / "model.safetensors"), tiny_bert / "weights.bin")
    (tiny_bert / "weights.bin").replace(tiny_bert / "model.safetensors")
    assert "model.safetensors cannot be read: Error while deserializing header" in refusal(
        tiny_bert, trust=Trust(allow_pickle=True)
    )


def test_a_pickle_of_other_things_than_weights_is_refused(tiny_bert: Path) -> None:
    pickle_weights(tiny_bert, {"state_dict": {"a": torch.ones(1)}, "epoch": 3})
    assert "pytorch_model.bin cannot be read as weights" in refusal(tiny_bert, trust=Trust(allow_pickle=True))


def test_shards_in_half_precision_are_put_together_in_float32(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "bert", Task.FEATURE_EXTRACTION).to(torch.bfloat16)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight.float()), name


def test_other_files_of_weights_than_the_usual_are_refused(tiny_bert: Path) -> None:
    change_json(tiny_bert / "config.json", transformers_weights="other.safetensors")
    assert "says that the weights are in 'other.safetensors'" in refusal(tiny_bert)
