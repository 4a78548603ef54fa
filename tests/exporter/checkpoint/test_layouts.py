"""Checkpoints in the layouts that peers read: recognised, arranged as links, and read as what they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.heads import task_head
from hdexport.checkpoint.source import path_of_source
from hdexport.checkpoint.trust import Trust
from hdexport.extend import ExtendOptions, extend
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.comparators import assert_close
from support.tiny_models import VOCAB_SIZE, change_json, pickle_weights, save_tiny_model

TEXTS = ["w1 w2 w3", "w4", "w5 unknown w6"]
QUERY = "encoder.layer.0.attention.self.query"
RANK, ALPHA = 4, 8
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 90868376\n"


def save_chain(root: Path, encoder: str, pooling: str) -> None:
    """A tiny BERT and a mean pooling in folders, written into modules.json as they are given."""
    save_tiny_model(root / encoder, "bert", Task.FEATURE_EXTRACTION)
    (root / pooling).mkdir(parents=True)
    (root / pooling / "config.json").write_text('{"word_embedding_dimension": 32, "pooling_mode_mean_tokens": true}')
    (root / encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": false}')
    kinds = {"Transformer": encoder, "Pooling": pooling}
    chain = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    (root / "modules.json").write_text(json.dumps(chain))


def vectors(path: Path) -> np.ndarray:
    """What a checkpoint's model and pooling give for the texts, one after the other."""
    checkpoint = find_checkpoint(path)
    model = checkpoint.load(Task.SENTENCE_SIMILARITY)
    head: Any = task_head(checkpoint, Task.SENTENCE_SIMILARITY)
    with torch.inference_mode():
        encoded = [checkpoint.tokenizer(text, return_tensors="pt") for text in TEXTS]
        return np.concatenate([head(model(**each)[0], each["attention_mask"])[-1].numpy() for each in encoded])


def test_the_folders_of_sentence_transformers_give_its_vectors_however_they_are_written(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folders = (
        ("0_Transformer", "1_Pooling"),
        ("./0_Transformer/", "./1_Pooling/"),
        ("a/b", "c/d/"),
        (".", "1_Pooling"),
    )
    for number, (encoder, pooling) in enumerate(folders):
        root = tmp_path / str(number)
        save_chain(root, encoder, pooling)
        if encoder == "0_Transformer":  # before version 2
            (root / "config.json").write_text('{"__version__": "0.3.8"}')
        expected = SentenceTransformer(str(root), device="cpu").encode(TEXTS)
        assert_close(vectors(root), expected, atol=1e-5)
        assert find_checkpoint(root).origin == root
        assert path_of_source(str(number), tmp_path / "bundle") == root


def test_an_extended_checkpoint_has_its_encoder_at_the_top(tmp_path: Path) -> None:
    save_chain(tmp_path / "old", "enc/deep", "mods/1_Pooling")
    extend(ExtendOptions(model=tmp_path / "old", output=tmp_path / "new", max_len=128))
    assert (tmp_path / "new" / "mods" / "1_Pooling" / "config.json").is_file()
    assert_close(vectors(tmp_path / "new"), vectors(tmp_path / "old"), atol=0.0)


def test_googles_configuration_beside_pytorchs_weights_is_a_checkpoint(tiny_bert: Path) -> None:
    expected = find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION).state_dict()
    weights = load_file(tiny_bert / "model.safetensors")
    old = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    renamed = {f"bert.{name}": weight for name, weight in weights.items()}
    for new, name_of_2018 in old.items():
        renamed = {name.replace(new, name_of_2018): weight for name, weight in renamed.items()}
    pickle_weights(tiny_bert, renamed)
    (tiny_bert / "config.json").rename(tiny_bert / "bert_config.json")
    change_json(tiny_bert / "bert_config.json", model_type=None, architectures=None)
    with pytest.raises(ModelError, match="allow_pickle=True"):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)
    checkpoint = find_checkpoint(tiny_bert, trust=Trust(allow_pickle=True))
    assert checkpoint.remarks[0] == "Read bert_config.json as the config.json of a bert."
    model = checkpoint.load(Task.FEATURE_EXTRACTION)
    assert all(
        torch.equal(weight, expected[name]) for name, weight in model.state_dict().items() if "pooler" not in name
    )


