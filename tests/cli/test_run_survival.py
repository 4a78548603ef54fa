"""`hdexport run` killed, stopped, run twice, without space, and with files taken from under it: real processes."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.disturbed_jobs import run_job, run_job_on_a_small_disk_and_a_large_one
from support.forks import Fork
from support.full_disks import in_mount_namespace
from support.grids import nightly_unless
from support.recurrent_bundle import make_streaming_bundle
from support.waiting import wait_until

WORDS = ("long", "documents", "are", "read", "whole", ".")
ROWS, FEW_ROWS = 2000, 1000

OPTIONS: dict[str, list[object]] = {
    "out.jsonl": [],
    "out.parquet": [],
    "chunks.parquet": ["--late-chunking", "tokens:4"],
    "streams.jsonl": ["--overflow", "recur", "--segment", 4, "--batch-size", 2],
}
"""Output -> options of its job."""

SLOW = ("streams.jsonl",)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_streaming_bundle(tmp_path_factory.mktemp("bundles") / "tiny")
    return made


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for about half a second; one of 500 is not a number, one of 500 no row."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    chosen = random.Random(4)
    texts = (" ".join(chosen.choices(WORDS, k=chosen.randint(0, 14))) for _ in range(ROWS))
    lines = [json.dumps({"text": text}) for text in texts]
    lines[::500] = [json.dumps({"text": "nan"})] * len(lines[::500])
    lines[1::500] = ["{"] * len(lines[1::500])
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def few_rows(rows: Path) -> Path:
    """Half of them, for jobs that take longer."""
    path = rows.with_name("few.jsonl")
    path.write_text("\n".join(rows.read_text().splitlines()[:FEW_ROWS]))
    return path


@pytest.fixture(scope="module")
def whole(bundle: Path, rows: Path, few_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Output -> that of an undisturbed job."""
    directory = tmp_path_factory.mktemp("whole")

    def make(name: str) -> Path:
        output = directory / name
        if not output.exists():
            inputs = few_rows if name in SLOW else rows
            assert finished(bundle, inputs, "-o", output, *OPTIONS[name]).returncode == 2
        return output

    return make


def begun(*arguments: object, largest_file: int | None = None, computes_beside: bool = False) -> Fork:
    """The job, in a process of its own; `run_job` says what its arguments are."""
    return Fork(run_job, ["--progress", "none", *map(str, arguments)], largest_file, computes_beside)


