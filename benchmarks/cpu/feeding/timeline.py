"""What the threads of a process do over time, by looking at them every millisecond; and a picture of it.

A look reads where each Python thread stands, by which file: nothing of the program is replaced, and a file that is
split or a function with another name changes nothing. A thread that waits stands in no file of `_LANES`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import hdruntime

if TYPE_CHECKING:
    from typing import Self

READING, TOKENIZING, ANSWERS, COMPUTING, WRITING = "reading", "tokenizing", "batches, answers", "computing", "writing"
LANES = (READING, TOKENIZING, ANSWERS, COMPUTING, WRITING)

_PACKAGE = f"{Path(hdruntime.__file__).parent}/"
_LANE_OF_FILE: Mapping[str, str] = {
    "jobs/row_reader.py": READING,
    "jobs/input": READING,
    "text/": TOKENIZING,
    "inference/": ANSWERS,
    "packing.py": ANSWERS,
    "tasks/": ANSWERS,
    "jobs/row_inference.py": ANSWERS,
    "jobs/vectors.py": ANSWERS,
    "backends/": COMPUTING,
    "jobs/": WRITING,
}
"""How the name of a file in the package begins -> what a thread does that stands there; the first that fits."""

_ENCODES = "encode"
"""A part of the names of functions of `tasks` that make tokens of texts."""

_WAITS = ("/threading.py", "/queue.py", "/stand_in.py", "concurrent/futures/_base.py")
_LOOK_SECONDS = 0.001
_GAP_SECONDS = 0.002
"""A shorter gap between two spans of a lane is not drawn."""

_PIXELS_A_SECOND, _LEAST_PIXELS, _MOST_PIXELS = 200, 240, 1600
"""Pictures of two short jobs have one scale."""


class Span(NamedTuple):
    """A time in which a thread did one thing, in seconds of `time.perf_counter`."""

    lane: str
    began: float
    ended: float


class Looking:
    """While this holds, a thread looks at all others.

    Attributes:
        spans: what they did, in the order of their ends.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._ends = threading.Event()
        self._looking = threading.Thread(target=self._look, name="looking", daemon=True)
        self._switch_seconds = sys.getswitchinterval()

    def __enter__(self) -> Self:
        # A thread that computes in Python lets the one that looks run after this time.
        sys.setswitchinterval(_LOOK_SECONDS / 2)
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._looking.join()
        sys.setswitchinterval(self._switch_seconds)

    def _look(self) -> None:
        own, last = threading.get_ident(), time.perf_counter()
        doing: dict[int, Span] = {}
        while not self._ends.wait(_LOOK_SECONDS):
            now = time.perf_counter()
            frames = sys._current_frames()
            for thread in {*doing, *frames} - {own}:
                lane, since = lane_of(frames.get(thread)), doing.get(thread)
                if since is not None and lane == since.lane:
                    doing[thread] = since._replace(ended=now)
                    continue
                if since is not None:
                    self.spans.append(doing.pop(thread))
                if lane is not None:
                    doing[thread] = Span(lane, last, now)
            last = now
        self.spans += doing.values()


def lane_of(frame: FrameType | None) -> str | None:
    """What a thread does that stands there; None where it waits, or does nothing of a job."""
    if frame is not None and frame.f_code.co_filename.endswith(_WAITS):
        return None
    found = None
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(_PACKAGE):
            inside = file.removeprefix(_PACKAGE)
            if inside.startswith("tasks/") and _ENCODES in name:
                return TOKENIZING
            found = found or next((lane for start, lane in _LANE_OF_FILE.items() if inside.startswith(start)), None)
            if found is not None and found != ANSWERS:
                return found
        frame = frame.f_back
    return found


def merged(spans: Iterable[Span], *, gap: float = 0.0) -> list[Span]:
    """The spans of each lane, of all threads together; those that overlap or nearly touch are one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.lane, each.began)):
        last = found[-1] if found else None
        if last is not None and last.lane == span.lane and span.began <= last.ended + gap:
            found[-1] = last._replace(ended=max(last.ended, span.ended))
        else:
            found.append(span)
    return found


def shares(spans: Iterable[Span], *, began: float, ended: float) -> dict[str, float]:
    """Share of a time in which any thread did what a lane is for."""
    found = dict.fromkeys(LANES, 0.0)
    for span in merged(spans):
        found[span.lane] += max(0.0, min(span.ended, ended) - max(span.began, began)) / (ended - began)
    return found


def picture(spans: Sequence[Span], *, began: float, ended: float, title: str, subtitle: Sequence[str]) -> Any:
    """The lanes of a time, over seconds: a chart."""
    import altair as alt

    from hdexport.bench.page.charts import LIGHT_COLOURS

    of_lanes = shares(spans, began=began, ended=ended)
    label = {lane: f"{lane}, {share:.0%}" for lane, share in of_lanes.items()}
    points = [
        {
            "lane": label[span.lane],
            "from": round(max(span.began, began) - began, 4),
            "to": round(min(span.ended, ended) - began, 4),
        }
        for span in merged(spans, gap=_GAP_SECONDS)
        if span.ended > began and span.began < ended
    ]
    order = list(label.values())
    width = min(max(_LEAST_PIXELS, _PIXELS_A_SECOND * (ended - began)), _MOST_PIXELS)
    chart = alt.Chart(alt.InlineData(values=points), width=width, height=150).mark_bar(height=18)
    return (
        chart.encode(
            x=alt.X("from:Q", title="seconds", scale=alt.Scale(domain=[0, ended - began], nice=False)),
            x2="to:Q",
            y=alt.Y("lane:N", sort=order, title=None, scale=alt.Scale(domain=order)),
            color=alt.Color(
                "lane:N", legend=None, scale=alt.Scale(domain=order, range=list(LIGHT_COLOURS[: len(order)]))
            ),
        )
        .properties(title=alt.TitleParams(title, subtitle=list(subtitle), anchor="start"))
        .configure(background="white", font="'DejaVu Sans', sans-serif", axis={"labelLimit": 300})
    )


def save(chart: Any, target: Path) -> None:
    """Write a chart as SVG."""
    import vl_convert

    target.write_text(vl_convert.vegalite_to_svg(chart.to_json()), encoding="utf-8")
