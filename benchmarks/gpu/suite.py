"""Runs the steps one after the other, each in a process, until they or the time are over; then prints a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu import kernels_command
from benchmarks.gpu.job import Job, SkippedError, StepFailedError
from benchmarks.gpu.kernels import why_no_gpu
from benchmarks.gpu.plans import PLANS
from benchmarks.gpu.plans.plan import Plan
from benchmarks.gpu.steps import Step
from benchmarks.gpu.table import findings_of, verdicts_of
from hdexport.bench.measure.processes import run_process

NO_GPU = 3
STEP_FAILED = 1

_End = tuple[str, str, str | None]
"""Name, status and reason of a step."""

NOT_STARTED = "not started"
"""Status of a step for which no time was left."""

_ENDED_WELL = ("ok", "skipped")


def main(description: str, program: Sequence[str] = ("-m", "benchmarks.gpu")) -> int:
    """Run what the command line asks for; the result is the exit status.

    Args:
        program: what Python runs again, with ``--step``, for each step.
    """
    options = _read_options(description)
    if options.rehearse and (options.step or options.command):
        # Triton decides at its import whether it interprets; PyTorch likewise how many threads it starts.
        os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    plan = PLANS[options.plan]
    if options.step:
        return _run_step(options, _steps_by_name(plan)[options.step])
    if options.list:
        _print_plan(plan)
        return 0
    needs_gpu = not options.rehearse and not (options.command and options.compile)
    if needs_gpu and (missing := why_no_gpu()):
        if not options.command:
            _print_plan(plan, f"skipped: no GPU: {missing}")
        else:
            print(f"no GPU: {missing}")
        return NO_GPU
    if options.command:
        return kernels_command.run(options)
    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder) / "rows.jsonl"
        begin = output.stat().st_size if output.exists() else 0
        steps = _chosen_steps(plan, options, _rows_from(output, 0) if begin else [])
        ends = list(_run_steps(steps, options, program, output))
        proved = {step.name: step.proves for step in steps}
        for line in summary_of(_rows_from(output, begin), ends, proved, max_lines=plan.max_lines):
            print(line)
    return STEP_FAILED if any(status not in (*_ENDED_WELL, NOT_STARTED) for _, status, _ in ends) else 0


def _read_options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=description.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="append every row to this file, as JSON lines")
    parser.add_argument("--plan", choices=PLANS, default="all", help="which steps run (default: all)")
    parser.add_argument("--minutes", type=float, help="for all steps together (default: the plan's)")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="only these of the plan; --list names them")
    parser.add_argument("--bundle", type=Path, help="run this bundle's engine and graph where they fit a step")
    parser.add_argument("--list", action="store_true", help="print the plan, with what each step proves, and exit")
    parser.add_argument("--rehearse", action="store_true", help="run all on the CPU with tiny shapes, timing nothing")
    parser.add_argument(
        "--trial", action="store_true", help="run all on the GPU side by side, timing nothing: fills compilers' caches"
    )
    parser.add_argument("--step", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command")
    kernels_command.add_arguments(commands.add_parser("kernels", help="one operator's kernels"))
    options = parser.parse_args()
    plan = PLANS[options.plan]
    options.minutes = plan.limit_s / 60 if options.minutes is None else options.minutes
    unknown = [name for name in options.steps or () if name not in _steps_by_name(plan)]
    if unknown:
        parser.error(f"the plan {options.plan} has no step {unknown[0]}; it has {', '.join(_steps_by_name(plan))}")
    return options


def _steps_by_name(plan: Plan) -> dict[str, Step]:
    """All steps of a plan, by name, including the steps that the plan repeats."""
    repeated = PLANS[plan.repeats].steps if plan.repeats else ()
    return {step.name: step for step in (*repeated, *plan.steps)}


def _chosen_steps(plan: Plan, options: argparse.Namespace, earlier: Sequence[dict[str, Any]]) -> list[Step]:
    """The plan's steps, then the steps of the repeated plan that did not end well in the rows of earlier runs.

    Where no earlier rows are, that plan has not run, and nothing is repeated.
    """
    if options.steps:
        return [step for name, step in _steps_by_name(plan).items() if name in options.steps]
    steps = list(plan.steps)
    if plan.repeats and earlier:
        well = {
            row["step"]
            for row in earlier
            if row.get("case") == "step" and row["status"] in _ENDED_WELL and row["rehearsal"] == options.rehearse
        }
        steps += [step for step in PLANS[plan.repeats].steps if step.name not in well and step not in steps]
    return steps


def _run_steps(
    steps: Sequence[Step], options: argparse.Namespace, program: Sequence[str], output: Path
) -> Iterator[_End]:
    """How each step ends; also a row of the output, as soon as the step has ended."""
    deadline = time.monotonic() + 60 * options.minutes

    def run(step: Step) -> _End:
        began = time.monotonic()
        status, reason = _run_in_process(step, options, program, output, deadline - began)
        seconds = time.monotonic() - began
        about = Job(step=step.name, output=output, rehearsal=options.rehearse, trial=options.trial)
        about.write(case="step", status=status, reason=reason, seconds=seconds)
        print(f"{step.name}: {status} after {seconds:.0f} s{f': {reason}' if reason else ''}", file=sys.stderr)
        return step.name, status, reason

    times_nothing = options.rehearse or options.trial
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores if options.rehearse else max(1, cores * 3 // 4)) as pool:
        yield from pool.map(run, [step for step in steps if times_nothing or not step.is_timed])
    if not times_nothing:
        yield from map(run, [step for step in steps if step.is_timed])


def _run_in_process(
    step: Step, options: argparse.Namespace, program: Sequence[str], output: Path, seconds_left: float
) -> tuple[str, str | None]:
    if seconds_left < step.estimate_s:
        left = f"{max(0.0, seconds_left):.0f} s of {options.minutes:g} minutes"
        return NOT_STARTED, f"it takes {step.estimate_s:.0f} s, and {left} were left"
    command = [*program, "--step", step.name, "--output", str(output), "--plan", options.plan]
    command += ["--rehearse"] if options.rehearse else ["--trial"] if options.trial else []
    command += ["--bundle", str(options.bundle)] if options.bundle else []
    budget_s = seconds_left if options.rehearse or options.trial else min(step.budget_s, seconds_left)
    outcome = run_process(command, time_limit_s=budget_s)
    if outcome.output is not None and outcome.output.get("skipped"):
        return "skipped", outcome.reason
    return outcome.status.value, outcome.reason


def _run_step(options: argparse.Namespace, step: Step) -> int:
    """The process of a step: its last line is JSON, for `run_process`."""
    job = Job(
        step=options.step, output=options.output, rehearsal=options.rehearse, trial=options.trial, bundle=options.bundle
    )
    try:
        step.run(job)
    except SkippedError as reason:
        print(json.dumps({"skipped": True, "reason": str(reason)}))
    except ModuleNotFoundError as error:
        print(json.dumps({"skipped": True, "reason": f"the package {error.name!r} is not installed"}))
    except StepFailedError as reason:
        print(json.dumps({"status": "failed", "reason": str(reason)}))
    else:
        print(json.dumps({"status": "ok"}))
    return 0


def _print_plan(plan: Plan, skipped: str = "") -> None:
    """The minutes at which a step has ended at the latest; steps that time nothing run side by side before others.

    Args:
        skipped: why no step runs; "" tells what each step proves.
    """
    minutes = max((step.budget_s for step in plan.steps if not step.is_timed), default=0.0) / 60
    for step in plan.steps:
        minutes += step.budget_s / 60 if step.is_timed else 0.0
        print(
            f"{minutes:5.1f} min  {step.name:<32}{step.estimate_s:4.0f} s, {step.budget_s:.0f} at most  "
            f"{skipped or step.proves}"
        )


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


def summary_of(
    rows: Sequence[dict[str, Any]], ends: Sequence[_End], proved: Mapping[str, str], *, max_lines: int | None = None
) -> list[str]:
    """Summarize measurements, goals and the outcome of each step.

    Args:
        rows: of this run.
        ends: of the steps.
        proved: name of a step -> what is known when it ended well.
        max_lines: of the result; goals and ends take the place of measurements, which are in the output anyway.
    """
    last = [*verdicts_of(rows), *(f"{name:<32}{status:<11} {reason or proved[name]}" for name, status, reason in ends)]
    findings = list(findings_of(rows))
    room = len(findings) if max_lines is None else max(0, max_lines - len(last) - 1)
    left_out = len(findings) - room
    more = [f"... and {left_out} more measurements, whose rows are in the output"] if left_out > 0 else []
    return [*findings[:room], *more, *last][:max_lines]
