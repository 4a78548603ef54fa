"""bench.html in a real browser: every chart has its series, they can be ticked, and no text is markup."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hdexport.bench.page.figures import FIGURES
from hdexport.bench.results.result import BenchResult, Status
from support.sample_results import BATCHES, COMPILED, MEASURED, OURS, SENTENCE, TORCH, sample_result

pytest.importorskip("altair", reason="the page's charts are drawn by altair: pip install 'hdexport[bench]'")

from hdexport.bench.page.html import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHARTS = [f"{figure.key}-{batch}" for batch in BATCHES for figure in FIGURES]

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


NASTY = "<script>document.title='taken'</script> & \"quotes\" </script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("needs chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "bench.html"
    write_page(path, sample_result())
    return path


def of_one_batch(result: BenchResult) -> BenchResult:
    """One batch size of a result, whose page has half as many charts."""
    cases = tuple(case for case in result.cases if case.batch == BATCHES[0])
    return dataclasses.replace(result, cases=cases, largest_batches=())


@pytest.fixture(scope="module")
def short_html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that is drawn quickly: one length, one batch size."""
    path = tmp_path_factory.mktemp("short") / "bench.html"
    write_page(path, of_one_batch(sample_result(lengths=(1024,))))
    return path


@dataclasses.dataclass
class Visit:
    """A page that is open, what it complained of and what it asked the network for."""

    page: Page
    complaints: list[str]
    requests: list[str]


@contextlib.contextmanager
def visit(browser: Browser, html: Path, *, width: int = 1280) -> Iterator[Visit]:
    page = browser.new_page(viewport={"width": width, "height": 900})
    found = Visit(page, [], [])
    page.on("console", lambda message: found.complaints.append(message.text))
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.route("**/*", lambda route: route.continue_() if route.request.url == html.as_uri() else route.abort())
    page.goto(html.as_uri())
    page.wait_for_function("document.documentElement.dataset.drawn", timeout=30_000)
    yield found
    page.close()


@pytest.fixture(scope="module")
def light(browser: Browser, html: Path) -> Iterator[Visit]:
    """The page as most see it; a test that changes it puts it back."""
    with visit(browser, html) as found:
        yield found


def points(page: Page, chart: str) -> int:
    """Marks of cases in a chart, rings around wrong answers not counted."""
    return page.locator(f"#chart-{chart} g.mark-symbol.role-mark path:not([stroke='var(--wrong)'])").count()


def lines(page: Page, chart: str) -> int:
    return page.locator(f"#chart-{chart} g.mark-line path").count()


def wait_for_lines(page: Page, chart: str, count: int) -> None:
    page.wait_for_function(f"document.querySelectorAll('#chart-{chart} g.mark-line path').length == {count}")


def missing(page: Page, result: BenchResult) -> list[str]:
    """Charts without one line per series and one mark per case."""
    cases = {batch: sum(case.batch == batch for case in result.cases) for batch in BATCHES}
    expected = {chart: (len(MEASURED), cases[int(chart.rpartition("-")[2])]) for chart in CHARTS}
    return [chart for chart in CHARTS if (lines(page, chart), points(page, chart)) != expected[chart]]


def test_every_chart_has_one_line_per_series_and_one_mark_per_case(light: Visit) -> None:
    assert missing(light.page, sample_result()) == []


def test_the_console_stays_empty_and_the_network_is_not_used(light: Visit, html: Path) -> None:
    assert light.complaints == []
    assert light.requests == [html.as_uri()]


def test_the_page_forbids_itself_the_network(browser: Browser, short_html: Path, tmp_path: Path) -> None:
    """And what the test above looks for is seen: a complaint."""
    before, end, after = short_html.read_text().rpartition("</body>")
    image = "<img src='http://127.0.0.1:9/a.png' alt=''>"
    (tmp_path / "bench.html").write_text(before + image + end + after)
    with visit(browser, tmp_path / "bench.html") as found:
        assert any("Content Security Policy" in complaint for complaint in found.complaints)


def test_a_series_leaves_all_charts_when_it_is_unticked_and_comes_back(light: Visit) -> None:
    page = light.page
    whole = {chart: points(page, chart) for chart in CHARTS}
    page.get_by_label(COMPILED, exact=True).focus()
    page.keyboard.press("Space")
    wait_for_lines(page, "error-8", len(MEASURED) - 1)
    cases = {batch: sum(case.batch == batch for case in sample_result().cases) for batch in BATCHES}
    assert {chart: lines(page, chart) for chart in CHARTS} == dict.fromkeys(CHARTS, len(MEASURED) - 1)
    assert {chart: whole[chart] - points(page, chart) for chart in CHARTS} == {
        chart: cases[int(chart.rpartition("-")[2])] // len(MEASURED) for chart in CHARTS
    }
    assert missing(page, sample_result()) == CHARTS
    page.get_by_label(COMPILED, exact=True).check()
    wait_for_lines(page, "latency-1", len(MEASURED))
    assert {chart: points(page, chart) for chart in CHARTS} == whole


