"""Charts hold every case, exactly where it belongs, and their series are told apart by everybody."""

from __future__ import annotations

import dataclasses
import itertools
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("altair", reason="charts are drawn by altair: pip install 'hdexport[bench]'")

from hdexport.bench.page.chart_rows import chart_rows
from hdexport.bench.page.charts import Look, chart, write_pngs
from hdexport.bench.page.figures import FIGURES, Figure, describe
from hdexport.bench.page.palette import DARK_COLOURS, LIGHT_COLOURS, SeriesStyle
from hdexport.bench.results.result import BenchResult, CaseResult, PeakMemory, Status
from support.sample_results import BATCHES, OPTIMUM, OURS, TORCH, sample_result, with_cases

FIGURE = {figure.key: figure for figure in FIGURES}
LOOK = Look(series=LIGHT_COLOURS, ink="#000000", wrong="#ff0000", has_legend=True)


def with_errors(value: float | None) -> BenchResult:
    """Every answer is off by that."""

    def change(case: CaseResult) -> CaseResult:
        if case.error is None:
            return case
        return dataclasses.replace(case, error=dataclasses.replace(case.error, max_abs_error=value, passed=False))

    return with_cases(sample_result(), change)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_every_case_is_a_point_at_its_value_or_a_mark_at_the_edge(figure: Figure, batch: int) -> None:
    result = sample_result()
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


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
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


def test_no_error_at_all_stands_below_all_others_and_is_called_0() -> None:
    rows = chart_rows(sample_result(), FIGURE["error"], 1)
    assert rows is not None
    zeros = {row["y"] for row in rows.points if row["series"] == TORCH}
    assert zeros == {rows.zero}
    assert 10 * rows.zero <= min(row["y"] for row in rows.points if row["series"] != TORCH)
    assert {row["detail_0"] for row in rows.points if row["series"] == TORCH} == {"0"}
    drawn = chart(sample_result(), FIGURE["error"], 1, LOOK)
    assert drawn is not None
    axis = drawn.to_dict()["layer"][0]["encoding"]["y"]["axis"]
    assert axis["values"][0] == rows.zero
    assert axis["labelExpr"].startswith("datum.index == 0 ? '0' : ")


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


def test_memory_is_the_gpus_where_there_is_one_and_growth_is_not_shown() -> None:
    def on_gpu(case: CaseResult) -> CaseResult:
        memory = PeakMemory(rss_bytes=9_000_000_000, growth_bytes=5, vram_bytes=2_000_000_000)
        return dataclasses.replace(case, memory=memory) if case.memory else case

    result = with_cases(sample_result(), on_gpu)
    rows = chart_rows(result, FIGURE["memory"], 1)
    assert rows is not None
    assert {row["y"] for row in rows.points} == {2000.0}
    assert chart_rows(result, FIGURE["growth"], 1) is None
    assert chart(result, FIGURE["growth"], 1, LOOK) is None


def test_a_chart_filters_by_one_parameter_and_shows_the_lengths_that_were_measured() -> None:
    drawn = chart(sample_result(), FIGURE["latency"], 1, LOOK)
    assert drawn is not None
    spec = drawn.to_dict()
    assert spec["params"] == [{"name": "shown", "value": [True] * 6}]
    assert all("shown[datum.i]" in layer["transform"][0]["filter"] for layer in spec["layer"])
    (axis, *_) = [layer["encoding"]["x"]["axis"] for layer in spec["layer"]]
    assert axis["values"] == [512, 1024, 2048, 4096, 8192]
    assert spec["layer"][0]["encoding"]["x"]["scale"]["base"] == 2


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-7])
def test_an_axis_of_one_value_and_one_length_has_an_extent(value: float) -> None:
    result = with_errors(value)
    result = dataclasses.replace(result, cases=tuple(case for case in result.cases if case.tokens == 1024))
    rows = chart_rows(result, FIGURE["error"], 1)
    assert rows is not None
    assert 0 < rows.domain[0] <= (value or rows.zero or 0) <= rows.domain[1]
    assert rows.domain[1] > 2 * rows.domain[0]
    drawn = chart(result, FIGURE["error"], 1, LOOK)
    assert drawn is not None
    low, high = drawn.to_dict()["layer"][0]["encoding"]["x"]["scale"]["domain"]
    assert low < 1024 < high


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


# Colours

VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB."""

LEAST_DIFFERENCE = 14.0
"""CIE 1976 distance of two colours; 2.3 is just noticeable side by side."""


def linear(colour: str) -> npt.NDArray[np.float64]:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    weak, strong = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (strong + 0.05) / (weak + 0.05)


def closest(colours: tuple[str, ...], vision: str) -> float:
    seen = [lab(np.array(VISION[vision]) @ linear(colour)) for colour in colours]
    return min(float(np.linalg.norm(one - other)) for one, other in itertools.combinations(seen, 2))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [LIGHT_COLOURS, DARK_COLOURS], ids=["light", "dark"])
def test_colour_blind_people_tell_the_series_apart(colours: tuple[str, ...], vision: str) -> None:
    assert closest(colours, vision) > LEAST_DIFFERENCE


def test_that_colours_which_only_some_tell_apart_would_not_pass() -> None:
    pair = ("#d1520a", "#8a6a00")
    assert closest(pair, "normal") > LEAST_DIFFERENCE > closest(pair, "protanopia")


@pytest.mark.parametrize(("colours", "paper"), [(LIGHT_COLOURS, "#ffffff"), (DARK_COLOURS, "#12161c")])
def test_lines_stand_out_from_their_background(colours: tuple[str, ...], paper: str) -> None:
    assert min(contrast(colour, paper) for colour in colours) >= 3


def test_no_two_of_36_series_look_the_same_and_of_six_each_part_differs() -> None:
    styles = [SeriesStyle.of(index) for index in range(36)]
    assert len(set(styles)) == 36
    for part in ("colour", "dash", "shape"):
        assert len({getattr(style, part) for style in styles[:6]}) == 6
