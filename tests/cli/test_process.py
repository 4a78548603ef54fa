"""A process at its edges: streams that are closed, an ASCII locale, little memory, signals."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hdexport.cli import process
from hdexport.cli.process import want_of_memory
from support.commands import HDEXPORT, Command
from support.forks import Fork, run_command
from support.grids import nightly_unless
from support.tiny_bundle import make_bundle
from support.waiting import wait_until

OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small bundle, whose name is not ASCII, and a text."""
    folder = tmp_path_factory.mktemp("edges")
    make_bundle(folder / "bücher-文", external_data=True)
    (folder / "tëxt.txt").write_text("long documents")
    (folder / "bad.jsonl").write_text("{}\n")
    return folder


def test_a_warning_goes_to_the_standard_error_of_its_command(tmp_path: Path) -> None:
    """Also where an earlier command of the process had another."""
    script = (
        "import contextlib, io, logging, hdexport.cli\n"
        "for number in range(2):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.redirect_stdout(io.StringIO()):\n"
        "        hdexport.cli.main(['inspect', 'nothing'])\n"
        "        logging.getLogger('hdexport').warning('number %d', number)\n"
        "    print(error.getvalue().count(f'hdexport: number {number}'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


def shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with `$HDEXPORT`; the exit code is the command's also where it is the first of a pipe."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env=OFFLINE | {"HDEXPORT": HDEXPORT} | environment,
    )


# Streams


def test_a_closed_output_is_one_sentence(small: Path) -> None:
    done = shell("$HDEXPORT inspect bücher-文 >&-", small)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: The standard output is closed, so nothing can be printed.\nSend it elsewhere: > /dev/null\n"
    )


def test_a_closed_standard_error_takes_nothing(small: Path) -> None:
    done = shell("$HDEXPORT inspect bücher-文 2>&-", small)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 to 16 tokens" in done.stdout
    assert shell("$HDEXPORT inspect nowhere 2>&-", small).returncode == 1


def without_reader(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command whose stdout is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [HDEXPORT, *arguments]
    try:
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, env=OFFLINE)
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["inspect", "{small}", "--json"], "1"), (["build", "--help"], "")],
)
def test_output_without_a_reader_ends_a_command_as_it_ends_cat(
    small: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], unbuffered: str
) -> None:
    monkeypatch.setitem(OFFLINE, "PYTHONUNBUFFERED", unbuffered)
    done = without_reader(*(argument.format(small=small / "bücher-文") for argument in arguments))
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "{small}/bücher-文", "{small}/bad.jsonl", "-o", "{output}", "--progress", "json"], 2),
        nightly_unless(False, ["build", "{checkpoint}", "--target", "onnx", "--no-verify", "-o", "{output}"], 0),
    ],
    ids=["run", "build"],
)
def test_work_is_done_without_a_reader_of_the_output(
    small: Path, checkpoint: Path, tmp_path: Path, arguments: list[str], code: int
) -> None:
    names = {"small": small, "checkpoint": checkpoint, "output": tmp_path / "out.jsonl"}
    done = without_reader(*(argument.format(**names) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert {path.name for path in tmp_path.iterdir()} - {".out.jsonl.job"} == {"out.jsonl"}


def test_warnings_without_a_reader_do_not_end_the_work(small: Path, tmp_path: Path) -> None:
    done = shell(
        f"$HDEXPORT run bücher-文 bad.jsonl -o {tmp_path}/out.jsonl 2>&1 | true; echo ${{PIPESTATUS[0]}}", small
    )
    assert done.stdout == "2\n"
    assert (tmp_path / "out.jsonl").exists()


def test_a_full_disk_behind_the_output_is_one_sentence(small: Path) -> None:
    done = shell("$HDEXPORT build --help > /dev/full", small)
    assert done.returncode == 1
    assert done.stderr == "error: No space left on device.\nFree some space there, or choose another place.\n"


# Locale


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run bücher-文 tëxt.txt -o öut.jsonl --force", 0),
        ("inspect nowhere-文", 1),
    ],
)
def test_an_ascii_locale_takes_any_path(small: Path, command: str, code: int) -> None:
    done = shell(f"$HDEXPORT {command}", small, **ASCII)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ") == bool(code)
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).isascii()
    if command.startswith("run"):
        assert (small / "öut.jsonl").read_text().startswith('{"id": 0')


# Memory


@pytest.mark.pinned  # numpy 2.0 says more when it finds out
@pytest.mark.parametrize("megabytes", [150, 250])
def test_too_little_memory_is_one_sentence(small: Path, megabytes: int) -> None:
    """Whichever library is the first to find out; OpenBLAS may say so itself and end the process."""
    done = shell(f"ulimit -v {megabytes * 1000}; $HDEXPORT run bücher-文 tëxt.txt -o out.jsonl --force 2>&1", small)
    assert done.returncode == 1, done.stdout
    if "OpenBLAS error: Memory allocation still failed" in done.stdout:
        return
    first, second = [line for line in done.stdout.splitlines() if not line.startswith("OpenBLAS")]
    assert first.startswith("error: There is not enough memory: ")
    assert second == (
        f"This process may have {megabytes * 1.024:.0f} MB of addresses; raise the limit: ulimit -v unlimited"
    )
    assert not list(small.glob(".out.jsonl*"))


