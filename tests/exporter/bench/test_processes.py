"""Processes that end well, badly, late or not at all: each is a result, and none is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hdexport.bench.measure import processes
from hdexport.bench.measure.processes import ProcessOutcome, run_process
from hdexport.bench.results.result import RunStatus
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux")

_TIME_LIMIT_S = 60.0
"""Reached only where something is wrong."""


def run_code(
    code: str, *arguments: str, time_limit_s: float = _TIME_LIMIT_S, memory: int | None = None
) -> ProcessOutcome:
    return run_process(["-c", code, *arguments], time_limit_s=time_limit_s, memory_limit_bytes=memory)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def wait_for_pids(file: Path, number: int) -> list[int]:
    wait_until(lambda: file.exists() and len(file.read_text().split("\n")) > number)
    return [int(line) for line in file.read_text().split()]


def test_the_last_line_is_the_result_whatever_is_printed_before_and_beside() -> None:
    noise = (
        "import sys; sys.stderr.write('x' * 5_000_000); sys.stdout.buffer.write(bytes(range(256)) * 20_000 + b'\\n');"
    )
    outcome = run_code(noise + "print('{\"seconds\": 1.5}')")
    assert outcome == ProcessOutcome(
        status=RunStatus.OK, output={"seconds": 1.5}, reason=None, peak_rss_bytes=outcome.peak_rss_bytes
    )


def test_output_without_a_json_object_is_a_failure() -> None:
    outcome = run_code("import sys; print('[1, 2]'); print('some hint', file=sys.stderr)")
    assert (outcome.status, outcome.output) == (RunStatus.FAILED, None)
    assert outcome.reason == "The last line of output is not a JSON object. some hint"


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (
            "raise ValueError('the cause')",
            RunStatus.FAILED,
            "The process ended with exit code 1: ValueError: the cause",
        ),
        (
            "import os, sys; print('std::bad_alloc', file=sys.stderr, flush=True); os.abort()",
            RunStatus.OUT_OF_MEMORY,
            "The process ended with signal SIGABRT: std::bad_alloc",
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            RunStatus.OUT_OF_MEMORY,
            "The process was killed (SIGKILL), as by the kernel when memory runs out.",
        ),
    ],
    ids=["error", "abort without memory", "killed"],
)
def test_a_bad_end_is_a_result_with_its_last_words(code: str, status: RunStatus, reason: str) -> None:
    outcome = run_code(code)
    assert (outcome.status, outcome.output, outcome.reason) == (status, None, reason)


_STUBBORN_FAMILY = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    with open(sys.argv[1], "a") as file:
        print(os.getpid(), file=file)
    time.sleep(600)
with open(sys.argv[1], "a") as file:
    print(child.pid, os.getpid(), sep="\\n", file=file)
time.sleep(600)
"""


def test_the_time_limit_ends_a_process_that_ignores_signals_and_all_that_it_started(tmp_path: Path) -> None:
    # A busy machine may need more than the first limits to start them all, and to look at them.
    for limit_s in (1, 4, 30):
        file = tmp_path / str(limit_s)
        began = time.monotonic()
        outcome = run_code(_STUBBORN_FAMILY, str(file), time_limit_s=limit_s)
        assert (outcome.status, outcome.reason) == (RunStatus.TIMEOUT, f"Killed at its time limit of {limit_s} s.")
        assert time.monotonic() - began >= limit_s
        pids = list(map(int, file.read_text().split())) if file.exists() else []
        if len(pids) == 3 and outcome.peak_rss_bytes > 15e6:
            break
    assert len(pids) == 3
    assert not any(map(is_running, pids))
    assert outcome.peak_rss_bytes > 15e6  # of three Pythons


def test_what_a_process_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    code = """
import os, sys, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, str(os.getpid()).encode())
        time.sleep(600)
    os._exit(0)
print('{"left": %s}' % os.read(read, 100).decode())
"""
    outcome = run_code(code)
    assert outcome.status is RunStatus.OK
    assert outcome.output is not None
    assert not is_running(outcome.output["left"])


_TAKE_MEMORY = """
import sys, time
blocks = []
for _ in range(int(sys.argv[1]) // 10_000_000):
    blocks.append(bytearray(b"x") * 10_000_000)
    time.sleep(0.01)
print('{"done": true}')
"""


def test_a_process_that_takes_more_than_it_may_is_ended_and_we_live() -> None:
    outcome = run_code(_TAKE_MEMORY, "3000000000", memory=100_000_000)
    assert (outcome.status, outcome.output) == (RunStatus.OUT_OF_MEMORY, None)
    assert outcome.reason == "Killed at its memory limit of 0.10 GB."
    assert 100e6 < outcome.peak_rss_bytes < 1500e6
    assert run_code(_TAKE_MEMORY, "100000000", memory=300_000_000).status is RunStatus.OK


def test_a_process_may_never_take_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "free_bytes", lambda: 100_000_000)
    for limit in (None, 10**12):
        outcome = run_code(_TAKE_MEMORY, "3000000000", memory=limit)
        assert outcome.reason == "Killed at its memory limit of 0.09 GB."


# Long enough to be looked at, at a quarter of a second.
_WITH_CHILDREN = """
import os, sys, time
block = bytearray(b"x") * 60_000_000
for _ in range(3):
    if os.fork() == 0:
        if sys.argv[1] == "own":
            block = bytearray(b"y") * 60_000_000
        time.sleep(2)
        os._exit(0)
time.sleep(2)
print('{"done": true}')
"""


@pytest.mark.parametrize(("pages", "status"), [("own", RunStatus.OUT_OF_MEMORY), ("shared", RunStatus.OK)])
def test_the_memory_of_children_counts_but_shared_pages_once(
    pages: str, status: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_LOOK_UP_SHARE", 0)
    outcome = run_code(_WITH_CHILDREN, pages, memory=180_000_000)
    assert outcome.status is status
    assert outcome.peak_rss_bytes > 180_000_000


_PARENT = """
import sys
from hdexport.bench.measure.processes import run_process
run_process(["-c", sys.argv[1], sys.argv[2]], time_limit_s=600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_the_waiting_process_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, _STUBBORN_FAMILY, str(tmp_path / "pids")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:
        try:
            pids = wait_for_pids(tmp_path / "pids", 3)
            assert all(map(is_running, pids))
            parent.send_signal(number)
            _, errors = parent.communicate(timeout=30)
        finally:
            parent.kill()  # where the signal did not: what it started ends with it
    assert parent.returncode == -number
    assert ("KeyboardInterrupt" in errors) == (number is signal.SIGINT)
    wait_until(lambda: not any(map(is_running, pids)))
