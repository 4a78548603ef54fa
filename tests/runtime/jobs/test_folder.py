"""What a job keeps while it runs: after a kill between any two steps, the same job continues, and only that."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hdruntime
from hdexport.support.bundle_writer import seal
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import open_bundle
from hdruntime.errors import DamagedJobError, HdexportError, InputError, OutputExistsError
from hdruntime.jobs import JobOptions, VectorOptions, plan_job, writers
from hdruntime.jobs import results as job_results
from hdruntime.jobs.checksums import json_with_checksum
from hdruntime.jobs.output import LocalOutput
from hdruntime.jobs.progress import JobManifest, JobProgress, json_from_manifest
from hdruntime.jobs.results import KeptResults
from hdruntime.jobs.rows import Columns
from hdruntime.jobs.state_folder import state_folder_path
from hdruntime.text.embeddings import EmbeddingPrecision
from hdruntime.text.encoding import Overflow
from hdruntime.text.splitting import SplitPooling
from hdruntime.text.tokenization import TextTokenizer
from support.comparators import named_case
from support.grids import nightly_unless
from support.job_runs import content_of, left_in, random_texts, read, run, run_words, stop_at, write_rows

TESTS = Path(__file__).parents[2]


def run_until(rows: int, bundle: Path, inputs: Path, output: Path, **options: object) -> None:
    """Run a job that is stopped when so many rows are done."""
    with pytest.raises(KeyboardInterrupt):
        run(bundle, inputs, output, on_progress=stop_at(rows), **options)


KILLED_AT_EVERY_STEP = """
import io, os, shutil, sys, traceback
from pathlib import Path
from typing import Any

# Once, before the forks; pyarrow imports pandas when it first needs it.
import pyarrow
pyarrow.array([None])

from hdruntime.bundle.reader import open_bundle
from hdruntime.jobs import VectorOptions
from hdruntime.jobs import results as job_results
from hdruntime.jobs import writers
from hdruntime.tasks import text_inference
from hdruntime.text.embeddings import EmbeddingPrecision
from support.job_runs import content_of, left_in, run_words

inputs, output = map(Path, sys.argv[2:4])
vectors = VectorOptions(output_dtype=EmbeddingPrecision(sys.argv[4]))
bundle = open_bundle(Path(sys.argv[1]))
text_inference._WINDOW_TEXTS = 10
writers._GROUP_ROWS = writers._PART_ROWS = 10
job_results._COMMIT_SECONDS = job_results._COMMIT_SHARE = 0
STEPS = ("open", "write", "ftruncate", "fsync", "replace", "unlink", "rmdir", "mkdir")


