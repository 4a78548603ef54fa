"""The outcome of a verification on the terminal and on a pipe: a table, and a line for each skipped comparison."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from hdruntime.bundle.verification import Case, Skip, SkipCause, Status, VerificationRecord

if TYPE_CHECKING:
    from hdexport.support.check import Check
    from hdruntime.bundle.manifest import Fp16Overflow

COLUMNS = ("graph", "precision", "status", "cases", "max abs error", "min cosine", "tolerance, or why skipped")

_PIPED_WIDTH = 1000
"""Columns of a table that is not printed on a terminal: every row stays on one line, for grep."""


def print_table(
    title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, right: tuple[str, ...] = ()
) -> None:
    """Print a title and a table without lines; cells wrap on a terminal only."""
    from rich.console import Console
    from rich.table import Table

    # No markup: "[PAD]" is a token, not a style.
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in right else "left")
    for row in rows:
        table.add_row(*row)
    with console.capture() as captured:
        if title:
            console.print(title, style="bold")
        console.print(table)
    # The last column is padded to its widest cell, which copies badly. Flushed here, because rich ends the process
    # where its own flush finds no reader.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def print_verification(record: VerificationRecord, fp16_overflow: Fp16Overflow | None, *, title: str = "") -> None:
    """Print the table of a verification and what is below it."""
    print_table(title, COLUMNS, rows(record))
    for line in notes(record, fp16_overflow):
        print(line, flush=True)


def rows(record: VerificationRecord) -> Iterator[tuple[str, ...]]:
    """Yield the cells of `COLUMNS` for each graph; a graph that was not compared has the status SKIP and reasons."""
    for name, graph in record.graphs.items():
        error = "not finite" if graph.max_abs_error is None else f"{graph.max_abs_error:.2e}"
        cosine = "-" if graph.min_cosine is None else f"{graph.min_cosine:.6f}"
        cases = f"{graph.checks}" if graph.status is Status.PASS else f"{graph.checks - graph.passed} of {graph.checks}"
        detail = str(graph.tolerance) + (f"; in {graph.parts} parts" if graph.parts > 1 else "")
        yield name, graph.precision, graph.status.value, cases, error, cosine, detail
    reasons: dict[str, list[str]] = {}
    for skip in filter(functools.partial(_is_whole_graph, record), record.skipped):
        reasons.setdefault(skip.graph or "", []).append(_reason(skip))
    for name, given in reasons.items():
        yield name, "-", Status.SKIP.value, "0", "-", "-", "; ".join(dict.fromkeys(given))


def notes(record: VerificationRecord, fp16_overflow: Fp16Overflow | None) -> Iterator[str]:
    """Yield a line for each reason to skip cases, for the float16 range, and for each measurement."""
    groups: dict[Skip, list[Skip]] = {}
    for skip in record.skipped:
        if _is_whole_graph(record, skip):
            continue
        groups.setdefault(dataclasses.replace(skip, graph=None, case=None, needed=None), []).append(skip)
    for skips in groups.values():
        yield f"{Status.SKIP.value}  {_subject(skips)}: {_reason(max(skips, key=lambda skip: skip.needed or 0))}"
    if fp16_overflow is not None:
        yield f"float16 range: {overflow_text(fp16_overflow)}"
    yield from record.information


def _is_whole_graph(record: VerificationRecord, skip: Skip) -> bool:
    """Whether the skipped graph was not compared at all, so that the table has a row with the reason."""
    return skip.graph is not None and skip.graph not in record.graphs


def outcome_line(outcome: Check | Skip) -> str:
    """One check, or one skipped comparison, in a line."""
    if isinstance(outcome, Skip):
        return f"{Status.SKIP.value}  {_subject([outcome])}: {_reason(outcome)}"
    case = _case(outcome.case) if outcome.text is None else f"{outcome.text}, {outcome.case.tokens} tokens"
    parts = [
        f"{outcome.status.value}  {outcome.graph}  {outcome.precision.value}  {case}",
        f"max abs error {outcome.max_abs_error:.2e}",
        f"min cosine {outcome.min_cosine:.6f}",
        f"tolerance {outcome.tolerance}",
    ]
    if outcome.samples is not None:
        parts.append(f"logits at {outcome.samples} tokens, their input at all")
    if outcome.failed_outputs:
        parts.append(f"failed: {', '.join(outcome.failed_outputs)}")
    parts += outcome.wrong_decisions
    if outcome.error is not None:
        parts.append(f"error: {outcome.error}")
    return "  ".join(parts)


def overflow_text(overflow: Fp16Overflow) -> str:
    """The largest activation of a float16 graph, in words."""
    largest = "infinity or NaN" if overflow.largest is None else f"{overflow.largest:,.5g}"
    where = f"{overflow.operator} {overflow.node}" + (f" of {overflow.module}" if overflow.module else "")
    tokens = ", ".join(map(str, overflow.tokens))
    return f"largest activation {largest}, limit {overflow.limit:,.0f} ({where}, {overflow.text} of {tokens} tokens)"


def _subject(skips: list[Skip]) -> str:
    graphs = ", ".join(dict.fromkeys(skip.graph for skip in skips if skip.graph is not None)) or "all graphs"
    cases = list(dict.fromkeys(skip.case for skip in skips if skip.case is not None))
    if not cases:
        return graphs
    if len(cases) == 1:
        return f"{graphs}, {_case(cases[0])}"
    tokens = sorted({case.tokens for case in cases})
    lengths = f"{tokens[0]} to {tokens[-1]}" if len(tokens) > 1 else f"{tokens[0]}"
    return f"{graphs}, {len(cases)} cases of {lengths} tokens"


def _case(case: Case) -> str:
    return f"batch {case.batch}, {case.tokens} tokens, padding {case.padding}"


def _reason(skip: Skip) -> str:
    texts = {
        SkipCause.MAX_LENGTH: f"lengths above {skip.limit} tokens; compare them with --longest {skip.needed}",
        SkipCause.OPERATIONS: f"a build compares up to {skip.limit} tokens; for more: hdexport verify BUNDLE",
        SkipCause.MEMORY: f"outputs and attention scores take {_gib(skip.needed)}, limit {_gib(skip.limit)}",
        SkipCause.WEIGHTS: f"a session takes {_gib(skip.needed)}, limit {_gib(skip.limit)}: --verify-memory",
        SkipCause.ENGINE_PROFILE: f"the engine's profiles end at {skip.limit} tokens",
        SkipCause.NO_GPU: f"needs an NVIDIA GPU: hdexport verify BUNDLE --backend {skip.backend}",
        SkipCause.BACKEND: f"{skip.backend} cannot run it on this machine. {skip.detail}",
        SkipCause.PRECISION: "computes in another precision than --precision",
        SkipCause.NO_KERNEL: f"{skip.detail}",
        SkipCause.NOT_INSTALLED: f"not installed: {skip.detail}",
        SkipCause.HIDDEN_DECISIONS: "PyTorch cannot follow its decisions; only float32 graphs expose them",
        SkipCause.LEFT_PADDING: f"no padding on the left: {skip.detail}",
        SkipCause.SLOW_IMPORT: "loading it takes as long as the build: hdexport verify BUNDLE",
        SkipCause.LIBRARY: f"{skip.detail}",
        SkipCause.NO_TEXT_FITS: f"no text fits in {skip.limit} tokens beside the special tokens",
        SkipCause.UNTRUSTED_CODE: "not run without --trust-remote-code",
        SkipCause.REBUILT: "rebuilt since the comparison: hdexport verify BUNDLE",
    }
    return texts[skip.cause]


def _gib(size_bytes: int | None) -> str:
    return f"{(size_bytes or 0) / 2**30:.2g} GiB"
