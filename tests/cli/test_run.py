"""`hdexport run`: what it writes, what it says, and what it refuses."""

from __future__ import annotations

import argparse
import functools
import json
import os
import pty
import re
import subprocess
from enum import Enum
from pathlib import Path

import pyarrow.parquet
import pytest

from hdexport.cli import run as run_command
from hdruntime.backends.precision import Precision
from hdruntime.bundle.reader import open_bundle
from hdruntime.gpu.driver import gpus, no_gpu_reason
from hdruntime.jobs import VectorOptions, plan_job
from hdruntime.jobs.input_files import RowFormat
from hdruntime.optional import is_installed
from hdruntime.tasks import text_inference
from hdruntime.text.embeddings import EmbeddingPrecision
from hdruntime.text.encoding import Overflow
from hdruntime.text.entities import Aggregation
from hdruntime.text.splitting import SplitPooling
from support.commands import HDEXPORT, Command
from support.every_key import resealed
from support.job_runs import run as run_job
from support.job_runs import stop_at, write_rows
from support.tiny_bundle import make_bundle

TEXTS = ["long documents are read whole.", "", "read long documents"]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The tiny bundle of the runtime's tests: 16 tokens, 4 dimensions, NaN for the word "nan"."""
    made: Path = make_bundle(tmp_path / "bundle")
    return made


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def run(hdexport: Command) -> Command:
    """Run `hdexport run` in this process."""
    return functools.partial(hdexport, "run")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_job_writes_a_row_a_row_and_sums_up(
    installed: Command, run: Command, bundle: Path, rows: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    done = installed("run", bundle, rows, "-o", output, "--progress", "none")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3 rows, 0 failed, 15 tokens in ")
    reason = ".*" if gpus() else re.escape(f"in float32. {no_gpu_reason(())} The bundle has no graph for OpenVINO.")
    assert re.search(rf" tokens/s\): {output}\nBackend: onnxruntime\w* {reason}\n$", done.stdout)
    assert "Backend" not in run(bundle, rows, "-o", output, "--force", "--backend", "onnxruntime").stdout
    assert [row["tokens"] for row in lines_of(output)] == [8, 2, 5]
    assert list(lines_of(output)[0]) == ["id", "embedding", "tokens", "error"]


def test_what_a_backend_does_not_compute_in_or_on_is_refused(
    run: Command, bundle: Path, rows: Path, tmp_path: Path
) -> None:
    for options, message in (
        (
            ("--precision", "bfloat16", "--backend", "onnxruntime"),
            "ONNX Runtime computes in bfloat16 only on Linux on aarch64",
        ),
        (
            ("--precision", "int8"),
            "has no graph in int8 that ONNX Runtime on the CPU can run.\nBuild it again with --int8",
        ),
        (("--device", "GPU"), "has no graph for OpenVINO" if is_installed("openvino") else "OpenVINO is not installed"),
        (("--device", "GPU", "--ray"), "--device GPU is for one machine; Ray gives its workers"),
    ):
        done = run(bundle, rows, "-o", tmp_path / "out.jsonl", *options)
        assert done.returncode == 1
        assert message in done.stderr
    same = run(bundle, rows, "-o", tmp_path / "out.jsonl", "--precision", "float32", "--progress", "none")
    assert same.returncode == 0
    assert "Backend: onnxruntime in float32. The precision float32 is for CPUs. " in same.stdout


def test_options_of_other_tasks_are_refused(run: Command, bundle: Path, rows: Path, tmp_path: Path) -> None:
    """What they do where they fit: tests/runtime/text."""
    for options, message in (
        (("--top-k", 2), "--top-k and --handle-impossible-answer are for question-answering"),
        (("--handle-impossible-answer",), "--top-k and --handle-impossible-answer are for question-answering"),
        (("--aggregation", "average"), "--aggregation is for token-classification"),
    ):
        done = run(bundle, rows, "-o", tmp_path / "out.jsonl", *options)
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_failed_rows_are_counted_and_give_exit_code_2(run: Command, bundle: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(
        b'{"text": "read"}\n{"txt": "a"}\n{"text": "\xff"}\n{"text": "nan"}\n{"text": "' + b"a " * 15 + b'"}\n'
    )
    done = run(bundle, rows, "-o", tmp_path / "out.jsonl")
    assert done.returncode == 2
    assert done.stdout.startswith("5 rows, 4 failed, 3 tokens in ")
    assert done.stderr.startswith(
        "4 of 5 rows failed: 1 without a usable value in a column; 1 unreadable; 1 with NaN or infinity; "
        "1 rejected by the bundle.\nThe column `error` says why. The first of them is row 1: The row has no column"
    )
    assert [row["error"] is None for row in lines_of(tmp_path / "out.jsonl")] == [True] + [False] * 4
    matrix = run(bundle, rows, "-o", tmp_path / "out.npz")
    assert matrix.stderr == done.stderr.replace("The column `error` says why. ", "")


def test_a_quotation_mark_that_is_never_closed_gives_exit_code_2_and_its_line(
    run: Command, bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text('id,text\n1,read\n2,"long\n3,documents\n')
    done = run(bundle, tmp_path / "rows.csv", "-o", tmp_path / "out.jsonl")
    assert done.returncode == 2
    assert "Line 3 opens a quotation mark that is never closed: it takes in all up to line 4, the last." in done.stderr


UNUSABLE = [
    (
        b'{"text": "' + b"long " * 15 + b'"}',
        r"The text has 17 tokens; this bundle accepts 1 to 16\.\n"
        r"Truncate it \(--overflow truncate\), run it in chunks \(--overflow split\), or build the bundle again with "
        r"--max-len 17\.",
    ),
    (b'{"text": "' + b"x" * 17_000_000 + b'"}', r"Line 4 has more than 16777216 bytes, the maximum length of a line"),
    (b'{"text": "\xff"}', r"Line 6 is not valid UTF-8: its byte 11"),
    (b'{"text": "nan"}', r"The output last_hidden_state holds NaN or infinity\.\nCompare .* hdexport verify"),
    (b'{"text": "beyond"}', r"input_ids\[0, 1\] is 99; .* 0 to 10\.\nUse the bundle's tokenizer"),
]
"""Rows, one between two that are usable -> what is said of them."""


def test_a_row_that_cannot_be_used_says_why_and_its_neighbours_are_done(
    run: Command, bundle: Path, tmp_path: Path
) -> None:
    tokenizer = json.loads((bundle / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["beyond"] = 99  # an id that the model has no row for
    (bundle / "tokenizer.json").write_text(json.dumps(tokenizer))
    resealed(bundle, json.loads((bundle / "manifest.json").read_text()))
    (tmp_path / "rows.jsonl").write_bytes(b"".join(b'{"text": "long"}\n' + row + b"\n" for row, _ in UNUSABLE))
    done = run(bundle, tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    rows = lines_of(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == list(range(2 * len(UNUSABLE)))
    for failed, (_, message) in zip(rows[1::2], UNUSABLE, strict=True):
        assert re.search(message, str(failed["error"])), failed["error"]
        assert failed["embedding"] is None
    assert all(row["embedding"] and row["error"] is None for row in rows[::2])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--overflow", "truncate"], (0, 16)),
        (["--overflow", "split", "--stride", 2, "--split-pooling", "max"], (0, 102)),
        (["--text-column", "body", "--text-pair-column", "more", "--id-column", "key"], ("k", 5)),
    ],
)
def test_texts_and_columns_are_chosen_by_options(
    run: Command, bundle: Path, tmp_path: Path, options: list[object], expected: tuple[object, int]
) -> None:
    row = {"text": "long " * 100, "key": "k", "body": "long", "more": "read"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    done = run(bundle, tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl", *options)
    assert done.returncode == 0
    assert (", 1 truncated, " in done.stdout) == ("truncate" in options)
    (found,) = lines_of(tmp_path / "out.jsonl")
    assert (found["id"], found["tokens"], found["error"]) == (*expected, None)


def test_what_is_read_and_written_is_named_by_options(run: Command, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.data").write_text("text,lang,id\nlong,en,x\nnan,en,y\nread,de,z\n")
    options = ["--input-format", "csv", "--keep-columns", "lang", "--id-column="]
    vectors = ["--skip-failed", "--normalize", "--truncate-dim", 2]
    done = run(bundle, tmp_path / "rows.data", "-o", tmp_path / "out.parquet", *options, *vectors)
    assert done.returncode == 2, done.stderr
    assert "\nThe first of them is row 1: " in done.stderr
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table.select(["id", "lang", "error"]).to_pylist() == [
        {"id": 0, "lang": "en", "error": None},
        {"id": 2, "lang": "de", "error": None},
    ]
    assert [sum(x * x for x in vector) for vector in table["embedding"].to_pylist()] == pytest.approx([1, 1])
    assert {len(vector) for vector in table["embedding"].to_pylist()} == {2}
    kept = [*options[:2], "--keep-columns", "all", "--output-dtype", "binary"]
    done = run(bundle, tmp_path / "rows.data", "-o", tmp_path / "out.jsonl", *kept)
    assert done.returncode == 2
    assert "\nThe column `error` says why. The first of them is row y: " in done.stderr
    assert list(lines_of(tmp_path / "out.jsonl")[0]) == ["id", "text", "lang", "embedding", "tokens", "error"]
    assert [len(row["embedding"]) for row in lines_of(tmp_path / "out.jsonl")[::2]] == [1, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "spans"),
    [
        (["sentences"], [(0, 30), (31, 35)]),
        (["tokens:4", "--overlap", 3], [(0, 23), (24, 35)]),
    ],
)
def test_late_chunking_writes_a_row_per_chunk(
    run: Command, bundle: Path, tmp_path: Path, options: list[object], spans: list[tuple[int, int]]
) -> None:
    row = {"id": "x", "text": "Long documents are read whole. Read"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"id": "y", "text": ""}))
    done = run(bundle, tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl", "--late-chunking", *options)
    assert done.returncode == 2
    assert done.stdout.startswith("2 rows, 1 failed, 9 tokens in ")
    assert done.stderr.startswith("1 of 2 rows failed: 1 rejected by the bundle.\nThe column `error` says why. ")
    *found, failed = lines_of(tmp_path / "out.jsonl")
    assert [(row["id"], row["chunk"], (row["start"], row["end"])) for row in found] == [
        ("x", chunk, span) for chunk, span in enumerate(spans)
    ]
    assert (failed["id"], failed["chunk"], failed["embedding"]) == ("y", None, None)


def test_a_damaged_job_says_how_to_start_over_and_not_that_it_continues(
    run: Command, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_inference, "_WINDOW_TEXTS", 2)
    rows, output = write_rows(tmp_path / "rows.jsonl", ["long", "read", "whole", "."]), tmp_path / "out.jsonl"
    vectors = VectorOptions(output_dtype=EmbeddingPrecision.INT8)
    with pytest.raises(KeyboardInterrupt):
        run_job(bundle, rows, output, vectors=vectors, on_progress=stop_at(2))
    (tmp_path / ".out.jsonl.job" / "ranges.json").unlink()
    done = run(bundle, rows, "-o", output, "--output-dtype", "int8")
    damage = "ranges.json is missing or has changed"
    assert (done.returncode, done.stderr.splitlines()[-2:]) == (
        1,
        [f"error: The unfinished job in {tmp_path}/.out.jsonl.job is damaged: {damage}.", "Start over with --restart."],
    )
    assert "same command" not in done.stderr
    assert run(bundle, rows, "-o", output, "--output-dtype", "int8", "--restart").returncode == 0


REFUSED = [
    (["{bundle}", "{tmp}/empty.jsonl"], "error: No input holds a row: {tmp}/empty.jsonl.\nCheck what"),
    (["{tmp}/none", "{rows}"], "error: There is no bundle at {tmp}/none"),
    (["{bundle}", "{rows}", "--threads", "0"], "error: argument --threads: '0' is not a whole number, 1 or more"),
    (["{bundle}", "{rows}", "--stride", "4"], "error: --stride is for texts that are split.\nAdd --overflow split"),
    (["{bundle}", "{rows}", "--overlap", "4"], "error: --overlap is for late chunking.\nAdd --late-chunking tokens:"),
    (
        ["{bundle}", "{rows}", "--late-chunking", "sentences", "--overflow", "split"],
        "error: --overflow split and --late-chunking contradict each other: late chunking reads long texts whole",
    ),
    (
        ["{bundle}", "{rows}", "--progress", "bar"],
        "error: --progress bar needs a terminal on stderr.\nUse --progress",
    ),
    (["{bundle}", "{rows}", "--ray", "--rebuild"], "error: --rebuild is for one machine; with --ray every worker"),
]
"""Arguments -> what is said of them."""


def test_bad_arguments_are_explained_and_nothing_is_written(
    run: Command, bundle: Path, rows: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    before = sorted(tmp_path.iterdir())
    names = {"bundle": bundle, "rows": rows, "tmp": tmp_path}
    for arguments, message in REFUSED:
        done = run("-o", tmp_path / "out.jsonl", *(argument.format(**names) for argument in arguments))
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert done.stderr.startswith(message.format(**names)), (arguments, done.stderr)
        assert "Traceback" not in done.stderr, arguments
        assert sorted(tmp_path.iterdir()) == before, arguments


def test_progress_is_shown_on_a_terminal_only_on_stderr(bundle: Path, rows: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [HDEXPORT, "run", str(bundle), str(rows), "-o", str(tmp_path / "out.jsonl")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, env=environment)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "3 rows, " in shown
    assert "tokens/s" in shown
    assert done.stdout.count("\n") == 2


def test_without_a_gpu_nothing_is_rebuilt_and_the_job_runs(
    run: Command, bundle: Path, rows: Path, tmp_path: Path
) -> None:
    if gpus():
        pytest.skip("there is a GPU here, for which an engine would be built")
    before = (bundle / "manifest.json").read_bytes()
    assert run(bundle, rows, "-o", tmp_path / "out.jsonl", "--rebuild").returncode == 0
    assert len(lines_of(tmp_path / "out.jsonl")) == len(TEXTS)
    assert (bundle / "manifest.json").read_bytes() == before


CHOICES: dict[str, type[Enum]] = {
    "input_format": RowFormat,
    "overflow": Overflow,
    "split_pooling": SplitPooling,
    "output_dtype": EmbeddingPrecision,
    "aggregation": Aggregation,
    "precision": Precision,
}


def test_the_choices_of_an_option_are_those_of_its_type() -> None:
    command = argparse.ArgumentParser()
    run_command.add_arguments(command)
    named = {action.dest: list(action.choices or ()) for action in command._actions if action.dest in CHOICES}
    assert named == {name: [choice.value for choice in choices] for name, choices in CHOICES.items()}


def test_every_option_that_changes_results_belongs_to_the_identity_of_a_job(
    rows: Path, bundle: Path, tmp_path: Path
) -> None:
    command = argparse.ArgumentParser()
    run_command.add_arguments(command)
    flags = {flag for action in command._actions for flag in action.option_strings if flag.startswith("--")}
    changing_nothing = {"--help", "--output", "--force", "--restart", "--progress", "--batch-tokens", "--batch-size"}
    changing_nothing |= {"--backend", "--device", "--rebuild", "--threads", "--ray", "--max-wait-ms"}
    changing_nothing |= {"--ranges-from"}  # another name of --ranges
    identity = plan_job(open_bundle(bundle), [rows], tmp_path / "out.jsonl").identity
    settings = {f"--{name.replace('_', '-')}" for name in identity["settings"]}
    assert settings - {"--max-answer-tokens"} == flags - changing_nothing
