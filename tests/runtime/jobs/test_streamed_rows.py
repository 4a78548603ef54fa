"""Jobs whose rows are streamed: each row's result is that of its document alone, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime.backends import RecurrentStates
from hdruntime.backends.onnxruntime.cpu import OnnxRuntimeRunner
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, InputError, OutOfMemoryError
from hdruntime.jobs import JobOptions, plan_job, run_job
from hdruntime.jobs.row_inference import LocalPool
from hdruntime.session import Session
from hdruntime.text.encoding import Overflow
from support.comparators import assert_close
from support.job_runs import WORDS, read, results, write_rows
from support.recurrent_bundle import make_streaming_bundle, streamed_states
from support.tiny_bundle import NAN_ID

RECUR = Overflow.RECUR
NAN = "long documents are nan read whole"


def long_texts(count: int, most: int = 60) -> list[str]:
    chosen = random.Random(count)
    return [" ".join(chosen.choices(WORDS, k=chosen.randint(0, most))) for _ in range(count)]


def ids_of(bundle: Path, texts: Sequence[str]) -> list[list[int]]:
    with hdruntime.load(bundle, "onnxruntime") as session:
        return [encoding.input_ids for encoding in session.tokenize(texts, overflow="recur")]


@pytest.mark.parametrize(("segment", "options"), [(5, {"batch_tokens": 1}), (None, {"batch_size": 2})])
def test_vectors_are_those_of_one_long_text(tmp_path: Path, segment: int | None, options: dict[str, Any]) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    texts = long_texts(20)
    rows = results(bundle, texts, overflow=RECUR, segment=segment, **options)
    for row, ids in zip(rows, ids_of(bundle, texts), strict=True):
        assert (row["error"], row["tokens"]) == (None, len(ids))
        assert_close(np.array(row["embedding"]), streamed_states(ids, segment or 16).mean(0), atol=1e-5)


def test_rows_of_ids_are_streamed(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    ids = [[2, 4, 5, 3] * 10, [5]]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"ids": {row}}}\n' for row in ids))
    output, opened = tmp_path / "out.jsonl", open_bundle(bundle)
    columns = hdruntime.jobs.rows.Columns(input_ids="ids")  # type: ignore[attr-defined]
    job = plan_job(opened, [path], output, options=JobOptions(overflow=RECUR, segment=7, columns=columns))
    with hdruntime.load(opened, "onnxruntime") as session:
        run_job(job, LocalPool(session, job.task, options=job.options))
    for row, of_row in zip(read(output), ids, strict=True):
        assert_close(np.array(row["embedding"]), streamed_states(of_row, 7).mean(0), atol=1e-5)


def test_a_text_has_the_class_of_its_last_segment(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle", task="text-classification")
    texts = long_texts(6)
    rows = results(bundle, texts, overflow=RECUR, segment=5)
    for row, ids in zip(rows, ids_of(bundle, texts), strict=True):
        start = (len(ids) - 1) // 5 * 5
        logits = streamed_states(ids, 5)[start:].mean(0)
        odds = np.exp(logits - logits.max())
        assert_close(np.array(list(row["scores"].values())), odds / odds.sum(), atol=1e-5)


def test_entities_are_found_in_all_segments(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle", task="token-classification")
    texts = long_texts(6)
    rows = results(bundle, texts, overflow=RECUR, segment=5)
    for row, ids in zip(rows, ids_of(bundle, texts), strict=True):
        best = streamed_states(ids, 5).argmax(axis=1)[1:-1]
        assert [entity["label"] for entity in row["entities"]] == [f"LABEL_{label}" for label in best]


def test_a_bad_row_has_its_error_and_the_others_their_results(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    texts = [*long_texts(5), NAN, *long_texts(4)]
    rows = results(bundle, texts, overflow=RECUR, segment=4, batch_size=3)
    assert "holds NaN or infinity" in rows[5]["error"]
    ids = ids_of(bundle, texts)
    for number, row in enumerate(rows):
        if number != 5:
            assert_close(np.array(row["embedding"]), streamed_states(ids[number], 4).mean(0), atol=1e-5)


def test_a_text_is_scored_across_its_segments(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle", task="text-scoring")
    texts = long_texts(4)
    rows = results(bundle, texts, overflow=RECUR, segment=5)
    for row, ids in zip(rows, ids_of(bundle, texts), strict=True):
        assert_close(np.array(row["log_probabilities"]), streamed_states(ids, 5)[:, 0], atol=1e-5)


# A backend that fails


class FailingMemories:
    """Memories whose runs fail if a test says so."""

    def __init__(self, carried: RecurrentStates, fails: Callable[[np.ndarray], BackendError | None]) -> None:
        self._carried, self._fails = carried, fails
        self.reset, self.computed_tokens = carried.reset, carried.computed_tokens

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        if error := self._fails(inputs["input_ids"]):
            raise error
        return self._carried.run(inputs, outputs)


class FailingRunner(OnnxRuntimeRunner):
    fails: Callable[[np.ndarray], BackendError | None]

    def open_states(self, rows: int) -> FailingMemories:  # type: ignore[override]
        return FailingMemories(super().open_states(rows), self.fails)


def run_failing(bundle: Path, texts: list[str], fails: Callable[[np.ndarray], BackendError | None]) -> Any:
    opened = open_bundle(bundle)
    path, output = write_rows(bundle.with_name("in.jsonl"), texts), bundle.with_name("out.jsonl")
    job = plan_job(opened, [path], output, options=JobOptions(overflow=RECUR, segment=4))
    runner = FailingRunner(opened)
    runner.fails = fails
    with Session(opened, runner) as session:
        run_job(job, LocalPool(session, job.task, options=job.options))
    return read(output)


def test_where_memory_is_short_fewer_rows_are_streamed_at_a_time(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    texts, shapes = long_texts(12), []

    def fails(ids: np.ndarray) -> BackendError | None:
        shapes.append(len(ids))
        return OutOfMemoryError("no memory") if len(ids) > 3 else None

    rows = run_failing(bundle, texts, fails)
    assert shapes[:3] == [12, 6, 3]
    assert set(shapes[3:]) == {3}
    for row, ids in zip(rows, ids_of(bundle, texts), strict=True):
        assert_close(np.array(row["embedding"]), streamed_states(ids, 4).mean(0), atol=1e-5)


def test_a_row_that_the_backend_fails_on_is_found(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    texts = [*long_texts(4), NAN, *long_texts(3)]

    def fails(ids: np.ndarray) -> BackendError | None:
        return BackendError("the model does not like this id") if (ids == NAN_ID).any() else None

    rows = run_failing(bundle, texts, fails)
    assert [row["error"] for row in rows] == [None] * 4 + ["the model does not like this id"] + [None] * 3


def test_a_backend_that_fails_on_everything_ends_the_job(tmp_path: Path) -> None:
    bundle = make_streaming_bundle(tmp_path / "bundle")
    with pytest.raises(BackendError, match="the model likes nothing"):
        run_failing(bundle, long_texts(3), lambda ids: BackendError("the model likes nothing"))


# Invalid options


def plan(bundle: Path, **options: Any) -> None:
    path = write_rows(bundle.with_name("in.jsonl"), ["long"])
    plan_job(open_bundle(bundle), [path], bundle.with_name("out.jsonl"), options=JobOptions(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment": 4}, r"segment is for texts that are streamed\.\nAdd overflow='recur'"),
        ({"overflow": RECUR, "segment": 17}, r"segment is 17; it must be 1 to 16"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(make_streaming_bundle(tmp_path / "bundle"), **options)