def finished(*arguments: object, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    return begun(*arguments, largest_file=largest_file).finished(timeout=100)


def started(*arguments: object, computes_beside: bool = False) -> Fork:
    """The job, when it has said that it reads rows or is done already."""
    job = begun(*arguments, "--progress", "json", computes_beside=computes_beside)
    wait_until(lambda: "\n" in job.errors() or job.poll() is not None)
    assert job.errors().startswith('{"state": '), job.errors()
    return job


@pytest.mark.parametrize("computes_beside", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [nightly_unless(name != "chunks.parquet", name) for name in OPTIONS])
def test_killed_at_random_moments_it_writes_the_same_bytes(
    bundle: Path,
    rows: Path,
    few_rows: Path,
    whole: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    kills: int,
    computes_beside: bool,
) -> None:
    inputs, number = (few_rows, FEW_ROWS) if name in SLOW else (rows, ROWS)
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails
    chosen = random.Random(seed)
    output = tmp_path / name
    # A text without tokens has no chunk.
    failed = number // 250 + (inputs.read_text().count('{"text": ""}') if "chunks" in name else 0)
    kept: list[int] = []
    while True:
        process = started(bundle, inputs, "-o", output, *OPTIONS[name], computes_beside=computes_beside)
        if len(kept) < kills:
            # Every other time at any moment, else when more was committed: on a slow machine, too, the job gets on.
            if len(kept) % 2:
                wait_until(has_committed_more(output, process))
            time.sleep(chosen.uniform(0, 0.2))
            process.kill()
        ended = process.finished(timeout=100)
        if ended.returncode == -signal.SIGKILL:
            kept.append(kept_rows(output))
            continue
        # Done: here, or because the machine is a fast one; then the other kills hit a job of their own.
        assert (ended.returncode, output.read_bytes()) == (2, whole(output.name).read_bytes())
        done = json.loads(ended.stderr.splitlines()[-1])
        assert (done["state"], done["rows"], done["failed_rows"]) == ("done", number, failed)
        if len(kept) == kills:
            break
        output.unlink()
    assert sorted(os.listdir(tmp_path)) == sorted([output.name, f".{output.name}.job"])
    assert max(kept) > 0


def has_committed_more(output: Path, process: Fork) -> Callable[[], bool]:
    before = kept_rows(output)
    return lambda: kept_rows(output) != before or process.poll() is not None


def kept_rows(output: Path) -> int:
    """Rows of whole shards, and those that are done of the next one."""
    try:
        saved = json.loads((output.parent / f".{output.name}.job" / "manifest.json").read_text())
    except FileNotFoundError:
        return 0
    rows: int = saved["counts"]["rows"] + (saved["partial"]["counts"]["rows"] if saved["partial"] else 0)
    return rows


@pytest.mark.parametrize(
    ("number", "code", "options", "computes_beside"),
    [(signal.SIGTERM, 143, (), True), *((signal.SIGINT, 130, ("--restart",), beside) for beside in (False, True))],
)
def test_a_job_that_is_stopped_says_how_to_continue(
    bundle: Path,
    rows: Path,
    whole: Callable[[str], Path],
    tmp_path: Path,
    number: signal.Signals,
    code: int,
    options: tuple[str, ...],
    computes_beside: bool,
) -> None:
    output = tmp_path / "out.jsonl"
    process = begun(bundle, rows, "-o", output, *options, computes_beside=computes_beside)
    wait_until(lambda: kept_rows(output) > 0 or process.poll() is not None)
    process.send_signal(number)
    stopped = process.finished(timeout=60)
    errors = stopped.stderr
    assert stopped.returncode == code, errors
    again = " ".join(["The same command", *(f"without {option}" for option in options)])
    said = re.fullmatch(rf"Stopped\. (\d+) rows are kept in (.*)\. {again} continues after them\.\n", errors)
    assert said, errors
    assert (int(said[1]), said[2]) == (kept_rows(output), str(tmp_path / ".out.jsonl.job"))
    assert not output.exists()
    done = finished(bundle, rows, "-o", output)
    assert done.stderr.startswith(
        f"Continuing after {said[1]} rows that are done.\n{ROWS // 250} of {ROWS} rows failed"
    )
    assert output.read_bytes() == whole(output.name).read_bytes()


def test_a_second_job_on_one_output_is_refused_and_the_first_goes_on(
    bundle: Path, rows: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    first = started(bundle, rows, "-o", output)
    first.send_signal(signal.SIGSTOP)
    try:
        for option in ([], ["--force"], ["--restart"]):
            second = finished(bundle, rows, "-o", output, *option)
            assert (second.returncode, second.stdout) == (1, "")
            assert re.match(
                rf"error: Another job is writing {output}: process {first.pid} on \S+\.\nWait until it ends, or",
                second.stderr,
            ), second.stderr
        # What it may not write it may not forbid to others.
        few = tmp_path / "few.jsonl"
        few.write_text('{"text": "long"}\n')
        assert finished(bundle, few, "-o", tmp_path / "other.jsonl").returncode == 0
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.finished(timeout=100).returncode == 2
    assert output.read_bytes() == whole(output.name).read_bytes()


@pytest.mark.parametrize("ending", [nightly_unless(ending == "parquet", ending) for ending in ("jsonl", "parquet")])
def test_a_full_disk_stops_the_job_and_what_is_done_is_kept(
    bundle: Path, rows: Path, whole: Callable[[str], Path], tmp_path: Path, ending: str
) -> None:
    """A limit on the size of files fails a write in its middle, as a full disk does."""
    size = whole(f"out.{ending}").stat().st_size
    output = tmp_path / f"out.{ending}"
    full = finished(bundle, rows, "-o", output, largest_file=size // 2)
    assert (full.returncode, full.stdout) == (1, "")
    assert re.search(
        rf"^error: {output} could not be written: File too large\.\n"
        rf"Free some space there; then the same command continues\.\n"
        rf"\d+ rows are kept in {tmp_path}/\.out\.{ending}\.job\. The same command continues after them\.\n",
        full.stderr,
    ), full.stderr
    kept = kept_rows(output)
    assert kept > 0
    done = finished(bundle, rows, "-o", output)
    assert done.stderr.startswith(f"Continuing after {kept} rows that are done.\n")
    assert output.read_bytes() == whole(output.name).read_bytes()


@pytest.mark.parametrize("ending", [nightly_unless(ending == "jsonl", ending) for ending in ("jsonl", "parquet")])
def test_a_disk_that_is_really_full_loses_nothing(
    bundle: Path, rows: Path, whole: Callable[[str], Path], tmp_path: Path, ending: str
) -> None:
    size = whole(f"out.{ending}").stat().st_size
    output = tmp_path / "disk" / f"out.{ending}"
    job = list(map(str, (bundle, rows, "-o", output)))
    done = in_mount_namespace(run_job_on_a_small_disk_and_a_large_one, job, output, (size * 2 // 3, size * 10))
    assert re.findall(r"exit code \d+", done.stdout) == ["exit code 1", "exit code 2"], done.stderr
    assert "could not be written: No space left on device.\nFree some space there" in done.stderr
    assert int(re.search(r"Continuing after (\d+) rows", done.stderr)[1]) > 0  # type: ignore[index]
    assert {output.name} == set(ast.literal_eval(done.stdout.splitlines()[-1])) - {f".{output.name}.job"}
    assert (tmp_path / output.name).read_bytes() == whole(output.name).read_bytes()


def test_a_job_whose_input_is_cut_says_so_and_what_is_kept(
    bundle: Path, rows: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "rows.jsonl"
    copy.write_bytes(rows.read_bytes())
    output = tmp_path / "out.jsonl"
    process = started(bundle, copy, "-o", output)
    wait_until(lambda: kept_rows(output) > 0)
    process.send_signal(signal.SIGSTOP)
    size = copy.stat().st_size
    os.truncate(copy, size - 1)
    process.send_signal(signal.SIGCONT)
    failed = process.finished(timeout=60)
    errors = failed.stderr
    assert failed.returncode == 1
    kept = kept_rows(output)
    assert errors.endswith(
        f"error: {copy} has changed: its size was {size} bytes, and is {size - 1}.\n"
        f"{kept} rows are kept in {tmp_path}/.out.jsonl.job; they belong to the old content. Restore the file "
        "with its modification time, and the same command continues after them. Start over with --restart.\n"
    )
    assert '"state": "failed"' in errors
    results = (tmp_path / ".out.jsonl.job" / "results").read_bytes().splitlines(keepends=True)
    assert 0 < len(results) <= kept
    assert results == whole(output.name).read_bytes().splitlines(keepends=True)[: len(results)]
    assert not output.exists()


def test_a_killed_job_with_force_continues_and_keeps_the_old_output_until_its_end(
    bundle: Path, rows: Path, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    process = started(bundle, rows, "-o", output, "--force")
    wait_until(lambda: kept_rows(output) > 0)
    process.kill()
    assert output.read_text() == "old"
    refused = finished(bundle, rows, "-o", output)
    assert refused.stderr.startswith(f"error: {output} exists.\nReplace it with --force")
    done = finished(bundle, rows, "-o", output, "--force")
    assert done.stderr.startswith("Continuing after ")
    assert output.read_bytes() == whole(output.name).read_bytes()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
def test_memory_does_not_grow_with_the_input(bundle: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.txt"
    # Long words of one token each take much memory and little time.
    rows.write_text(("x" * 5000 + "\n") * 5000)
    small = tmp_path / "small.txt"
    small.write_text(("x" * 5000 + "\n") * 500)
    peaks = []
    for inputs in (small, rows):
        script = (
            "import re, sys; from hdexport.cli import main; code = main(); "
            "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(code)"
        )
        arguments = ["run", str(bundle), str(inputs), "-o", str(inputs.with_suffix(".parquet")), "--threads", "1"]
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]))
    # Measured: 2 MiB. To hold the rows would take 27.
    assert peaks[1] - peaks[0] < 12 * 1024, peaks