def test_only_the_error_of_a_page_of_advice_on_installations_is_shown() -> None:
    page = "\n\nIMPORTANT: PLEASE READ THIS\n\nOriginal error was: a.so: failed to map segment from shared object\n\n"
    said = want_of_memory(ImportError(page))
    assert said is not None
    first, _ = said.splitlines()
    assert first == ("There is not enough memory: Original error was: a.so: failed to map segment from shared object")


# Signals


@contextlib.contextmanager
def building(checkpoint: Path, output: Path, *ignored: signal.Signals) -> Iterator[Fork]:
    """`hdexport build`, whose temporary directory is there."""
    words = ["build", str(checkpoint), "--force", "--target", "onnx", "-o", str(output)]
    build = Fork(run_command, words, ignored)
    try:
        wait_until(lambda: any(output.parent.glob(f".{output.name}.partial-*")) or build.poll() is not None)
        assert build.poll() is None, build.errors()
        yield build
    finally:
        build.kill()


def test_a_build_that_is_stopped_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """By SIGHUP; the tests beneath stop one by SIGINT and by SIGTERM."""
    with building(checkpoint, tmp_path / "deep" / "out") as process:
        process.send_signal(signal.SIGHUP)
        stopped = process.finished(timeout=60)
    assert stopped.returncode == 129, stopped.stderr
    assert stopped.stderr.endswith("interrupted: nothing was kept\n")
    assert "Traceback" not in stopped.stderr
    assert not list(tmp_path.iterdir())


FORGOTTEN = """
import signal, sys, time, weakref
from hdexport.cli import process
from hdexport.cli.process import exit_code, stopped_like_interrupted

class Something:
    pass

number = int(sys.argv[1])
if number == signal.SIGHUP:
    signal.signal(number, signal.SIG_DFL)  # what nohup starts ignores it
process._AGAIN_SECONDS = float(sys.argv[2])
try:
    with stopped_like_interrupted():
        something = Something()
        reference = weakref.ref(something, lambda _: signal.raise_signal(number))
        del something
        assert reference() is None
        time.sleep(10)
except KeyboardInterrupt as stop:
    sys.exit(exit_code(stop))
"""


@pytest.mark.parametrize(
    ("number", "after"),
    # The least time is over before Python has done with what it forgets.
    [(signal.SIGINT, 0.01), (signal.SIGHUP, 0.01), (signal.SIGTERM, 1e-6)],
    ids=str,
)
def test_a_signal_that_python_forgets_interrupts_after_that(number: signal.Signals, after: float) -> None:
    """It prints what callbacks of weak references raise, among them those of imports, and goes on."""
    command = [sys.executable, "-c", FORGOTTEN, str(int(number)), str(after)]
    ended = subprocess.run(command, timeout=60, capture_output=True)
    assert ended.returncode == 128 + number, ended.stderr
    assert ended.stderr == b""


def test_a_signal_during_the_import_of_a_compiled_module_interrupts() -> None:
    """ONNX Runtime's, for one, turns the interruption into an error of its import."""
    with pytest.raises(KeyboardInterrupt) as stop, process.stopped_like_interrupted():
        raise ImportError("initialization failed") from KeyboardInterrupt(signal.SIGTERM)
    assert process.exit_code(stop.value) == 143


def test_a_stopped_build_says_that_what_it_would_have_replaced_is_as_it_was(
    checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    shutil.copytree(bundle, tmp_path / "out")
    with building(checkpoint, tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        stopped = process.finished(timeout=60)
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stderr.endswith(f"interrupted: {tmp_path}/out is unchanged\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_job_that_is_stopped_before_its_first_row_says_that_nothing_was_kept(
    hdexport: Command, small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Interrupted where it begins, which no signal hits."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hdruntime.jobs.run_job", interrupt)
    done = hdexport("run", small / "bücher-文", small / "tëxt.txt", "-o", tmp_path / "out.jsonl")
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "Stopped. No row is kept: the same command starts over.\n",
    )
    assert not list(tmp_path.iterdir())


def test_what_was_ignored_stays_ignored(checkpoint: Path, tmp_path: Path) -> None:
    """As under nohup, and of what a script runs in the background."""
    with building(checkpoint, tmp_path / "out", signal.SIGHUP, signal.SIGINT) as process:
        ignored = int(next(line for line in status_of(process) if line.startswith("SigIgn:")).split()[1], 16)
        for number in (signal.SIGHUP, signal.SIGINT):
            assert ignored & 1 << (number - 1)
            process.send_signal(number)
        process.send_signal(signal.SIGTERM)
        stopped = process.finished(timeout=60)
    assert stopped.returncode == 143, stopped.stderr
    assert not list(tmp_path.iterdir())


def status_of(process: Fork) -> list[str]:
    return Path(f"/proc/{process.pid}/status").read_text().splitlines()
