"""Runs the steps one after the other, each in a process, until they or the time are over; then prints a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import kernels_command
from benchmarks.gpu.job import Job, SkippedError, StepFailedError
from benchmarks.gpu.kernels import why_no_gpu
from benchmarks.gpu.steps import PLAN_MINUTES, STEPS, Step
from benchmarks.gpu.table import lines_of
from hdexport.bench.measure.processes import run_process

NO_GPU = 3
STEP_FAILED = 1

_End = tuple[str, str, str | None]
"""Name, status and reason of a step."""

_LEAST_SECONDS = 5.0
"""A step that would get less time is skipped."""

_BY_NAME = {step.name: step for step in STEPS}


def main(description: str, program: Sequence[str] = ("-m", "benchmarks.gpu")) -> int:
    """Run what the command line asks for; the result is the exit status.

    Args:
        program: what Python runs again, with ``--step``, for each step.
    """
    options = _read_options(description)
    if options.rehearse and (options.step or options.command):
        # Triton decides at its import whether it interprets; PyTorch likewise how many threads it starts.
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if options.step:
        return _run_step(options)
    if options.list:
        _print_plan()
        return 0
    needs_gpu = not options.rehearse and not (options.command and options.compile)
    if needs_gpu and (missing := why_no_gpu()):
        if not options.command:
            _print_plan(f"skipped: no GPU: {missing}")
        else:
            print(f"no GPU: {missing}")
        return NO_GPU
    if options.command:
        return kernels_command.run(options)
    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder) / "rows.jsonl"
        begin = output.stat().st_size if output.exists() else 0
        ends = list(_run_steps(options, program, output))
        _print_summary(_rows_from(output, begin), ends)
    return STEP_FAILED if any(status not in ("ok", "skipped") for _, status, _ in ends) else 0


def _read_options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=description.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="append every row to this file, as JSON lines")
    parser.add_argument(
        "--minutes", type=float, default=PLAN_MINUTES, help=f"for all steps together (default: {PLAN_MINUTES:g}, all)"
    )
    parser.add_argument("--steps", nargs="+", metavar="NAME", choices=_BY_NAME, help="only these; --list names them")
    parser.add_argument("--bundle", type=Path, help="run this bundle's engine and graph where they fit a step")
    parser.add_argument("--list", action="store_true", help="print the plan, with what each step proves, and exit")
    parser.add_argument("--rehearse", action="store_true", help="run all on the CPU with tiny shapes, timing nothing")
    parser.add_argument(
        "--trial", action="store_true", help="run all on the GPU side by side, timing nothing: fills compilers' caches"
    )
    parser.add_argument("--step", choices=_BY_NAME, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command")
    kernels_command.add_arguments(commands.add_parser("kernels", help="one operator's kernels"))
    return parser.parse_args()


def _run_steps(options: argparse.Namespace, program: Sequence[str], output: Path) -> Iterator[_End]:
    """How each step ends; also a row of the output."""
    deadline = time.monotonic() + 60 * options.minutes

    def run(step: Step) -> _End:
        began = time.monotonic()
        status, reason = _run_in_process(step, options, program, output, deadline - began)
        seconds = time.monotonic() - began
        about = Job(step=step.name, output=output, rehearsal=options.rehearse, trial=options.trial)
        about.write(case="step", status=status, reason=reason, seconds=seconds)
        print(f"{step.name}: {status} after {seconds:.0f} s{f': {reason}' if reason else ''}", file=sys.stderr)
        return step.name, status, reason

    steps = [step for step in STEPS if not options.steps or step.name in options.steps]
    times_nothing = options.rehearse or options.trial
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores if options.rehearse else max(1, cores * 3 // 4)) as pool:
        yield from pool.map(run, [step for step in steps if times_nothing or not step.is_timed])
    if not times_nothing:
        yield from map(run, [step for step in steps if step.is_timed])


def _run_in_process(
    step: Step, options: argparse.Namespace, program: Sequence[str], output: Path, seconds_left: float
) -> tuple[str, str | None]:
    if seconds_left < _LEAST_SECONDS:
        return "skipped", f"the {options.minutes:g} minutes are over"
    command = [*program, "--step", step.name, "--output", str(output)]
    command += ["--rehearse"] if options.rehearse else ["--trial"] if options.trial else []
    command += ["--bundle", str(options.bundle)] if options.bundle else []
    budget_s = seconds_left if options.rehearse or options.trial else min(step.budget_s, seconds_left)
    outcome = run_process(command, time_limit_s=budget_s)
    if outcome.output is not None and outcome.output.get("skipped"):
        return "skipped", outcome.reason
    return outcome.status.value, outcome.reason


def _run_step(options: argparse.Namespace) -> int:
    """The process of a step: its last line is JSON, for `run_process`."""
    job = Job(
        step=options.step, output=options.output, rehearsal=options.rehearse, trial=options.trial, bundle=options.bundle
    )
    try:
        _BY_NAME[options.step].run(job)
    except SkippedError as reason:
        print(json.dumps({"skipped": True, "reason": str(reason)}))
    except ModuleNotFoundError as error:
        print(json.dumps({"skipped": True, "reason": f"the package {error.name!r} is not installed"}))
    except StepFailedError as reason:
        print(json.dumps({"status": "failed", "reason": str(reason)}))
    else:
        print(json.dumps({"status": "ok"}))
    return 0


def _print_plan(skipped: str = "") -> None:
    """The minutes at which a step has ended at the latest; steps that time nothing run side by side before others.

    Args:
        skipped: why no step runs; "" tells what each step proves.
    """
    minutes = max((step.budget_s for step in STEPS if not step.is_timed), default=0.0) / 60
    for step in STEPS:
        minutes += step.budget_s / 60 if step.is_timed else 0.0
        print(f"{minutes:5.1f} min  {step.name:<28}{step.budget_s:4.0f} s at most  {skipped or step.proves}")


def _rows_from(output: Path, begin: int) -> list[dict[str, Any]]:
    """The rows of this run; a process that was killed while it wrote may have left half a line."""
    rows = []
    with output.open("rb") as file:
        file.seek(begin)
        for line in file:
            try:
                rows.append(json.loads(line))
            except ValueError:
                print(f"half a line was left: {line[:80]!r}", file=sys.stderr)
    return rows


def _print_summary(rows: Sequence[dict[str, Any]], ends: Sequence[_End]) -> None:
    for line in lines_of(rows):
        print(line)
    for name, status, reason in ends:
        print(f"{name:<28}{status:<8} {reason or _BY_NAME[name].proves}")
