"""A checkpoint is found, named and loaded, or refused with what is wrong and what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.trust import Trust
from hdexport.families import SUPPORTED_MODEL_TYPES, family_of
from hdexport.model.task import ENCODER_TASKS
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.family_tasks import tasks_of
from support.grids import nightly_unless
from support.tiny_models import change_json, pickle_weights, save_tiny_model

WITH_HEADS = [name for name in SUPPORTED_MODEL_TYPES if family_of(name).tasks is None]
"""The others, parts of a larger model, have tests of their own."""

HEADS = [Task.FILL_MASK, Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING]


def families_with(tasks: Sequence[Task]) -> list[Any]:
    """(model type, task): every run tries all tasks of BERT, and one of families that name their heads otherwise.

    Not every family of transformers has every head.
    """
    others = {("distilbert", Task.QUESTION_ANSWERING), ("modernbert", Task.FILL_MASK)}
    return [
        nightly_unless(model_type == "bert" or (model_type, task) in others, model_type, task)
        for model_type in WITH_HEADS
        for task in tasks
        if task in tasks_of(model_type)
    ]


@pytest.mark.parametrize(
    ("model_type", "task"), families_with([task for task in ENCODER_TASKS if task is not Task.SENTENCE_SIMILARITY])
)
def test_the_task_is_that_of_the_head(tmp_path: Path, model_type: str, task: Task) -> None:
    save_tiny_model(tmp_path, model_type, task)
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.task() is task
    model = checkpoint.load(task)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_relative_or_trailing_path_is_named_after_its_directory(tiny_bert: Path, monkeypatch) -> None:
    monkeypatch.chdir(tiny_bert)
    assert find_checkpoint(".").name == "tiny-bert"
    assert find_checkpoint(f"{tiny_bert}{os.sep}").name == "tiny-bert"


def test_what_is_not_a_directory_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(ModelError, match=r"no model directory '.*model.safetensors'.\nName a directory"):
        find_checkpoint(tiny_bert / "model.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"holds no config.json(.|\n)*save_pretrained"),
        ("{", r"config.json cannot be read"),
        ("{}", r"names no model_type(.|\n)*\"model_type\": \"bert\""),
        (
            '{"model_type": "no_such_type"}',
            r"no family for the model type 'no_such_type', and .* no class.\n.* albert, bert, .*, xlm-roberta",
        ),
        ('{"model_type": "bert", "is_decoder": true}', r"says is_decoder(.|\n)*\"is_decoder\": false"),
        ('{"model_type": "bert", "is_causal": true}', r"is_causal True(.|\n)*a bert sees both sides"),
        ('{"model_type": "bert", "auto_map": 5}', r"auto_map 5, which names no class"),
        ('{"model_type": "bert", "position_embedding_type": "relative_key"}', r"asks for 'relative_key' positions"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=message):
        find_checkpoint(tmp_path)


def test_a_config_without_positions_is_refused(tiny_bert: Path) -> None:
    change_json(tiny_bert / "config.json", max_position_embeddings=None)
    with pytest.raises(ModelError, match=r"max_position_embeddings .* leaves no position"):
        _ = find_checkpoint(tiny_bert).base_positions


def test_positions_that_follow_the_padding_need_its_id(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "roberta", Task.FEATURE_EXTRACTION)
    change_json(tmp_path / "config.json", pad_token_id=None)
    with pytest.raises(
        ModelError, match=r"has pad_token_id None, which is not a token id.\nSet it to the tokenizer's, e.g. 1"
    ):
        _ = find_checkpoint(tmp_path).base_positions


def test_a_checkpoint_without_weights_is_refused(tiny_bert: Path) -> None:
    (tiny_bert / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights.\nIt needs a model.safetensors"):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)


def test_pickles_are_refused_unless_allowed(tiny_bert: Path) -> None:
    expected = find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)
    pickle_weights(tiny_bert)
    with pytest.raises(ModelError, match=r"as a pickle \(.bin\)(.|\n)*allow_pickle=True"):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)
    model = find_checkpoint(tiny_bert, trust=Trust(allow_pickle=True)).load(Task.FEATURE_EXTRACTION)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected.get_parameter(name)), name


def test_a_pickle_that_holds_code_does_not_run_it_even_where_pickles_are_allowed(tiny_bert: Path) -> None:
    marker = tiny_bert / "was_here"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    pickle_weights(tiny_bert, {"embeddings.word_embeddings.weight": Payload()})
    with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be read as weights(.|\n)*Download the model again"):
        find_checkpoint(tiny_bert, trust=Trust(allow_pickle=True)).load(Task.FEATURE_EXTRACTION)
    assert not marker.exists()


def test_safetensors_are_preferred_to_a_pickle_beside_them(tiny_bert: Path) -> None:
    (tiny_bert / "pytorch_model.bin").write_bytes(b"no pickle at all")
    for pickles in (False, True):
        find_checkpoint(tiny_bert, trust=Trust(allow_pickle=pickles)).load(Task.FEATURE_EXTRACTION)


@pytest.mark.parametrize("left_bytes", [0, -4])
def test_truncated_weights_are_refused(tiny_bert: Path, left_bytes: int) -> None:
    weights = tiny_bert / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left_bytes])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: .*\nDownload the model again"):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)


def test_weights_of_another_shape_than_the_configs_are_named(tiny_bert: Path) -> None:
    change_json(tiny_bert / "config.json", max_position_embeddings=128)
    message = (
        r"shape of embeddings.position_embeddings.weight is not what config.json says: \[64, 32\] in the file, "
        r"\[128, 32\] by config.json \(max_position_embeddings 128\)\.\nSet max_position_embeddings to 64"
    )
    with pytest.raises(ModelError, match=message):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)


def test_a_remedy_for_a_shape_is_a_key_that_gives_the_shape(tmp_path: Path) -> None:
    """A value that happens to be the same is no reason to name its key."""
    save_tiny_model(tmp_path, "bert", Task.TEXT_CLASSIFICATION, id2label=dict(enumerate("abcde")), label2id=None)
    change_json(tmp_path / "config.json", id2label=None, label2id=None)
    with pytest.raises(ModelError, match=r"\[2\] by config.json \(num_labels 2\)\.\nSet num_labels to 5,") as refused:
        find_checkpoint(tmp_path).load(Task.TEXT_CLASSIFICATION)
    assert "num_hidden_layers" not in str(refused.value)
    change_json(tmp_path / "config.json", num_labels=5)
    assert find_checkpoint(tmp_path).load(Task.TEXT_CLASSIFICATION).config.num_labels == 5


def test_labels_are_names_or_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "bert", Task.TEXT_CLASSIFICATION)
    change_json(tmp_path / "config.json", id2label={"0": 1, "1": 2.5, "2": "x"}, label2id=None)
    labels = find_checkpoint(tmp_path).load(Task.TEXT_CLASSIFICATION).config.id2label
    assert labels == {0: "1", 1: "2.5", 2: "x"}
    for wrong, message in (
        ({"0": "a", "1": None, "2": "b"}, r'gives 1 the label None; (.|\n)*"LABEL_1"'),
        ({"1": "a", "2": "b", "3": "c"}, r"has no label 0; each number from 0 to 2 needs a name"),
        ({"0": "a", "1": "b", "2": "a"}, r"gives 2 numbers the label 'a', and scores(.|\n)*a label of its own"),
    ):
        change_json(tmp_path / "config.json", id2label=wrong)
        with pytest.raises(ModelError, match=message):
            find_checkpoint(tmp_path).load(Task.TEXT_CLASSIFICATION)
        find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)


def test_a_padding_that_is_no_token_is_remarked(tmp_path: Path) -> None:
    # RoBERTa's positions begin after the padding's row: after -1, they have all 66.
    for model_type, positions in (("bert", 64), ("roberta", 66)):
        save_tiny_model(tmp_path / model_type, model_type, Task.FEATURE_EXTRACTION)
        change_json(tmp_path / model_type / "config.json", pad_token_id=-1)
        checkpoint = find_checkpoint(tmp_path / model_type)
        assert checkpoint.base_positions == positions
        assert checkpoint.remarks[0].startswith("config.json has pad_token_id -1, which is no token")
        checkpoint.load(Task.FEATURE_EXTRACTION)


def test_missing_weights_are_named(tiny_bert: Path) -> None:
    weights = load_file(tiny_bert / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if ".layer.0." not in name}
    save_file(kept, tiny_bert / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"no weights for encoder.layer.0.*and \d+ more.*\nDownload the checkpoint again\.$"
    ):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)
    change_json(tiny_bert / "config.json", architectures=["BertForMaskedLM"])
    with pytest.raises(
        ModelError, match=r"\nDownload the checkpoint again, or build its encoder: task=.feature-extract"
    ):
        find_checkpoint(tiny_bert).load(Task.FILL_MASK)


@pytest.mark.parametrize(
    ("model_type", "task"),
    # NeoMME predicts words by its embeddings' weights alone: none can be missing.
    [each for each in families_with(HEADS) if each.values != ("neomme", Task.FILL_MASK)],
)
def test_a_missing_head_is_refused(tmp_path: Path, model_type: str, task: Task) -> None:
    labels = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    save_tiny_model(tmp_path, model_type, Task.FEATURE_EXTRACTION, **labels)
    message = rf"no weights for .*which the task {task} needs.\nChoose .*task='feature-extraction'"
    with pytest.raises(ModelError, match=message):
        find_checkpoint(tmp_path).load(task)


@pytest.mark.parametrize("model_type", [nightly_unless(name in ("bert", "modernbert"), name) for name in WITH_HEADS])
def test_an_encoder_is_loaded_from_a_checkpoint_with_another_head(tmp_path: Path, model_type: str) -> None:
    """A masked language model has no pooler, and its encoder's answers need none."""
    trained = save_tiny_model(tmp_path, model_type, Task.FILL_MASK)
    model = find_checkpoint(tmp_path).load(Task.FEATURE_EXTRACTION)
    for name, weight in model.named_parameters():
        if "pooler" not in name:
            assert torch.equal(weight, trained.base_model.get_parameter(name)), name


def test_weights_that_are_not_finite_are_named(tiny_bert: Path) -> None:
    weights = load_file(tiny_bert / "model.safetensors")
    weights["encoder.layer.1.output.dense.weight"][2, 3] = float("nan")
    save_file(weights, tiny_bert / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN or infinite: encoder.layer.1.output.dense.weight"):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)