def save_adapter(folder: Path, model: str | None, **config: Any) -> torch.Tensor:
    """An adapter of one weight, as PEFT writes it; returns what it adds."""
    folder.mkdir()
    first, second = torch.randn(RANK, 32), torch.randn(32, RANK)
    factors = {f"base_model.model.{QUERY}.lora_{name}.weight": each for name, each in (("A", first), ("B", second))}
    save_file(factors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": model}
    change_json(folder / "adapter_config.json", **values, **config)
    return second @ first * (ALPHA / RANK)


def test_an_adapter_is_merged_into_its_model_where_that_is_on_this_machine(tiny_bert: Path) -> None:
    before = find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION).get_submodule(QUERY).weight
    for number, name in enumerate((str(tiny_bert), "organisation/tiny-bert")):  # a path, and a neighbour
        folder = tiny_bert.parent / f"adapter-{number}"
        added = save_adapter(folder, name)
        checkpoint = find_checkpoint(folder)
        assert checkpoint.remarks == (f"The adapter of {folder} is merged into the weights of {tiny_bert}.",)
        for each in (checkpoint, checkpoint.with_adapter(None), checkpoint.with_adapter(checkpoint.adapter)):
            weight = each.load(Task.FEATURE_EXTRACTION).get_submodule(QUERY).weight
            assert_close(weight.detach().numpy(), (before + added).detach().numpy(), atol=1e-5)


def test_modules_that_an_adapter_saved_whole_take_the_places_of_its_models(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_tiny_model(base, "roberta", Task.FILL_MASK)
    save_adapter(folder, str(base), modules_to_save=["classifier", "score", "LayerNorm"])
    of_adapter = load_file(folder / "adapter_model.safetensors")
    weights = {
        "classifier.dense.weight": torch.randn(32, 32),
        "classifier.dense.bias": torch.randn(32),
        "classifier.out_proj.weight": torch.randn(2, 32),
        "classifier.out_proj.bias": torch.randn(2),
        "roberta.embeddings.LayerNorm.weight": torch.randn(32),
    }
    named = {f"base_model.model.{name}": weight for name, weight in weights.items()}
    save_file(of_adapter | named, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"changes 'classifier.dense', which a RobertaForMaskedLM(.|\n)* task is the"):
        find_checkpoint(folder).load(Task.FILL_MASK)
    # The head's labels are in no file of PEFT.
    with pytest.raises(ModelError, match=r"'classifier.out_proj.\w+' of shape \[2.*\[3(.|\n)*config.json of its own"):
        find_checkpoint(folder).load(Task.TEXT_CLASSIFICATION)
    shutil.copyfile(base / "config.json", folder / "config.json")
    change_json(folder / "config.json", id2label={"0": "a", "1": "b"})
    state = find_checkpoint(folder).load(Task.TEXT_CLASSIFICATION).state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    del named["base_model.model.classifier.out_proj.bias"]
    save_file(of_adapter | named, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"no weights for classifier.out_proj.bias, which the task text-class"):
        find_checkpoint(folder).load(Task.TEXT_CLASSIFICATION)


def test_a_saved_embedding_is_not_tied_to_the_head_of_the_model(tiny_bert: Path) -> None:
    base, folder = tiny_bert.parent / "masked", tiny_bert.parent / "adapter"
    words = save_tiny_model(base, "bert", Task.FILL_MASK).get_input_embeddings().weight
    save_adapter(folder, str(base), modules_to_save=["word_embeddings"])
    name, file = "base_model.model.bert.embeddings.word_embeddings.weight", folder / "adapter_model.safetensors"
    save_file({**load_file(file), name: torch.ones_like(words)}, file)
    model = find_checkpoint(folder).load(Task.FILL_MASK)
    assert torch.equal(model.get_input_embeddings().weight, torch.ones_like(words))
    assert torch.equal(model.get_output_embeddings().weight, words)


def test_an_adapter_in_a_pickle_is_read_where_that_is_allowed(tiny_bert: Path) -> None:
    folder = tiny_bert.parent / "adapter"
    save_adapter(folder, str(tiny_bert))
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=rf"{folder} holds its weights as a pickle(.|\n)*allow_pickle=True"):
        find_checkpoint(folder).load(Task.FEATURE_EXTRACTION)
    find_checkpoint(folder, trust=Trust(allow_pickle=True)).load(Task.FEATURE_EXTRACTION)


