"""Every reader of a bundle's files truncates and pads as the bundle's session does, without hdexport."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from hdexport.build import BuildOptions, build
from hdexport.families import SUPPORTED_MODEL_TYPES
from hdexport.package.readers import djl_tokenizer, transformers_tokenizer
from hdruntime.bundle.manifest import Task
from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.text.lengths import checked_length
from hdruntime.text.tokenization import Overflow, TextTokenizer
from support.file_tokenizers import put_tokenizer, word_pieces
from support.grids import EVERY_RUN_TYPES, nightly_unless
from support.tiny_models import change_json, save_sentence_modules, save_tiny_model

Reader = Callable[[Path, str], list[int]]


def by_sentence_transformers(path: Path, text: str) -> list[int]:
    """``max_seq_length`` of the settings, or else the tokenizer's own."""
    found = list(path.glob("sentence_*_config.json"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    length = json.loads(found[0].read_text())["max_seq_length"] if found else tokenizer.model_max_length
    return tokenizer(text, truncation=True, max_length=length)["input_ids"]  # type: ignore[no-any-return]


def by_djl(path: Path, text: str) -> list[int]:
    """With ``optTokenizerConfigPath``, from which DJL takes ``modelMaxLength``."""
    length = json.loads((path / "tokenizer_config.json").read_text())["model_max_length"]
    return list(djl_tokenizer(path / "tokenizer.json", model_max_length=length).encode(text).ids)


READERS: Mapping[str, Reader] = {
    "tokenizers": lambda path, text: list(Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids),
    "transformers": lambda path, text: list(AutoTokenizer.from_pretrained(path)(text, truncation=True)["input_ids"]),
    "sentence-transformers": by_sentence_transformers,
    "transformers.js": lambda path, text: list(transformers_tokenizer(path).encode(text).ids),
    "DJL": by_djl,
}


def differences(bundle: Bundle, lengths: list[int]) -> list[str]:
    """The readers and the numbers of words for which the ids are not the session's."""
    length = checked_length(None, bundle.manifest, max_tokens=bundle.manifest.max_len)
    tokenizer = TextTokenizer.of(bundle, max_len=length)
    found = []
    for words in lengths:
        text = " ".join(f"w{number % 100}" for number in range(words))
        (expected,) = tokenizer.encode([text], overflow=Overflow.TRUNCATE)
        assert len(expected) <= length
        found += [f"{name}: {words}" for name, ids in READERS.items() if ids(bundle.path, text) != list(expected.ids)]
    return found


def around(length: int) -> list[int]:
    return sorted({1, 128, 129, 512, 513, *range(max(1, length - 4), length + 3)})


@pytest.mark.parametrize(
    "model_type", [nightly_unless(name in EVERY_RUN_TYPES, name) for name in SUPPORTED_MODEL_TYPES]
)
def test_readers_of_every_family_truncate_as_the_session(model_type: str, tiny_bundles: Any) -> None:
    bundle = open_bundle(tiny_bundles(model_type).path)
    assert differences(bundle, around(bundle.manifest.positions.base)) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedder of word pieces, whose file has the truncation and the padding of its training."""
    path = tmp_path_factory.mktemp("readers") / "checkpoint"
    model = save_tiny_model(path, "bert", Task.SENTENCE_SIMILARITY, vocab_size=300)
    width = {"word_embedding_dimension": model.config.hidden_size}
    save_sentence_modules(path, pooling={"pooling_mode_mean_tokens": True, **width})
    tokenizer = word_pieces()
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16, pad_id=1, pad_token="[PAD]")
    put_tokenizer(path, tokenizer, None)
    change_json(path / "tokenizer_config.json", model_max_length=32)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    return path


def built(checkpoint: Path, output: Path, text_length: int | None) -> Bundle:
    build(BuildOptions(model=checkpoint, output=output, max_len=600, text_length=text_length, verify=None))
    return open_bundle(output)


@pytest.mark.parametrize("text_length", [600, None])
def test_readers_do_not_truncate_as_in_training(checkpoint: Path, tmp_path: Path, text_length: int | None) -> None:
    bundle = built(checkpoint, tmp_path / "bundle", text_length)
    length = checked_length(None, bundle.manifest, max_tokens=600)
    assert length == (text_length or 32)
    assert differences(bundle, around(length)) == []
    tokenizer = Tokenizer.from_file(str(bundle.path / "tokenizer.json"))
    assert tokenizer.truncation["max_length"] == length
    one, longer = tokenizer.encode_batch(["w1", "w1 w2 w3"])
    assert len(one.ids) == len(longer.ids) < 16
    assert one.ids[-1] == bundle.manifest.tokenizer.pad_token_id
    assert one.attention_mask[-1] == 0
    (config,) = bundle.path.glob("sentence_*_config.json")
    assert json.loads(config.read_text())["max_seq_length"] == length


def test_a_reader_that_truncates_elsewhere_is_found(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = built(checkpoint, tmp_path / "bundle", 600)
    tokenizer = Tokenizer.from_file(str(bundle.path / "tokenizer.json"))
    tokenizer.enable_truncation(128)
    tokenizer.save(str(bundle.path / "tokenizer.json"))
    change_json(bundle.path / "tokenizer_config.json", model_max_length=512)
    found = differences(bundle, [1, 200, 600])
    assert {each.partition(":")[0] for each in found} == {"tokenizers", "transformers", "transformers.js", "DJL"}
