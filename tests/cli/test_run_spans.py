"""`hdexport run` of entities and answers: its options, against transformers and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification, AutoTokenizer
from transformers.pipelines import pipeline

from hdexport.model.tasks import Task
from support.made_once import made_once
from support.tiny_models import save_tiny_model

Command = Callable[..., Any]

KINDS = ("O", "B-X", "I-X", "I-Y")

TEXTS = ["w7aa w8 w9ab w10b", "w11abab. w12a w13 w14b w15", "", "w16b"]

QUESTIONS = ["w1 w2", "w3", "w4 w5 w6"]
CONTEXTS = ["w20 w21 w22 w23 w24 w25", "w30", "w40 w41  w42 w43 w44 w45 w46 w47 w48"]


@pytest.fixture(scope="module")
def built_for(hdexport: Command, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Task], Path]:
    """Task -> a folder with a tiny BERT's ``checkpoint`` and its ``bundle``."""

    def maker(task: Task) -> Callable[[Path], None]:
        def make(directory: Path) -> None:
            checkpoint = directory / "checkpoint"
            labels = {"id2label": dict(enumerate(KINDS)), "label2id": {kind: n for n, kind in enumerate(KINDS)}}
            save_tiny_model(checkpoint, "bert", task, **labels, initializer_range=0.5)
            _cut_words(checkpoint / "tokenizer.json")
            done = hdexport("build", checkpoint, "-o", directory / "bundle", "--target", "onnx", "--no-verify")
            assert done.returncode == 0, done.stderr

        return make

    return lambda task: made_once(tmp_path_factory, f"spans of {task.value}", maker(task))


def _cut_words(file: Path) -> None:
    """Give a tokenizer of whole words the pieces ``##a`` and ``##b``."""
    tokenizer = json.loads(file.read_text())
    words = [*list(tokenizer["model"]["vocab"])[:-2], "##a", "##b"]
    tokenizer["model"] = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {word: number for number, word in enumerate(words)},
    }
    file.write_text(json.dumps(tokenizer))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def entities_of_transformers(checkpoint: Path, strategy: str) -> list[list[tuple[Any, ...]]]:
    model = AutoModelForTokenClassification.from_pretrained(checkpoint)
    find = pipeline("token-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(checkpoint))
    label = "entity" if strategy == "none" else "entity_group"
    return [
        [
            (each["start"], each["end"], each[label], float(each["score"]))
            for each in find(text, aggregation_strategy=strategy)
        ]
        for text in TEXTS
    ]


def test_aggregation_makes_entities_of_words_as_transformers_does(
    built_for: Callable[[Task], Path], hdexport: Command, tmp_path: Path
) -> None:
    directory = built_for(Task.TOKEN_CLASSIFICATION)
    inputs = tmp_path / "in.jsonl"
    inputs.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = {}
    for strategy in ("none", "simple", "first", "max", "average"):
        output = tmp_path / f"{strategy}.jsonl"
        done = hdexport("run", directory / "bundle", inputs, "-o", output, "--aggregation", strategy)
        assert done.returncode == 0, done.stderr
        found[strategy] = [
            [(each["start"], each["end"], each["label"], each["score"]) for each in row["entities"]]
            for row in rows_of(output)
        ]
        expected = entities_of_transformers(directory / "checkpoint", strategy)
        assert [[each[:3] for each in row] for row in found[strategy]] == [
            [each[:3] for each in row] for row in expected
        ]
        scores = [[each[3] for row in rows for each in row] for rows in (found[strategy], expected)]
        np.testing.assert_allclose(*scores, rtol=1e-4)
    assert all(found["average"] != found[other] for other in ("none", "simple", "first", "max"))
    assert hdexport("run", directory / "bundle", inputs, "-o", tmp_path / "default.jsonl").returncode == 0
    assert rows_of(tmp_path / "default.jsonl") == rows_of(tmp_path / "none.jsonl")


def answers_by_hand(checkpoint: Path, question: str, context: str, *, impossible: bool) -> list[tuple[int, int, float]]:
    """All answers, best first: (start, end, score)."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    inside = [token for token, text in enumerate(encoded.sequence_ids()) if text == 1]
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        logits = AutoModelForQuestionAnswering.from_pretrained(checkpoint)(**encoded)
    starts, ends = (each[0, [0, *inside]].double().softmax(0) for each in (logits.start_logits, logits.end_logits))
    found = [
        (offsets[inside[first]][0], offsets[inside[last]][1], float(starts[1 + first] * ends[1 + last]))
        for last in range(len(inside))
        for first in range(last + 1)
    ]
    if impossible:
        found.append((0, 0, float(starts[0] * ends[0])))
    return sorted(found, key=lambda each: -each[2])


def test_top_k_and_impossible_answers_are_those_of_the_probabilities(
    built_for: Callable[[Task], Path], hdexport: Command, tmp_path: Path
) -> None:
    directory = built_for(Task.QUESTION_ANSWERING)
    inputs = tmp_path / "in.jsonl"
    rows = [{"q": question, "c": context} for question, context in zip(QUESTIONS, CONTEXTS, strict=True)]
    inputs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--text-column", "q", "--text-pair-column", "c")
    are_empty = []
    for top_k, impossible in ((1, False), (1, True), (4, False), (4, True)):
        output = tmp_path / f"{top_k}{impossible}.jsonl"
        options = [*(["--top-k", top_k] if top_k > 1 else []), *(["--handle-impossible-answer"] if impossible else [])]
        done = hdexport("run", directory / "bundle", inputs, "-o", output, *columns, *options)
        assert done.returncode == 0, done.stderr
        for question, context, row in zip(QUESTIONS, CONTEXTS, rows_of(output), strict=True):
            found = row["answers"] if top_k > 1 else [row]
            expected = answers_by_hand(directory / "checkpoint", question, context, impossible=impossible)[:top_k]
            assert [(each["start"], each["end"]) for each in found] == [each[:2] for each in expected]
            assert [each["answer"] for each in found] == [context[start:end] for start, end, _ in expected]
            np.testing.assert_allclose([each["score"] for each in found], [each[2] for each in expected], rtol=1e-4)
            are_empty += ["" in [each["answer"] for each in found]] if impossible else []
    assert len(set(are_empty)) == 2, "the empty answer should be among some, and not among others"


def test_options_of_other_tasks_and_numbers_below_1_are_refused(
    built_for: Callable[[Task], Path], refused: Callable[..., str], tmp_path: Path
) -> None:
    inputs = tmp_path / "in.jsonl"
    inputs.write_text('{"text": "w7"}\n')
    of_tokens = ("run", built_for(Task.TOKEN_CLASSIFICATION) / "bundle", inputs, "-o", tmp_path / "out.jsonl")
    asks = "--top-k and .* are for question-answering, .* is token-classification"
    refused(*of_tokens, "--top-k", 2, message=asks)
    refused(*of_tokens, "--handle-impossible-answer", message=asks)
    refused(*of_tokens, "--top-k", 0, message="argument --top-k: 0 is not a whole number, 1 or more")
    assert not (tmp_path / "out.jsonl").exists()