def test_an_adapter_that_cannot_be_merged_is_said_to_be_one(tiny_bert: Path) -> None:
    parent = tiny_bert.parent
    for number, (name, message) in enumerate(
        (
            (None, r"names no model in base_model_name_or_path.\nSet that to the directory of the model"),
            (
                "nobody/nothing",
                r"adapter of the model 'nobody/nothing'(.|\n)*: hf download nobody/nothing,(.|\n)*merge_and",
            ),
            ("/no/where/base", rf"adapter of the model '/no/where/base'(.|\n)*Put the model into {parent}/base, and"),
        )
    ):
        save_adapter(parent / str(number), name)
        with pytest.raises(ModelError, match=message):
            find_checkpoint(parent / str(number))
    save_adapter(parent / "fitting", str(tiny_bert))
    with pytest.raises(ModelError, match=r"fitting holds an adapter(.|\n)*Merge it with PEFT first"):
        extend(ExtendOptions(model=parent / "fitting", output=parent / "out", max_len=128))


def test_a_pointer_of_git_lfs_is_named_wherever_it_stands(tmp_path: Path) -> None:
    save_chain(tmp_path, "0_Transformer", "1_Pooling")
    encoder = tmp_path / "0_Transformer"
    (encoder / "special_tokens_map.json").write_text("{}")
    names = ("modules.json", "1_Pooling/config.json", *(f"0_Transformer/{file.name}" for file in encoder.iterdir()))
    assert "0_Transformer/model.safetensors" in names
    assert "0_Transformer/tokenizer.json" in names
    for name in names:
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text(POINTER)
        with pytest.raises(ModelError, match=rf"{tmp_path / name} is a pointer of Git LFS(.|\n)*git lfs pull"):
            vectors(tmp_path)
        (tmp_path / name).write_bytes(before)
    vectors(tmp_path)


def test_a_pointer_of_git_lfs_that_is_not_read_is_no_obstacle(tiny_bert: Path) -> None:
    for name in ("pytorch_model.bin", "vocab.txt", "spm.model"):
        (tiny_bert / name).write_text(POINTER)
    checkpoint = find_checkpoint(tiny_bert, trust=Trust(allow_pickle=True))
    checkpoint.load(Task.FEATURE_EXTRACTION)
    assert len(checkpoint.tokenizer) == VOCAB_SIZE
    pickle_weights(tiny_bert)
    (tiny_bert / "pytorch_model.bin").write_text(POINTER)
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pointer of Git LFS"):
        checkpoint.load(Task.FEATURE_EXTRACTION)


def test_names_that_a_wrapper_left_are_those_of_the_model(tmp_path: Path) -> None:
    for task in (Task.FEATURE_EXTRACTION, Task.TEXT_CLASSIFICATION):
        path = tmp_path / task
        expected = save_tiny_model(path, "bert", task).state_dict()
        weights = load_file(path / "model.safetensors")
        for prefix in ("model.", "bert.bert.", "0.auto_model."):
            save_file({prefix + name: weight for name, weight in weights.items()}, path / "model.safetensors")
            said: list[str] = []
            model = find_checkpoint(path).load(task, report=said.append)
            assert f"names of the weights begin with {prefix}, which a wrapper" in said[0]
            left = {name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])}
            assert all("pooler" in name for name in left), left


def test_wrapped_weights_of_several_models_or_other_layers_are_refused(tiny_bert: Path) -> None:
    weights = load_file(tiny_bert / "model.safetensors")
    both = {f"{side}.{name}": weight.clone() for side in ("query", "passage") for name, weight in weights.items()}
    save_file(both, tiny_bert / "model.safetensors")
    with pytest.raises(ModelError, match=r"several models, whose names begin with passage. and query.\.\nKeep"):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)
    save_file({f"module.{name}": weight for name, weight in weights.items()}, tiny_bert / "model.safetensors")
    change_json(tiny_bert / "config.json", num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"num_hidden_layers 1(.|\n)*Set num_hidden_layers to 2"):
        find_checkpoint(tiny_bert).load(Task.FEATURE_EXTRACTION)
