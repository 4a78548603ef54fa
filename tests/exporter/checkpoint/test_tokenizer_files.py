"""A checkpoint's tokenizer becomes one file that gives the ids transformers gives."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer, EsmTokenizer

from hdexport.checkpoint import find_checkpoint
from hdexport.checkpoint.tokenizer_files import as_tokenizer_file, read_tokenizer, write_tokenizer
from hdruntime.bundle.manifest import Task
from hdruntime.errors import ModelError
from support.tiny_models import VOCAB_SIZE, change_json, save_tiny_model

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


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "NoSuchModel"}}'])
def test_a_damaged_tokenizer_is_refused(tiny_bert: Path, tmp_path: Path, content: str) -> None:
    (tiny_bert / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer of .* could not be read(.|\n)*Download the model again"):
        write_tokenizer(find_checkpoint(tiny_bert), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_the_tokenizers_config_overrules_its_file_as_in_transformers(tiny_bert: Path, tmp_path: Path) -> None:
    remove_tokenizer(tiny_bert)
    (tiny_bert / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word", "Word"]))
    BertTokenizer.from_pretrained(tiny_bert, do_lower_case=True).save_pretrained(tiny_bert)
    change_json(tiny_bert / "tokenizer_config.json", do_lower_case=False)
    expected = AutoTokenizer.from_pretrained(tiny_bert).encode("Word word")
    assert write_tokenizer(find_checkpoint(tiny_bert), tmp_path) is not None
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Word word").ids == expected


AMINO_ACIDS = "L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>"


@pytest.fixture
def esm(tmp_path: Path) -> Path:
    """A tiny ESM with a tokenizer as it is published: a vocabulary."""
    path = tmp_path / "esm"
    save_tiny_model(path, "esm", Task.FEATURE_EXTRACTION)
    remove_tokenizer(path)
    (path / "vocab.txt").write_text("\n".join(f"<cls> <pad> <eos> <unk> {AMINO_ACIDS}".split()))
    change_json(path / "tokenizer_config.json", tokenizer_class="EsmTokenizer", model_max_length=1024)
    return path


def test_a_vocabulary_of_amino_acids_gives_the_ids_of_its_class(esm: Path, tmp_path: Path) -> None:
    info = write_tokenizer(find_checkpoint(esm), tmp_path)
    assert info is not None
    assert (info.pad_token, info.pad_token_id, info.unk_token_id, info.mask_token_id) == ("<pad>", 1, 3, 32)
    written, expected = Tokenizer.from_file(str(tmp_path / info.file)), EsmTokenizer.from_pretrained(esm)
    for text in ("MKTAYIAK", "M K<mask>T  JJ k", "", "<cls>M<eos>"):
        assert written.encode(text).ids == expected(text)["input_ids"], text
    assert written.encode("MK", "T").ids == expected("MK", "T")["input_ids"]
    assert find_checkpoint(esm).tokenizer.model_max_length == 1024


def test_a_tokenizer_whose_ids_differ_once_is_not_converted(esm: Path) -> None:
    class Different(EsmTokenizer):
        def _tokenize(self, text: str, **kwargs: object) -> list[str]:
            return ["<mask>"] if "\u0e20" in text else super()._tokenize(text, **kwargs)

    as_tokenizer_file(EsmTokenizer.from_pretrained(esm), esm)
    with pytest.raises(ModelError, match=r"Different, a program of Python(.|\n)*tokenizer=None"):
        as_tokenizer_file(Different.from_pretrained(esm), esm)


WORDS_OF_BERT = "[PAD] [UNK] [CLS] [SEP] [MASK] w7".replace(" ", "\n")
JAPANESE = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}
PUBLISHED: dict[str, tuple[dict[str, str], dict[str, object], dict[str, object]]] = {
    "PhoBERT": ({"vocab.txt": "w7 9\n", "bpe.codes": "w 7 1\n"}, {}, {"tokenizer_class": "PhobertTokenizer"}),
    "BERT-Japanese": ({"vocab.txt": WORDS_OF_BERT}, JAPANESE | {"subword_tokenizer_type": "wordpiece"}, {}),
    "RoFormer": ({"vocab.txt": WORDS_OF_BERT}, {"do_lower_case": True}, {"model_type": "roformer"}),
    "ByT5": ({}, {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}, {}),
    "code of its own": ({"vocab.txt": WORDS_OF_BERT}, {"tokenizer_class": "OwnTokenizer"}, {}),
}
"""Name of a layout -> files, settings of the tokenizer and settings of the model, as published."""


@pytest.mark.parametrize(("files", "of_tokenizer", "of_model"), PUBLISHED.values(), ids=PUBLISHED)
def test_tokenizers_that_no_file_can_hold_are_refused_in_a_sentence(
    tiny_bert: Path, tmp_path: Path, files: dict[str, str], of_tokenizer: dict[str, object], of_model: dict[str, object]
) -> None:
    remove_tokenizer(tiny_bert)
    for name, content in files.items():
        (tiny_bert / name).write_text(content)
    change_json(tiny_bert / "tokenizer_config.json", **of_tokenizer)
    checkpoint = find_checkpoint(tiny_bert)
    change_json(tiny_bert / "config.json", **of_model)
    with pytest.raises(ModelError, match=r"^.*Tokenizer.*\n.*[Bb]uild for token ids.*: tokenizer=None$"):
        write_tokenizer(checkpoint, tmp_path)
    assert write_tokenizer(dataclasses.replace(checkpoint, tokenizer_source=None), tmp_path) is None


def test_a_setting_that_no_file_can_hold_is_refused(tiny_bert: Path) -> None:
    change_json(tiny_bert / "tokenizer_config.json", split_special_tokens=True)
    # In transformers, texts have none of the special tokens that they name.
    assert AutoTokenizer.from_pretrained(tiny_bert)("[MASK]", add_special_tokens=False)["input_ids"] != [4]
    with pytest.raises(ModelError, match=r"split_special_tokens true(.|\n)*Set it to false .*tokenizer=None"):
        read_tokenizer(tiny_bert)


def test_files_of_a_tokenizer_that_its_class_does_not_read_are_named(tiny_bert: Path) -> None:
    (tiny_bert / "tokenizer.json").unlink()
    change_json(tiny_bert / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
    (tiny_bert / "vocab.json").write_text("{}")
    message = r"holds vocab.json .*reads vocab.json and merges.txt, or tokenizer.json(.|\n)*Put .*tokenizer=None"
    with pytest.raises(ModelError, match=message):
        read_tokenizer(tiny_bert)


def test_each_familys_sentencepiece_file_is_found(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sentencepiece" else find_spec(name))
    remove_tokenizer(tiny_bert)
    for model_type, name in (
        ("deberta-v2", "spm.model"),
        ("rembert", "sentencepiece.model"),
        ("xlm-roberta", "sentencepiece.bpe.model"),
        ("t5", "spiece.model"),
        ("gemma3_text", "tokenizer.model"),
    ):
        change_json(tiny_bert / "config.json", model_type=model_type)
        (tiny_bert / name).write_bytes(b"of SentencePiece")
        with pytest.raises(ModelError, match=rf"\n{name} is converted by sentencepiece: pip install sentencepiece"):
            read_tokenizer(tiny_bert)
        (tiny_bert / name).unlink()
        assert read_tokenizer(tiny_bert) is None


def test_a_tokenizer_that_is_not_wanted_is_not_read(tiny_bert: Path, tmp_path: Path, caplog) -> None:
    (tiny_bert / "tokenizer.json").write_text("damaged")
    checkpoint = dataclasses.replace(find_checkpoint(tiny_bert), tokenizer_source=None)
    with caplog.at_level(logging.WARNING):
        assert write_tokenizer(checkpoint, tmp_path) is None
    assert "is built without its tokenizer; the bundle will take input_ids" in caplog.text


def test_tokens_beyond_the_vocabulary_are_refused_only_where_texts_take_them(
    tiny_bert: Path, tmp_path: Path, caplog
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<unused>"]})
    tokenizer.save_pretrained(tiny_bert)
    with caplog.at_level(logging.WARNING):
        assert write_tokenizer(find_checkpoint(tiny_bert), tmp_path) is not None
    assert f"gives the id {VOCAB_SIZE} to '<unused>'" in caplog.text
    change_json(tiny_bert / "config.json", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(ModelError, match=r"Use the tokenizer that the model was trained with"):
        write_tokenizer(find_checkpoint(tiny_bert), tmp_path)
