"""Entities and answers of texts that are run in chunks, in Python and in a job, against transformers."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast, TokenClassificationPipeline
from transformers.pipelines.document_question_answering import select_starts_ends

import hdruntime
from hdruntime.errors import InputError
from hdruntime.jobs.rows import Columns
from hdruntime.session import Session
from hdruntime.text.answers import Answer, AnswerOptions, best_answers
from hdruntime.text.encoding import Encoding, Overflow
from hdruntime.text.entities import Aggregation
from hdruntime.text.splitting import SplitEncoding, as_single_chunk
from support.job_runs import VOCABULARY, WORDS, gather_bundle, read, run, write_rows

BundleMaker = Callable[..., Path]

LABELS = ("O", "B-X", "I-X", "I-Y-Z")
STRIDE = 6


def words(count: int, seed: int = 0) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


# Entities


def model_of_tokens() -> BertForTokenClassification:
    """Its labels depend on the token alone, so that chunks change nothing."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=8,
        num_hidden_layers=0,
        num_attention_heads=1,
        initializer_range=1.0,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = BertForTokenClassification(config).eval()
    torch.nn.init.zeros_(model.bert.embeddings.position_embeddings.weight)
    return model


def test_entities_of_a_long_text_are_those_of_transformers_on_the_whole_text(
    new_bundle: BundleMaker, tmp_path: Path
) -> None:
    model = model_of_tokens()
    with torch.inference_mode():
        table = model(input_ids=torch.arange(len(VOCABULARY))[:, None]).logits[:, 0].numpy()
    bundle = gather_bundle(new_bundle(), "token-classification", {"logits": table}, labels=LABELS)
    texts = [words(count, count) for count in (1, 14, 15, 16, 60)]
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    whole, cut = (
        TokenClassificationPipeline(
            model=model,
            tokenizer=PreTrainedTokenizerFast(
                tokenizer_file=str(bundle / "tokenizer.json"), model_max_length=limit, **special
            ),
        )
        for limit in (512, 16)
    )
    with hdruntime.load(bundle) as session:
        for aggregation in Aggregation:
            options: dict[str, Any] = {"aggregation": aggregation, "overflow": Overflow.SPLIT}
            theirs = [entities_of(whole, text, aggregation_strategy=aggregation.value) for text in texts]
            assert any(theirs)
            for stride in (0, STRIDE, 13):
                found = session.entities(texts, stride=stride, **options)
                assert [[dataclasses.astuple(each) for each in of_text] for of_text in found] == theirs
            run(bundle, write_rows(tmp_path / "in.jsonl", texts), tmp_path / f"{aggregation}.jsonl", **options)
            rows = read(tmp_path / f"{aggregation}.jsonl")
            assert [[tuple(each.values()) for each in row["entities"]] for row in rows] == theirs
        # In chunks the pipeline finds the same, where an entity is whole in one of them; ours are not cut.
        simple = [session.entities([text], aggregation="simple", overflow="split", stride=3)[0] for text in texts]
        in_chunks = [entities_of(cut, text, aggregation_strategy="simple", stride=12) for text in texts]
        assert [[dataclasses.astuple(each) for each in of_text] for of_text in simple] == in_chunks
        with pytest.raises(InputError, match=r"^session.answers is for question-answering, .* is token-classification"):
            session.answers(["long"], ["long"])
        with pytest.raises(InputError, match="This bundle has no recurrent states"):
            session.entities(texts, overflow="recur")


def entities_of(pipeline: TokenClassificationPipeline, text: str, **options: Any) -> list[tuple[Any, ...]]:
    label = "entity" if options["aggregation_strategy"] == "none" else "entity_group"
    return [
        (each["start"], each["end"], text[each["start"] : each["end"]], each[label], pytest.approx(each["score"], 1e-5))
        for each in pipeline(text, **options)
    ]


# Answers


def answers_of_transformers(
    split: SplitEncoding, outputs: list[dict[str, np.ndarray]], context: str, *, top_k: int, impossible: bool
) -> list[tuple[str, int, int, float]]:
    """Every chunk's by transformers' own function; a span of two chunks has its higher score."""
    best: dict[tuple[int, int], float] = {}
    null = 1e6
    for chunk, of_chunk in zip(split.chunks, outputs, strict=True):
        masked = np.array([[text != 1 for text in chunk.sequence_ids]], int)
        masked[0, 0] = 0  # [CLS]
        starts, ends, scores, null = select_starts_ends(
            of_chunk["start_logits"][None],
            of_chunk["end_logits"][None],
            masked,
            np.ones_like(masked),
            min_null_score=null,
            top_k=50,
            handle_impossible_answer=impossible,
            max_answer_len=5,
        )
        for start, end, score in zip(starts, ends, scores, strict=True):
            if not score:  # It ends before it starts, or is too long.
                continue
            place = chunk.offsets[start][0], chunk.offsets[end][1]
            best[place] = max(best.get(place, 0), float(score))
    found = [(context[start:end], start, end, score) for (start, end), score in best.items()]
    if impossible:
        found.append(("", 0, 0, null))
    return sorted(found, key=lambda each: -each[3])[:top_k]


