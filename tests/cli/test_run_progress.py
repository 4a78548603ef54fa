"""What `hdexport run` says while it runs, to people and to programs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hdexport.cli.job_report import PlainLines, job_report
from hdexport.support.memory import GpuMemory
from hdruntime.jobs.input_search import find_inputs
from hdruntime.jobs.progress import JobManifest, JobState, ProgressMeter, RowCounts
from hdruntime.jobs.rows import Columns, Position
from support.commands import HDEXPORT, Command
from support.job_runs import left_in
from support.tiny_bundle import make_bundle
from support.waiting import wait_until

KEYS = [
    "state",
    "rows",
    "rows_total",
    "resumed_rows",
    "failed_rows",
    "errors",
    "tokens",
    "tokens_per_second",
    "seconds",
    "eta_seconds",
    "bytes_read",
    "bytes_total",
    "padding_waste",
]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    made: Path = make_bundle(tmp_path / "bundle")
    return made


def test_json_progress_is_an_object_a_line_and_ends_with_what_was_done(
    hdexport: Command, bundle: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "long documents"}\n' * 9000 + '{"text": "nan"}\n{}\n')
    done = hdexport("run", bundle, rows, "-o", tmp_path / "out.jsonl", "--progress", "json")
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [list(line) for line in lines[:-1]] == [KEYS] * (len(lines) - 1)
    assert list(lines[-1]) == [*KEYS, "message"]
    assert [line["state"] for line in (lines[0], *lines[-2:])] == ["running", "finishing", "done"]
    counts = [line["rows"] for line in lines]
    assert (counts, counts[0]) == (sorted(counts), 0)
    last = lines[-1]
    assert (last["rows"], last["failed_rows"], last["errors"]) == (9002, 2, {"not_finite": 1, "column": 1})
    assert (last["tokens"], last["rows_total"], last["resumed_rows"]) == (9000 * 4, None, 0)
    assert last["bytes_read"] == last["bytes_total"] == rows.stat().st_size
    assert last["message"].startswith("2 of 9002 rows failed: ")


def test_a_job_that_fails_says_so_last(hdexport: Command, bundle: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [str(number) * 50 for number in range(1000)]}), rows)
    content = rows.read_bytes()
    rows.write_bytes(content[:10] + bytes(190) + content[200:])
    done = hdexport("run", bundle, rows, "-o", tmp_path / "out.jsonl", "--progress", "json")
    assert done.returncode == 1
    last = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")][-1]
    assert last["state"] == "failed"
    assert "rows.parquet cannot be read to its end: " in last["message"]


def test_a_log_gets_a_line_every_few_seconds_the_first_within_five(capsys: pytest.CaptureFixture[str]) -> None:
    pauses: list[float] = []
    lines = PlainLines()
    lines.begin("Loading the bundle")

    def ended(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 3:
            lines.show("3 rows")
        return len(pauses) == 5

    lines.print_until(ended)
    assert capsys.readouterr().err == "Loading the bundle\n" * 2 + "3 rows\n" * 2
    assert pauses == [pauses[0]] * 5
    assert 1 <= pauses[0] < 5


@pytest.mark.parametrize(("choice", "shown"), [("auto", True), ("lines", True), ("none", False)])
def test_off_a_terminal_lines_are_shown_unless_not_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], choice: str, shown: bool
) -> None:
    monkeypatch.setattr("hdexport.cli.job_report._PLAIN_SECONDS", 0)
    with job_report(choice):
        wait_until(lambda: not shown or "Loading the bundle\n" in capsys.readouterr().err)
    assert shown or not capsys.readouterr().err


def test_results_go_to_the_standard_output_and_its_reader_may_have_enough(
    hdexport: Command, bundle: Path, tmp_path: Path
) -> None:
    rows = '{"text": "long documents"}\n' * 5000
    (tmp_path / "rows.jsonl").write_text(rows)
    command = [HDEXPORT, "run", str(bundle), "--progress", "none"]
    options = ["--output-dtype", "int8", "-o"]
    whole = hdexport("run", bundle, tmp_path / "rows.jsonl", *options, tmp_path / "out.jsonl")
    piped = subprocess.run([*command, "-", *options, "-"], input=rows, capture_output=True, text=True, timeout=60)
    assert (whole.returncode, piped.returncode) == (0, 0), piped.stderr
    assert piped.stdout == (tmp_path / "out.jsonl").read_text()
    assert piped.stderr.startswith("5000 rows, 0 failed, 20000 tokens in ")
    process = subprocess.Popen(
        [*command, str(tmp_path / "rows.jsonl"), "-o", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["id"] == 0
    process.stdout.close()
    said = process.stderr.read()
    assert (process.wait(timeout=60), said) == (
        141,
        "Stopped: the program that reads the standard output has ended.\n",
    )
    process.stderr.close()
    left = ["bundle", "out.jsonl", "out.jsonl.ranges.npz", "rows.jsonl"]
    assert left_in(tmp_path) == left


def test_the_time_to_go_follows_from_the_bytes_and_the_speed_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x" * 99 + "\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 10}), tmp_path / "b.parquet")
    text, parquet = find_inputs([tmp_path], columns=Columns())
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    before = JobManifest(counts=RowCounts(rows=5, tokens=1000), position=Position(offset=50, row=5), seconds=7.0)
    meter = ProgressMeter([text, parquet], before)
    assert meter.progress(JobState.RUNNING, before).eta_seconds is None
    clock[0] = 2.0
    after = JobManifest(counts=RowCounts(rows=8, tokens=1600), position=Position(file=1, offset=5, row=8))
    now = meter.progress(JobState.RUNNING, after)
    half = round(parquet.version.size_bytes / 2)
    assert (now.bytes_read, now.bytes_total) == (100 + half, 100 + parquet.version.size_bytes)
    assert now.eta_seconds == pytest.approx(2.0 * (parquet.version.size_bytes - half) / (50 + half))
    assert (now.tokens_per_second, now.seconds, now.resumed_rows) == (300, 9.0, 5)


def test_gpu_memory_is_reported_where_the_rows_run_on_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("long\n")
    meter = ProgressMeter(find_inputs([tmp_path], columns=Columns()), JobManifest())
    monkeypatch.setattr("hdexport.cli.job_report.gpu_memory", lambda: GpuMemory(used_bytes=5, total_bytes=9))
    for has_gpu in (True, False):
        with job_report("json") as report:
            report.loaded(has_gpu=has_gpu)
            report.progress(meter.progress(JobState.RUNNING, JobManifest()))
        (line,) = capsys.readouterr().err.splitlines()
        expected = {"gpu_used_bytes": 5, "gpu_total_bytes": 9} if has_gpu else {}
        assert {key: value for key, value in json.loads(line).items() if key not in KEYS} == expected
