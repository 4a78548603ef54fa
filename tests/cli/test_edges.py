"""A process at its edges: streams that are closed, an ASCII locale, little memory, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hdexport.cli.memory_errors import want_of_memory
from support.tiny_bundle import make_bundle
from support.waiting import wait_until

HDEXPORT = str(Path(sys.executable).with_name("hdexport"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small bundle, whose name is not ASCII, and a text."""
    folder = tmp_path_factory.mktemp("edges")
    make_bundle(folder / "bücher-文", external_data=True)
    (folder / "tëxt.txt").write_text("long documents")
    return folder


def shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script with `$HDEXPORT`; the exit code is the command's also where it is the first of a pipe."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env=os.environ | {"HDEXPORT": HDEXPORT, "OMP_NUM_THREADS": "1"} | environment,
    )


# Streams


@pytest.mark.parametrize("command", ["inspect bücher-文", "inspect nowhere", "--help"])
def test_a_closed_output_is_one_sentence(small: Path, command: str) -> None:
    done = shell(f"$HDEXPORT {command} >&-", small)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: The standard output is closed, so nothing can be printed.\nSend it elsewhere: > /dev/null\n"
    )


def test_a_closed_standard_error_takes_nothing(small: Path) -> None:
    done = shell("$HDEXPORT inspect bücher-文 2>&-", small)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 to 16 tokens" in done.stdout
    assert shell("$HDEXPORT inspect nowhere 2>&-", small).returncode == 1


@pytest.mark.parametrize("command", ["inspect bücher-文", "inspect bücher-文 --json", "--help"])
def test_a_reader_that_had_enough_is_no_error(small: Path, command: str) -> None:
    done = shell(f"$HDEXPORT {command} | head -c 1", small)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")


def test_a_full_disk_behind_the_output_is_one_sentence(small: Path) -> None:
    done = shell("$HDEXPORT inspect bücher-文 > /dev/full", small)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\nTo see where it happened, add --debug.\n"


# Locale


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("inspect bücher-文", 0),
        ("inspect bücher-文 --json", 0),
        ("run bücher-文 tëxt.txt -o öut.jsonl --force", 0),
        ("package bücher-文 --triton repositörium", 1),
        ("verify bücher-文", 1),
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


@pytest.mark.parametrize("megabytes", [150, 300])
def test_too_little_memory_is_one_sentence(small: Path, megabytes: int) -> None:
    """Whichever library is the first to find out; OpenBLAS may say so itself and end the process."""
    done = shell(f"ulimit -v {megabytes * 1000}; $HDEXPORT run bücher-文 tëxt.txt -o out.jsonl --force 2>&1", small)
    assert done.returncode == 1, done.stdout
    if "OpenBLAS error: Memory allocation still failed" in done.stdout:
        return
    first, second = [line for line in done.stdout.splitlines() if not line.startswith("OpenBLAS")]
    assert first.startswith("error: There is too little memory: ")
    assert second == (
        f"This process may have {megabytes * 1.024:.0f} MB of addresses; raise the limit: ulimit -v unlimited"
    )
    assert not list(small.glob(".out.jsonl*"))


def test_of_a_page_of_advice_on_installations_the_error_is_said() -> None:
    page = "\n\nIMPORTANT: PLEASE READ THIS\n\nOriginal error was: a.so: failed to map segment from shared object\n\n"
    said = want_of_memory(ImportError(page))
    assert said is not None
    first, _ = said.splitlines()
    assert first == ("There is too little memory: Original error was: a.so: failed to map segment from shared object")


# Signals


@contextlib.contextmanager
def building(checkpoint: Path, output: Path, *ignored: signal.Signals) -> Iterator[subprocess.Popen[str]]:
    """`hdexport build`, whose temporary directory is there."""

    def ignore() -> None:
        # What runs the tests may ignore some: the command is to find all as a terminal leaves them.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    command = [HDEXPORT, "build", str(checkpoint), "--target", "onnx", "-o", str(output)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ignore,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    try:
        wait_until(lambda: any(output.parent.glob(f".{output.name}.partial-*")) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
)
def test_a_build_that_is_stopped_leaves_nothing(
    checkpoint: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with building(checkpoint, tmp_path / "deep" / "out") as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_what_was_ignored_stays_ignored(checkpoint: Path, tmp_path: Path) -> None:
    """As under nohup, and of what a script runs in the background."""
    with building(checkpoint, tmp_path / "out", signal.SIGHUP, signal.SIGINT) as process:
        ignored = int(next(line for line in status_of(process) if line.startswith("SigIgn:")).split()[1], 16)
        for number in (signal.SIGHUP, signal.SIGINT):
            assert ignored & 1 << (number - 1)
            process.send_signal(number)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert not list(tmp_path.iterdir())


def status_of(process: subprocess.Popen[str]) -> list[str]:
    return Path(f"/proc/{process.pid}/status").read_text().splitlines()
