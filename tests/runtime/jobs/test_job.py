"""Batch jobs on real files and real ONNX Runtime sessions: rows, refusals, and what each task writes."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, BundleCorruptError, InputError, OutputExistsError
from hdruntime.jobs import JobOptions, plan_job, run_job
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.row_inference import LocalPool
from hdruntime.jobs.rows import Columns
from hdruntime.tasks import text_inference
from hdruntime.text.encoding import Overflow
from hdruntime.text.tokenization import TextTokenizer
from support.job_runs import (
    MAX_WORDS,
    VOCABULARY,
    embeddings,
    forget_unknown_token,
    gather_bundle,
    left_in,
    random_texts,
    read,
    results,
    run,
    stop_at,
    write_rows,
)

BundleMaker = Callable[..., Path]


@pytest.mark.parametrize(
    ("ending", "shard_rows", "batch_tokens"),
    [(".jsonl", 1, 40), (".jsonl", 4096, None), (".parquet", 64, 1)],
)
def test_every_row_gets_its_own_embedding_in_order(
    bundle_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    shard_rows: int,
    batch_tokens: int | None,
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", shard_rows)
    texts = random_texts(80)
    inputs = write_rows(tmp_path / "in.jsonl", list(texts))
    done = run(bundle_path, inputs, tmp_path / f"out{ending}", batch_tokens=batch_tokens)
    rows = read(tmp_path / f"out{ending}")
    assert [row["id"] for row in rows] == list(range(80))
    assert [row["error"] for row in rows] == [None] * 80
    assert [row["tokens"] for row in rows] == [len(text.split()) + 2 for text in texts]
    np.testing.assert_allclose(
        np.array([row["embedding"] for row in rows], np.float32), embeddings(bundle_path, texts), atol=1e-6
    )
    assert (done.rows, done.failed_rows) == (80, 0)
    assert done.tokens == sum(len(text.split()) + 2 for text in texts)


BAD_ROWS = [
    (None, "Column 'text' is null"),
    (7, "Column 'text' holds int"),
    ("long " * 15, "has 17 tokens; this bundle accepts 1 to 16"),
    ("read nan", "NaN"),
]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_a_bad_row_has_its_error_and_its_neighbours_their_values(
    bundle_path: Path, tmp_path: Path, ending: str
) -> None:
    # Of the length of some bad rows, too, so that they share batches.
    good = ["read whole", "", "long documents"]
    inputs = write_rows(tmp_path / "in.jsonl", [good[0], *(bad for bad, _ in BAD_ROWS), *good[1:]])
    done = run(bundle_path, inputs, tmp_path / f"out{ending}")
    first, *bad, second, third = read(tmp_path / f"out{ending}")
    for row, (_, error) in zip(bad, BAD_ROWS, strict=True):
        assert error in str(row["error"])
        assert row["embedding"] is None
    rows = [first, second, third]
    assert [row["error"] for row in rows] == [None] * 3
    vectors = np.array([row["embedding"] for row in rows])
    np.testing.assert_allclose(vectors, embeddings(bundle_path, good), atol=1e-6)
    assert (done.rows, done.failed_rows, done.tokens) == (7, 4, 4 + 2 + 4)
    assert str(done.first_error).startswith("row 1: ")


def test_a_text_that_the_tokenizer_cannot_encode_is_only_that_rows_error(bundle_path: Path) -> None:
    forget_unknown_token(bundle_path)
    rows = results(bundle_path, ["read whole", "never seen", "", "long documents"])
    assert str(rows[1]["error"]).startswith("The text cannot be encoded by the bundle's tokenizer: WordLevel error")
    assert [row["tokens"] for row in rows] == [4, None, 2, 4]
    assert [row["error"] is None for row in rows] == [True, False, True, True]


@pytest.mark.parametrize("bad", ["long " * 15, "long " * 9000, "never seen"])
def test_texts_that_are_refused_do_not_keep_the_others_from_one_another(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Which texts of a call are refused is known, so that only these are tokenized alone."""
    forget_unknown_token(bundle_path)
    calls: list[int] = []
    encoded = TextTokenizer.encode

    def noted(self: TextTokenizer, texts: Sequence[str], *others: Any, **options: Any) -> Any:
        calls.append(len(texts))
        return encoded(self, texts, *others, **options)

    monkeypatch.setattr(TextTokenizer, "encode", noted)
    rows = results(bundle_path, ["read whole", bad, *["long"] * 20, bad, "documents"])
    assert [index for index, row in enumerate(rows) if row["error"]] == [1, 22]
    assert calls == [24, 1, 1, 22]


def test_rows_are_seldom_searched_for_garbage(bundle_path: Path, tmp_path: Path) -> None:
    before, seen = gc.get_threshold(), []
    inputs = write_rows(tmp_path / "in.jsonl", ["read whole"])
    run(bundle_path, inputs, tmp_path / "out.jsonl", on_progress=lambda progress: seen.append(gc.get_threshold()[0]))
    assert max(seen) > before[0]
    with pytest.raises(KeyboardInterrupt):
        run(bundle_path, inputs, tmp_path / "other.jsonl", on_progress=stop_at(1))
    assert gc.get_threshold() == before


def test_a_text_that_is_too_long_is_truncated_on_request(bundle_path: Path) -> None:
    texts = ["long " * 15, "long " * MAX_WORDS, "long " * 3000]
    cut, whole, very_long = results(bundle_path, texts, overflow=Overflow.TRUNCATE)
    assert list(cut) == ["id", "embedding", "tokens", "truncated", "tokens_given", "error"]
    assert cut["tokens"] == 16
    assert cut["embedding"] == whole["embedding"] == very_long["embedding"]
    said = [(row["truncated"], row["tokens_given"]) for row in (cut, whole, very_long)]
    assert said == [(True, 17), (False, 16), (True, None)], "a very long text's tokens are not counted"


