"""A checkpoint's tokenizer becomes one file that gives the ids transformers gives."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.tokenizer_files import read_tokenizer, write_tokenizer
from hdruntime.errors import ModelError
from support.tiny_models import change_json

TEXT = "w7 w8, w9 unknown w10"


def remove_tokenizer(directory: Path) -> None:
    for file in directory.glob("*token*"):
        file.unlink()


def test_the_file_gives_the_ids_that_transformers_gives(tiny_bert: Path, tmp_path: Path) -> None:
    info = write_tokenizer(find_checkpoint(tiny_bert), tmp_path)
    assert info is not None
    assert Tokenizer.from_file(str(tmp_path / info.file)).encode(TEXT).ids == AutoTokenizer.from_pretrained(
        tiny_bert
    ).encode(TEXT)
    assert (info.pad_token, info.pad_token_id, info.unk_token_id, info.mask_token_id) == ("[PAD]", 1, 3, 4)


def test_a_vocabulary_alone_is_converted(tiny_bert: Path, tmp_path: Path) -> None:
    remove_tokenizer(tiny_bert)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "w7", "w8", "##9", "w", ","]
    (tiny_bert / "vocab.txt").write_text("\n".join(words))
    info = write_tokenizer(find_checkpoint(tiny_bert), tmp_path)
    assert info is not None
    expected = BertTokenizer.from_pretrained(tiny_bert).encode("W7 w8, w9 unknown")
    assert Tokenizer.from_file(str(tmp_path / info.file)).encode("W7 w8, w9 unknown").ids == expected
    assert expected == [2, 5, 6, 9, 8, 7, 1, 3]
    assert (info.pad_token_id, info.unk_token_id) == (0, 1)


def test_a_checkpoint_without_a_tokenizer_is_reported_to_take_ids(tiny_bert: Path, tmp_path: Path, caplog) -> None:
    remove_tokenizer(tiny_bert)
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


def test_of_a_sentencepiece_file_alone_it_is_said_what_converts_it(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find_spec(name))
    change_json(tiny_bert / "config.json", model_type="t5")
    (tiny_bert / "tokenizer_config.json").unlink()
    (tiny_bert / "spiece.model").write_bytes(b"no such model")
    with pytest.raises(ModelError, match=r"could not be read: .*\nDownload the model again."):
        read_tokenizer(tiny_bert)
    (tiny_bert / "tokenizer.json").unlink()
    with pytest.raises(
        ModelError, match=r"could not be read: .*\nspiece.model is converted by sentencepiece: pip install"
    ):
        read_tokenizer(tiny_bert)


def test_the_tokenizers_config_overrules_its_file_as_in_transformers(tiny_bert: Path, tmp_path: Path) -> None:
    remove_tokenizer(tiny_bert)
    (tiny_bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "Word"]))
    BertTokenizer.from_pretrained(tiny_bert, do_lower_case=True).save_pretrained(tiny_bert)
    change_json(tiny_bert / "tokenizer_config.json", do_lower_case=False)
    expected = AutoTokenizer.from_pretrained(tiny_bert).encode("Word word")
    assert write_tokenizer(find_checkpoint(tiny_bert), tmp_path) is not None
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Word word").ids == expected