def test_wrong_answers_are_ringed_in_every_chart_and_named_in_the_tables(light: Visit) -> None:
    wrong = [case for case in sample_result().cases if case.error is not None and not case.error.passed]
    for batch in BATCHES:
        expected = sum(case.batch == batch for case in wrong)
        for chart in (chart for chart in CHARTS if chart.endswith(f"-{batch}")):
            assert light.page.locator(f"#chart-{chart} path[stroke='var(--wrong)']").count() == expected
    assert light.page.locator("td.wrong").count() == len(wrong)
    findings = light.page.locator(".findings").inner_text().replace("\n", " ")
    assert "optimum: wrong answers at batch 1" in findings
    assert f"{SENTENCE}: sentence-transformers is not installed. Install it with: pip install" in findings


def test_the_tables_say_what_was_measured(light: Visit) -> None:
    result = sample_result()
    caption = light.page.locator("caption").first.inner_text()
    assert caption.startswith(f"Batch 1. The ratio is the median latency over that of {OURS}")
    rows = light.page.locator("table:has(#table-1) tbody tr")
    assert rows.count() == sum(case.batch == 1 for case in result.cases)
    torch = rows.filter(has_text=TORCH).first.locator("td").all_inner_texts()
    assert re.fullmatch(r"3\d\d", torch[0])
    assert re.fullmatch(r"[34]\.\d\dx\s+[34]\.\d\d to [34]\.\d\d", torch[5])
    environment = light.page.locator(".facts").inner_text()
    assert all(value in environment for value in result.environment.values())
    assert light.page.locator("pre").inner_text() == result.command
    assert light.page.locator("table:has(#table-largest) tbody tr").count() == len(result.largest_batches)


def test_on_a_telephone_nothing_is_cut_off_and_wide_tables_scroll_in_their_own_box(
    browser: Browser, html: Path
) -> None:
    with visit(browser, html, width=390) as found:
        page = found.page
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.eval_on_selector(".scroll:has(.glance)", "box => box.scrollWidth - box.clientWidth") == 0
        wide = page.locator(".scroll:has(#table-1)")
        last = wide.locator("thead th").last
        assert (last.bounding_box() or {})["x"] > 390
        wide.evaluate("box => box.scrollLeft = box.scrollWidth")
        assert (last.bounding_box() or {})["x"] + (last.bounding_box() or {})["width"] <= 390
        assert (wide.locator("tbody .name").first.bounding_box() or {})["x"] >= 0


def nasty_result() -> BenchResult:
    """Names and texts that are markup."""
    result = of_one_batch(sample_result(lengths=(1024,)))
    renamed = {OURS: NASTY}
    series = tuple(
        dataclasses.replace(series, name=renamed.get(series.name, series.name), bundle=NASTY, model=NASTY, remark=NASTY)
        for series in result.series
    )
    cases = tuple(dataclasses.replace(case, series=renamed.get(case.series, case.series)) for case in result.cases)
    failed = dataclasses.replace(
        cases[1], status=Status.FAILED, reason=NASTY, latency=None, error=None, memory=None, roofline=None,
        tokens_per_s=None,
    )  # fmt: skip
    return dataclasses.replace(
        result, series=series, cases=(cases[0], failed, *cases[2:]), command=NASTY, environment={NASTY: NASTY},
        notes=(NASTY,), largest_batches=(),
    )  # fmt: skip


def test_no_text_becomes_markup(browser: Browser, tmp_path: Path) -> None:
    write_page(tmp_path / "bench.html", nasty_result())
    with visit(browser, tmp_path / "bench.html") as found:
        assert found.complaints == []
        assert found.page.title() != "taken"
        assert found.page.locator("script").count() == 2
        assert found.page.locator(".eyebrow").inner_text() == NASTY
        assert found.page.locator("pre").inner_text() == NASTY
        assert lines(found.page, "latency-1") == len(MEASURED) - 1
        found.page.locator("#chart-latency-1 g.mark-symbol.role-mark path").first.hover()
        assert NASTY in found.page.locator("#vg-tooltip-element").inner_text()


def test_every_id_is_used_once_and_a_chart_without_figures_is_left_out(html: Path, tmp_path: Path) -> None:
    result = of_one_batch(sample_result(lengths=(1024,)))
    result = dataclasses.replace(result, cases=(), ceilings=(), largest_batches=(), environment={})
    write_page(tmp_path / "bench.html", result)
    for path, has_charts in ((html, True), (tmp_path / "bench.html", False)):
        ids = re.findall(r'<\w+ [^>]*\bid="([^"]+)"', path.read_text().partition("<script")[0])
        assert len(set(ids)) == len(ids) >= 2
        assert any(name.startswith("chart-error") for name in ids) == has_charts
