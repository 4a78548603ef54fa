"""What documents are read as, what is found and said, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import hdruntime
from hdexport.quality.encoding import LongTextMode, similarities_by_mode
from hdexport.quality.measurement import (
    Mean,
    QualityResult,
    Score,
    findings,
    mean_of,
    measure_quality,
    ranks_of,
    reciprocal_ranks,
)
from hdexport.quality.queries import Collection, Queries
from hdexport.support.texts import NamedText
from hdruntime.backends.precision import Precision
from hdruntime.errors import InputError
from support.tiny_bundle import MAX_LEN, TABLE, WORDS, make_bundle


class Silent:
    """A line that keeps what it is told."""

    def __init__(self) -> None:
        self.total = 0.0
        self.done = 0.0

    def begin(self, text: str, *, total: float | None = None) -> None:
        self.total, self.done = total or 0, 0

    def show(self, text: str) -> None:
        pass

    def did(self, amount: float) -> None:
        self.done += amount


def vector(words: str) -> np.ndarray:
    """What the tiny model gives, doubled: the mean of [CLS], the words and [SEP]."""
    mean = TABLE[[WORDS.index(word) for word in ("[CLS]", *words.split(), "[SEP]")]].mean(axis=0)
    return mean / np.linalg.norm(mean)


def test_documents_are_truncated_split_and_read_whole(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", task="sentence-similarity")
    long, short, longer = "long documents are read whole .", "read whole", " ".join(["are read long"] * 6)
    collection = Collection([long, short, longer], {"later": Queries(["documents are"], [0]), "name": Queries()})
    line = Silent()
    with hdruntime.load(bundle, backend="onnxruntime", threads=1) as session:
        found = similarities_by_mode(
            session,
            collection,
            trained=6,
            modes=tuple(LongTextMode),
            begin=lambda tokens: line.begin("", total=tokens),
            line=line,
        )
    query = vector("documents are")
    cut = vector("long documents are read")

    def mean_of(*chunks: str) -> np.ndarray:
        vectors = [len(chunk.split()) + 2 for chunk in chunks] @ np.stack(
            [TABLE[[WORDS.index(word) for word in ("[CLS]", *chunk.split(), "[SEP]")]].mean(axis=0) for chunk in chunks]
        )
        return vectors / np.linalg.norm(vectors)

    assert {mode: list(kinds) for mode, kinds in found.items()} == {mode: ["later"] for mode in LongTextMode}
    assert found[LongTextMode.TRUNCATED]["later"][0, :2] == pytest.approx(
        [query @ cut, query @ vector(short)], abs=1e-6
    )
    split = mean_of("long documents are read", "whole .")
    assert found[LongTextMode.SPLIT]["later"][0, :2] == pytest.approx([query @ split, query @ vector(short)], abs=1e-6)
    whole = [query @ vector(long), query @ vector(short), query @ vector(" ".join(longer.split()[: MAX_LEN - 2]))]
    assert found[LongTextMode.WHOLE]["later"][0] == pytest.approx(whole, abs=1e-6)
    assert line.done == line.total > 0


def score(mode: LongTextMode, kind: str, low: float, high: float, bundle: str = "one") -> Score:
    difference = Mean((low + high) / 2, low, high)
    return Score(
        bundle=bundle, precision=Precision.FLOAT32, mode=mode, kind=kind, mrr=Mean(0.5, 0.4, 0.6), difference=difference
    )


RESULT = QualityResult(
    trained=512,
    texts=9,
    long_texts=7,
    median_tokens=900,
    longest_tokens=2000,
    truncated_texts={"one": 0},
    queries={"first": 7, "later": 40},
    scores=(
        score(LongTextMode.TRUNCATED, "first", 0, 0),
        score(LongTextMode.TRUNCATED, "later", 0, 0),
        score(LongTextMode.WHOLE, "first", -0.3, -0.1),
        score(LongTextMode.WHOLE, "later", 0.02, 0.12),
    ),
)


def test_findings_say_what_whole_texts_change_and_begin_with_what_truncation_loses() -> None:
    assert list(findings(RESULT)) == [
        "whole texts find later sentences better than truncation: +0.07 (+0.02 to +0.12)",
        "whole texts find first sentences worse than truncation: -0.20 (-0.30 to -0.10)",
    ]


TEXTS = [NamedText(f"{number}.txt", "Long documents are read. " * 4) for number in range(5)]


def refusal(*bundles: Path, texts: list[NamedText] = TEXTS) -> str:
    with pytest.raises(InputError) as raised:
        measure_quality(bundles, texts, sentences=2, trained=None, backend="onnxruntime", line=Silent())
    return str(raised.value)


def test_bundles_without_vectors_and_of_other_models_are_refused(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    classes = make_bundle(tmp_path / "classes", task="text-classification")
    assert "task is text-classification, which has no embeddings" in refusal(classes)
    bare = make_bundle(tmp_path / "bare", tokenizer=False)
    assert "has no tokenizer" in refusal(bare)
    other = hdruntime.open_bundle(make_bundle(tmp_path / "other"))
    from hdexport.support.bundle_writer import write_manifest

    write_manifest(other.path, dataclasses.replace(other.manifest, num_layers=2, name="large"))
    assert "is of another model than" in (message := refusal(bundle, other.path))
    assert "large" in message


def test_too_few_texts_or_sentences_are_refused(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    short = [NamedText("a", "whole"), *TEXTS[:3]]
    assert "3 of 4 texts have more than 4 tokens, which the model was trained with; at least 5" in refusal(
        bundle, texts=short
    )
    assert "0 sentences of 8 to 60 words were found after the first 4 tokens of 5 long texts" in refusal(bundle)


def test_the_rank_counts_from_the_most_similar_and_ties_earn_nothing() -> None:
    similarities = np.array([[0.9, 0.5, 0.1, 0.7], [0.9, 0.5, 0.1, 0.7], [0.5, 0.5, 0.5, 0.5]])
    assert ranks_of(similarities, [0, 1, 2]).tolist() == [1, 3, 4]
    # Another answer has another rank: a metric that ignores answers would not see the difference.
    assert ranks_of(similarities, [1, 0, 2]).tolist() == [3, 1, 4]


def test_mrr_is_that_computed_by_hand() -> None:
    ranks = np.array([1.0, 2.0, 3.0, 10.0, 11.0, np.inf])
    assert reciprocal_ranks(ranks).tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 10, 0, 0])


def test_an_interval_draws_documents_and_not_queries() -> None:
    scores = np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 10)
    apart = mean_of(scores, range(60))
    assert apart.value == 0.5
    assert apart.low == pytest.approx(0.37, abs=0.02)  # 0.5 - 1.96 * sqrt(0.25 / 60)
    assert apart.high == pytest.approx(0.63, abs=0.02)
    assert mean_of(scores, [0] * 60) == Mean(0.5, 0.5, 0.5)
    grouped = mean_of(scores, np.repeat(np.arange(20), 3).tolist())
    assert grouped.high - grouped.low > 1.5 * (apart.high - apart.low)


def test_an_interval_holds_its_mean_whatever_the_order_of_the_sum() -> None:
    """Thirteen equal scores of three documents: summed by document, their mean is a bit smaller than that of all."""
    answers = np.repeat([0, 1, 2], [4, 5, 4])
    found = mean_of(np.full(len(answers), 0.9), answers.tolist())
    assert found.low <= found.value <= found.high
