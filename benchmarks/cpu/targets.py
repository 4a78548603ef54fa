"""Code that the CPU benchmarks share: every case runs in a process of its own, all cases once per round.

Ratios are taken within a round; their median is printed with the smallest and largest, and the exit status is 1 if a
target is missed. A child process runs the same script that calls `run_cases`, with ``--case NAME``; such a
process prints what `figures_of` returns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.record import append, command_line, now
from hdexport.bench.measure.calls import environment, timed, with_growth
from hdexport.bench.measure.processes import run_process
from hdexport.bench.results.result import RunStatus
from hdexport.support.memory import peak_resident_bytes

TARGET_MISSED = 1
"""Exit status."""

_TIME_LIMIT_S = 3600.0
"""Time limit of a case."""

_TIMED_RUNS = 3
_VALUES_COMPARED = 16
"""Tokens of each answer that are compared, spread over the text."""

_RESIDENT = "resident_mb"
"""Key for resident memory again and again, which a case may print besides; the first round's is kept."""

_PACKAGES = ("hdexport", "torch", "transformers", "onnxruntime", "openvino", "nncf")

Ids = npt.NDArray[np.int64]
Run = Callable[[Ids], npt.NDArray[np.float32]]
"""A model's run: from ids, [1, tokens], to vectors, [1, tokens, hidden]."""


class Figure(StrEnum):
    """A measured figure of a case."""

    LATENCY = "latency"
    CPU_TIME = "CPU time"
    MEMORY = "memory growth"
    PEAK = "peak memory"
    """Peak memory of the whole process."""
    OVERHEAD = "overhead"
    """A ratio that a case takes itself, of interleaved calls: processes differ by more."""
    COSINE_LOSS = "cosine loss"
    """1 less the worst cosine of a case's vectors with PyTorch's."""
    ERROR = "error"
    """The largest difference of a case's answers from PyTorch's."""
    KEPT = "MB kept"
    """Resident memory after a long text, above the resident memory before."""


_KEYS = {
    Figure.LATENCY: "latency_ms",
    Figure.CPU_TIME: "cpu_ms",
    Figure.MEMORY: "growth_bytes",
    Figure.PEAK: "peak_bytes",
    Figure.OVERHEAD: "overhead",
    Figure.COSINE_LOSS: "cosine_loss",
    Figure.ERROR: "error",
    Figure.KEPT: "kept_mb",
}


@dataclass(frozen=True)
class Target:
    """A ratio of two cases, or a figure of one, and the largest that it may be.

    Attributes:
        case: whose figure is divided.
        against: by whose; None where the figure itself is the target's.
        figure: which one.
        at_most: the target.
    """

    case: str
    against: str | None
    figure: Figure
    at_most: float


def run_cases(
    module: str,
    parser: argparse.ArgumentParser,
    case_figures: Callable[[argparse.Namespace], Mapping[str, Any]],
    comparison: Callable[[argparse.Namespace], Mapping[str, Any]],
) -> int:
    """Compare all cases and report, or, in a child process, measure one; the result is the exit status.

    Args:
        case_figures: from the options, among which `case` and `models`, the line that the process of one case prints.
        comparison: from the options, the arguments of `compare`; it saves files that all cases read in the empty folder
            `models`.
    """
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cases", nargs="+", metavar="WORD", help="only cases with one of these words; all targets of them"
    )
    parser.add_argument("--output", type=Path, help="append the result to this file, as a JSON line")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case_figures(options)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.models = Path(folder)
        given = {"arguments": child_arguments(options), "same_answers": {}, **chosen(options, comparison(options))}
        result = compare(module, rounds=options.rounds, **given)
    return report(result, options.output)


def is_chosen(options: argparse.Namespace, case: str) -> bool:
    """Whether `--cases` leaves a case in."""
    return options.cases is None or not set(options.cases).isdisjoint(case.split())


