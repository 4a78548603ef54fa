"""An input that changes during a job or between two runs ends the job; kept rows stay correct."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from hdruntime.bundle.reader import Bundle, open_bundle
from hdruntime.errors import InputChangedError
from hdruntime.jobs import JobOptions, plan_job, run_job
from hdruntime.jobs.output import LocalOutput
from hdruntime.jobs.progress import JobProgress
from hdruntime.jobs.shards import Shard, ShardResult
from hdruntime.tasks import text_inference
from support.job_runs import WordPool, left_in, run_words, stop_at, write_rows

ROWS = 2000
"""Whose files are longer than what is read of them at once."""

Change = Callable[[Path], object]


@pytest.fixture
def bundle(bundle_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 100)
    return open_bundle(bundle_path)


def write_input(path: Path, words: str = "long documents", rows: int = ROWS) -> Path:
    """Rows of one length, so that other words of that length make a file of the same size."""
    texts = [f"{words} {number:06}" for number in range(rows)]
    if path.suffix == ".jsonl":
        write_rows(path, list(texts))
    elif path.suffix == ".txt":
        path.write_text("\n".join(texts) + "\n")
    else:
        # Not compressed, so that its size does not depend on the words.
        table = pa.table({"text": texts})
        pa.parquet.write_table(table, path, row_group_size=200, compression="none", use_dictionary=False)
    # Long ago: later writes have another time.
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """JSON Lines, or what the test asks for."""
    return write_input(tmp_path / f"in{getattr(request, 'param', '.jsonl')}")


def other_content(path: Path) -> bytes:
    """A file of the same size and other texts."""
    other = write_input(path.with_name(f"other{path.suffix}"), "read documents")
    content = other.read_bytes()
    other.unlink()
    assert len(content) == path.stat().st_size
    assert content != path.read_bytes()
    return content


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def rewrite(path: Path) -> None:
    content = other_content(path)
    with path.open("r+b") as file:
        file.write(content)


def rewrite_and_set_back(path: Path) -> None:
    touch(path, rewrite)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"text": "more"}\n')


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(other_content(path))
    new.replace(path)


def touch(path: Path, change: Change) -> None:
    """Change a file and set its time of change back; the inode's own time cannot be."""
    before = path.stat()
    change(path)
    # The clock of files goes in steps of some milliseconds.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def once(at_rows: int, change: Callable[[], object]) -> Callable[[JobProgress], None]:
    """What changes something when so many rows are done."""
    calls: Iterator[Callable[[], object]] = iter([change])

    def on_progress(progress: JobProgress) -> None:
        if progress.rows >= at_rows:
            next(calls, lambda: None)()

    return on_progress


CHANGES = {
    "truncated": (truncate, r"its size was \d+ bytes, and is \d+\."),
    "rewritten": (rewrite, r"it was written to at \d{4}-\d\d-\d\d [\d:.]+, though its size is the same\."),
    "appended to": (append, r"its size was \d+ bytes, and is \d+\."),
    "replaced": (replace, r"it was written to at .*, though its size is the same\."),
    "removed": (Path.unlink, r"it can no longer be found \(No such file or directory\)\."),
}


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        *((".jsonl", name) for name in CHANGES),
        (".txt", "rewritten"),
        (".parquet", "truncated"),
    ],
    indirect=["rows"],
)
def test_an_input_that_changes_ends_the_job_and_kept_rows_are_of_the_old_content(
    bundle: Bundle, rows: Path, tmp_path: Path, name: str
) -> None:
    change, message = CHANGES[name]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_words(bundle, [rows], whole)
    original = shutil.copy2(rows, tmp_path / "original")
    with pytest.raises(InputChangedError, match=rf"{rows} has changed: {message}\n300 rows are kept in .*restart=True"):
        run_words(bundle, [rows], output, on_progress=once(300, lambda: change(rows)))
    assert not output.exists()
    assert LocalOutput(output).kept_rows() == 300
    results = (tmp_path / ".out.jsonl.job" / "results").read_bytes()
    assert results == b"".join(whole.read_bytes().splitlines(keepends=True)[:300])
    # The old content with its time has another inode: kept rows are compared, and the job continues.
    shutil.copy2(original, tmp_path / "copy")
    (tmp_path / "copy").replace(rows)
    assert run_words(bundle, [rows], output).resumed_rows == 300
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("rows", [".jsonl", ".parquet"], indirect=True)
@pytest.mark.parametrize("name", ["rewritten"])
def test_an_input_that_changes_while_rows_are_read_ahead_leaves_no_row_of_the_new_content(
    bundle: Bundle, rows: Path, tmp_path: Path, name: str
) -> None:
    """Rows that were read before the change may be kept, too."""
    change, message = CHANGES[name]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_words(bundle, [rows], whole)
    with pytest.raises(InputChangedError, match=message):
        run_words(bundle, [rows], output, computes_beside=True, on_progress=once(300, lambda: change(rows)))
    kept = LocalOutput(output).kept_rows()
    assert kept in (300, 400)
    results = (tmp_path / ".out.jsonl.job" / "results").read_bytes()
    assert results == b"".join(whole.read_bytes().splitlines(keepends=True)[:kept])


