"""A picture of the retrieval benchmark's results: MRR@10 and its interval per variant, a panel per kind of query.

Usage: python -m benchmarks.quality.picture benchmarks/results/quality.jsonl docs/positions-retrieval.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from benchmarks.quality.results import BASELINE, TITLES, Line, read_lines
from benchmarks.quality.retrieval import CHUNK
from hdexport.bench.page.charts import LIGHT_COLOURS
from hdexport.quality.queries import KINDS

_TITLES = {"name": "by its title", "first": "by its first sentence", "later": "by a sentence after token 512"}
_INK = "#22262b"
_PANEL_WIDTH, _ROW_HEIGHT, _SCALE = 205, 19, 1.5
"""Pixels at 1: the whole is about 800 wide, and readable there."""


def picture(lines: Sequence[Line], corpus: str) -> alt.HConcatChart:
    """The panels of one corpus; variants from the best for later sentences to the worst."""
    lines = [line for line in lines if line.facts.corpus == corpus and not line.is_of_precisions]
    failed = [line for line in lines if _fails(line, lines)]
    lines = [line for line in lines if line not in failed]
    order = [_label(line) for line in sorted(lines, key=lambda line: -line.mrr("later").value)]
    rows = [row for line in lines for row in _rows(line)]
    panels = [_panel([row for row in rows if row["kind"] == kind], kind, order) for kind in KINDS]
    about = lines[0].about
    title = alt.TitleParams(
        f"Finding one of {about['documents']} long documents, MRR@10 with intervals of 95 %",
        subtitle=[
            f"{lines[0].facts.model}, {TITLES[corpus]}, median {about['tokens']['median']} tokens; dashed: truncated",
            "blue: truncated, split or in chunks; orange: whole, not trained for it; violet: tuned",
            *(["not drawn, below half of truncated: " + "; ".join(map(_label, failed))] if failed else []),
        ],
        anchor="start",
        offset=12,
    )
    return alt.hconcat(*panels, spacing=14, title=title).configure(
        background="white",
        font="'DejaVu Sans', sans-serif",
        view={"stroke": None},
        axis={"labelColor": _INK, "titleColor": _INK, "labelFontSize": 11, "labelLimit": 400, "gridOpacity": 0.3},
        title={"color": _INK, "subtitleColor": _INK, "fontSize": 13},
    )


def _fails(line: Line, lines: Sequence[Line]) -> bool:
    """Whether a score is so low that an axis which shows it shows no other difference."""
    (baseline,) = (line for line in lines if line.variant == BASELINE)
    return any(line.mrr(kind).value < baseline.mrr(kind).value / 2 for kind in KINDS)


def _label(line: Line) -> str:
    return line.variant.replace(f":{CHUNK}, the best", "")


def _rows(line: Line) -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        mean = line.mrr(kind)
        group = "tuned" if line.build["checkpoint"] else "chunks" if line.build["scheme"] == "none" else "whole"
        yield {"variant": _label(line), "kind": kind, "group": group, **vars(mean)}


def _panel(rows: Sequence[dict[str, Any]], kind: str, order: Sequence[str]) -> alt.LayerChart:
    lows, highs = zip(*((row["low"], row["high"]) for row in rows), strict=True)
    axis = None if kind != KINDS[0] else alt.Axis(title=None, ticks=False, domain=False)
    y = alt.Y("variant:N", sort=list(order), axis=axis)
    scale = alt.Scale(domain=[min(lows) - 0.02, max(highs) + 0.02], nice=True, zero=False)
    groups = ["chunks", "whole", "tuned"]
    colour = alt.Color("group:N", scale=alt.Scale(domain=groups, range=list(LIGHT_COLOURS[:3])), legend=None)
    base = alt.Chart(alt.Data(values=list(rows))).encode(y=y, color=colour)
    (baseline,) = (row["value"] for row in rows if row["variant"] == BASELINE)
    reference = alt.Chart(alt.Data(values=[{"x": baseline}])).mark_rule(strokeDash=[4, 3], color=_INK, opacity=0.6)
    return alt.layer(
        reference.encode(x=alt.X("x:Q", scale=scale)),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=None, scale=scale), x2="high:Q"),
        base.mark_point(filled=True, size=55, opacity=1).encode(x=alt.X("value:Q", scale=scale)),
    ).properties(
        width=_PANEL_WIDTH,
        height=_ROW_HEIGHT * len(order),
        title=alt.TitleParams(_TITLES[kind], fontSize=12, anchor="start"),
    )


def main() -> int:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="what the benchmark wrote")
    parser.add_argument("picture", type=Path, help="the .png file to write")
    parser.add_argument("--corpus", default="debian", help="of the results (default: debian)")
    options = parser.parse_args()
    drawn = picture(read_lines(options.results), options.corpus)
    options.picture.write_bytes(vl_convert.vegalite_to_png(drawn.to_json(), scale=_SCALE))
    return 0


if __name__ == "__main__":
    sys.exit(main())
