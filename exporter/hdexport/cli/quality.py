"""Measure what long inputs do to retrieval with your own texts, without labels.

Sentences are taken out of each long text and must find it among all texts: sentences from after the positions that the
model was trained with ("later"), the first sentence ("first"), and the name of a text that is a file ("name"). The
score is MRR@10, the mean of 1 / rank in the first ten, for texts truncated at the trained positions, split (the mean of
the chunks' vectors), and whole. Intervals are of 95 %, from drawing texts; a difference whose interval has 0 in it is
not shown by these texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hdexport.cli.arguments import add_precision_argument, add_texts_arguments, local_path, whole_number
from hdruntime.backends.precision import Precision
from hdruntime.backends.registry import backend_names
from hdruntime.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from hdexport.quality.measurement import QualityResult

SUMMARY = "measure what long inputs do to retrieval with your own texts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundles", metavar="BUNDLE", type=local_path, nargs="+", help="directories of bundles of one model"
    )
    add_texts_arguments(parser)
    parser.add_argument(
        "--limit", metavar="N", type=whole_number, default=500, help="number of texts to read (default: 500)"
    )
    parser.add_argument(
        "--sentences",
        metavar="N",
        type=whole_number,
        default=10,
        help="maximum number of later sentences per text (default: 10)",
    )
    parser.add_argument(
        "--trained",
        metavar="TOKENS",
        type=whole_number,
        help="length to truncate and split at (default: the trained positions of the model, the fewest of several "
        "bundles)",
    )
    parser.add_argument(
        "--backend",
        choices=["auto", *backend_names()],
        default="auto",
        help="backend that runs the bundles (default: auto)",
    )
    add_precision_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("-o", "--output", metavar="FILE", type=local_path, help="file for the JSON object of --json")


def run(options: argparse.Namespace) -> int:
    from hdexport.cli.progress import StatusLine
    from hdexport.quality.measurement import findings, measure_quality
    from hdexport.support.texts import read_texts
    from hdruntime.whole_files import write_whole

    if options.output is not None and (wrong := _unwritable_reason(options.output)) is not None:
        raise InputError(
            f"{options.output} cannot be written: {wrong}.",
            hint="Name a file in a directory that can be written: -o FILE",
        )
    bundles = list(dict.fromkeys(options.bundles))
    with StatusLine() as line:
        texts = list(itertools.islice(read_texts(options.texts, column=options.text_column), options.limit + 1))
        result = measure_quality(
            bundles,
            texts[: options.limit],
            sentences=options.sentences,
            trained=options.trained,
            backend=options.backend,
            precision=Precision(options.precision),
            line=line,
        )
    record = json.dumps({"command": options.command_line, **dataclasses.asdict(result)}, indent=2)
    if options.output is not None:
        write_whole(options.output, f"{record}\n".encode())
    if options.json:
        print(record)
        return 0
    print("\n".join(findings(result)))
    _show(result)
    if len(texts) > options.limit:
        print(f"Only the first {options.limit} texts were read; for more: --limit N")
    return 0


def _unwritable_reason(file: Path) -> str | None:
    """Why the result cannot be written there when it is measured; None if it can."""
    if file.is_dir():
        return "it is a directory"
    if file.exists() and not file.is_file():
        return "it is a device or a pipe, which a file would replace"
    if not file.parent.is_dir():
        return "its directory does not exist"
    may_write = os.access(file.parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    return None if may_write else "its directory has no permission for that"


def _show(result: QualityResult) -> None:
    from rich.console import Console

    print(
        f"\n{result.long_texts} of {result.texts} texts have more than {result.trained} tokens: median "
        f"{result.median_tokens}, longest {result.longest_tokens}."
    )
    for bundle, precision in {score.bundle: score.precision for score in result.scores}.items():
        if precision is not Precision.FLOAT32:
            print(f"{bundle} computed in {precision.value}.")
    for bundle, number in result.truncated_texts.items():
        if number:
            print(f"{bundle} takes fewer tokens than {number} texts have: these texts were truncated.")
    print()
    # A pipe and a small terminal, too: rows of a table must stay whole.
    console = Console(highlight=False, markup=False, emoji=False, width=max(Console().width, 100))
    console.print(_table(result))


def _table(result: QualityResult) -> Table:
    from rich.table import Table

    several = len(result.truncated_texts) > 1
    table = Table(
        box=None, pad_edge=False, header_style="dim", title="MRR@10", title_justify="left", title_style="bold"
    )
    table.add_column("bundle" if several else "")
    for kind, number in result.queries.items():
        table.add_column(f"{kind} ({number})", no_wrap=True)
    for row in _rows(result):
        table.add_row(*row)
    return table


def _rows(result: QualityResult) -> Iterator[list[str]]:
    of_row: dict[tuple[str, str], list[str]] = {}
    for number, score in enumerate(result.scores):
        difference = "" if number < len(result.queries) else f"  {score.difference}"
        of_row.setdefault((score.bundle, score.mode.value), []).append(f"{score.mrr.value:.2f}{difference}")
    for (bundle, mode), cells in of_row.items():
        yield [f"{bundle}, {mode}" if len(result.truncated_texts) > 1 else mode, *cells]
