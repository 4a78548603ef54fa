"""How well a corpus is fed to a GPU, measured without one: all that a bundle costs besides computing.

Usage: python -m benchmarks.cpu.feeding [--what cpu share ...] [--corpus short ...] [--task similarity ...]
    [--tokens-per-second 1e6] [--in-flight 2] [--repeats 2] [--output FILE] [--timeline FILE.svg] [--bundle BUNDLE]

A stand-in takes the place of the backend (`stand_in.py`): it computes nothing, and answers at once or when a GPU of
`--tokens-per-second` would. The bundles have one layer and the sample model's tokenizer; the texts are prose of
Python's own help: "short" of 4 to 20 words, "mixed" of 8 to 1200, "long" of 3000. Every case is a process of its own,
warm before it is measured, and the best of `--repeats` counts.

cpu: CPU seconds per million tokens of jobs, `Session.embed`, `SentenceEncoder.encode`, beside the tokenizer alone and
    what sentence-transformers does before it computes.
share: share of the time of a job and of `encode` in which the GPU would compute.
batches: padding and shapes of the batches of a job and of `embed`, for several sizes.
serve: CPU seconds of the server's process, `hdexport serve`, with one text and with 32 texts a request.
cores: what the shares would be on 16 cores, by the CPU time of Python's threads, which share one core, and of others.
stages: shares of the time in which a job reads, tokenizes, computes, writes. `--timeline` draws one such job; with
    `--bundle` it runs on this machine's CPU instead, and the exit status is 1 if computing takes less than 0.9.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cpu.feeding.cases import WHAT, Case, Settings, cases_of
from benchmarks.cpu.feeding.inputs import BUNDLES, CORPORA, make_bundles, make_corpus
from benchmarks.cpu.feeding.tables import TABLES
from benchmarks.cpu.feeding.timeline import COMPUTING
from benchmarks.cpu.targets import TARGET_MISSED, output_of
from benchmarks.record import append, command_line, now
from hdexport.bench.measure.calls import environment

_MODULE = "benchmarks.cpu.feeding"
_ROOT = Path(__file__).parents[3]

_LEAST_SHARE = 0.9
"""The least share of a CPU job's time that computing should take."""

_PACKAGES = ("hdexport", "numpy", "tokenizers", "pyarrow", "sentence-transformers")


def main() -> int:
    """Measure, and print tables."""
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        return _compared(options, options.folder or Path(scratch))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, help="(default: all; with --timeline or --bundle: stages)")
    parser.add_argument("--corpus", nargs="+", choices=CORPORA, help="(default: all; with --timeline: mixed)")
    parser.add_argument("--task", nargs="+", choices=BUNDLES, default=list(BUNDLES), help="(default: all)")
    parser.add_argument("--part", type=float, default=1.0, help="of the texts of each corpus (default: 1)")
    parser.add_argument("--repeats", type=int, default=2, help="(default: 2)")
    parser.add_argument("--tokens-per-second", type=float, default=1e6, help="of the GPU (default: 1e6)")
    parser.add_argument("--in-flight", type=int, default=2, help="batches in flight (default: 2)")
    parser.add_argument("--folder", type=Path, help="where bundles and corpora stay for the next run")
    parser.add_argument("--bundle", type=Path, help="run this bundle on this machine, by the backend auto")
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="draw a job")
    parser.add_argument("--output", type=Path, help="append the result to this file, as a JSON line")
    options = parser.parse_args()
    only_stages = options.timeline or options.bundle
    options.what = options.what or (["stages"] if only_stages else list(WHAT))
    if options.bundle and options.what != ["stages"]:
        parser.error("--bundle measures stages alone: leave out --what")
    options.corpus = options.corpus or (["mixed"] if options.timeline else list(CORPORA))
    return options


def _compared(options: argparse.Namespace, folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(_ROOT), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    cases = [case for what in options.what for case in cases_of(what, options.task, options.corpus)]
    make_bundles(folder, sorted({case.bundle for case in cases}))
    tokenizer = folder / cases[0].bundle / "tokenizer.json"
    corpora = {name: make_corpus(folder, name, part=options.part, tokenizer=tokenizer) for name in options.corpus}
    settings = Settings(
        folder=str(folder),
        repeats=options.repeats,
        tokens_per_second=options.tokens_per_second,
        in_flight=options.in_flight,
        bundle=options.bundle and str(options.bundle),
        timeline=options.timeline and str(options.timeline),
    )
    found: dict[Case, dict[str, Any]] = {}
    for number, case in enumerate(cases):
        print(f"{number + 1}/{len(cases)}: {case}", file=sys.stderr)
        given = json.dumps({"case": case, "settings": settings._asdict()})
        found[case] = {**corpora[case.corpus], **output_of(["-m", f"{_MODULE}.measure", given])}
    machine = environment()
    result = {
        "benchmark": _MODULE.removeprefix("benchmarks."),
        "date": now(),
        "command": command_line(_MODULE),
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "commit": machine.get("commit"),
        "versions": {name: machine[name] for name in _PACKAGES if name in machine},
        "tokens_per_second": settings.tokens_per_second,
        "in_flight": settings.in_flight,
        "corpora": corpora,
        "cases": {str(case): figures for case, figures in found.items()},
    }
    print(f"{result['command']}: {result['cpu']}, cores: {result['cores']}, {result['date']}")
    for what in options.what:
        of_kind = {case: figures for case, figures in found.items() if case.what == what}
        print("", *TABLES[what](of_kind, settings), sep="\n")
    append(options.output, result)
    computing = [figures["shares"][COMPUTING] for case, figures in found.items() if case.what == "stages"]
    return TARGET_MISSED if settings.bundle is not None and min(computing) < _LEAST_SHARE else 0


if __name__ == "__main__":
    sys.exit(main())
