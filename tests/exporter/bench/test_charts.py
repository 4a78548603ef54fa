"""Charts hold every case, exactly where it belongs, and their series are told apart by everybody."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="charts are drawn by altair: pip install 'hdexport[bench]'")

from hdexport.bench.page.charts import _DIFFERS, _RING_AREA, _WRONG, chart, chart_rows, write_pngs
from hdexport.bench.page.figures import FIGURES, Figure
from hdexport.bench.results.result import BenchResult, CaseResult, ModelChange, RunStatus
from support.sample_results import OPTIMUM, TORCH, sample_result, with_cases, without_change

FIGURE = {figure.key: figure for figure in FIGURES}


def with_errors(value: float | None) -> BenchResult:
    """Every answer is off by that."""

    def change(case: CaseResult) -> CaseResult:
        if case.error is None:
            return case
        return dataclasses.replace(case, error=dataclasses.replace(case.error, max_abs_error=value, passed=False))

    return with_cases(sample_result(), change)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_every_case_is_a_point_at_its_value_or_a_mark_at_the_edge(figure: Figure) -> None:
    result, batch = sample_result(), 8
    rows = chart_rows(result, figure, batch)
    assert rows is not None
    values = {(row["series"], row["tokens"]): row["y"] for row in rows.points}
    for case in result.cases:
        value = figure.value(case)
        if case.batch == batch and value:
            assert values[case.series, case.tokens] == value
    marks = {(row["series"], row["tokens"]): row["what"] for row in rows.failures}
    assert marks == {
        (case.series, case.tokens): case.status.value
        for case in result.cases
        if case.batch == batch and case.status is not RunStatus.OK
    }
    assert len(values) + len(marks) == sum(case.batch == batch for case in result.cases)


@pytest.mark.parametrize("figure", [FIGURE["latency"], FIGURE["error"]], ids=lambda figure: figure.key)
def test_everything_is_inside_the_axes_and_failures_are_apart(figure: Figure) -> None:
    rows = chart_rows(sample_result(), figure, 8)
    assert rows is not None
    ends = [row[name] for row in rows.points for name in ("y", "high") if row[name] is not None]
    assert all(rows.domain[0] <= value <= rows.domain[1] for value in ends)
    assert [row["rank"] for row in rows.failures if row["tokens"] == 8192] == [0, 1, 2]
    drawn = chart(sample_result(), figure, 8)
    assert drawn is not None
    layers = drawn.to_dict()["layer"]
    # The axis leaves room for all three, at the edge where bad values are.
    places = [layer["encoding"]["y"].get("value") for layer in layers]
    pixels = sorted({int(place if figure.fails_high else place["expr"][9:]) for place in places if place})
    assert len(pixels) == 3
    assert layers[0]["encoding"]["y"]["scale"]["padding"] > pixels[-1]


def test_an_output_that_is_not_finite_is_marked_at_the_edge() -> None:
    rows = chart_rows(with_errors(None), FIGURE["error"], 1)
    assert rows is not None
    assert rows.points == []
    assert {row["what"] for row in rows.failures} == {"not finite", "failed"}


def test_outputs_beyond_the_tolerance_are_ringed_in_every_chart() -> None:
    result = without_change(sample_result(), ModelChange.ATTENTION, TORCH)
    for figure in FIGURES:
        rows = chart_rows(result, figure, 1)
        assert rows is not None
        states = {(row["series"], row["tokens"]): row["state"] for row in rows.points}
        assert {case for case, state in states.items() if state == "wrong"} == {
            (OPTIMUM, tokens) for tokens in (1024, 2048, 4096, 8192)
        }
        assert {series for (series, _), state in states.items() if state == "differs"} == {TORCH}
        drawn = chart(result, figure, 1)
        assert drawn is not None
        rings = [layer for layer in drawn.to_dict()["layer"] if layer["mark"].get("size") == _RING_AREA]
        assert [layer["encoding"]["color"]["value"] for layer in rings] == [_WRONG, _DIFFERS]


def test_pngs_are_written_one_a_figure_and_batch_at_the_size_of_a_slide(tmp_path: Path) -> None:
    result = sample_result(lengths=(512, 1024))
    one = tuple(case for case in result.cases if case.batch == 8)
    paths = write_pngs(tmp_path, dataclasses.replace(result, cases=one))
    assert [path.name for path in paths] == [f"{figure.key}-batch-8.png" for figure in FIGURES]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path in paths:
        header = path.read_bytes()[:24]
        width, height = struct.unpack(">II", header[16:])
        assert header.startswith(b"\x89PNG")
        assert width > 1600
        assert height > 800