def chosen(options: argparse.Namespace, comparison: Mapping[str, Any]) -> dict[str, Any]:
    """A comparison of the cases that are left, with the targets and answers that need no other."""
    cases = [case for case in comparison["cases"] if is_chosen(options, case)]
    if not cases:
        sys.exit(
            f"No case has one of the words {' '.join(options.cases)}. There are: {', '.join(comparison['cases'])}."
        )
    answers = {
        key: {case: other for case, other in comparison[key].items() if {case, other[0]} <= set(cases)}
        for key in ("same_answers", "alike_answers")
        if key in comparison
    }
    targets = [target for target in comparison["targets"] if {target.case, target.against or target.case} <= set(cases)]
    return {**comparison, "cases": cases, "targets": targets, **answers}


def child_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of a child process: this process' own, and where the models are."""
    return [*sys.argv[1:], "--models", str(options.models)]


def figures_of(run: Run, ids: Ids, *, warm_up_tokens: int = 64, least_seconds: float = 0.0) -> dict[str, Any]:
    """Latency, CPU time and growth of peak memory of a run, and values of its answer.

    Args:
        ids: [1, tokens], the text.
        warm_up_tokens: length of the chunks of the text that are run first, so that later growth is the long
            text's and not the weights'.
        least_seconds: that the timed runs take together; there are 3 at least.
    """
    for start in range(0, ids.shape[1], warm_up_tokens):
        run(ids[:, start : start + warm_up_tokens])
    answer, growth_bytes = with_growth(lambda: run(ids))  # also warms up: the first run pays for every page it touches
    peak_bytes = peak_resident_bytes()
    runs: list[tuple[object, float, float]] = []
    while len(runs) < _TIMED_RUNS or sum(latency_ms for _, latency_ms, _ in runs) < least_seconds * 1e3:
        runs.append((None, *timed(lambda: run(ids))[1:]))  # answers are not kept: that would be memory of the case
    return {
        "latency_ms": statistics.median(latency_ms for _, latency_ms, _ in runs),
        "cpu_ms": statistics.median(cpu_ms for _, _, cpu_ms in runs),
        "growth_bytes": growth_bytes,
        "peak_bytes": peak_bytes,
        "answer": answer[0, :: max(1, ids.shape[1] // _VALUES_COMPARED)].ravel().tolist(),
    }


def output_of(arguments: Sequence[str]) -> dict[str, Any]:
    """The JSON object in the last line that a Python process prints; exit where it ends badly."""
    outcome = run_process(arguments, time_limit_s=_TIME_LIMIT_S)
    if outcome.status is not RunStatus.OK or outcome.output is None:
        sys.exit(f"python {' '.join(arguments)}: {outcome.status.value}: {outcome.reason}")
    return outcome.output


def compare(
    module: str,
    *,
    cases: Sequence[str],
    targets: Sequence[Target],
    rounds: int,
    arguments: Sequence[str],
    same_answers: Mapping[str, tuple[str, float]],
    alike_answers: Mapping[str, tuple[str, float]] | None = None,
    **about: Any,
) -> dict[str, Any]:
    """Measure all cases, once per round each, so that drift of a shared machine hits them alike.

    Args:
        arguments: of the script's child processes besides the case.
        same_answers: case -> (the case whose answer it must give, the largest difference of a value); asked in the
            first round.
        alike_answers: case -> (the case whose answer its own must be like, the smallest cosine of both); likewise.

    Returns:
        The content of the JSON.
    """
    if with_growth(lambda: None)[1] is None:
        sys.exit("This system does not report how far a process's memory grows. Run it on Linux.")
    measured: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases:
            measured[case].append(output_of(["-m", module, "--case", case, *arguments]))
            print(f"round {number + 1}/{rounds}: {case}", file=sys.stderr)
        if number == 0:
            answers = {case: runs[0]["answer"] for case, runs in measured.items() if "answer" in runs[0]}
            alike = check_answers(answers, same_answers, alike_answers or {})
    machine = environment()
    return {
        "benchmark": module.removeprefix("benchmarks."),
        "date": now(),
        "command": command_line(module),
        "cpu": machine["cpu"],
        "commit": machine.get("commit"),
        "rounds": rounds,
        **about,
        "versions": {name: machine[name] for name in _PACKAGES if name in machine},
        "cases": {
            case: {key: statistics.median(run[key] for run in runs) for key in _KEYS.values() if key in runs[0]}
            | ({_RESIDENT: runs[0][_RESIDENT]} if _RESIDENT in runs[0] else {})
            for case, runs in measured.items()
        },
        **({"cosines": alike} if alike else {}),
        "ratios": [_ratio(measured, target) for target in targets],
    }


def check_answers(
    answers: Mapping[str, Sequence[float]],
    same_answers: Mapping[str, tuple[str, float]],
    alike_answers: Mapping[str, tuple[str, float]],
) -> dict[str, float]:
    """Exit, naming the case, where an answer differs from the one that it must equal, or be like; see `compare`.

    Returns:
        case -> cosine, of `alike_answers`.
    """
    found = {}
    for case, (other, tolerance) in same_answers.items():
        difference = float(np.abs(np.array(answers[case]) - np.array(answers[other])).max())
        if not difference <= tolerance:
            sys.exit(f"{case} gives a wrong answer: it differs from {other} by {difference:.3g}.")
    for case, (other, least_cosine) in alike_answers.items():
        cosine = float(cosines(np.array(answers[case]), np.array(answers[other])))
        if not cosine >= least_cosine:
            sys.exit(f"{case} gives a wrong answer: its cosine with that of {other} is {cosine:.5f}.")
        found[case] = cosine
    return found


def cosines(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Any:
    """Cosines of vectors [..., features]: [...]; NaN for a vector that is zero."""
    with np.errstate(invalid="ignore"):
        return (actual * expected).sum(-1) / (np.linalg.norm(actual, axis=-1) * np.linalg.norm(expected, axis=-1))


def report(result: Mapping[str, Any], output: Path | None) -> int:
    """Print a result, and append it to a file; the exit status says whether every target was met."""
    print(f"{result['command']}: {result['cpu']}, median of {result['rounds']} rounds")
    width = max(map(len, result["cases"]))
    for case, figures in result["cases"].items():
        print(
            f"  {case:<{width}} {figures['latency_ms']:8.1f} ms  {figures['cpu_ms']:8.1f} ms of CPU time  "
            f"{figures['growth_bytes'] / 1e6:8.0f} MB more at peak"
        )
    for case, cosine in result.get("cosines", {}).items():
        print(f"  {case}, cosine of its answer: {cosine:.5f}")
    for ratio in result["ratios"]:
        verdict = "met" if _is_met(ratio) else "MISSED"
        compared = f"{ratio['case']} / {ratio['against']}" if ratio["against"] else ratio["case"]
        print(
            f"  {compared}, {ratio['figure']}: {ratio['median']:.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f}), target {ratio['target']:.4g}: {verdict}"
        )
    append(output, result)
    return 0 if all(map(_is_met, result["ratios"])) else TARGET_MISSED


def random_ids(tokens: int, vocab_size: int) -> Ids:
    """[1, tokens]; the ids below 5, special tokens of most models, are left out."""
    return np.random.default_rng(0).integers(5, vocab_size, (1, tokens))


def _is_met(ratio: Mapping[str, Any]) -> bool:
    return bool(ratio["median"] <= ratio["target"])


def _ratio(measured: Mapping[str, Sequence[Mapping[str, Any]]], target: Target) -> dict[str, Any]:
    key = _KEYS[target.figure]
    ratios = [run[key] for run in measured[target.case]]
    if target.against is not None:
        ratios = [ours / theirs[key] for ours, theirs in zip(ratios, measured[target.against], strict=True)]
    return {
        "case": target.case,
        "against": target.against,
        "figure": target.figure.value,
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "target": target.at_most,
    }
