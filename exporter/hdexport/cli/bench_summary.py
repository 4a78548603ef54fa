"""What a benchmark found, as tables for the terminal."""

from __future__ import annotations

__all__ = ["SHORT_COLUMNS", "case_line", "cell_table", "figure_cells", "summary_parts"]

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hdexport.bench.results.columns import LATENCIES, columns_of
from hdexport.bench.results.figure_text import bytes_text, case_state, error_text, ms_text
from hdexport.bench.results.findings import findings
from hdexport.bench.results.result import BenchResult, CaseResult

_WIDE = 118
"""Columns of a terminal that has room for all figures."""

SHORT_COLUMNS = ("p50", "tokens/s", "memory", "error")
"""The most important figures."""


def case_line(case: CaseResult) -> str:
    """A finished case in one line."""
    where = f"{case.series}, {case.batch} x {case.tokens}"
    if case.latency is None:
        return f"{where}: {case.status.value}" + (f": {case.reason}" if case.reason else "")
    figures = [f"p50 {ms_text(case.latency.p50_ms)}", f"p95 {ms_text(case.latency.p95_ms)}"]
    columns = columns_of()
    figures += [f"{columns['tokens/s'].text(case)} tokens/s", columns["memory"].text(case)]
    figures += [f"error {error_text(case.error)}" if case.error else ""]
    figures += ["WRONG ANSWER"] if case_state(case) == "wrong" else []
    return f"{where}: {', '.join(filter(None, figures))}"


def figure_cells(case: CaseResult, names: Sequence[str], result: BenchResult | None = None) -> list[str]:
    """A case's cells in the columns of those figures; a case without figures says why in the first.

    Args:
        case: the case.
        names: names of figures, as `columns_of` has them.
        result: the result that ratios are taken in.
    """
    columns = columns_of(result)
    cells = {name: columns[name].text(case) for name in names}
    if case.latency is None:
        cells["p50"] = case.status.value
    if case_state(case) == "wrong":
        cells["error"] += " wrong"
    return list(cells.values())


def cell_table(columns: Sequence[str], *, title: str | None = None) -> Table:
    """An empty table; only its column ``series`` breaks lines."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", header_style="dim")
    for name in columns:
        is_text = name in ("series", "stopped by")
        header = f"{name} ms" if name in LATENCIES else name
        table.add_column(header, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def summary_parts(result: BenchResult, *, width: int) -> Iterator[RenderableType]:
    """The tables, one per batch size, the largest batches, and what did not run.

    Args:
        result: the measurement.
        width: columns of the terminal; a narrow one shows the most important figures only.
    """
    wide = ("p99", "mean", "sd") if width >= _WIDE else ()
    names = ["p50", "p95", *wide, "ratio", "tokens/s", "memory", "error"]
    names += ["roofline"] if width >= _WIDE and any(case.roofline for case in result.cases) else []
    for batch in result.batches:
        yield _cases_table(result, batch, names)
    if result.first_series is not None:
        yield Text(f"ratio: of the median latencies, to {result.first_series} in this run")
    if result.largest_batches:
        yield Text()
        yield _largest_batches(result)
    yield from (Text(": ".join(filter(None, finding))) for finding in findings(result))


def _cases_table(result: BenchResult, batch: int, names: Sequence[str]) -> Table:
    table = cell_table(["tokens", "series", *names], title=f"batch {batch}")
    for tokens in result.lengths:
        found = [result.case(series.name, batch, tokens) for series in result.series]
        cases = [case for case in found if case is not None]
        for case in cases:
            shown = str(tokens) if case is cases[0] else ""
            style = {"ok": "", "wrong": "red"}.get(case_state(case), "yellow")
            cells = [Text(cell, style=style) for cell in figure_cells(case, names, result)]
            table.add_row(shown, Text(case.series), *cells, end_section=case is cases[-1])
    return table


def _largest_batches(result: BenchResult) -> Table:
    budget = bytes_text(result.largest_batches[0].budget_bytes)
    table = cell_table(["tokens", "series", "batch", "peak", "stopped by"], title=f"largest batch within {budget}")
    for found in result.largest_batches:
        batch = f"{found.batch}" + ("" if found.is_limit else " or more")
        peak = "" if found.peak_bytes is None else bytes_text(found.peak_bytes)
        table.add_row(str(found.tokens), Text(found.series), batch, peak, Text(found.reason))
    return table
