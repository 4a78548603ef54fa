"""A benchmark on the terminal: lines while it runs, tables at the end, at any width and without a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from hdexport.bench.results.result import BenchResult, CaseState, ModelChange, RunStatus
from hdexport.cli.bench_table import BenchTable, case_line, summary_parts
from hdexport.cli.progress import duration_text
from support.sample_results import COMPILED, OPTIMUM, OURS, PLAIN, SENTENCE, TORCH, sample_result, without_change


def watch(table: BenchTable, result: BenchResult, *, rounds: int = 3) -> None:
    """What a run tells its watcher: rounds of all cases in turn; one that failed gets no other."""
    table.step("Making the inputs")
    table.note("PyTorch's checkpoint is not here.")
    table.planned([(case.series, case.batch, case.tokens) for case in result.cases], rounds)
    for number in range(1, rounds + 1):
        for case in result.cases:
            if number == 1 or case.status is RunStatus.OK:
                table.begin(case.series, case.batch, case.tokens, number)
                table.finish(case)


def text_of(result: BenchResult, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in summary_parts(result, width=width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_there_is_one_line_per_finished_case_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = sample_result()
    with BenchTable() as table:
        watch(table, result)
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert sorted(lines) == sorted(map(case_line, result.cases))
    assert "\x1b" not in captured.out
    (first, *_) = result.cases
    with BenchTable() as table:
        table.planned([(first.series, first.batch, first.tokens)], 2)
        table.begin(first.series, first.batch, first.tokens, 1)
        table.finish(first)
        assert capsys.readouterr().out == ""  # another round follows


def test_a_line_says_what_matters() -> None:
    result = sample_result(noise=0)
    lines = {(case.series, case.batch, case.tokens): case_line(case) for case in result.cases}
    assert lines[OURS, 1, 1024] == f"{OURS}, 1 x 1024: p50 159 ms, p95 170 ms, 6,452 tokens/s, 369 MB, max error 3.5e-6"
    wrong = "outputs are wrong: max abs error 0.4, min cosine 0.62; tolerance: abs 0.0001 or 2 ulp"
    assert lines[OPTIMUM, 1, 4096].endswith(f" GB, {wrong}")
    assert lines[PLAIN, 8, 8192] == f"{PLAIN}, 8 x 8192: OOM: its processes took 61.2 GB, of which 60.0 GB were free"


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_and_hold_every_case(width: int) -> None:
    result = sample_result()
    lines = text_of(result, width)
    tables = lines[: next(n for n, line in enumerate(lines) if line.startswith("ratio:"))]
    assert max(len(line.rstrip()) for line in tables) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for batch in result.batches:
        assert f"batch {batch}" in text
    rows = [line for line in tables if re.search(r"\d\.\d\dx|failed|OOM|timeout", line)]
    assert len(rows) == len(result.cases)
    assert sum("wrong" in line for line in rows) == sum(case.state is CaseState.WRONG for case in result.cases)
    assert ("p95 ms" in text) == (width >= 110)


def test_what_did_not_run_follows_the_tables_with_its_reason() -> None:
    result = dataclasses.replace(sample_result(), notes=("The benchmark was stopped early.",))
    text = "\n".join(text_of(result, 160))
    assert f"{SENTENCE}: sentence-transformers is not installed. Install it with: pip install" in text
    assert f"failed: {COMPILED}: failed at batch 1 with 512 tokens: torch._inductor" in text
    assert f"wrong: {OPTIMUM}: outputs are wrong: max abs error 0.5, min cosine 0.62; tolerance: " in text
    assert f"ratio: median latency divided by the median latency of {OURS} in this run" in text
    assert "The benchmark was stopped early." in text


def test_a_baseline_without_a_requested_change_differs_by_it_and_no_line_calls_it_wrong() -> None:
    result = without_change(sample_result(lengths=(1024,)), ModelChange.ATTENTION, TORCH)
    case = result.case(TORCH, 1, 1024)
    assert case is not None
    text = "outputs differ by the requested change of attention: max abs error 0.35, min cosine 0.81"
    assert case_line(case).endswith(f" MB, {text}")
    lines = text_of(result, 160)
    assert any(line.startswith(f"differs: {TORCH}: {text}") for line in lines)
    assert [line for line in lines if TORCH in line.split() and "wrong" in line] == []
    assert any(re.search(r"^ +torch .* 0\.35 +differs$", line.rstrip()) for line in lines)


def test_a_run_without_cases_has_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    result = dataclasses.replace(sample_result(), cases=())
    with BenchTable() as table:
        table.summary(result)
    assert "pip install sentence-transformers" in capsys.readouterr().out


def test_names_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    case = dataclasses.replace(sample_result().cases[0], series="[red]a[/red]")
    result = dataclasses.replace(
        sample_result(),
        series=(dataclasses.replace(sample_result().series[0], name="[red]a[/red]"),),
        cases=(case,),
    )
    with BenchTable() as table:
        watch(table, result)
        table.summary(result)
    assert capsys.readouterr().out.count("[red]a[/red]") == 3


PROGRAM = """
    from hdexport.cli.bench_table import BenchTable
    from support.sample_results import sample_result
    import time
    result = sample_result()
    with BenchTable() as table:
        table.step("Making the inputs")
        table.planned([(case.series, case.batch, case.tokens) for case in result.cases], 2)
        for number in (1, 2):
            for case in result.cases[:12]:
                table.begin(case.series, case.batch, case.tokens, number)
                time.sleep(0.03)
                table.finish(case)
        table.begin("torch", 8, 8192, 2)
        time.sleep(0.5)
        table.summary(result)