@pytest.fixture
def qa_bundle(new_bundle: BundleMaker) -> Path:
    tables = np.random.default_rng(5).normal(0, 2, (2, len(VOCABULARY))).astype(np.float32)
    return gather_bundle(new_bundle(), "question-answering", {"start_logits": tables[0], "end_logits": tables[1]})


QUESTIONS = ["long documents", "read", "read", "whole ."]
CONTEXTS = [words(count, count) for count in (3, 12, 13, 50)]


def answered(session: Session, **options: Any) -> list[list[tuple[Any, ...]]]:
    found = session.answers(QUESTIONS, CONTEXTS, overflow="split", stride=5, **options)
    return [[dataclasses.astuple(each) for each in of_question] for of_question in found]


@pytest.mark.parametrize("impossible", [False, True])
def test_answers_are_the_best_of_all_chunks_as_transformers_scores_them(qa_bundle: Path, impossible: bool) -> None:
    with hdruntime.load(qa_bundle) as session:
        found = session.answers(
            QUESTIONS,
            CONTEXTS,
            top_k=7,
            max_answer_tokens=5,
            handle_impossible_answer=impossible,
            overflow="split",
            stride=5,
        )
        splits = session.split(QUESTIONS, CONTEXTS, stride=5)
        assert [len(split.chunks) > 1 for split in splits] == [False, False, True, True]
        for split, context, ours in zip(splits, CONTEXTS, found, strict=True):
            theirs = answers_of_transformers(
                split, session.infer(split.chunks), context, top_k=1000, impossible=impossible
            )
            # Words of a kind have equal logits: of equal scores any span may come first.
            scores = {(text, start, end): score for text, start, end, score in theirs}
            assert [each.score for each in ours] == pytest.approx([score for *_, score in theirs[:7]], rel=1e-5)
            assert all(
                each.score == pytest.approx(scores[each.answer, each.start, each.end], rel=1e-5) for each in ours
            )
            assert len({(each.start, each.end) for each in ours}) == len(ours)
        (first,) = zip(*session.answers(QUESTIONS, CONTEXTS, overflow="split", stride=5), strict=True)
        assert [each.score for each in first] == pytest.approx([row[0][3] for row in answered(session, top_k=9)])


def test_a_job_gives_the_answers_that_the_session_gives(qa_bundle: Path, tmp_path: Path) -> None:
    inputs = tmp_path / "in.jsonl"
    rows = [{"q": question, "c": context} for question, context in zip(QUESTIONS, CONTEXTS, strict=True)]
    inputs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = Columns(text="q", text_pair="c")
    with hdruntime.load(qa_bundle) as session:
        for top_k, impossible, ending in itertools.product((1, 3), (False, True), ("jsonl", "parquet")):
            output = tmp_path / f"{top_k}{impossible}.{ending}"
            answers = AnswerOptions(top_k=top_k, handle_impossible_answer=impossible)
            run(qa_bundle, inputs, output, columns=columns, answers=answers, overflow=Overflow.SPLIT, stride=5)
            found = [row["answers"] if top_k > 1 else [row] for row in read(output)]
            names = ("answer", "start", "end", "score")
            ours = [[tuple(each[name] for name in names) for each in of_row] for of_row in found]
            expected = answered(session, top_k=top_k, handle_impossible_answer=impossible)
            assert ours == [[(*each[:3], pytest.approx(each[3], rel=1e-6)) for each in row] for row in expected]


def test_of_equal_scores_the_shortest_comes_first_and_tokens_of_one_place_take_none() -> None:
    tokens = as_single_chunk(Encoding([1, 2, 3, 4], [0, 1, 1, 1], [(0, 1), (0, 1), (0, 1), (1, 2)], [0, 1, 1, 1]))
    logits = {name: np.zeros(4, np.float32) for name in ("start_logits", "end_logits")}
    found = best_answers(tokens, [logits], context="xy", options=AnswerOptions(top_k=3))
    assert [each.answer for each in found] == ["x", "y", "xy"]


def test_an_impossible_answer_needs_a_token_before_the_question() -> None:
    bare = as_single_chunk(Encoding([1, 2], [0, 1], [(0, 1), (0, 1)], [0, 1]))
    logits = {name: np.zeros(2, np.float32) for name in ("start_logits", "end_logits")}
    assert best_answers(bare, [logits], context="x", options=AnswerOptions()) == [Answer("x", 0, 1, 1.0)]
    with pytest.raises(InputError, match=r"no special token before the question.*\n.*handle_impossible_answer"):
        best_answers(bare, [logits], context="x", options=AnswerOptions(handle_impossible_answer=True))
    empty = as_single_chunk(Encoding([1, 2], [0, 0], [(0, 0), (0, 1)], [None, 0]))
    for impossible in (False, True):
        options = AnswerOptions(handle_impossible_answer=impossible)
        assert best_answers(empty, [logits], context="", options=options) == [Answer("", 0, 0, float(impossible))]