def die_at(step, power_fails):
    # This process ends at its step-th call that changes a file, and of a write only half the bytes are written.
    # If the power fails, bytes that were appended and not synced are lost.
    left = [step]
    synced = {}

    def opened(path):
        descriptor = open_descriptor(path, os.O_RDWR)  # which outlives the other, and does not share its lock
        synced[descriptor] = os.fstat(descriptor).st_size

    def count(write=None, data=b""):
        left[0] -= 1
        if left[0] == 0:
            if write is not None:
                write(bytes(data)[: len(data) // 2])
            for descriptor, size in synced.items() if power_fails else ():
                if os.fstat(descriptor).st_size > size:
                    truncate(descriptor, size)
            os._exit(9)

    def dying(name):
        original = getattr(os, name)

        def call(*arguments, **options):
            count(*[lambda half: original(arguments[0], half), arguments[1]] if name == "write" else [])
            result = original(*arguments, **options)
            if name == "open" and arguments[1] & os.O_CREAT:
                opened(arguments[0])
            if name == "fsync":
                status = os.fstat(arguments[0])
                synced.update({each: status.st_size for each in synced if os.path.samestat(os.fstat(each), status)})
            return result

        setattr(os, name, call)

    class DyingFile(io.FileIO):
        def write(self, data):
            count(super().write, data)
            return super().write(data)

    open_file, open_descriptor, truncate = io.open, os.open, os.ftruncate

    def open_dying(path, mode="r", *arguments, **options):
        if mode != "wb":
            return open_file(path, mode, *arguments, **options)
        count()
        file = DyingFile(path, "w")
        opened(path)
        return io.BufferedWriter(file)

    for name in STEPS:
        dying(name)
    io.open = open_dying  # as pathlib calls it


def killed(step, power_fails=False):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            die_at(step, power_fails)
            run_words(bundle, [inputs], output, computes_beside=True, vectors=vectors, skip_failed=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    return status == 9


step = 0
while killed(step := step + 1, power_fails=step % 2):
    if step % 3 == 0:
        killed(1 + step * 7 % 23)  # going on, too
    assert not killed(sys.maxsize)
    print(step, content_of(output), left_in(output.parent))
    shutil.rmtree(output) if output.is_dir() else output.unlink()
"""


@pytest.mark.parametrize(
    ("ending", "dtype"),
    [nightly_unless(False, ".jsonl", "float32"), nightly_unless(False, ".parquet", "int8"), ("", "int8")],
)
def test_a_job_killed_at_any_step_continues_and_writes_the_same_bytes(
    bundle_path: Path,
    tmp_path: Path,
    small_shards: None,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    dtype: str,
) -> None:
    """Without an ending, the output is a directory of two files."""
    monkeypatch.setattr(writers, "_GROUP_ROWS", 10)
    monkeypatch.setattr(writers, "_PART_ROWS", 10)
    inputs = write_rows(tmp_path / "in.jsonl", [*random_texts(8), "nan", None, *random_texts(9)])
    options = {"vectors": VectorOptions(output_dtype=EmbeddingPrecision(dtype)), "skip_failed": True}
    run_words(open_bundle(bundle_path), [inputs], tmp_path / f"whole{ending}", **options)
    output = tmp_path / f"out{ending}"
    command = [sys.executable, "-c", KILLED_AT_EVERY_STEP, str(bundle_path), str(inputs), str(output), dtype]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    steps = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(steps) > 40
    expected = [
        content_of(tmp_path / f"whole{ending}"),
        str(["bundle", "in.jsonl", f"out{ending}", f"whole{ending}"]),
    ]
    assert [step for step, *found in steps if found != expected] == []


def test_finished_rows_are_neither_read_nor_run_again(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None
) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", [*random_texts(30), None, *random_texts(14)])
    output = tmp_path / "out.jsonl"
    run_until(20, bundle_path, inputs, output)
    assert LocalOutput(output).kept_rows() == 20
    seen: list[JobProgress] = []
    tokenized: list[str] = []
    encode = TextTokenizer.encode

    def spy(tokenizer: TextTokenizer, texts: list[str], *arguments: Any, **options: Any) -> object:
        tokenized.extend(texts)
        return encode(tokenizer, texts, *arguments, **options)

    monkeypatch.setattr(TextTokenizer, "encode", spy)
    # The size of batches may change between runs.
    done = run(bundle_path, inputs, output, on_progress=seen.append, batch_tokens=20)
    assert len(tokenized) == 45 - 20 - 1
    assert (seen[0].rows, seen[0].resumed_rows, seen[0].bytes_read > 0) == (20, 20, True)
    assert (done.rows, done.resumed_rows, done.failed_rows, done.errors) == (45, 20, 1, {"column": 1})
    assert [row["id"] for row in read(output)] == list(range(45))


def test_counts_and_errors_include_earlier_runs(bundle_path: Path, tmp_path: Path, small_shards: None) -> None:
    texts = [*["long"] * 9, "nan", *["read"] * 10, None, "nan"]
    inputs = write_rows(tmp_path / "in.jsonl", texts)
    run_until(20, bundle_path, inputs, tmp_path / "out.jsonl")
    stopped = run(bundle_path, inputs, tmp_path / "out.jsonl")
    whole = run(bundle_path, inputs, tmp_path / "whole.jsonl")
    for field in ("rows", "tokens", "errors", "first_error", "computed_tokens", "failed_rows", "bytes_read"):
        assert getattr(stopped, field) == getattr(whole, field), field
    assert stopped.errors == {"not_finite": 2, "column": 1}


@pytest.fixture
def unfinished(bundle_path: Path, tmp_path: Path, small_shards: None) -> Path:
    """The output of a job over in.jsonl that was stopped after 10 of 25 rows."""
    write_rows(tmp_path / "in.jsonl", list(random_texts(25)))
    run_until(10, bundle_path, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    return tmp_path / "out.jsonl"


OTHER_OPTIONS = [
    ({"columns": Columns(id="text")}, "id_column was None, and is text"),
    ({"columns": Columns(keep=None)}, "keep_columns was None, and is text"),
    ({"vectors": VectorOptions(normalize=True)}, "normalize was False, and is True"),
    ({"vectors": VectorOptions(truncate_dim=2)}, "truncate_dim was None, and is 2"),
    ({"vectors": VectorOptions(output_dtype=EmbeddingPrecision.FLOAT16)}, "output_dtype was float32, and is float16"),
    ({"skip_failed": True}, "skip_failed was False, and is True"),
    ({"prompt": "a "}, "prompt was .*, and is a "),
    ({"precision": Precision.FLOAT32}, "precision was auto, and is float32"),
    ({"overflow": Overflow.SPLIT, "stride": 3}, "stride was 2, and is 3"),
    ({"overflow": Overflow.SPLIT, "stride": 2, "split_pooling": SplitPooling.MAX}, "split_pooling was .* is max"),
    ({"overflow": Overflow.TRUNCATE}, "overflow was error, and is truncate"),
]


def test_a_job_with_other_options_is_refused_with_the_difference(
    bundle_path: Path, tmp_path: Path, unfinished: Path
) -> None:
    inputs, split = tmp_path / "in.jsonl", tmp_path / "split.jsonl"
    run_until(10, bundle_path, inputs, split, overflow=Overflow.SPLIT, stride=2)
    for options, what in OTHER_OPTIONS:
        output = split if "stride" in options else unfinished
        message = rf"job with 10 rows in .*/\.{output.name}.job; .*: {what}\.\n.* restart=True"
        with named_case(what), pytest.raises(InputError, match=message):
            plan_job(open_bundle(bundle_path), [inputs], output, options=JobOptions(**options))  # type: ignore[arg-type]
    assert LocalOutput(unfinished).kept_rows() == 10
    done = run(bundle_path, inputs, unfinished, restart=True, **options)
    assert (done.rows, done.resumed_rows) == (25, 0)
    assert left_in(tmp_path) == [".split.jsonl.job", "bundle", "in.jsonl", "out.jsonl"]


def test_a_job_with_other_inputs_is_refused_by_name(bundle_path: Path, tmp_path: Path, unfinished: Path) -> None:
    inputs = tmp_path / "in.jsonl"
    bundle = open_bundle(bundle_path)
    more = write_rows(tmp_path / "more.jsonl", ["read"])
    with pytest.raises(InputError, match=rf"{more} was not among its inputs"):
        plan_job(bundle, [inputs, more], unfinished)
    status = inputs.stat()
    os.utime(inputs, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(InputError, match=rf"its input {inputs} has changed since"):
        plan_job(bundle, [inputs], unfinished)


def test_inputs_in_another_order_or_fewer_are_another_job(
    bundle_path: Path, tmp_path: Path, small_shards: None
) -> None:
    files = [write_rows(tmp_path / name, list(random_texts(15))) for name in ("a.jsonl", "b.jsonl")]
    bundle = open_bundle(bundle_path)
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, files, tmp_path / "out.jsonl", on_progress=stop_at(20))
    with pytest.raises(InputError, match="its inputs were in another order"):
        plan_job(bundle, files[::-1], tmp_path / "out.jsonl")
    with pytest.raises(InputError, match=rf"its input {files[0]} is missing"):
        plan_job(bundle, files[1:], tmp_path / "out.jsonl")


def test_files_without_rows_that_appear_or_go_away_leave_a_job_the_same(
    bundle_path: Path, tmp_path: Path, small_shards: None
) -> None:
    bundle, folder, output = open_bundle(bundle_path), tmp_path / "in", tmp_path / "out.jsonl"
    folder.mkdir()
    for name in ("b", "d"):
        write_rows(folder / f"{name}.jsonl", list(random_texts(15)))
    (folder / "c.jsonl").touch()
    run_words(bundle, [folder], tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_words(bundle, [folder], output, on_progress=stop_at(20))
    (folder / "c.jsonl").unlink()
    (folder / "a.csv").write_text("other\n")
    assert run_words(bundle, [folder], output).resumed_rows == 20
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    (folder / "e.txt").touch()
    assert run_words(bundle, [folder], output).resumed_rows == 30
    (folder / "e.txt").write_text("read")
    with pytest.raises(OutputExistsError):
        run_words(bundle, [folder], output)


def test_a_job_of_another_bundle_is_refused_but_one_verified_or_with_new_kernels_is_the_same(
    bundle_path: Path, tmp_path: Path, unfinished: Path, new_bundle: object
) -> None:
    manifest = open_bundle(bundle_path).manifest
    (bundle_path / "kernels").mkdir()
    (bundle_path / "kernels" / "new").touch()
    seal(bundle_path, dataclasses.replace(manifest, verification={"passed": True}))
    plan_job(open_bundle(bundle_path), [tmp_path / "in.jsonl"], unfinished)
    other = new_bundle("other", task="sentence-similarity")  # type: ignore[operator]
    with pytest.raises(InputError, match="the bundle has changed"):
        plan_job(open_bundle(other), [tmp_path / "in.jsonl"], unfinished)


def test_another_version_does_not_continue(
    bundle_path: Path, tmp_path: Path, unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    with pytest.raises(InputError, match=r"the version of hdexport was \S+, and is 99.0"):
        plan_job(open_bundle(bundle_path), [tmp_path / "in.jsonl"], unfinished)


def test_a_folder_without_rows_does_not_block_another_job(bundle_path: Path, tmp_path: Path) -> None:
    # As a job leaves it that was killed before its first row was done.
    folder = state_folder_path(tmp_path / "out.jsonl")
    folder.mkdir()
    (folder / "job.json").write_text('{"bundle": "another"}')
    (folder / "manifest.json").write_text(json_from_manifest(JobManifest()))
    (folder / "results").write_text("half a li")
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])
    assert run(bundle_path, inputs, tmp_path / "out.jsonl").rows == 1
    assert left_in(tmp_path) == ["bundle", "in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("results", "", "results, which holds 10 rows, is missing or has changed"),
        ("manifest.json", "{", "manifest.json: "),
        ("manifest.json", None, "manifest.json: "),
        ("job.json", None, "job.json: "),
        (
            "manifest.json",
            json_with_checksum({"counts": {"rows": -3}}),
            "manifest.json: manifest.counts.rows should be",
        ),
        ("manifest.json", json_with_checksum({}), "manifest.json: it lacks keys of a manifest, or has others"),
        ("job.json", "[]", "job.json: not an object"),
        ("job.json", "[" * 10**5, "job.json: too many lists and objects are inside each other"),
    ],
)
def test_a_damaged_folder_is_refused_without_restart(
    bundle_path: Path, tmp_path: Path, unfinished: Path, name: str, content: str | None, reason: str
) -> None:
    """Without a content, a named pipe is in the file's place."""
    file = state_folder_path(unfinished) / name
    file.unlink()
    os.mkfifo(file) if content is None else file.write_text(content)
    with pytest.raises(HdexportError, match=rf"is damaged: {reason}.*\nStart over with restart=True"):
        run(bundle_path, tmp_path / "in.jsonl", unfinished)
    assert run(bundle_path, tmp_path / "in.jsonl", unfinished, restart=True).rows == 25


@pytest.mark.parametrize("name", ["job.json", "manifest.json"])
def test_a_folder_without_one_of_its_records_is_refused(
    bundle_path: Path, tmp_path: Path, unfinished: Path, name: str
) -> None:
    (state_folder_path(unfinished) / name).unlink()
    with pytest.raises(DamagedJobError, match=rf"is damaged: {name} is missing\.\nStart over with restart=True"):
        run(bundle_path, tmp_path / "in.jsonl", unfinished)


@pytest.mark.parametrize("content", [None, "another digit"])
def test_ranges_that_are_not_those_of_the_kept_rows_are_refused(
    bundle_path: Path, tmp_path: Path, small_shards: None, content: str | None
) -> None:
    """Else the remaining rows would get another scale than the kept ones."""
    rows, output = write_rows(tmp_path / "in.jsonl", list(random_texts(25))), tmp_path / "out.jsonl"
    vectors = VectorOptions(output_dtype=EmbeddingPrecision.INT8)
    with pytest.raises(KeyboardInterrupt):
        run(bundle_path, rows, output, vectors=vectors, on_progress=stop_at(10))
    file = state_folder_path(output) / "ranges.json"
    right = file.read_text()
    if content is None:
        file.unlink()
    else:
        digit = max(right.index("1"), right.index("2"))
        file.write_text(f"{right[:digit]}9{right[digit + 1 :]}")
    with pytest.raises(HdexportError, match=r"is damaged: ranges\.json is missing or has changed.*\nStart over with"):
        run(bundle_path, rows, output, vectors=vectors)
    file.write_text(right)
    assert run(bundle_path, rows, output, vectors=vectors).rows == 25


def test_a_position_beyond_the_inputs_is_refused(bundle_path: Path, tmp_path: Path, unfinished: Path) -> None:
    path = state_folder_path(unfinished) / "manifest.json"
    saved = json.loads(path.read_text())
    del saved["crc32"]
    saved["position"][0] = 1
    path.write_text(json_with_checksum(saved))
    with pytest.raises(
        HdexportError, match=r"is damaged: it continues in input 2 of 1\.\nStart over with restart=True"
    ):
        run(bundle_path, tmp_path / "in.jsonl", unfinished)


def test_other_files_in_the_folder_stay(bundle_path: Path, tmp_path: Path, unfinished: Path) -> None:
    (state_folder_path(unfinished) / "notes.txt").write_text("mine")
    run(bundle_path, tmp_path / "in.jsonl", unfinished)
    assert len(read(unfinished)) == 25
    assert "notes.txt" in left_in(state_folder_path(unfinished))


@pytest.mark.parametrize("removed", [False, True])
def test_an_output_is_only_taken_for_that_of_the_same_job(
    bundle_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    removed: bool,
) -> None:
    """A job is killed between the two last steps: its output is in place, and its manifest does not say so."""
    inputs = write_rows(tmp_path / "in.jsonl", ["long"])
    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(KeptResults, "_write_ranges", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(bundle_path, inputs, output)
    assert left_in(tmp_path) == [".out.jsonl.job", "bundle", "in.jsonl", "out.jsonl"]
    with pytest.raises(OutputExistsError, match="Replace it with force=True"):
        plan_job(open_bundle(bundle_path), [inputs], output, options=JobOptions(overflow=Overflow.TRUNCATE))
    content = output.read_bytes()
    if removed:
        output.unlink()
    assert run(bundle_path, inputs, output).resumed_rows == (0 if removed else 1)
    said = f"1 rows were finished, but are neither in {output} nor in {state_folder_path(output)} any more"
    assert caplog.text.count(said) == removed
    assert left_in(tmp_path) == ["bundle", "in.jsonl", "out.jsonl"]
    assert output.read_bytes() == content


@pytest.mark.parametrize("position", [-1, -9, 5])
def test_results_that_change_while_the_output_is_made_of_them_are_refused(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    inputs, output = write_rows(tmp_path / "in.jsonl", list(random_texts(25))), tmp_path / "out.parquet"
    finish = writers._ParquetResults.finish

    def change_and_finish(self: Any, folder: Path, **options: Any) -> Path:
        content = bytearray((folder / "results").read_bytes())
        content[position] ^= 1
        (folder / "results").write_bytes(content)
        return finish(self, folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(writers._ParquetResults, "finish", change_and_finish)
        with pytest.raises(DamagedJobError, match=r"is damaged: results has changed\.\nStart over with restart=True"):
            run(bundle_path, inputs, output)
    assert not output.exists()
    with pytest.raises(DamagedJobError, match="results, which holds 25 rows, is missing or has changed"):
        run(bundle_path, inputs, output)
    assert run(bundle_path, inputs, output, restart=True).rows == 25


@pytest.mark.parametrize("options", [{}, {"restart": True}, {"restart": True, "overflow": Overflow.TRUNCATE}])
def test_a_directory_that_a_killed_job_was_replacing_is_replaced_with_force_only(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A kill between the two steps of replacing a directory."""
    inputs, output = write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out"
    run(bundle_path, write_rows(tmp_path / "old.jsonl", ["read"]), output)
    old = content_of(output)
    replace = os.replace

    def replace_but_the_output(source: Path, target: Path) -> None:
        if target == output:
            raise ZeroDivisionError
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace_but_the_output)
        with pytest.raises(ZeroDivisionError):
            run(bundle_path, inputs, output, force=True)
    assert not output.exists()
    with pytest.raises(OutputExistsError):
        run(bundle_path, inputs, output, **options)
    assert content_of(output) == old
    run(bundle_path, inputs, output, force=True, **options)
    assert content_of(output) != old


def test_a_finished_job_is_not_run_again(bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = write_rows(tmp_path / "in.jsonl", ["long", None])
    output = tmp_path / "out.jsonl"
    done = run(bundle_path, inputs, output)
    monkeypatch.setattr(hdruntime.Session, "run_batches", None)
    again = run(bundle_path, inputs, output)
    assert (again.rows, again.errors, again.first_error) == (done.rows, done.errors, done.first_error)
    monkeypatch.undo()
    bundle = open_bundle(bundle_path)
    with pytest.raises(OutputExistsError):
        plan_job(bundle, [inputs], output, options=JobOptions(overflow=Overflow.TRUNCATE))
    assert run(bundle_path, inputs, output, force=True).resumed_rows == 0
    with output.open("a") as file:
        file.write("{}\n")
    with pytest.raises(OutputExistsError):
        plan_job(bundle, [inputs], output)


def test_commits_take_a_bounded_share_of_the_time(
    bundle_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_shards: None
) -> None:
    """On a disk that takes its time to sync, there is one commit at the start and one at the end."""
    synced = []

    def slow(descriptor: int) -> None:
        synced.append(descriptor)
        time.sleep(0.05)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(job_results, "_COMMIT_SECONDS", 0)
    run(bundle_path, write_rows(tmp_path / "in.jsonl", list(random_texts(300))), tmp_path / "out.jsonl")
    # job.json and the first manifest; results and manifest of two commits; the output's checksum; both folders;
    # that the job is done.
    assert len(synced) == 2 + 2 * 2 + 1 + 2 + 1


def test_a_file_in_place_of_the_folder_is_refused(bundle_path: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.jsonl.job").write_text("")
    with pytest.raises(HdexportError, match=r"\.out\.jsonl\.job is a file, not a folder.*\nRemove it, or change"):
        run(bundle_path, write_rows(tmp_path / "in.jsonl", ["long"]), tmp_path / "out.jsonl")