def test_rows_that_are_read_after_a_change_are_not_run(bundle: Bundle, tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in.jsonl")
    given: list[int] = []

    class Spy(WordPool):
        def map(self, shards: Iterator[Shard]) -> Generator[tuple[Shard, ShardResult], None, None]:
            for shard in shards:
                given.append(shard.end.row)
                yield from super().map(iter([shard]))

    job = plan_job(bundle, [rows], tmp_path / "out.jsonl")
    with pytest.raises(InputChangedError):
        run_job(job, Spy(), on_progress=once(300, lambda: rewrite(rows)))
    assert given == [100, 200, 300]


@pytest.mark.parametrize("name", ["truncated", "removed"])
def test_a_change_after_the_last_row_was_read_is_detected(
    bundle: Bundle, rows: Path, tmp_path: Path, name: str
) -> None:
    change, message = CHANGES[name]
    with pytest.raises(InputChangedError, match=rf"{rows} has changed: {message}\n2000 rows are kept"):
        run_words(bundle, [rows], tmp_path / "out.jsonl", on_progress=once(ROWS, lambda: change(rows)))
    assert not (tmp_path / "out.jsonl").exists()


def test_rows_that_were_read_before_a_change_and_done_after_it_are_not_kept(bundle: Bundle, tmp_path: Path) -> None:
    """As where many processes run shards, reading is ahead of what is done."""
    rows = write_input(tmp_path / "in.jsonl")

    class Ahead(WordPool):
        def map(self, shards: Iterator[Shard]) -> Generator[tuple[Shard, ShardResult], None, None]:
            done = list(super().map(shards))
            truncate(rows)
            yield from done

    job = plan_job(bundle, [rows], tmp_path / "out.jsonl")
    with pytest.raises(InputChangedError, match=r"its size was .*\nNo row is kept\. Run the same command again when"):
        run_job(job, Ahead())
    assert left_in(tmp_path) == ["bundle", "in.jsonl"]


def test_a_change_after_rows_were_printed_names_their_number(
    bundle: Bundle, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    rows = write_input(tmp_path / "in.jsonl")
    with pytest.raises(InputChangedError) as caught:
        run_words(bundle, [rows], Path("-"), on_progress=once(300, lambda: truncate(rows)))
    printed = capsysbinary.readouterr().out.count(b"\n")
    assert printed >= 300
    assert str(caught.value.hint).startswith(f"{printed} rows were printed; they belong to the old content. Run the")


def test_a_change_before_the_first_row_is_read_is_detected(bundle: Bundle, rows: Path, tmp_path: Path) -> None:
    job = plan_job(bundle, [rows], tmp_path / "out.jsonl")
    rewrite(rows)
    with pytest.raises(InputChangedError, match="it was written to at"):
        run_job(job, WordPool())


def make_another_name(path: Path) -> None:
    path.with_name("linked").hardlink_to(path)


def copy_over(path: Path) -> None:
    shutil.copy2(path, path.with_name("new")).replace(path)


@pytest.mark.parametrize(("rows", "change"), [(".txt", make_another_name), (".parquet", copy_over)], indirect=["rows"])
def test_a_file_that_was_only_touched_or_copied_is_the_same(
    bundle: Bundle, rows: Path, tmp_path: Path, change: Change
) -> None:
    run_words(bundle, [rows], tmp_path / "whole.jsonl")
    run_words(bundle, [rows], tmp_path / "out.jsonl", on_progress=once(300, lambda: touch(rows, change)))
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize(("index", "at_rows"), [(0, 1400), (1, 1000)])
def test_of_several_inputs_each_is_watched_to_the_end(bundle: Bundle, tmp_path: Path, index: int, at_rows: int) -> None:
    """A file that is cut where a shard ends looks as if it had ended there."""
    files = [write_input(tmp_path / f"in{number}.jsonl", rows=1000) for number in range(2)]

    def cut() -> None:
        os.truncate(files[index], files[index].stat().st_size // 10)

    with pytest.raises(InputChangedError, match=rf"{files[index]} has changed: its size was"):
        run_words(bundle, files, tmp_path / "out.jsonl", on_progress=once(at_rows, cut))
    assert not (tmp_path / "out.jsonl").exists()


def test_a_job_does_not_continue_if_what_it_read_has_changed(bundle: Bundle, rows: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, [rows], output, on_progress=stop_at(300))
    rewrite_and_set_back(rows)
    with pytest.raises(InputChangedError, match=r"its content differs.*\n300 rows are kept in .*restart=True"):
        run_words(bundle, [rows], output)
    assert LocalOutput(output).kept_rows() == 300
    assert run_words(bundle, [rows], output, restart=True).resumed_rows == 0


def test_a_change_between_two_runs_is_refused_with_both_sizes(bundle: Bundle, tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, [rows], tmp_path / "out.jsonl", on_progress=stop_at(300))
    size = rows.stat().st_size
    append(rows)
    with pytest.raises(ValueError, match=rf"has changed since: its size was {size} bytes, and is {size + 17}\.\n"):
        plan_job(bundle, [rows], tmp_path / "out.jsonl", options=JobOptions())


def test_a_file_that_gets_its_first_rows_during_a_job_ends_it_but_one_that_goes_away_does_not(
    bundle: Bundle, tmp_path: Path
) -> None:
    rows, empty, gone = write_input(tmp_path / "a.jsonl"), tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    empty.touch()
    gone.touch()
    output = tmp_path / "out.jsonl"
    with pytest.raises(
        InputChangedError, match=rf"{empty}, which had no rows, has changed: its size was 0 .*\n2000 rows"
    ):
        run_words(bundle, [rows, empty, gone], output, on_progress=once(300, lambda: append(empty)))
    empty.write_text("")
    assert run_words(bundle, [rows, empty, gone], output).resumed_rows == 2000
    output.unlink()
    assert run_words(bundle, [rows, empty, gone], output, on_progress=once(300, gone.unlink)).rows == 2000


def test_rows_that_were_not_read_are_read_as_they_are_when_a_job_continues(
    bundle: Bundle, rows: Path, tmp_path: Path
) -> None:
    """A file of the same size and time, with another last row: what was read is compared, as the page says."""
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, [rows], tmp_path / "out.jsonl", on_progress=stop_at(300))
    *lines, last = rows.read_bytes().splitlines(keepends=True)
    touch(rows, lambda path: path.write_bytes(b"".join([*lines, last.replace(b"long", b"read")])))
    run_words(bundle, [rows], tmp_path / "whole.jsonl")
    assert run_words(bundle, [rows], tmp_path / "out.jsonl").resumed_rows >= 300
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
