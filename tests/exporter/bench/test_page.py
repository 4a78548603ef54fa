"""bench.html is one file without scripts: charts as SVG, tables of all cases, and texts that never become markup."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hdexport.bench.page.figures import FIGURES
from hdexport.bench.results.result import BenchResult, ModelChange, RunStatus
from support.sample_results import BATCHES, MEASURED, OURS, SENTENCE, TORCH, sample_result, without_change

pytest.importorskip("altair", reason="the page's charts are drawn by altair: pip install 'hdexport[bench]'")

from hdexport.bench.page.html import write_page

NASTY = "<script>document.title='taken'</script> & \"quotes\" </script>"


class Parsed(HTMLParser):
    """Elements and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []
        self.links += [str(values[name]) for name in ("href", "src") if values.get(name)]

    def handle_data(self, data: str) -> None:
        self.text += data


def of_one_batch(result: BenchResult) -> BenchResult:
    return dataclasses.replace(result, cases=tuple(case for case in result.cases if case.batch == BATCHES[0]))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "bench.html"
    write_page(path, without_change(sample_result(), ModelChange.ATTENTION, TORCH))
    return path.read_text()


def picture(page: str, chart: str) -> str:
    """SVG of a chart."""
    found = re.search(rf'<figure id="chart-{chart}">(.*?)</figure>', page, re.DOTALL)
    assert found, chart
    return found[1]


def test_every_chart_has_one_line_per_series(page: str) -> None:
    for batch in BATCHES:
        for figure in FIGURES:
            drawn = picture(page, f"{figure.key}-{batch}")
            assert drawn.count('class="mark-line role-mark') == len(MEASURED)


def test_the_page_loads_nothing_and_runs_nothing(page: str) -> None:
    parsed = Parsed(page)
    assert "script" not in parsed.tags
    assert [link for link in parsed.links if not link.startswith("#")] == []
    assert "default-src 'none'" in page


def test_the_tables_have_every_case_and_the_notes_say_how_outputs_differ(page: str) -> None:
    result = sample_result()
    parsed = Parsed(page)
    for batch in BATCHES:
        table = page[page.index(f'<table id="table-{batch}"') :].partition("</table>")[0]
        assert table.count('<th scope="row"') == sum(case.batch == batch for case in result.cases)
        assert table.count('class="badge wrong"') == sum(
            case.batch == batch and case.series == "optimum" and case.status is RunStatus.OK and case.tokens > 512
            for case in result.cases
        )
    notes = re.sub(r"\s+", " ", parsed.text)
    assert "optimum: outputs are wrong: max abs error 0.5, min cosine 0.62; tolerance: " in notes
    assert f"{TORCH}: outputs differ by the requested change of attention: max abs error 0.35, min cosine 0.81" in notes
    assert f"{SENTENCE}: sentence-transformers is not installed. Install it with: pip install" in notes
    assert f"divided by the median latency of {OURS} in this run" in notes
    assert all(value in parsed.text for value in result.environment.values())
    assert result.command in parsed.text


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    result = of_one_batch(sample_result(lengths=(1024,)))
    series = tuple(
        dataclasses.replace(
            each, name=NASTY if each.name == OURS else each.name, bundle=NASTY, model=NASTY, remark=NASTY
        )
        for each in result.series
    )
    cases = tuple(
        dataclasses.replace(case, series=NASTY if case.series == OURS else case.series) for case in result.cases
    )
    failed = dataclasses.replace(
        cases[1], status=RunStatus.FAILED, reason=NASTY, latency=None, error=None, memory=None, tokens_per_s=None
    )
    result = dataclasses.replace(
        result, series=series, cases=(cases[0], failed, *cases[2:]), command=NASTY, environment={NASTY: NASTY},
        notes=(NASTY,),
    )  # fmt: skip
    write_page(tmp_path / "bench.html", result)
    parsed = Parsed((tmp_path / "bench.html").read_text())
    assert "script" not in parsed.tags
    assert parsed.text.count(NASTY) > 8


def test_every_id_is_used_once_and_a_run_without_cases_has_no_charts(page: str, tmp_path: Path) -> None:
    write_page(tmp_path / "bench.html", dataclasses.replace(sample_result(), cases=(), environment={}))
    for text, has_charts in ((page, True), ((tmp_path / "bench.html").read_text(), False)):
        ids = [name for name in Parsed(text).ids if name.startswith(("chart-", "table-"))]
        assert len(set(ids)) == len(ids)
        assert bool(ids) == has_charts
