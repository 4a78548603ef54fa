"""Rows of a pipe: what runs together, how much is read ahead, and shards that are made beside a GPU."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hdruntime.bundle.reader import open_bundle
from hdruntime.jobs import JobOptions, VectorOptions, arriving, plan_job, run_job
from hdruntime.jobs.arriving import ArrivingInput, ArrivingShards
from hdruntime.jobs.input_search import find_inputs
from hdruntime.jobs.plan import rows_arrive
from hdruntime.jobs.row_reader import read_rows
from hdruntime.jobs.rows import Columns, Row
from hdruntime.jobs.shards import Shard
from hdruntime.text.embeddings import EmbeddingPrecision
from support.job_runs import WordPool

LONG = 10**9
"""Milliseconds: a test that waits for so long hangs."""


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of the standard input to write to."""
    source, sink = os.pipe()
    with open(source) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield sink


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def shards_of(
    pipe: int, *, characters: int, wait_ms: float, told: Callable[[Iterator[Row]], Iterator[Row]] = iter
) -> tuple[ArrivingShards, ArrivingInput]:
    (file,) = find_inputs(["-"], columns=Columns(id=""), wait_seconds=wait_ms / 1000)
    assert isinstance(file.source, ArrivingInput)
    rows = told(read_rows([file], columns=Columns(id="")))
    return ArrivingShards(rows, file.source, characters=characters), file.source


def test_rows_that_come_faster_than_they_are_run_fill_shards_and_others_do_not_wait(pipe: int) -> None:
    os.write(pipe, lines(*["12345"] * 100))
    shards, _ = shards_of(pipe, characters=100, wait_ms=LONG)
    # As many as of a file, though the pipe is open and a row might wait for hours.
    assert [len(next(shards).rows) for _ in range(5)] == [20] * 5
    shards.stop()
    assert list(shards) == []


def test_a_row_waits_no_longer_than_it_may(pipe: int) -> None:
    os.write(pipe, lines("one"))
    shards, _ = shards_of(pipe, characters=100, wait_ms=0)
    for text in ("one", "two", "three"):
        assert [row.text for row in next(shards).rows] == [text]
        if text != "three":
            os.write(pipe, lines({"one": "two", "two": "three"}[text]))
    os.close(pipe)
    assert list(shards) == []
    shards.stop()


@pytest.mark.parametrize(
    ("characters_per_second", "rows_of_shards"),
    [
        # As long as the first row may wait for, and soon for half of the time that it has waited.
        (8, [41, 41, 41, 62, 93, 139, 209]),
        (2**10, [41, 615, 615, 636]),
        # As many as of a file.
        (2**17, [41, 1311, 1311]),
    ],
)
def test_the_first_results_of_many_rows_come_soon_and_full_shards_follow(
    pipe: int, monkeypatch: pytest.MonkeyPatch, characters_per_second: int, rows_of_shards: list[int]
) -> None:
    now, read = [0.0], threading.Semaphore(0)
    monkeypatch.setattr(arriving, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def write() -> None:
        content = lines(*["x" * 100] * sum(rows_of_shards))
        threading.Thread(target=os.write, args=(pipe, content), daemon=True).start()

    def wait_until_read() -> None:
        for _ in range(sum(rows_of_shards)):
            read.acquire()

    def told(rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            yield row
            read.release()

    def ran(shard: Shard) -> int:
        now[0] += 100 * len(shard.rows) / characters_per_second
        return len(shard.rows)

    write()
    shards, _ = shards_of(pipe, characters=2**17, wait_ms=60_000, told=told)
    wait_until_read()
    assert [ran(next(shards)) for _ in rows_of_shards] == rows_of_shards
    # Rows that come later have not waited.
    write()
    wait_until_read()
    assert ran(next(shards)) == rows_of_shards[1]
    shards.stop()


def test_a_first_line_that_is_too_long_is_an_error_before_its_end_has_come(pipe: int) -> None:
    begun = threading.Event()

    def write() -> None:
        for _ in range(17):
            os.write(pipe, b"x" * 2**20)
        begun.wait()
        os.write(pipe, b"\n" + lines("read"))
        os.close(pipe)

    threading.Thread(target=write, daemon=True).start()
    shards, _ = shards_of(pipe, characters=100, wait_ms=0)
    begun.set()
    long, other = (row for shard in shards for row in shard.rows)
    assert str(long.error).startswith("Line 1 has more than 16777216 bytes")
    assert (other.text, other.error) == ("read", None)
    shards.stop()


def test_memory_holds_some_shards_however_much_comes(pipe: int) -> None:
    """The writer waits, as for any program that reads at its own pace."""
    count = 20_000
    written = [0]

    def write() -> None:
        for _ in range(count):
            written[0] += 1
            os.write(pipe, lines("x" * 50))
        os.close(pipe)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    shards, _ = shards_of(pipe, characters=1000, wait_ms=LONG)
    rows = 0
    for shard in shards:
        rows += len(shard.rows)
        # 64 lines a shard, four shards read ahead, and what a pipe and a read of it hold.
        assert written[0] - rows <= 4000 * 4 // 64 + 20 + 4 * 2**16 // 64
    assert rows == count
    shards.stop()


@pytest.mark.parametrize("computes_beside", [False, True])
def test_a_job_of_a_pipe_prints_what_a_job_of_its_file_writes(
    pipe: int, bundle_path: Path, tmp_path: Path, computes_beside: bool, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    bundle = open_bundle(bundle_path)
    content = lines(*(f"text {number}" for number in range(300))) + b'\n{"text": "nan"}\n{"text'
    (tmp_path / "in.jsonl").write_bytes(content)
    pool = WordPool(computes_beside=computes_beside)
    whole = run_job(plan_job(bundle, [tmp_path / "in.jsonl"], tmp_path / "out.jsonl"), pool)
    os.write(pipe, content)
    os.close(pipe)
    options = JobOptions(max_wait_ms=1)
    assert rows_arrive(["-"], "-", options)
    done = run_job(plan_job(bundle, ["-"], "-", options=options), pool)
    assert capfdbinary.readouterr().out == (tmp_path / "out.jsonl").read_bytes()
    assert (done.rows, done.errors, done.bytes_read) == (whole.rows, whole.errors, whole.bytes_total)


def test_what_needs_the_whole_input_waits_for_its_end(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = VectorOptions(output_dtype=EmbeddingPrecision.INT8, ranges=Path("ranges.npy"))
    cases: list[tuple[list[Any], str, JobOptions, bool]] = [
        (["-"], "-", JobOptions(max_wait_ms=0), True),
        (["-"], "-", JobOptions(), False),
        (["-"], "out.jsonl", JobOptions(max_wait_ms=0), False),
        (["-", "a.jsonl"], "-", JobOptions(max_wait_ms=0), False),
        (["-"], "-", JobOptions(max_wait_ms=0, vectors=VectorOptions(output_dtype=EmbeddingPrecision.INT8)), False),
        (["-"], "-", JobOptions(max_wait_ms=0, vectors=ranges), True),
    ]
    assert [rows_arrive(inputs, output, options) for inputs, output, options, _ in cases] == [
        expected for *_, expected in cases
    ]
    with open(__file__) as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert not rows_arrive(["-"], "-", JobOptions(max_wait_ms=0))
