"""A job of one shard of slow rows: progress is shown and rows are kept while the shard runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hdruntime
from hdruntime.errors import DamagedJobError, HdexportError, InputChangedError
from hdruntime.jobs import VectorOptions, row_inference
from hdruntime.jobs import results as job_results
from hdruntime.jobs.output import LocalOutput
from hdruntime.jobs.partial_file import bytes_of_rows, rows_of_bytes
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.rows import Columns, Position
from hdruntime.jobs.state_folder import state_folder_path
from hdruntime.text.embeddings import EmbeddingPrecision
from hdruntime.text.encoding import Encoding, Overflow
from support.job_runs import content_of, left_in, random_texts, run, write_rows

TEXTS = [*random_texts(40), "nan", None, "read " * 30, *random_texts(17)]

FEW_TOKENS = 24
"""Of a batch, so that a shard has many."""


@pytest.fixture
def parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch ends a part, and is committed."""
    monkeypatch.setattr(row_inference, "_PARTIAL_SECONDS", 0.0)
    monkeypatch.setattr(job_results, "_COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(job_results, "_COMMIT_SHARE", 0)


def stopped(bundle: Path, inputs: Path, output: Path, *, rows: int, **options: Any) -> list[JobProgress]:
    """The progress of a job that is stopped when so many rows are done."""
    seen: list[JobProgress] = []

    def stop(progress: JobProgress) -> None:
        seen.append(progress)
        if progress.rows >= rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(bundle, inputs, output, on_progress=stop, batch_tokens=FEW_TOKENS, **options)
    return seen


JOBS: dict[str, dict[str, Any]] = {
    "out.jsonl": {},
    "out.parquet": {"columns": Columns(keep=("text",))},
    "int8.parquet": {"vectors": VectorOptions(output_dtype=EmbeddingPrecision.INT8, normalize=True)},
    "split.npz": {"overflow": Overflow.SPLIT, "stride": 3},
    "chunks.jsonl": {"late_chunking": "tokens:4"},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_shard_that_is_stopped_again_and_again_gives_the_same_bytes_and_runs_no_batch_twice(
    bundle_path: Path, tmp_path: Path, parts_of_a_batch: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, options = write_rows(tmp_path / "in.jsonl", TEXTS), JOBS[name]
    whole = run(bundle_path, inputs, tmp_path / f"whole.{name}", batch_tokens=FEW_TOKENS, **options)
    shown = [0]
    for rows in (1, 7, 30, 52):
        seen = stopped(bundle_path, inputs, tmp_path / name, rows=rows, **options)
        assert seen[0].rows == shown[-1] == seen[0].resumed_rows
        assert LocalOutput(tmp_path / name).kept_rows() == seen[-1].rows
        shown += [progress.rows for progress in seen[1:]]
    assert shown == sorted(shown)
    assert len(set(shown)) > 10
    assert 0 < seen[-1].bytes_read < seen[-1].bytes_total
    done = run(bundle_path, inputs, tmp_path / name, batch_tokens=FEW_TOKENS, **options)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"whole.{name}").read_bytes()
    for field in ("rows", "tokens", "errors", "first_error", "truncated_rows"):
        assert getattr(done, field) == getattr(whole, field), field
    assert left_in(tmp_path) == sorted(["bundle", "in.jsonl", name, f"whole.{name}"])
    if "overflow" not in options and "late_chunking" not in options:
        # The row that is NaN runs again with its batch.
        assert 0 <= done.computed_tokens - whole.computed_tokens <= 4 * FEW_TOKENS


@pytest.mark.parametrize("options", [{"overflow": Overflow.SPLIT}, {"late_chunking": "tokens:4"}])
def test_rows_of_several_chunks_are_done_one_after_another_and_give_the_same_bytes_after_stops(
    bundle_path: Path, tmp_path: Path, parts_of_a_batch: None, options: dict[str, Any]
) -> None:
    """The last chunk of a text is short, and does not wait for the long chunks of all other texts."""
    texts = [" ".join(["long documents are read whole ."] * (5 + number % 7)) for number in range(40)]
    inputs, seen = write_rows(tmp_path / "in.jsonl", [*texts, "nan", None, *random_texts(5)]), list[JobProgress]()
    shared = {"batch_tokens": FEW_TOKENS, **options}
    whole = run(bundle_path, inputs, tmp_path / "whole.jsonl", on_progress=seen.append, **shared)
    first = next(progress for progress in seen if progress.rows)
    assert first.computed_tokens < 0.1 * whole.computed_tokens
    half = next(progress for progress in seen if progress.computed_tokens >= 0.5 * whole.computed_tokens)
    assert half.rows >= 0.4 * whole.rows
    for rows in (1, 9, 30):
        stopped(bundle_path, inputs, tmp_path / "out.jsonl", rows=rows, **options)
    done = run(bundle_path, inputs, tmp_path / "out.jsonl", **shared)
    assert done.resumed_rows >= 30
    assert content_of(tmp_path / "out.jsonl") == content_of(tmp_path / "whole.jsonl")


def test_texts_of_one_chunk_are_sorted_by_length_together_beside_texts_of_several(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of neighbours would pad them more."""
    run_batches, calls = hdruntime.Session.run_batches, list[list[int]]()

    def recorded(session: hdruntime.Session, encodings: list[Encoding], **options: Any) -> Any:
        calls.append([len(encoding) for encoding in encodings])
        return run_batches(session, encodings, **options)

    monkeypatch.setattr(hdruntime.Session, "run_batches", recorded)
    texts = [text for number in range(1, 13) for text in (" ".join(["read"] * number), "long " * 30)]
    inputs = write_rows(tmp_path / "in.jsonl", texts)
    run(bundle_path, inputs, tmp_path / "out.jsonl", overflow=Overflow.SPLIT, batch_tokens=FEW_TOKENS)
    # A text of 30 words has chunks of 16, 16 and 4 tokens; eight batches, 192 tokens, take five such texts.
    assert calls == [[16, 16, 4] * 5, [16, 16, 4] * 5, [16, 16, 4] * 2, list(range(3, 15))]


def test_a_row_that_fails_alone_after_a_stop_is_that_rows_error(
    bundle_path: Path, tmp_path: Path, parts_of_a_batch: None
) -> None:
    """A session that has run nothing yet would be taken for broken."""
    inputs = write_rows(tmp_path / "in.jsonl", ["long documents are read", "nan"])
    stopped(bundle_path, inputs, tmp_path / "out.jsonl", rows=1)
    done = run(bundle_path, inputs, tmp_path / "out.jsonl", batch_tokens=FEW_TOKENS)
    assert (done.rows, done.resumed_rows, done.errors) == (2, 1, {"not_finite": 1})


def test_rows_that_were_done_are_kept_if_the_job_ends_before_two_seconds(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the only shard, with the real times between commits."""
    inputs, batches = write_rows(tmp_path / "in.jsonl", TEXTS), [0]
    of_row = hdruntime.Session.outputs_of_row

    def interrupted(*arguments: Any) -> Any:
        batches[0] += 1
        if batches[0] == 20:
            raise KeyboardInterrupt
        return of_row(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(hdruntime.Session, "outputs_of_row", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(bundle_path, inputs, tmp_path / "out.jsonl", batch_tokens=FEW_TOKENS)
    assert LocalOutput(tmp_path / "out.jsonl").kept_rows() == 19
    run(bundle_path, inputs, tmp_path / "whole.jsonl", batch_tokens=FEW_TOKENS)
    assert run(bundle_path, inputs, tmp_path / "out.jsonl", batch_tokens=FEW_TOKENS).resumed_rows == 19
    assert content_of(tmp_path / "out.jsonl") == content_of(tmp_path / "whole.jsonl")


def test_rows_of_other_content_are_not_taken_for_kept_ones(
    bundle_path: Path, tmp_path: Path, parts_of_a_batch: None
) -> None:
    inputs, output = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"

    def change(progress: JobProgress) -> None:
        if progress.rows > 10:
            inputs.write_text(inputs.read_text() + "\n")

    with pytest.raises(InputChangedError, match=r"in.jsonl has changed: its size was .*\n\d\d rows are kept in"):
        run(bundle_path, inputs, output, batch_tokens=FEW_TOKENS, on_progress=change)


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_kept_rows_that_are_damaged_are_refused(
    bundle_path: Path, tmp_path: Path, parts_of_a_batch: None, damage: str
) -> None:
    inputs, output = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    stopped(bundle_path, inputs, output, rows=20)
    part = state_folder_path(output) / "partial"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes({"shorter": content[:-9], "flipped": content, "missing": b""}[damage])
    with pytest.raises(DamagedJobError, match=r"is damaged: partial is missing or has changed.\nStart over with"):
        run(bundle_path, inputs, output, batch_tokens=FEW_TOKENS)
    assert run(bundle_path, inputs, output, restart=True).rows == len(TEXTS)


def test_a_file_of_kept_rows_that_is_removed_while_the_job_runs_ends_the_job(
    bundle_path: Path, tmp_path: Path, parts_of_a_batch: None
) -> None:
    inputs, output = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"

    def remove(progress: JobProgress) -> None:
        if progress.rows > 20:
            (state_folder_path(output) / "partial").unlink(missing_ok=True)

    with pytest.raises(HdexportError, match="partial is missing or has changed"):
        run(bundle_path, inputs, output, batch_tokens=FEW_TOKENS, on_progress=remove)


def test_a_job_killed_while_a_shard_follows_one_with_parts_loses_neither(
    bundle_path: Path, tmp_path: Path, parts_of_a_batch: None, small_shards: None
) -> None:
    inputs, output = write_rows(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    run(bundle_path, inputs, tmp_path / "whole.jsonl", batch_tokens=FEW_TOKENS)
    for rows in range(3, 60, 5):
        stopped(bundle_path, inputs, output, rows=rows)
        saved = json.loads((state_folder_path(output) / "manifest.json").read_text())
        assert saved["counts"]["rows"] + (saved["partial"]["counts"]["rows"] if saved["partial"] else 0) >= rows
    run(bundle_path, inputs, output, batch_tokens=FEW_TOKENS)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_kept_values_come_back_with_their_types() -> None:
    values: dict[str, object] = {
        "embedding": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.float16(0.1) * np.ones(3, np.float16),
        "score": np.float32(0.1),
        "entities": [{"text": "zwölf", "start": 2**40, "score": 0.1, "none": None, "label": True}],
    }
    first, second = Position(0, 5, 1, 1, 9), Position(1, 2, 3, 4, 2**32 - 1)
    content = bytes_of_rows({first: [values]}) + bytes_of_rows({second: []})
    found = rows_of_bytes(content)
    assert list(found) == [first, second]
    (row,) = found[first]
    assert row["entities"] == values["entities"]
    for name in ("embedding", "half", "score"):
        assert type(row[name]) is type(values[name])
        np.testing.assert_array_equal(row[name], values[name], strict=True)
