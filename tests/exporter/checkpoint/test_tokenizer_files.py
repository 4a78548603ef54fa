"""A checkpoint's tokenizer becomes one file that gives the ids transformers gives."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.tokenizer_files import write_tokenizer
from hdexport.model.tasks import Task
from hdruntime.errors import ModelError
from support.tiny_models import save_tiny_model

TEXT = "w7 w8, w9 unknown w10"


@pytest.fixture
def tiny_bert(tmp_path: Path) -> Path:
    save_tiny_model(tmp_path / "model", "bert", Task.FEATURE_EXTRACTION)
    return tmp_path / "model"


def test_the_file_gives_the_ids_that_transformers_gives(tiny_bert: Path, tmp_path: Path) -> None:
    info = write_tokenizer(find_checkpoint(tiny_bert), tmp_path)
    assert info is not None
    assert Tokenizer.from_file(str(tmp_path / info.file)).encode(TEXT).ids == AutoTokenizer.from_pretrained(
        tiny_bert
    ).encode(TEXT)
    assert (info.pad_token, info.pad_token_id, info.unk_token_id, info.mask_token_id) == ("[PAD]", 1, 3, 4)


def test_a_vocabulary_alone_is_converted(tiny_bert: Path, tmp_path: Path) -> None:
    for file in tiny_bert.glob("*token*"):
        file.unlink()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "w7", "w8", "##9", "w", ","]
    (tiny_bert / "vocab.txt").write_text("\n".join(words))
    info = write_tokenizer(find_checkpoint(tiny_bert), tmp_path)
    assert info is not None
    expected = BertTokenizer.from_pretrained(tiny_bert).encode("W7 w8, w9 unknown")
    assert Tokenizer.from_file(str(tmp_path / info.file)).encode("W7 w8, w9 unknown").ids == expected
    assert expected == [2, 5, 6, 9, 8, 7, 1, 3]
    assert (info.pad_token_id, info.unk_token_id) == (0, 1)


def test_a_checkpoint_without_a_tokenizer_is_said_to_take_ids(tiny_bert: Path, tmp_path: Path, caplog) -> None:
    for file in tiny_bert.glob("*token*"):
        file.unlink()
    with caplog.at_level(logging.WARNING):
        assert write_tokenizer(find_checkpoint(tiny_bert), tmp_path) is None
    assert "no tokenizer; the bundle will take input_ids" in caplog.text
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "NoSuchModel"}}'])
def test_a_damaged_tokenizer_is_refused(tiny_bert: Path, tmp_path: Path, content: str) -> None:
    (tiny_bert / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer of .* could not be read(.|\n)*Download the model again"):
        write_tokenizer(find_checkpoint(tiny_bert), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_the_tokenizers_config_overrules_its_file_as_in_transformers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_tiny_model(model, "bert", Task.FEATURE_EXTRACTION)
    for file in model.glob("*token*"):
        file.unlink()
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "Word"]))
    BertTokenizer.from_pretrained(model, do_lower_case=True).save_pretrained(model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"do_lower_case": False}))
    expected = AutoTokenizer.from_pretrained(model).encode("Word word")
    assert write_tokenizer(find_checkpoint(model), tmp_path) is not None
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Word word").ids == expected
