"""Batch jobs on real files and real ONNX Runtime sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import hdruntime
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import BackendError, BundleCorruptError, InputError, OutputExistsError
from hdruntime.jobs import JobOptions, plan_job, portions, run_job
from hdruntime.jobs.portions import LocalPool
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.rows import Columns
from hdruntime.text.tokenization import Overflow
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
    ("ending", "portion_rows", "batch_tokens"),
    [(".jsonl", 1, 40), (".jsonl", 4096, None), (".parquet", 64, 1)],
)
def test_every_row_gets_its_own_embedding_in_order(
    bundle_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    portion_rows: int,
    batch_tokens: int | None,
) -> None:
    monkeypatch.setattr(portions, "_PORTION_ROWS", portion_rows)
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


def test_a_text_that_is_too_long_is_truncated_on_request(bundle_path: Path) -> None:
    cut, whole = results(bundle_path, ["long " * 15, "long " * MAX_WORDS], overflow=Overflow.TRUNCATE)
    assert cut["tokens"] == 16
    assert cut["embedding"] == whole["embedding"]


def test_a_session_that_breaks_stops_the_job_and_keeps_the_old_output_and_the_rows_that_are_done(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "_PORTION_ROWS", 1)
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
    with pytest.raises(OutputExistsError, match=r"out.jsonl exists.\nReplace it with --force, or choose"):
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
        ("out.csv", r"Outputs end in \.jsonl, \.parquet, \.npy or \.npz; a name without an ending is a directory"),
        ("directory", r"directory is a directory that holds notes\.txt\.\nName a file .* or another directory"),
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
    with pytest.raises(InputError, match=r"--text-column question --text-pair-column context"):
        plan(gather_bundle(new_bundle("qa"), "question-answering", tables))
    with pytest.raises(InputError, match=r"reads one text.\nLeave out --text-pair-column"):
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
