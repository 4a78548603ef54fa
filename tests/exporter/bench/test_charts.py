"""Charts hold every case, exactly where it belongs, and their series are told apart by everybody."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

pytest.importorskip("altair", reason="charts are drawn by altair: pip install 'hdexport[bench]'")

from hdexport.bench.page.charts import LIGHT_COLOURS, Look, chart, chart_rows, write_pngs
from hdexport.bench.page.figures import FIGURES, Figure, describe
from hdexport.bench.results.result import BenchResult, CaseResult, Status
from support.sample_results import OPTIMUM, OURS, sample_result, with_cases

FIGURE = {figure.key: figure for figure in FIGURES}
LOOK = Look(series=LIGHT_COLOURS, ink="#000000", wrong="#ff0000", has_legend=True)


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
        if case.batch == batch and case.status is not Status.OK
    }
    assert len(values) + len(marks) == sum(case.batch == batch for case in result.cases)


@pytest.mark.parametrize("figure", [FIGURE["latency"], FIGURE["error"]], ids=lambda figure: figure.key)
def test_everything_is_inside_the_axes_and_failures_are_apart(figure: Figure) -> None:
    rows = chart_rows(sample_result(), figure, 8)
    assert rows is not None
    ends = [row[name] for row in rows.points for name in ("y", "high") if row[name] is not None]
    assert all(rows.domain[0] <= value <= rows.domain[1] for value in ends)
    assert [row["rank"] for row in rows.failures if row["tokens"] == 8192] == [0, 1, 2]
    drawn = chart(sample_result(), figure, 8, LOOK)
    assert drawn is not None
    layers = drawn.to_dict()["layer"]
    # The axis leaves room for all three, at the edge where bad values are.
    places = [layer["encoding"]["y"].get("value") for layer in layers]
    pixels = sorted({int(place if figure.fails_high else place["expr"][9:]) for place in places if place})
    assert len(pixels) == 3
    assert not figure.is_log or layers[0]["encoding"]["y"]["scale"]["padding"] > pixels[-1]


def test_an_output_that_is_not_finite_is_marked_at_the_edge() -> None:
    rows = chart_rows(with_errors(None), FIGURE["error"], 1)
    assert rows is not None
    assert rows.points == []
    assert {row["what"] for row in rows.failures} == {"not finite", "failed"}
    assert "not finite at 512 tokens" in describe(with_errors(None), FIGURE["error"], 1)


def test_wrong_answers_are_wrong_in_every_chart() -> None:
    for figure in FIGURES:
        rows = chart_rows(sample_result(), figure, 1)
        assert rows is not None
        wrong = {(row["series"], row["tokens"]) for row in rows.points if row["is_wrong"]}
        assert wrong == {(OPTIMUM, tokens) for tokens in (1024, 2048, 4096, 8192)}


def test_a_description_says_what_the_lines_do() -> None:
    result = sample_result(noise=0)
    text = describe(result, FIGURE["latency"], 8)
    assert text.startswith("Latency: median, whisker to p95, batch 8, over tokens. ")
    assert f"{OURS}: 635 ms at 512 tokens to 10,158 ms at 8192 tokens;" in text
    assert "timeout at 8192" in text


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