def test_a_session_that_breaks_stops_the_job_and_keeps_the_old_output_and_the_rows_that_are_done(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 1)
    opened = open_bundle(bundle_path)
    inputs = write_rows(tmp_path / "in.jsonl", ["long", "read"])
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    job = plan_job(opened, [inputs], output, options=JobOptions(force=True))
    session = hdruntime.load(opened)

    def close_after_a_row(progress: JobProgress) -> None:
        if progress.rows:
            session.close()

    with pytest.raises(BackendError, match="session is closed"):
        run_job(job, LocalPool(session, job.task), on_progress=close_after_a_row)
    assert output.read_text() == "old"
    assert left_in(tmp_path) == [".out.jsonl.job", "bundle", "in.jsonl", "out.jsonl"]
    done = run(bundle_path, inputs, output, force=True)
    assert (done.rows, done.resumed_rows) == (2, 1)
    assert [row["id"] for row in read(output)] == [0, 1]
    assert left_in(tmp_path) == ["bundle", "in.jsonl", "out.jsonl"]


def test_a_job_that_is_interrupted_before_any_row_leaves_nothing(bundle_path: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(bundle_path, write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out.parquet", on_progress=stop_at(0))
    assert left_in(tmp_path) == ["bundle", "in.jsonl"]


def test_an_output_that_exists_is_refused_before_any_work(bundle_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    with pytest.raises(OutputExistsError, match=r"out.jsonl exists.\nReplace it with force=True, or change"):
        plan_job(open_bundle(bundle_path), [tmp_path / "missing.jsonl"], output)
    run(bundle_path, write_rows(tmp_path / "in.jsonl", ["long"]), output, force=True)
    assert len(read(output)) == 1


def test_an_output_that_appears_meanwhile_is_not_replaced(bundle_path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])
    with pytest.raises(OutputExistsError):
        run(bundle_path, inputs, output, on_progress=lambda progress: output.write_text("theirs") and None)
    assert output.read_text() == "theirs"
    # Nothing is lost: told that it may, the same job only has to move its output into place.
    done = run(bundle_path, tmp_path / "in.jsonl", output, force=True)
    assert (done.rows, done.resumed_rows) == (1, 1)
    assert len(read(output)) == 1


def test_a_linked_output_keeps_its_link(bundle_path: Path, tmp_path: Path) -> None:
    (tmp_path / "target.jsonl").write_text("old")
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "target.jsonl")
    run(bundle_path, write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out.jsonl", force=True)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert len(read(tmp_path / "target.jsonl")) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.csv", r"Outputs end in \.jsonl, \.parquet, \.npy or \.npz; a name without a suffix is a directory"),
        ("directory", r"directory is a directory that holds notes\.txt\.\nGive output a name .* another directory"),
        ("inputs", r"inputs is an input as well as the output"),
        ("missing/out.jsonl", r"There is no directory .*missing for the output.\nMake it: mkdir -p"),
        ("directory.jsonl", r"directory.jsonl is a directory"),
        ("rows.jsonl", r"rows.jsonl is an input as well as the output"),
        ("/", r"^/ is a directory that holds "),
    ],
)
def test_an_output_in_an_invalid_place_is_refused(bundle_path: Path, tmp_path: Path, name: str, message: str) -> None:
    inputs = write_rows(tmp_path / "rows.jsonl", ["long"])
    (tmp_path / "directory.jsonl").mkdir()
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "notes.txt").touch()
    (tmp_path / "inputs").mkdir()
    pa.parquet.write_table(pa.table({"text": ["long"]}), tmp_path / "inputs" / "part-00000.parquet")
    with pytest.raises((InputError, OutputExistsError), match=message):
        plan_job(
            open_bundle(bundle_path), [inputs, tmp_path / "inputs"], tmp_path / name, options=JobOptions(force=True)
        )


def test_options_that_do_not_fit_the_task_are_refused(new_bundle: BundleMaker, tmp_path: Path) -> None:
    logits = np.zeros((len(VOCABULARY), 2))
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])

    def plan(bundle: Path, **options: object) -> None:
        plan_job(open_bundle(bundle), [inputs], tmp_path / "o.jsonl", options=JobOptions(**options))  # type: ignore[arg-type]

    tables = {"start_logits": logits[:, 0], "end_logits": logits[:, 0]}
    with pytest.raises(InputError, match=r"text_column='question' text_pair_column='context'"):
        plan(gather_bundle(new_bundle("qa"), "question-answering", tables))
    with pytest.raises(InputError, match=r"reads one text.\nLeave out text_pair_column"):
        plan(
            gather_bundle(new_bundle("ner"), "token-classification", {"logits": logits}),
            columns=Columns(text_pair="b"),
        )
    with pytest.raises(InputError, match=r"has no mask token"):
        plan(gather_bundle(new_bundle("mlm"), "fill-mask", {"logits": logits}))
    with pytest.raises(BundleCorruptError, match=r"manifest.task should be one of 'feature-extraction',"):
        plan(gather_bundle(new_bundle("other"), "summarization", {"logits": logits}))
    with pytest.raises(InputError, match=r"has no tokenizer, so it cannot read text"):
        plan(new_bundle("silent", tokenizer=False))


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