"""


def on_terminal(stdout: Path, *, rows: int, columns: int) -> str:
    """What a program shows on a terminal of that size on stderr; its stdout is a file."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"LINES": str(rows), "COLUMNS": str(columns), "TERM": "xterm"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    with stdout.open("w") as file:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
        process = subprocess.Popen(command, stdout=file, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    # The end of a terminal is an error.
    with contextlib.suppress(OSError):
        while True:
            shown += os.read(ours, 65536)
    os.close(ours)
    assert process.wait(timeout=60) == 0, shown.decode()
    return shown.decode()


def test_a_terminal_shows_the_case_that_runs_and_what_is_left(tmp_path: Path) -> None:
    shown = on_terminal(tmp_path / "out.txt", rows=16, columns=80)
    out = (tmp_path / "out.txt").read_text()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "torch, 8 x 8192, round 2 of 2" in plain
    assert re.search(r"about \d+:\d\d:\d\d to go", plain)
    assert re.search(r"torch +1 x 1024 +2/2 +644 ", plain) or re.search(r"torch +1 x 1024 +1/2 +\d", plain)
    frames = re.split(r"[\r\n]+", plain)
    assert max(map(len, frames)) <= 80
    assert "\x1b" not in out
    assert "batch 8" in out
    assert "round 2" not in out


def test_the_time_to_go_is_in_proportion_to_the_tokens_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    ours, short, long = sample_result(lengths=(512, 1024)).cases[0], ("torch", 1, 512), ("torch", 1, 1024)
    table = BenchTable()

    def shown() -> str:
        console = Console(file=io.StringIO(), width=120)
        console.print(*table._line.get_renderables())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    table.planned([short, long], 2)
    assert "to go" not in shown()
    for status, (series, batch, tokens), seconds, expected in [
        (RunStatus.OK, short, 60.0, "about 0:05:00 to go"),  # of 1 + 2 tokens twice, 1 took a minute
        (RunStatus.OK, long, 180.0, "about 0:03:00 to go"),
        (RunStatus.TIMEOUT, short, 240.0, "about 0:02:00 to go"),
        (RunStatus.FAILED, long, 360.0, "about 0:00:00 to go"),
    ]:
        clock[0] = seconds
        table.finish(dataclasses.replace(ours, series=series, batch=batch, tokens=tokens, status=status))
        assert expected in shown()
    table.planned([short, long], 3)
    clock[0] += 60.0
    table.finish(dataclasses.replace(ours, series="torch", batch=1, tokens=1024, status=RunStatus.OUT_OF_MEMORY))
    assert "about 0:01:30 to go" in shown()  # what is over gets no other round


def test_durations_are_read_as_on_a_clock() -> None:
    assert [duration_text(seconds) for seconds in (0.4, 67, 3725.2)] == ["0:00:00", "0:01:07", "1:02:05"]
