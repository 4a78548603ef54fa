"""What a job writes for each task, and how values and ids survive the file formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hdruntime.jobs.rows import Columns
from support.job_runs import VOCABULARY, embeddings, gather_bundle, read, results, run

BundleMaker = Callable[..., Path]


def test_jsonl_embeddings_read_back_as_the_same_float32(new_bundle: BundleMaker, tmp_path: Path) -> None:
    bundle = new_bundle(task="sentence-similarity")
    (row,) = results(bundle, ["long documents"])
    assert np.array(row["embedding"], np.float32).tobytes() == embeddings(bundle, ["long documents"]).tobytes()


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_ids_are_passed_through(bundle_path: Path, tmp_path: Path, ending: str) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"key": "b", "text": "long"}\n{"key": 12345678901234567890123, "text": "read"}\n{"text": "."}')
    run(bundle_path, inputs, tmp_path / f"out{ending}", columns=Columns(id="key"))
    ids = [row["id"] for row in read(tmp_path / f"out{ending}")]
    # One Parquet column cannot hold strings and integers.
    large: object = 12345678901234567890123
    assert ids == ["b", str(large) if ending == ".parquet" else large, None]


def test_a_class_has_its_label_and_every_score(new_bundle: BundleMaker, tmp_path: Path) -> None:
    logits = np.zeros((len(VOCABULARY), 2))
    logits[VOCABULARY.index("long")] = [0, np.log(3)]
    bundle = gather_bundle(new_bundle(), "text-classification", {"logits": logits}, labels=("no", "yes"))
    row, failed = results(bundle, ["long", None], ending=".parquet")
    assert list(row) == ["id", "label", "score", "scores", "tokens", "error"]
    assert row["label"] == "yes"
    assert row["score"] == pytest.approx(0.75, rel=1e-6)
    assert row["scores"] == pytest.approx({"no": 0.25, "yes": 0.75}, rel=1e-6)
    assert (failed["label"], failed["scores"]) == (None, None)


@pytest.mark.parametrize(
    ("config", "classes", "scores"),
    [
        ({"problem_type": "multi_label_classification"}, 2, [0.5, 0.75]),
        ({"problem_type": "regression"}, 2, [0.0, np.log(3)]),
        ({}, 1, [0.5]),
    ],
)
def test_scores_follow_the_problem_type_of_the_checkpoint(
    new_bundle: BundleMaker, tmp_path: Path, config: dict[str, object], classes: int, scores: list[float]
) -> None:
    logits = np.tile([0, np.log(3)], (len(VOCABULARY), 1))[:, :classes]
    bundle = gather_bundle(new_bundle(), "text-classification", {"logits": logits}, config=config)
    (row,) = results(bundle, ["long"])
    # Classes without a name have the one that transformers gives them.
    expected = {f"LABEL_{index}": score for index, score in enumerate(scores)}
    assert row["scores"] == pytest.approx(expected, rel=1e-6)


def test_entities_are_listed_with_their_characters(new_bundle: BundleMaker, tmp_path: Path) -> None:
    logits = np.tile([9.0, 0.0], (len(VOCABULARY), 1))
    logits[VOCABULARY.index("documents")] = [0, np.log(3)]
    bundle = gather_bundle(new_bundle(), "token-classification", {"logits": logits}, labels=("O", "THING"))
    one, none, failed = results(bundle, ["Long Documents", "", None], ending=".jsonl")
    (entity,) = one["entities"]
    assert entity.pop("score") == pytest.approx(0.75)
    assert entity == {"start": 5, "end": 14, "text": "Documents", "label": "THING"}
    assert none["entities"] == []
    assert failed["entities"] is None


def test_questions_are_answered_from_their_context(new_bundle: BundleMaker, tmp_path: Path) -> None:
    start, end = np.zeros(len(VOCABULARY)), np.zeros(len(VOCABULARY))
    start[VOCABULARY.index("documents")] = end[VOCABULARY.index("read")] = 9
    bundle = gather_bundle(new_bundle(), "question-answering", {"start_logits": start, "end_logits": end})
    rows = [
        {"q": "documents read long?", "c": "Long documents are read whole."},
        {"q": "long", "c": ""},
        {"q": " ", "c": "documents"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = Columns(text="q", text_pair="c")
    run(bundle, tmp_path / "in.jsonl", tmp_path / "out.parquet", columns=columns)
    found, empty, asked_nothing = read(tmp_path / "out.parquet")
    assert (found["answer"], found["start"], found["end"]) == ("documents are read", 5, 23)
    assert (empty["answer"], empty["score"], empty["error"]) == ("", 0, None)
    assert asked_nothing["error"] == "The question has no tokens."


def test_masks_are_filled(new_bundle: BundleMaker, tmp_path: Path) -> None:
    mask = VOCABULARY.index("whole")
    logits = np.zeros((len(VOCABULARY), len(VOCABULARY)))
    logits[mask, VOCABULARY.index("read")] = 9
    bundle = gather_bundle(new_bundle(), "fill-mask", {"logits": logits}, mask_token_id=mask)
    two, none = results(bundle, ["long whole whole", "long"], ending=".parquet")
    assert [(len(mask), mask[0]["token"]) for mask in two["masks"]] == [(5, "read"), (5, "read")]
    assert "The text has no mask to fill.\nWrite whole in place of a word." in str(none["error"])


def test_a_text_has_its_perplexity_and_the_score_of_every_token(new_bundle: BundleMaker, tmp_path: Path) -> None:
    table = np.full(len(VOCABULARY), -np.log(2))
    table[VOCABULARY.index("[CLS]")] = 0
    bundle = gather_bundle(new_bundle(), "text-scoring", {"log_probabilities": table})
    row, failed = results(bundle, ["long documents", None], ending=".jsonl")
    assert list(row) == ["id", "log_probability", "perplexity", "log_probabilities", "tokens", "error"]
    assert row["log_probabilities"] == pytest.approx([0, *[-np.log(2)] * 3], rel=1e-6)
    assert row["log_probability"] == pytest.approx(-3 * np.log(2), rel=1e-6)
    assert row["perplexity"] == pytest.approx(2, rel=1e-6)
    assert (failed["log_probability"], failed["log_probabilities"]) == (None, None)
