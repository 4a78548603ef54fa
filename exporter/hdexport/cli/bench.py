"""Measure latency, memory and error of bundles and of other ways to run the model, across lengths.

Each case runs in its own process, and each round runs every case, so that drift of the machine affects all alike.
Running out of memory or time is a result. DIR receives bench.json, bench.csv and bench.html, one page that needs no
network. After Ctrl-C, the command writes what it has. See docs/bench.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.arguments import PRECISIONS, add_trust_arguments, local_path, path_or_url, trust_of, whole_number
from hdexport.cli.process import outlive_readers, whole_or_nothing
from hdruntime.backends.registry import backend_names
from hdruntime.errors import InputError
from hdruntime.optional import require

if TYPE_CHECKING:
    from hdexport.bench.run.plan import BenchOptions

SUMMARY = "measure latency, memory and error across lengths, beside other ways to run the model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundles", metavar="BUNDLE", type=local_path, nargs="*", help="directories that `hdexport build` made"
    )
    parser.add_argument(
        "--lengths",
        metavar="LIST",
        help="tokens per text: 128,512,4096, or 512:8192:x2, or 512:2048:+512 (default: 512, doubled up to the "
        "longest that a bundle takes)",
    )
    parser.add_argument(
        "--corpus",
        metavar="FILE",
        type=path_or_url,
        help="in place of lengths, embed a whole corpus: a file or folder of texts (the column text), or the sample "
        "short, mixed or long; beside sentence-transformers and, on a CPU, fastembed at their default and best batch "
        "sizes. DIR receives corpus.json",
    )
    parser.add_argument(
        "--batch",
        metavar="LIST",
        type=_batches,
        help="texts per call: 1,8 (default: 1); of a corpus, the batch sizes among which a peer's best is searched "
        "(default: 1,4,16,32,64; on a GPU 16,32,64,128,256,512)",
    )
    parser.add_argument(
        "--peers",
        metavar="LIST",
        default="all",
        help="other ways to run the model: torch, torch-compile, openvino, openvino-default, openvino-int8, "
        "onnx-plain, optimum, sentence-transformers; all (default) or none",
    )
    parser.add_argument(
        "--backends",
        metavar="LIST",
        help=f"backends that run the bundles: {', '.join(backend_names())} (default: those that the bundle "
        "has a graph or an engine for; those on a GPU where there is one)",
    )
    parser.add_argument(
        "--precision",
        metavar="LIST",
        help=f"what the bundles compute in on a CPU: {', '.join(PRECISIONS)} (default: auto, and int8 if the bundle "
        "has its graph)",
    )
    parser.add_argument("--rounds", metavar="N", type=whole_number, default=3, help="processes per case (default: 3)")
    parser.add_argument(
        "--threads", metavar="N", type=whole_number, help="CPU threads of each process (default: one per usable core)"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="where peers run, and of a corpus the bundles too (default: the GPU if there is one)",
    )
    parser.add_argument(
        "--time-limit",
        metavar="S",
        type=float,
        default=600.0,
        help="time limit of one process in seconds (default: 600)",
    )
    parser.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="also find the largest batch of each length that fits SIZE, like 24GB: GPU memory on a GPU, else the "
        "process's memory",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        type=path_or_url,
        help="the checkpoint of the bundles (default: as for hdexport verify)",
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
    parser.add_argument("--png", action="store_true", help="also write each chart as a picture")
    parser.add_argument("--force", action="store_true", help="replace the results that are in DIR")
    parser.add_argument(
        "--compare",
        metavar=("A.json", "B.json"),
        nargs=2,
        type=local_path,
        help="measure nothing: print what changed from A to B beyond the noise",
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as one JSON object")


def run(options: argparse.Namespace) -> int:
    if options.compare:
        return _compare(*options.compare, as_json=options.json)
    if options.json:
        raise InputError("--json prints a comparison.\nAdd --compare A.json B.json, or read DIR/bench.json.")
    outlive_readers()
    if not options.bundles:
        raise InputError("No bundle was given.\nName one: hdexport bench BUNDLE, made by: hdexport build")
    if options.corpus is not None:
        return _corpus(options)
    # Measuring may take an hour: the packages that draw the page must be there before.
    for package in ("altair", "jinja2", "vl_convert"):
        require(package)
    from hdexport.bench.run.rounds import Bench
    from hdexport.bench.write import BENCH_DIRECTORY, write_results
    from hdexport.cli.bench_table import BenchTable
    from hdruntime.bundle.staging import staged_directory

    stopped_by: KeyboardInterrupt | None = None
    with (
        whole_or_nothing(options.output),
        staged_directory(options.output, BENCH_DIRECTORY, force=options.force) as folder,
    ):
        # In the directory that the next run removes if this one is killed.
        with tempfile.TemporaryDirectory(dir=folder) as scratch, BenchTable() as table:
            bench = Bench(_bench_options(options), table, Path(scratch))
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
    print(f"{options.output / 'bench.html'}: open it in a browser; bench.json and bench.csv are beside it")
    if stopped_by is not None:
        rounds = sum(len(case.latency.rounds_p50_ms) for case in result.cases if case.latency)
        raise KeyboardInterrupt(*(stopped_by.args or [signal.SIGINT]), f"{rounds} rounds are kept in {options.output}")
    # What failed is in the table.
    return 0 if any(case.latency for case in result.cases) else 1


def _corpus(options: argparse.Namespace) -> int:
    from hdexport.bench.corpus.bench import CORPUS_DIRECTORY, CorpusBench, write_corpus_result
    from hdexport.cli.bench_table import print_corpus
    from hdexport.cli.progress import StatusLine
    from hdruntime.bundle.staging import staged_directory

    for option in ("lengths", "memory_budget"):
        if getattr(options, option) is not None:
            raise InputError(f"--{option.replace('_', '-')} is about texts of one length.\nLeave it out with --corpus.")
    if options.png:
        raise InputError("--png draws charts across lengths.\nLeave it out with --corpus.")
    sizes = {} if options.batch is None else {"batch_sizes": options.batch}
    line = StatusLine()
    with (
        whole_or_nothing(options.output),
        staged_directory(options.output, CORPUS_DIRECTORY, force=options.force) as folder,
    ):
        with line:
            line.begin("Opening the bundles")
            bench = CorpusBench(_bench_options(options), options.corpus, on_step=line.begin, **sizes)
            result = bench.result()
        write_corpus_result(folder, result)
    print_corpus(result)
    print(f"{options.output / 'corpus.json'} has all rounds")
    return 0 if any(series.seconds for series in result.series) else 1


def _batches(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(whole_number, text.split(","))))


def _bench_options(options: argparse.Namespace) -> BenchOptions:
    from hdexport.bench.run.budget import bytes_from
    from hdexport.bench.run.plan import BenchOptions, parse_lengths

    if not 0 < options.time_limit < float("inf"):
        raise InputError(
            f"--time-limit {options.time_limit} is not a number of seconds.\nGive one like --time-limit 600."
        )
    return BenchOptions(
        bundles=tuple(dict.fromkeys(options.bundles)),
        lengths=None if options.lengths is None else parse_lengths(options.lengths),
        batches=options.batch or (1,),
        peers={"all": None, "none": ()}.get(options.peers, tuple(options.peers.split(","))),
        backends=None if options.backends is None else tuple(options.backends.split(",")),
        precisions=None if options.precision is None else tuple(options.precision.split(",")),
        rounds=options.rounds,
        threads=options.threads,
        device=options.device,
        time_limit_s=options.time_limit,
        memory_budget_bytes=None if options.memory_budget is None else bytes_from(options.memory_budget),
        model=options.model,
        trust=trust_of(options),
        command=options.command_line,
    )


def _compare(before: Path, after: Path, *, as_json: bool) -> int:
    from hdexport.bench.results.compare import compare_results, comparison_lines
    from hdexport.bench.results.files import read_result

    comparison = compare_results(read_result(before), read_result(after))
    print(json.dumps(dataclasses.asdict(comparison), indent=2) if as_json else "\n".join(comparison_lines(comparison)))
    return 0
