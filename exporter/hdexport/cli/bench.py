"""Measure latency, memory and error of bundles across sequence lengths, beside PyTorch and a plain ONNX export.

Each case runs in its own process, and each round runs every case. Running out of memory or time is a result. DIR
receives bench.json and bench.html. After Ctrl-C, the command writes the results so far. See docs/bench.md.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.arguments import (
    PRECISIONS,
    add_trust_arguments,
    local_path,
    options_as,
    path_or_url,
    trust_of,
    whole_number,
)
from hdexport.cli.process import outlive_readers, whole_or_nothing
from hdruntime.backends.registry import backend_names
from hdruntime.errors import InputError
from hdruntime.optional import require

if TYPE_CHECKING:
    from hdexport.bench.baselines.baseline import Baseline
    from hdexport.bench.run.plan import BenchOptions

SUMMARY = "measure latency, memory and error across sequence lengths, beside PyTorch"

BASELINE_NAMES = ("torch", "torch-compile", "onnx-plain")
"""Names of `hdexport.bench.baselines.BASELINES`, which is not imported for ``--help``."""


def add_arguments(parser: argparse.ArgumentParser, *, baselines: Sequence[str] = BASELINE_NAMES) -> None:
    parser.add_argument("bundles", metavar="BUNDLE", type=local_path, nargs="*", help="directories of bundles")
    parser.add_argument(
        "--lengths",
        metavar="LIST",
        help="sequence lengths in tokens: 128,512,4096, or 512:8192:x2, or 512:2048:+512 (default: 512, doubled up to "
        "the max_len of the bundle)",
    )
    parser.add_argument(
        "--batch", metavar="LIST", type=_batches, default=(1,), help="sequences per call: 1,8 (default: 1)"
    )
    parser.add_argument(
        "--baselines",
        metavar="LIST",
        default="all",
        help=f"baselines to measure: {', '.join(baselines)}; all (default) or none",
    )
    parser.add_argument(
        "--backends",
        metavar="LIST",
        help=f"backends that run the bundles: {', '.join(backend_names())} (default: each backend with a graph or an "
        "engine in the bundle; GPU backends only if there is a GPU)",
    )
    parser.add_argument(
        "--precision",
        metavar="LIST",
        help=f"precisions of the bundles on a CPU: {', '.join(PRECISIONS)} (default: auto, and int8 if the bundle has "
        "an int8 graph)",
    )
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=whole_number,
        default=3,
        help="processes per case (default: 3); more rounds show smaller differences",
    )
    parser.add_argument(
        "--threads", metavar="N", type=whole_number, help="CPU threads per process (default: one per usable core)"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="device of the baselines (default: cuda if there is a GPU)"
    )
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="time limit of one process in seconds (default: 600)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        type=path_or_url,
        help="checkpoint of the bundles (default: the source in each manifest)",
    )
    add_trust_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=local_path,
        default=Path("bench"),
        help="directory to write (default: bench)",
    )
    parser.add_argument("--png", action="store_true", help="write each chart as a PNG too")
    parser.add_argument("--force", action="store_true", help="replace the results in DIR")


def run(options: argparse.Namespace, *, baselines: Mapping[str, Baseline] | None = None) -> int:
    outlive_readers()
    if not options.bundles:
        raise InputError(
            "No bundle was given.", hint="Name a bundle: hdexport bench BUNDLE, written by: hdexport build"
        )
    # Measuring may take an hour: the packages that draw the page must be installed before.
    for package in ("altair", "jinja2", "vl_convert"):
        require(package)
    from hdexport.bench.baselines import BASELINES
    from hdexport.bench.run.rounds import Bench
    from hdexport.bench.write import BENCH_DIRECTORY, write_results
    from hdexport.cli.bench_table import BenchTable
    from hdruntime.bundle.staging import staged_directory

    stopped_by: KeyboardInterrupt | None = None
    with (
        whole_or_nothing(options.output),
        staged_directory(options.output, BENCH_DIRECTORY, force=options.force) as folder,
    ):
        # In the directory that the next run removes if this run is killed.
        with tempfile.TemporaryDirectory(dir=folder) as scratch, BenchTable() as table:
            bench = Bench(_bench_options(options, baselines or BASELINES), table, Path(scratch))
            try:
                bench.prepare()
                bench.measure()
            except KeyboardInterrupt as stop:
                if not bench.has_results:
                    raise
                stopped_by = stop
                bench.note("The benchmark was stopped early.")
            result = bench.result()
            table.summary(result)
        write_results(folder, result, png=options.png)
    print(f"Page:    {options.output / 'bench.html'}")
    print(f"Figures: {options.output / 'bench.json'}")
    if stopped_by is not None:
        rounds = sum(len(case.latency.rounds_p50_ms) for case in result.cases if case.latency)
        raise KeyboardInterrupt(*(stopped_by.args or [signal.SIGINT]), f"{rounds} rounds are kept in {options.output}")
    # The table shows failed cases.
    return 0 if any(case.latency for case in result.cases) else 1


def _batches(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole_number, text.split(","))))


def _bench_options(options: argparse.Namespace, baselines: Mapping[str, Baseline]) -> BenchOptions:
    from hdexport.bench.run.plan import BenchOptions, parse_lengths

    if not 0 < options.time_limit < float("inf"):
        raise InputError(
            f"--time-limit is {options.time_limit}; it must be a positive number of seconds.",
            hint="Example: --time-limit 600",
        )
    return options_as(
        BenchOptions,
        options,
        bundles=tuple(dict.fromkeys(options.bundles)),
        lengths=None if options.lengths is None else parse_lengths(options.lengths),
        batches=options.batch,
        baselines=_chosen(options.baselines, baselines),
        backends=None if options.backends is None else tuple(options.backends.split(",")),
        precisions=None if options.precision is None else tuple(options.precision.split(",")),
        time_limit_s=options.time_limit,
        trust=trust_of(options),
        command=options.command_line,
    )


def _chosen(text: str, baselines: Mapping[str, Baseline]) -> tuple[Baseline, ...]:
    """Baselines that ``--baselines`` names, in the order of tables."""
    names = {"all": list(baselines), "none": []}.get(text, text.split(","))
    for name in names:
        if name not in baselines:
            raise InputError(
                f"--baselines: {name!r} is not a baseline; valid: {', '.join(baselines)}, all, none.",
                hint="Name some of them, with commas, or leave --baselines out.",
            )
    return tuple(baseline for name, baseline in baselines.items() if name in names)
