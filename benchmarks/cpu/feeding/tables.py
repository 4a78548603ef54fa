"""Tables of what was measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.cpu.feeding.cases import LABELS, SIMILARITY, Case, Settings
from benchmarks.cpu.feeding.timeline import LANES

CORES = 16
"""Of the machine whose shares are modelled."""

_FASTER = 5
"""The second GPU of the model is so many times as fast."""

Found = Mapping[Case, Mapping[str, Any]]


def width(calls: Sequence[Sequence[int]], cores: int) -> float:
    """How many of so many cores have work on average while texts are tokenised, by the sizes of each call's texts."""
    work = sum(map(sum, calls))
    return work / sum(max(max(sizes), sum(sizes) / cores) for sizes in calls if sizes)


def modelled(python_s: float, others_s: float, width: float, gpu_s: float) -> tuple[float, float]:
    """Share of the time in which a GPU computes, of the seconds of each: after the CPU, and beside it.

    Python's threads share a core, and the other threads have `width` of them.
    """
    cpu_s = python_s + others_s / width
    return gpu_s / (cpu_s + gpu_s), min(1.0, gpu_s / cpu_s)


def _table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(cells)} |"


def _by_corpus(found: Found, cell: Callable[[Mapping[str, Any]], str], title: str) -> Iterator[str]:
    """A row for each way, and a column for each corpus."""
    corpora = list(dict.fromkeys(case.corpus for case in found))
    cells = {(case.bundle, case.way, case.corpus): cell(figures) for case, figures in found.items()}
    rows = {
        (f"{bundle}: " if bundle != SIMILARITY else "") + LABELS.get(way, way): [
            cells.get((bundle, way, corpus), "") for corpus in corpora
        ]
        for bundle, way in dict.fromkeys((case.bundle, case.way) for case in found)
    }
    return _table([title, *corpora], rows)


def per_million(figures: Mapping[str, Any]) -> float:
    """The best CPU seconds per million tokens."""
    return float(min(figures["cpu_s"]) / figures["tokens"] * 1e6)


def _cpu_table(found: Found, settings: Settings) -> Iterator[str]:
    return _by_corpus(found, lambda figures: f"{per_million(figures):.2f}", "CPU seconds per million tokens")


def _share_table(found: Found, settings: Settings) -> Iterator[str]:
    title = f"share of {settings.tokens_per_second:g} tokens/s, {settings.in_flight} in flight"
    return _by_corpus(found, lambda figures: f"{max(figures['share']):.0%}", title)


def _serve_table(found: Found, settings: Settings) -> Iterator[str]:
    return _by_corpus(found, lambda figures: f"{per_million(figures):.1f}", "server's CPU seconds, texts a request")


def _batches_table(found: Found, settings: Settings) -> Iterator[str]:
    rows = {
        f"{case.corpus}, {LABELS.get(case.way, case.way)}, {int(size) // 1024}k": [
            str(each["batches"]), f"{each['padding']:.1%}", str(each["shapes"]), str(each["lengths"])
        ]
        for case, figures in found.items()
        for size, each in figures["of_batch_tokens"].items()
    }  # fmt: skip
    return _table(["batch tokens", "batches", "padding", "shapes", "lengths"], rows)


def _cores_table(found: Found, settings: Settings) -> Iterator[str]:
    rows = {}
    for case, figures in found.items():
        millions = figures["tokens"] / 1e6
        python_s, others_s = figures["python_s"] / millions, figures["others_s"] / millions
        cells = [f"{python_s:.2f}", f"{others_s:.2f}", f"{figures['width']:.1f}"]
        for rate in (settings.tokens_per_second, _FASTER * settings.tokens_per_second):
            gpu_s = 1e6 / (1 - figures["padding"]) / rate
            cells.append("; ".join(f"{each:.0%}" for each in modelled(python_s, others_s, figures["width"], gpu_s)))
        rows[case.corpus] = cells
    rates = [f"{factor * settings.tokens_per_second:g} tokens/s: after; beside" for factor in (1, _FASTER)]
    return _table([f"a job on {CORES} cores", "Python s", "others s", "width", *rates], rows)


def _stages_table(found: Found, settings: Settings) -> Iterator[str]:
    rows = {case.corpus: [f"{figures['shares'][lane]:.1%}" for lane in LANES] for case, figures in found.items()}
    return _table(["share of a job's time", *LANES], rows)


TABLES: Mapping[str, Callable[[Found, Settings], Iterator[str]]] = {
    "cpu": _cpu_table,
    "share": _share_table,
    "batches": _batches_table,
    "serve": _serve_table,
    "cores": _cores_table,
    "stages": _stages_table,
}
