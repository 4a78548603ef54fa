"""Tables of the retrieval benchmark's results, as Markdown.

Usage: python -m benchmarks.quality.tables FILE [--precisions] [--against VARIANT] [--write docs/positions.md]

--write replaces the part of the page between its two markers. Results of `--runner openvino` are tables of their own,
with --precisions: bfloat16 and int8 beside float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.results import BASELINE, TITLES, Line, read_lines
from benchmarks.quality.retrieval import PRECISIONS, SCHEMES
from hdexport.quality.queries import KINDS

RESULTS = Path("benchmarks/results/quality.jsonl")
PAGE, PRECISIONS_PAGE = Path("docs/positions.md"), Path("docs/openvino.md")
BEGIN, END = "<!-- begin: python -m benchmarks.quality.tables -->", "<!-- end of the tables -->"


def markdown(lines: Sequence[Line], *, against: str = BASELINE) -> str:
    """One table per corpus: MRR@10, and its difference from a variant with its interval of 95 %.

    Args:
        lines: results.
        against: the variant's name. Results in bfloat16 or int8 are compared with the same variant's in float32.
    """
    comparable = [[line for line in lines if line.facts == facts] for facts in dict.fromkeys(it.facts for it in lines)]
    return "\n".join(text for table in comparable for text in _table(sorted(table, key=_order), against))


def _order(line: Line) -> tuple[Any, ...]:
    """First variants without more positions; then scheme by scheme, tuned ones last."""
    build = line.build
    schemes = ["none", *dict.fromkeys(scheme for scheme, _ in SCHEMES)]
    return (
        build["reading"] == "late",
        build["checkpoint"] or "",
        bool(build["window"]),
        schemes.index(build["scheme"]),
        build["alpha"] or 0,
        build["log_n"],
        [BASELINE, "split", "chunks", "whole", "late"].index(build["reading"]),
        PRECISIONS.index(line.precision),
    )


def _table(lines: Sequence[Line], against: str) -> Iterator[str]:
    (baseline,) = (line for line in lines if line.variant == against)
    about = baseline.about
    numbers = {kind: sum(map(len, baseline.ranks[kind])) for kind in KINDS}
    yield (
        f"{TITLES[baseline.facts.corpus]}: {about['documents']} documents, median {about['tokens']['median']} tokens, "
        f"longest {about['tokens']['longest']}; {baseline.facts.model} up to {baseline.facts.max_len} tokens, "
        f"{baseline.facts.runner}, {about['date'][:10]}.\n"
    )
    yield "| | " + " | ".join(f"{kind} ({numbers[kind]})" for kind in KINDS) + " |"
    yield "|---" * (len(KINDS) + 1) + "|"
    for line in lines:
        other = baseline if line.precision == "float32" else _in_float32(line, lines)
        cells = [_cell(line, other, kind) for kind in KINDS]
        yield f"| {line.variant} | " + " | ".join(cells) + " |"
    yield ""


def _in_float32(line: Line, lines: Sequence[Line]) -> Line:
    (found,) = (other for other in lines if other.build == {**line.build, "precision": "float32"})
    return found


def _cell(line: Line, baseline: Line, kind: str) -> str:
    value = f"{line.mrr(kind).value:.3f}"
    if line is baseline:
        return value
    difference = line.difference(baseline, kind)
    return f"{value} ({difference.low:+.3f} to {difference.high:+.3f})"


def main() -> int:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help="what the benchmark wrote")
    parser.add_argument("--against", default=BASELINE, metavar="VARIANT", help="what differences are taken from")
    parser.add_argument("--precisions", action="store_true", help="the results of --runner openvino, not the others")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page with markers, to write the tables into")
    options = parser.parse_args()
    lines = [line for line in read_lines(options.results) if line.is_of_precisions == options.precisions]
    tables = markdown(lines, against=options.against)
    if options.write is None:
        print(tables)
        return 0
    before, _, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        parser.error(f"{options.write} lacks the markers {BEGIN} and {END}")
    options.write.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
