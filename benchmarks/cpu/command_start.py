"""How soon a command says something: `--help`, the first line of a build on a terminal, `doctor`.

Usage: python -m benchmarks.cpu.command_start [--rounds 5] [--output FILE]

"help" is the slowest of ``hdexport [COMMAND] --help``, of each the fastest of three runs, so that files are in the page
cache. "first line" is from the start of ``hdexport build`` to the first thing that it shows on a terminal. "doctor" is
the whole command. CPU time is the processes' together.
"""

from __future__ import annotations

import argparse
import os
import pty
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cpu.targets import Figure, Target, run_cases
from hdexport.cli import COMMANDS

TARGETS = (
    Target("help", None, Figure.LATENCY, 500),
    Target("first line", None, Figure.LATENCY, 1000),
    Target("doctor", None, Figure.LATENCY, 3000),
)

_HDEXPORT = str(Path(sys.executable).with_name("hdexport"))
_RUNS = 3


def main() -> int:
    """Measure all cases, or, as a child process, one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cases = {"cases": list(_CASES), "targets": TARGETS}
    return run_cases("benchmarks.cpu.command_start", parser, _case_figures, lambda options: cases)


def _case_figures(options: argparse.Namespace) -> dict[str, float]:
    """Latency, CPU time of the processes that were started, and the largest of them."""
    latency_ms = _CASES[options.case]()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "latency_ms": latency_ms,
        "cpu_ms": (used.ru_utime + used.ru_stime) * 1e3,
        "growth_bytes": used.ru_maxrss * 1024,
    }


def _help_ms() -> float:
    commands = [(), *((name,) for name in COMMANDS)]
    return max(min(_command_ms(*name, "--help") for _ in range(_RUNS)) for name in commands)


def _command_ms(*arguments: str) -> float:
    began = time.perf_counter()
    subprocess.run([_HDEXPORT, *arguments], stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - began) * 1e3


def _first_line_ms() -> float:
    ours, theirs = pty.openpty()
    began = time.perf_counter()
    # A missing model is reported later.
    with subprocess.Popen(
        [_HDEXPORT, "build", "/nowhere"], stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b""
        while b"Starting" not in shown:
            shown += os.read(ours, 4096)
        latency_ms = (time.perf_counter() - began) * 1e3
        process.kill()
    os.close(ours)
    return latency_ms


_CASES: dict[str, Callable[[], float]] = {
    "help": _help_ms,
    "first line": lambda: min(_first_line_ms() for _ in range(_RUNS)),
    "doctor": lambda: min(_command_ms("doctor") for _ in range(_RUNS)),
}


if __name__ == "__main__":
    sys.exit(main())
