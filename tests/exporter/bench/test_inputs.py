"""The texts of a benchmark are real, of full length, different from row to row, and always the same ones."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from hdexport.bench.peers.inputs import Texts
from hdexport.verify import single_texts
from hdruntime.bundle.reader import Bundle, open_bundle
from support.tiny_models import SEPARATOR_ID, VOCAB_SIZE

CLS = 0
HELP = "\n".join(list(topics.values())[:8])


@pytest.fixture(autouse=True)
def less_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of Python's help takes long where every character is a token."""
    monkeypatch.setattr(single_texts, "english_texts", lambda: [HELP])


@pytest.fixture
def bert(tiny_bundles: Any) -> Bundle:
    """A bundle whose tokenizer knows no English word."""
    return open_bundle(tiny_bundles("bert").path)


@pytest.fixture
def longformer(tiny_bundles: Any) -> Bundle:
    """A bundle with global tokens, whose tokenizer knows no English word either."""
    return open_bundle(tiny_bundles("longformer").path)


def spelling(bundle: Bundle, directory: Path) -> tuple[Bundle, Tokenizer]:
    """The bundle with a tokenizer of one token per character, special tokens around the text; and that tokenizer."""
    characters = sorted(set(HELP))[: VOCAB_SIZE - 5]
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *characters]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEPARATOR_ID)],
    )
    path = Path(shutil.copytree(bundle.path, directory / "spelling"))
    tokenizer.save(str(path / "tokenizer.json"))
    return Bundle(path, bundle.manifest), tokenizer


def spelt(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return "".join(tokenizer.id_to_token(token) for token in ids)


@pytest.mark.parametrize("tokens", [1, 2, 65, 300])
def test_texts_are_pythons_help_between_special_tokens(bert: Bundle, tmp_path: Path, tokens: int) -> None:
    bundle, tokenizer = spelling(bert, tmp_path)
    rows = Texts(bundle).batch(3, tokens)["input_ids"]
    assert rows.shape == (3, tokens)
    assert (rows[:, -1] == SEPARATOR_ID).all()
    if tokens > 1:
        assert (rows[:, 0] == CLS).all()
    for row in rows:
        assert spelt(tokenizer, row[1:-1]) in HELP
    if tokens > 64:
        assert len({row.tobytes() for row in rows}) == 3
    np.testing.assert_array_equal(Texts(bundle).batch(3, tokens)["input_ids"], rows)


def test_every_input_of_the_manifest_is_there(bert: Bundle, longformer: Bundle) -> None:
    of_bert, of_longformer = Texts(bert).batch(2, 50), Texts(longformer).batch(2, 50)
    assert list(of_bert) == ["input_ids", "attention_mask", "token_type_ids"]
    assert list(of_longformer) == ["input_ids", "attention_mask", "global_attention_mask"]
    for arrays in (of_bert, of_longformer):
        assert all(values.shape == (2, 50) and values.dtype == np.int64 for values in arrays.values())
        assert arrays["attention_mask"].all()
    assert not of_bert["token_type_ids"].any()
    assert not of_longformer["global_attention_mask"].any(), "as in transformers, where nobody marks a token"


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_ids_are_random_and_no_special_ones_without_a_tokenizer_that_knows_the_words(
    bert: Bundle, has_tokenizer: bool
) -> None:
    manifest = bert.manifest if has_tokenizer else dataclasses.replace(bert.manifest, tokenizer=None)
    for tokens in (1, 2, 300):
        rows, again = (Texts(Bundle(bert.path, manifest)).batch(4, tokens)["input_ids"] for _ in range(2))
        assert rows.shape == (4, tokens)
        assert not set(rows.ravel().tolist()) & {0, 1, 2, 3}
        np.testing.assert_array_equal(rows, again)
    assert len({row.tobytes() for row in rows}) == 4
