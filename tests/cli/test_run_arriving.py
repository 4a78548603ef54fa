"""`hdexport run BUNDLE - -o -`: rows of a pipe are run as they come, while it stays open. Real processes and pipes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.commands import HDEXPORT, Command
from support.job_runs import random_texts
from support.tiny_bundle import make_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_bundle(tmp_path_factory.mktemp("bundles") / "tiny")
    return made


class Job:
    """A job whose standard streams are pipes to the test."""

    def __init__(self, bundle: Path, *options: object) -> None:
        command = [HDEXPORT, "run", bundle, "-", "-o", "-", "--progress", "none", *options]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(list(map(str, command)), **pipes)  # type: ignore[call-overload]

    def write(self, text: str) -> None:
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def read(self) -> dict[str, object]:
        """The next result; the test hangs if there is none while the input is open."""
        row: dict[str, object] = json.loads(self.process.stdout.readline())
        return row

    def ended(self) -> tuple[int, list[dict[str, object]], str]:
        """Close the input, and wait: the exit code, the results that were not read, and the standard error."""
        self.process.stdin.close()
        rest, said = self.process.stdout.read(), self.process.stderr.read().decode()
        return self.process.wait(60), [json.loads(line) for line in rest.splitlines()], said


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs that end with the test."""
    started: list[Job] = []
    yield started
    for job in started:
        job.process.kill()
        job.process.wait()
        for stream in (job.process.stdin, job.process.stdout, job.process.stderr):
            stream.close()


def test_each_result_comes_while_the_input_is_open_and_the_last_line_needs_no_end(
    bundle: Path, jobs: list[Job]
) -> None:
    jobs.append(job := Job(bundle, "--skip-failed", "--keep-columns", "lang"))
    for number, more in enumerate(["\n \n", '{"id": "bad"}\n{"text"\n', '{"id": "half', '"}\n', ""]):
        job.write(json.dumps({"id": f"r{number}", "text": "long documents", "lang": "en"}) + "\n" + more)
        row = job.read()
        assert (row["id"], row["lang"], row["tokens"]) == (f"r{number}", "en", 4)
        if more == '{"id": "half':
            job.write(' a line", "text": "read"}\n')
            assert job.read()["id"] == "half a line"
    job.write('{"id": "last", "text": "read"}')
    code, rest, said = job.ended()
    assert (code, [row["id"] for row in rest]) == (2, ["last"])
    assert said.startswith("3 of 10 rows failed: ")


def test_rows_of_other_formats_come_with_their_header_or_without(bundle: Path, jobs: list[Job]) -> None:
    jobs += [Job(bundle, "--input-format", "csv"), Job(bundle, "--input-format", "txt", "--max-wait-ms", 0)]
    jobs[0].write("id,text\n")  # no row yet
    for number in range(2):
        jobs[0].write(f'{number},"long\ndocuments"\n')
        jobs[1].write("read\n")
        assert [job.read()["id"] for job in jobs] == [str(number), number]
    assert [job.ended()[:2] for job in jobs] == [(0, []), (0, [])]


def assert_same_rows(found: bytes, expected: bytes, tolerance: float) -> None:
    """Rows of a pipe are batched as they come, so that an embedding may differ by the rounding of another batch."""
    pairs = list(zip(map(json.loads, found.splitlines()), map(json.loads, expected.splitlines()), strict=True))
    for row, other in pairs:
        vectors = [each.pop("embedding") for each in (row, other)]
        assert row == other
        if None in vectors:
            assert vectors == [None, None]
        else:
            np.testing.assert_allclose(*vectors, rtol=0, atol=tolerance)


def test_a_row_that_differs_is_seen() -> None:
    row = b'{"id": 0, "embedding": [0.5, 1.0], "error": null}\n'
    assert_same_rows(row, row.replace(b"0.5", b"0.5000001"), 1e-6)
    for wrong in (
        row.replace(b"0.5", b"0.50001"),
        row.replace(b"[0.5, 1.0]", b"null"),
        row.replace(b": 0", b": 1"),
        b"",
    ):
        with pytest.raises((AssertionError, ValueError)):
            assert_same_rows(wrong, row, 1e-6)


def test_a_pipe_that_ends_gives_what_its_file_gives(hdexport: Command, bundle: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = [*random_texts(9000), "nan"]
    rows.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts) + '{"text": 1}\n{"text": "read"}')
    for name, options in {"floats": [], "int8": ["--output-dtype", "int8"]}.items():
        expected = tmp_path / f"{name}.jsonl"
        assert hdexport("run", bundle, rows, "-o", expected, *options).returncode == 2
        command = [HDEXPORT, "run", str(bundle), "-", "-o", "-", "--progress", "json", *options]
        with subprocess.Popen(["cat", str(rows)], stdout=subprocess.PIPE) as source:
            done = subprocess.run(command, stdin=source.stdout, capture_output=True, timeout=100)
        assert done.returncode == 2
        assert_same_rows(done.stdout, expected.read_bytes(), tolerance=1e-6 if name == "floats" else 0)
        last = json.loads([line for line in done.stderr.decode().splitlines() if line.startswith("{")][-1])
        assert (last["state"], last["rows"], last["eta_seconds"] or 0) == ("done", 9003, 0)
        assert last["bytes_read"] == last["bytes_total"] == rows.stat().st_size


def test_a_job_that_waits_for_rows_ends_with_a_signal_or_its_reader(bundle: Path, jobs: list[Job]) -> None:
    """Nothing comes any more: signals are heard, and it is seen that nobody reads."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 141)):
        jobs.append(job := Job(bundle))
        job.write('{"text": "read"}\n')
        assert job.read()["tokens"] == 3
        if number is None:
            job.process.stdout.close()
        else:
            job.process.send_signal(number)
        said = job.process.stderr.read().decode()
        gone = "Stopped: the program that reads the standard output has ended.\n"
        assert (job.process.wait(60), said) == (
            code,
            gone
            if number is None
            else "Stopped. Printed rows are not kept: the same command starts with the first row again.\n",
        )


def test_a_job_whose_reader_is_gone_before_the_first_row_ends(bundle: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(bundle))
    job.process.stdout.close()
    assert job.process.wait(60) == 141
    assert b"Traceback" not in job.process.stderr.read()


def test_a_pipe_without_rows_is_refused_as_its_file(bundle: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(bundle))
    job.write("\n \n")
    code, rest, said = job.ended()
    assert (code, rest, said.startswith("error: No input holds a row: -")) == (1, [], True)
