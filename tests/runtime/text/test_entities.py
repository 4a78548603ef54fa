"""Entities by tokens, groups and words: those of transformers' pipeline."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast, TokenClassificationPipeline

from hdruntime.errors import InputError, OutputExistsError
from hdruntime.text.entities import Aggregation, entities
from hdruntime.text.tokenization import TextTokenizer
from support.job_runs import VOCABULARY, gather_bundle, read, run, write_rows

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "ada",
    "love",
    "##lace",
    "met",
    "char",
    "##les",
    "##!",
    "in",
    "london",
    ".",
]
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "A-B"]
TEXTS = [
    "Ada Lovelace met Charles in London.",
    "ada ada lovelace, love lace charles! Zürich in.london lovelace",
    "london",
    "",
    " met  Met ",
]


def tokenizer(kind: str) -> Tokenizer:
    """With marks for continuations of words, or only with splits, where one token begins with the space before it."""
    marks = kind == "word chunks"
    vocabulary = {word if marks else word.replace("##", " "): index for index, word in enumerate(WORDS)}
    if marks:
        made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix="##"))
        made.decoder = decoders.WordPiece(prefix="##")
    elif kind == "words":
        made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    else:
        made = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], unk_id=WORDS.index("[UNK]")))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r" lace|\w+|[^\w\s]+"), "removed", invert=True)
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


@pytest.fixture(scope="module")
def model() -> BertForTokenClassification:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        initializer_range=0.5,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    return BertForTokenClassification(config).eval()


def ours(model: Any, path: Path, text: str, aggregation: Aggregation) -> list[tuple[Any, ...]]:
    tokenizer = TextTokenizer(path, max_len=64)
    (encoding,) = tokenizer.encode([text])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([encoding.input_ids])).logits[0].numpy()
    options = {"aggregation": aggregation, "tokenizer": tokenizer.whole}
    found = entities(logits, LABELS, text=text, encoding=encoding, **options)
    assert all(entity.text == text[entity.start : entity.end] for entity in found)
    return [(entity.start, entity.end, entity.label, pytest.approx(entity.score, rel=1e-5)) for entity in found]


@pytest.mark.parametrize("kind", ["word chunks", "words", "unigrams"])
def test_entities_are_those_of_transformers(model: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer(kind).save(str(path))
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    pipeline = TokenClassificationPipeline(
        model=model, tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(path), **special)
    )
    seen = {}
    for aggregation in Aggregation:
        for text in filter(None, TEXTS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # A tokenizer without word chunks has no words, says the pipeline.
                found = pipeline(text, aggregation_strategy=aggregation.value)
            label = "entity" if aggregation is Aggregation.NONE else "entity_group"
            theirs = [(each["start"], each["end"], each[label], each["score"]) for each in found]
            assert ours(model, path, text, aggregation) == theirs, (aggregation, text)
            seen[aggregation, text] = theirs
        assert ours(model, path, "", aggregation) == []
    # The five differ here, or they would not be told apart.
    assert len({str([seen[aggregation, text] for text in filter(None, TEXTS)]) for aggregation in Aggregation}) == 5


def test_a_job_groups_entities_when_asked(new_bundle: Any, tmp_path: Path) -> None:
    logits = np.tile([9.0, 0.0, 0.0], (len(VOCABULARY), 1))
    logits[VOCABULARY.index("long")] = [0, 9, 0]
    logits[VOCABULARY.index("documents")] = [0, 0, 9]
    bundle = gather_bundle(new_bundle(), "token-classification", {"logits": logits}, labels=("O", "B-X", "I-X"))
    rows = write_rows(tmp_path / "in.jsonl", ["read long documents whole long"])
    found = {}
    for aggregation in (None, *Aggregation):
        run(bundle, rows, tmp_path / f"{aggregation}.jsonl", aggregation=aggregation)
        (row,) = read(tmp_path / f"{aggregation}.jsonl")
        found[aggregation] = [(each["text"], each["label"]) for each in row["entities"]]  # type: ignore[attr-defined]
    assert found[None] == found[Aggregation.NONE] == [("long", "B-X"), ("documents", "I-X"), ("long", "B-X")]
    assert found[Aggregation.SIMPLE] == found[Aggregation.FIRST] == [("long documents", "X"), ("long", "X")]
    # What was done is done for the same job alone.
    run(bundle, rows, tmp_path / "None.jsonl")
    with pytest.raises(OutputExistsError):
        run(bundle, rows, tmp_path / "None.jsonl", aggregation=Aggregation.SIMPLE)
    other = new_bundle("other", task="feature-extraction")
    with pytest.raises(InputError, match=r"aggregation is for token-classification, and .* is feature-extraction"):
        run(other, rows, tmp_path / "other.jsonl", aggregation=Aggregation.SIMPLE)
