"""The benchmark of quality: its metrics on rankings by hand, its queries, and a tiny run of the whole script."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.quality import retrieval


def test_the_rank_of_the_right_document_counts_from_the_most_similar_and_ties_earn_nothing() -> None:
    similarities = np.array([[0.9, 0.5, 0.1, 0.7], [0.9, 0.5, 0.1, 0.7], [0.5, 0.5, 0.5, 0.5]])
    answers = np.array([0, 1, 2])
    assert retrieval.ranks_of(similarities, answers, np.arange(4)).tolist() == [1, 3, 4]
    assert retrieval.ranks_of(similarities, answers, np.arange(3)).tolist() == [1, 2, 3]


def test_mrr_is_that_computed_by_hand() -> None:
    ranks = np.array([1.0, 2.0, 3.0, 10.0, 11.0])
    assert retrieval.reciprocal_ranks(ranks).tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 10, 0])


def test_an_interval_draws_documents_and_not_queries() -> None:
    scores = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 10)
    apart = retrieval.interval(scores, np.arange(60))
    assert apart[0] == pytest.approx(0.37, abs=0.02)  # 0.5 - 1.96 * sqrt(0.25 / 60)
    assert apart[1] == pytest.approx(0.63, abs=0.02)
    low, high = retrieval.interval(scores, np.repeat([0, 1] * 10, 3))
    assert high - low > 1.5 * (apart[1] - apart[0])
    assert retrieval.interval(scores, np.zeros(60, int)) == (0.5, 0.5)


TEXT = """Loud titles
***********

A "loud" title is followed by a line of stars, and this
is not the first sentence: a colon ends one, too. Short one.

   >>> This is an example, which is no prose but looks like it does.

Later there is a second sentence of prose with many more words.
"""


def test_sentences_are_of_prose() -> None:
    assert [" ".join(TEXT[start:end].split()) for start, end in retrieval.prose_sentences(TEXT)] == [
        'A "loud" title is followed by a line of stars, and this is not the first sentence:',
        "Later there is a second sentence of prose with many more words.",
    ]


def words(number: int) -> str:
    return " ".join(["word"] * number)


def test_sentences_are_taken_out_of_the_documents_that_they_ask_for(word_tokenizer: Any) -> None:
    first, twice = f"First of the {words(9)}.", f"Repeated {words(9)}."
    later = [f"Sentence {number} of what {words(9)}." for number in ("one", "two", "three")]
    documents = {
        "a-topic": " ".join([twice, first, words(40), *later]),
        "short": first.replace("First", "Other"),
        "another": f"{twice} {words(60)} Unique {words(9)} here.",
    }
    name, by_first, by_later = retrieval.queries_of(documents, word_tokenizer, base=30, sentences=2)
    assert (name.texts, name.answers, name.documents) == (["a topic", "another"], [0, 2], documents)
    assert (by_first.texts, by_first.answers) == ([first, f"Unique {words(9)} here."], [0, 2])
    assert (by_later.texts, by_later.answers) == ([later[0], later[2], f"Unique {words(9)} here."], [0, 0, 2])
    assert by_later.documents["a-topic"].split() == f"{twice} {first} {words(40)} {later[1]}".split()
    assert by_first.documents["short"] == documents["short"]
    for queries in (by_first, by_later):
        for text, answer in zip(queries.texts, queries.answers, strict=True):
            assert text not in list(queries.documents.values())[answer]


@pytest.mark.nightly
def test_the_script_reports_every_variant(
    tiny_sentence_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from support.tiny_models import BASE

    names = [f"w{number}" for number in range(100)]
    generator = np.random.default_rng(0)

    def sentence() -> str:
        return f"The {' '.join(generator.choice(names, 12))}."

    monkeypatch.setattr(retrieval, "topics", {name: " ".join(sentence() for _ in range(8)) for name in names[:6]})
    every = retrieval.variants(argparse.Namespace(window=8))
    monkeypatch.setattr(retrieval, "variants", lambda options: [*every[:2], every[-1]])
    results = tmp_path / "results.jsonl"
    options = f"--model {tiny_sentence_model} --max-len 90 --window 8 --sentences 2 --output {results}"
    monkeypatch.setattr(sys, "argv", ["retrieval.py", *options.split()])
    assert retrieval.main() == 0
    (result,) = map(json.loads, results.read_text().splitlines())
    variants = ["truncated", "split", "tile, window:8"]
    entries = result["results"]
    assert [entry["variant"] for entry in entries] == variants * 6
    assert result["queries"] == {"name": 6, "first": 6, "later": 12}
    assert result["collections"]["long topics"]["tokens_largest"] > BASE
    for entry in entries:
        low, high = entry["mrr_interval"]
        assert 0 <= low <= entry["mrr"] <= high <= 1
        assert (entry["mrr_difference"] == 0) or entry["variant"] != "truncated"
    assert len({json.dumps([entry["mrr"] for entry in entries[start::3]]) for start in range(3)}) == 3
    printed = capsys.readouterr().out
    assert all(printed.count(f"  {variant:<30} ") == 6 for variant in variants)
