"""Every family on a CPU: what works, and how long its bundle takes beside PyTorch's model.

Usage: python -m benchmarks.cpu.families [MODEL_TYPE ...] [--only checks|latency] [--layers 2] [--lengths 512 4096]
    [--rounds 3] [--again] [--output benchmarks/results/families.jsonl]

The models have base shape as far as their configurations allow it (hidden size 768, 12 heads, feed-forward 3072) and
random weights, on which speed does not depend. PyTorch's model is the library's own, by scaled_dot_product_attention
where it has that, with as many positions as the bundle. Both give one text's vectors, which must agree.

A model of one layer is built in float32 and verified, built in float16 and verified, and built for TensorRT-RTX, which
needs no GPU. Failures are recorded with their reasons. These checks want no quiet machine, and have rows of their own.

Rows that the output has already are left out, so an interrupted run continues; --again does them once more.
`python docs/generate_models.py` makes docs/models.md of the output.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.family_shapes import VOCAB_SIZE
from benchmarks.cpu.models import BUNDLE, HUGGING_FACE, build_bundle, load, save_checkpoint
from benchmarks.cpu.targets import Figure, Target, compare, figures_of, random_ids
from benchmarks.record import append, now
from hdexport.bench.measure.processes import run_process
from hdexport.bench.results.result import RunStatus
from hdexport.families import SUPPORTED_MODEL_TYPES

_MODULE = "benchmarks.cpu.families"
_TOLERANCE = 1e-3
_TIME_LIMIT_S = 1800.0
_CHECKED_TOKENS = 640  # past the 512 positions of most families
_CHECKS = ("verified", "fp16", "engine")
_PARTS = {"checks": "checks", "latency": "ratios"}
"""Part -> content of its rows."""


def main() -> int:
    """Measure all families that are not recorded yet, or, in a child process, one case of one family."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE", help="default: all")
    parser.add_argument("--only", choices=_PARTS, help="default: both")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="also families that the output has")
    parser.add_argument("--output", type=Path, help="append a JSON line per family to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(_case(options)))
        return 0
    failed = 0
    for part in [options.only] if options.only else _PARTS:
        recorded = set() if options.again else recorded_families(options.output, part)
        for model_type in options.families or SUPPORTED_MODEL_TYPES:
            if model_type not in recorded:
                row = _checked(model_type) if part == "checks" else _measured(model_type, options)
                failed += "failed" in row
                print(f"{model_type}: {row.get('checks') or row.get('ratios') or row['failed']}")
                append(options.output, row)
    return 1 if failed else 0


def recorded_families(output: Path | None, part: str) -> set[str]:
    """The families whose results of a part are in a file; a family that failed there is tried again."""
    if output is None or not output.exists():
        return set()
    rows = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    return {row["model_type"] for row in rows if _PARTS[part] in row}


def cases(lengths: list[int]) -> list[str]:
    """The timed cases: the bundle and the library's model at each length."""
    return [f"{model} {tokens}" for tokens in lengths for model in (BUNDLE, HUGGING_FACE)]


def _checked(model_type: str) -> dict[str, Any]:
    """A family's row of checks, with the reasons of failed checks."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = _outcomes("checks", [model_type, "--models", folder], of=_CHECKS)
    return {"benchmark": "cpu.families", "model_type": model_type, "checked": now(), "checks": outcomes}


def _measured(model_type: str, options: argparse.Namespace) -> dict[str, Any]:
    """A family's row of latencies. If a child process fails, its reason stands in the row."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [model_type, "--models", folder, "--layers", str(options.layers)]
        arguments += ["--lengths", *map(str, options.lengths)]
        made = _outcomes("build", arguments, of=["build"])["build"]
        if made != "yes":
            return {"benchmark": "cpu.families", "model_type": model_type, "failed": made}
        try:
            result = compare(
                _MODULE,
                cases=cases(options.lengths),
                targets=[
                    Target(f"{BUNDLE} {tokens}", f"{HUGGING_FACE} {tokens}", Figure.LATENCY, 1.0)
                    for tokens in options.lengths
                ],
                rounds=options.rounds,
                arguments=arguments,
                same_answers={
                    f"{BUNDLE} {tokens}": (f"{HUGGING_FACE} {tokens}", _TOLERANCE) for tokens in options.lengths
                },
                model_type=model_type,
                layers=options.layers,
                lengths=options.lengths,
            )
        except SystemExit as stopped:
            # The message of `compare` on a process that ends badly, and on a wrong answer.
            reason = str(stopped.code)
            return {"benchmark": "cpu.families", "model_type": model_type, "failed": reason}
    return result


def _outcomes(case: str, arguments: list[str], *, of: Sequence[str]) -> dict[str, str]:
    """The outcome of each step or check in `of`, which another process runs: "yes", or why not."""
    outcome = run_process(["-m", _MODULE, "--case", case, *arguments], time_limit_s=_TIME_LIMIT_S)
    if outcome.status is RunStatus.OK and outcome.output is not None:
        return {name: str(outcome.output[name]) for name in of}
    return dict.fromkeys(of, f"no: {outcome.status.value}: {outcome.reason}")


def _case(options: argparse.Namespace) -> Mapping[str, Any]:
    name, _, tokens = options.case.partition(" ")
    (model_type,) = options.families
    if name in (BUNDLE, HUGGING_FACE):
        return figures_of(load(name, options.models), random_ids(int(tokens), VOCAB_SIZE))
    if name == "build":
        return {"build": _outcome(lambda: _build(model_type, options))}
    save_checkpoint(options.models / name, model_type, layers=1)
    return {check: _outcome(lambda check=check: _check(check, options)) for check in _CHECKS}  # type: ignore[misc]


def _outcome(made: Callable[[], None]) -> str:
    try:
        made()
    except Exception as error:  # every reason is of interest, and none is this script's
        return f"no: {type(error).__name__}: {str(error).splitlines()[0]}"
    return "yes"


def _build(model_type: str, options: argparse.Namespace) -> None:
    save_checkpoint(options.models, model_type, layers=options.layers)
    build_bundle(options.models, max_len=max(options.lengths))


def _check(name: str, options: argparse.Namespace) -> None:
    from hdexport.engines.build import EngineOptions
    from hdexport.graph.targets.tensorrt.lowering import AttentionImpl
    from hdexport.graph.targets.tensorrt.profiles import profiles_from_options
    from hdexport.verify.grid import Grid
    from hdruntime.bundle.manifest import Backend

    engines = EngineOptions(
        variants=(Backend.TENSORRT_RTX,),
        attention_impl=AttentionImpl.NATIVE,
        profiles=profiles_from_options(_CHECKED_TOKENS, profiles=f"{_CHECKED_TOKENS}"),
        architectures=("sm86",),
    )
    build_bundle(
        options.models / options.case,
        max_len=_CHECKED_TOKENS,
        name=name,
        precision="float32" if name == "verified" else "float16",
        engines=engines if name == "engine" else EngineOptions(),
        verify=None if name == "engine" else Grid.QUICK,
    )


if __name__ == "__main__":
    sys.exit(main())
