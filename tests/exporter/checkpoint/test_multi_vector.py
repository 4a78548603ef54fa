"""Models of late interaction: read as sentence-transformers reads them, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.heads import task_head
from hdexport.checkpoint.sentence_settings import sentence_settings
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.sentence_settings import SentenceSettings
from hdruntime.errors import ModelError
from support.colbert_models import MODELS, save_colbert
from support.made_once import made_once
from support.tiny_models import change_json

sentence_transformers = pytest.importorskip("sentence_transformers")

CONFIG, TRANSFORMER, MASK = (
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "2_MultiVectorMask/config.json",
)


@pytest.fixture
def model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a model -> a copy of it, whose files a test may change."""

    def copy(name: str) -> Path:
        made = made_once(tmp_path_factory, f"saved colbert {name}", lambda path: save_colbert(path / "model", name))
        return Path(shutil.copytree(made / "model", tmp_path / name))

    return copy


def settings(path: Path) -> SentenceSettings:
    found = sentence_settings(find_checkpoint(path), Task.TOKEN_SIMILARITY)
    assert found is not None
    return found


def assert_read_as_the_library_does(path: Path) -> None:
    theirs = sentence_transformers.MultiVectorEncoder(str(path), device="cpu")
    found = settings(path)
    own, transformer = found.multi_vector, theirs[0]
    assert own is not None
    assert {"query": "", "document": ""} | found.prompts == {name: text or "" for name, text in theirs.prompts.items()}
    assert (own.query_length, own.document_length) == (transformer.query_length, transformer.document_length)
    expansion = transformer.query_expansion
    assert (own.expansion is None) == (expansion is None)
    if own.expansion is not None:
        names = ("strategy", "length", "attend")
        assert {name: getattr(own.expansion, name) for name in names} == {name: expansion[name] for name in names}
        token = expansion["token"] or theirs.tokenizer.mask_token
        assert own.expansion.token_id == theirs.tokenizer.convert_tokens_to_ids(token)
    mask = next(module for module in theirs if type(module).__name__ == "MultiVectorMask")
    skipped = [] if mask._skiplist_ids is None else mask._skiplist_ids.tolist()
    assert sorted(own.skipped_ids) == sorted(skipped)
    assert list(own.skipped_in) == mask.skiplist_tasks
    assert own.similarity == theirs.similarity_fn_name
    text = "".join(found.prompts.values()) + "what is [unused0] read?"
    checkpoint = find_checkpoint(path)
    assert checkpoint.tokenizer(text)["input_ids"] == theirs.tokenizer(text)["input_ids"]
    head = task_head(find_checkpoint(path), Task.TOKEN_SIMILARITY)
    assert head is not None
    states = torch.randn(1, 3, 32)
    with torch.inference_mode():
        (ours,) = head.outputs(states, torch.ones(1, 3, dtype=torch.int64), None)
        features = {"token_embeddings": states, "attention_mask": torch.ones(1, 3)}
        for module in list(theirs)[1:]:
            features = module(features)
    torch.testing.assert_close(ours, features["token_embeddings"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_format_is_read_as_the_library_does(name: str, model: Callable[[str], Path]) -> None:
    path = model(name)
    assert find_checkpoint(path).task() is Task.TOKEN_SIMILARITY
    assert_read_as_the_library_does(path)


@pytest.mark.parametrize(
    ("name", "file", "values"),
    [
        ("pylate", CONFIG, {"do_query_expansion": False}),
        ("pylate", CONFIG, {"attend_to_expansion_tokens": True, "query_length": None, "document_length": None}),
        ("pylate", CONFIG, {"skiplist_words": ["the", "nowhere-in-the-vocabulary"]}),
        ("pylate", CONFIG, {"skiplist_words": None}),
        ("pylate", CONFIG, {"model_type": None, "skiplist_words": None}),
        ("pylate", TRANSFORMER, {"query_expansion": {"strategy": "min", "length": 7}}),
        ("stanford", "artifact.metadata", {"attend_to_mask_tokens": True, "query_maxlen": 20, "doc_maxlen": None}),
        ("classic", MASK, {"skiplist_tasks": "query", "skiplist_words": ["[UNK]", "a"]}),
        ("classic", CONFIG, {"similarity_fn_name": "meanmaxsim"}),
    ],
)
def test_settings_are_read_as_the_library_does(
    name: str, file: str, values: dict[str, Any], model: Callable[[str], Path]
) -> None:
    path = model(name)
    if values.get("model_type", "") is None:
        content = json.loads((path / file).read_text())
        del content["model_type"]
        (path / file).write_text(json.dumps(content))
        values = {key: value for key, value in values.items() if key != "model_type"}
    change_json(path / file, **values)
    assert find_checkpoint(path).task() is Task.TOKEN_SIMILARITY
    assert_read_as_the_library_does(path)


def test_stanfords_defaults_are_those_of_the_library(model: Callable[[str], Path]) -> None:
    path = model("stanford")
    (path / "artifact.metadata").unlink()
    assert_read_as_the_library_does(path)


def test_another_reading_is_found(model: Callable[[str], Path]) -> None:
    """The comparison above sees a changed projection, and a changed list of words."""
    path = model("classic")
    theirs = sentence_transformers.MultiVectorEncoder(str(path), device="cpu")
    weights = load_file(path / "1_Dense/model.safetensors")
    head = task_head(find_checkpoint(path), Task.TOKEN_SIMILARITY)
    assert head is not None
    states = torch.randn(1, 3, 32)
    save_file({"linear.weight": weights["linear.weight"] + 0.01}, path / "1_Dense/model.safetensors")
    other = task_head(find_checkpoint(path), Task.TOKEN_SIMILARITY)
    assert other is not None
    (one,), (two,) = (each.outputs(states, torch.ones(1, 3, dtype=torch.int64), None) for each in (head, other))
    assert (one - two).abs().max() > 1e-4
    change_json(path / MASK, skiplist_words=["a"])
    own = settings(path).multi_vector
    assert own is not None
    assert list(own.skipped_ids) != sorted(theirs[2]._skiplist_ids.tolist())


@pytest.mark.parametrize(
    ("name", "file", "values", "message"),
    [
        ("classic", TRANSFORMER, {"query_length": 9}, r"9 tokens \(query_length\), and expands them to 16"),
        (
            "classic",
            TRANSFORMER,
            {"query_expansion": {"strategy": "fixed", "length": 9, "token": "<eos>"}},
            "token '<eos>', which its tokenizer does not know",
        ),
        ("classic", MASK, {"keep_only_token_ids": [5]}, "keep_only_token_ids, which are for images"),
        ("classic", "tokenizer_config.json", {"padding_side": "left"}, "tokenizer pads on the left"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    name: str, file: str, values: dict[str, Any], message: str, model: Callable[[str], Path]
) -> None:
    path = model(name)
    change_json(path / file, **values)
    with pytest.raises(ModelError, match=message):
        settings(path)


def test_other_modules_are_refused_and_the_tokens_vectors_are_not(model: Callable[[str], Path]) -> None:
    path = model("classic")
    modules = json.loads((path / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.multi_vector_encoder.modules.HierarchicalTokenPooling"
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(
        ModelError, match=r"HierarchicalTokenPooling, Normalize; for token embeddings.*\n.*feature-extraction"
    ):
        settings(path)
    assert sentence_settings(find_checkpoint(path), Task.FEATURE_EXTRACTION) is not None
    del modules[2]
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="has no module MultiVectorMask"):
        settings(path)


def test_what_is_no_model_of_late_interaction_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(ModelError, match=r"is no model of late interaction: .*\n.*task='feature-extraction'"):
        settings(tiny_bert)


@pytest.mark.parametrize(
    ("weight", "found"),
    [(None, "no such weight"), (torch.zeros(4, 31), r"float32 \[4, 31\]"), (torch.full((4, 32), torch.nan), "NaN")],
)
def test_a_wrong_projection_is_refused(weight: torch.Tensor | None, found: str, model: Callable[[str], Path]) -> None:
    path = model("stanford")
    weights = {name: value for name, value in load_file(path / "model.safetensors").items() if name != "linear.weight"}
    save_file(weights | ({} if weight is None else {"linear.weight": weight}), path / "model.safetensors")
    with pytest.raises(ModelError, match=found):
        task_head(find_checkpoint(path), Task.TOKEN_SIMILARITY)


def test_stanfords_projection_is_left_out_where_it_is_not_needed(model: Callable[[str], Path]) -> None:
    checkpoint = find_checkpoint(model("stanford"))
    for task, is_named in ((Task.TOKEN_SIMILARITY, False), (Task.FEATURE_EXTRACTION, True)):
        lines: list[str] = []
        checkpoint.load(task, report=lines.append)
        assert any("linear" in line for line in lines) == is_named
