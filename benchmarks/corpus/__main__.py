"""Embed a corpus by bundles, sentence-transformers and, on a CPU, fastembed.

Usage: python -m benchmarks.corpus BUNDLE [BUNDLE ...] [--corpus short|passages|mixed|long|FILE] [-o DIR]

Each run is a process of its own, round by round. Other products run with their default batch size and with the best of
--batch. DIR receives corpus.json. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.command import exit_with
from benchmarks.corpus.bench import CORPUS_DIRECTORY, CorpusBench, write_corpus_result
from benchmarks.corpus.table import print_corpus
from benchmarks.record import command_line
from hdexport.bench.run.plan import BenchOptions
from hdexport.cli.progress import StatusLine
from hdruntime.bundle.staging import staged_directory


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, and write corpus.json."""
    options = _parser().parse_args(arguments)
    bench_options = BenchOptions(
        bundles=tuple(dict.fromkeys(options.bundles)),
        baselines=(),
        backends=None if options.backends is None else tuple(options.backends.split(",")),
        precisions=None if options.precision is None else tuple(options.precision.split(",")),
        rounds=options.rounds,
        threads=options.threads,
        device=options.device,
        time_limit_s=options.time_limit,
        model=options.model,
        command=command_line("benchmarks.corpus"),
    )
    line = StatusLine()
    with staged_directory(options.output, CORPUS_DIRECTORY, force=options.force) as folder:
        with line:
            line.begin("Opening the bundles")
            bench = CorpusBench(
                bench_options,
                options.corpus,
                batch_sizes=options.batch,
                has_baselines=options.baselines == "all",
                on_step=line.begin,
            )
            result = bench.result()
        write_corpus_result(folder, result)
    print_corpus(result)
    print(f"{options.output / 'corpus.json'} has all rounds")
    return 0 if any(series.seconds for series in result.series) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", metavar="BUNDLE", type=Path, nargs="+")
    parser.add_argument(
        "--corpus",
        default="mixed",
        help="short, passages, mixed (default) or long, or a file or directory of texts (the column text)",
    )
    parser.add_argument(
        "--batch",
        type=lambda text: tuple(dict.fromkeys(map(int, text.split(",")))),
        help="batch sizes among which the best size of a baseline is searched (default: 1,4,16,32,64; on a GPU "
        "16,32,64,128,256,512)",
    )
    parser.add_argument("--baselines", choices=["all", "none"], default="all")
    parser.add_argument("--backends", help="backends that run the bundles, separated by commas")
    parser.add_argument("--precision", help="precisions of the bundles on a CPU, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="processes per series (default: 3)")
    parser.add_argument("--threads", type=int, help="CPU threads per process (default: one per usable core)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="device of all series (default: cuda if a bundle can)"
    )
    parser.add_argument("--time-limit", type=float, default=600.0, help="time limit of a run in seconds (default: 600)")
    parser.add_argument("--model", help="checkpoint of the bundles (default: the source that each bundle names)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("corpus"), help="directory to write (default: corpus)"
    )
    parser.add_argument("--force", action="store_true", help="replace the results in the directory")
    return parser


if __name__ == "__main__":
    exit_with(main)
