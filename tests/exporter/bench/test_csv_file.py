"""bench.csv has one row per case, and one per series that could not run."""

from __future__ import annotations

import csv
import dataclasses

import pytest

from hdexport.bench.results.csv_file import COLUMNS, write_csv
from hdexport.bench.results.result import CaseResult, Latency, OutputError, PeakMemory, Roofline
from support.sample_results import OPTIMUM, OURS, PLAIN, SENTENCE, sample_result


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    path = tmp_path_factory.mktemp("csv") / "bench.csv"
    write_csv(path, sample_result())
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def row_of(rows: list[dict[str, str]], series: str, batch: int, tokens: int) -> dict[str, str]:
    (row,) = (row for row in rows if (row["series"], row["batch"], row["tokens"]) == (series, str(batch), str(tokens)))
    return row


def test_every_case_has_its_row_in_the_order_of_the_series(rows: list[dict[str, str]]) -> None:
    result = sample_result()
    names = [series.name for series in result.series]
    cases = sorted(result.cases, key=lambda case: names.index(case.series))
    assert [(row["series"], row["batch"], row["tokens"]) for row in rows[:-1]] == [
        (case.series, str(case.batch), str(case.tokens)) for case in cases
    ]


def test_figures_are_exact(rows: list[dict[str, str]]) -> None:
    case = sample_result().case(OURS, 8, 4096)
    assert case is not None
    assert case.latency is not None
    row = row_of(rows, OURS, 8, 4096)
    assert float(row["p95_ms"]) == case.latency.p95_ms
    assert float(row["tokens_per_s"]) == case.tokens_per_s
    assert (row["status"], row["reason"], row["passed"]) == ("ok", "", "True")
    assert row_of(rows, OPTIMUM, 8, 4096)["passed"] == "False"


def test_a_case_without_figures_has_its_reason_in_their_place(rows: list[dict[str, str]]) -> None:
    row = row_of(rows, PLAIN, 8, 8192)
    assert row["status"] == "OOM"
    assert row["reason"].startswith("its processes took 61.2 GB")
    assert {row[name] for name in COLUMNS[COLUMNS.index("p50_ms") :]} == {""}


def test_a_series_that_could_not_run_is_there_with_the_command_that_installs_it(rows: list[dict[str, str]]) -> None:
    assert rows[-1]["series"] == SENTENCE
    assert (rows[-1]["status"], rows[-1]["batch"], rows[-1]["tokens"]) == ("unavailable", "", "")
    assert "pip install sentence-transformers" in rows[-1]["reason"]


def test_every_figure_of_a_case_has_a_column() -> None:
    parts = (Latency, PeakMemory, OutputError, Roofline)
    figures = {field.name for part in parts for field in dataclasses.fields(part)} - {"rounds_p50_ms"}
    own = {field.name for field in dataclasses.fields(CaseResult)} - {"latency", "memory", "error", "roofline"}
    assert set(COLUMNS) == figures | own | {"runner", "bundle", "is_peer", "ratio_to_first"}
