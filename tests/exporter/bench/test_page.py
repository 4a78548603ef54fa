"""bench.html in a real browser: every chart has its series, they can be ticked, and it is readable everywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hdexport.bench.page.figures import FIGURES
from hdexport.bench.results.result import BenchResult, Status
from support.sample_results import BATCHES, COMPILED, MEASURED, OPTIMUM, OURS, SENTENCE, TORCH, sample_result

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

LEAST_CONTRAST = 4.5
"""Of text with its background, WCAG 2.2, level AA."""

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
def visit(browser: Browser, html: Path, *, width: int = 1280, scheme: str = "light") -> Iterator[Visit]:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
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


@pytest.fixture(scope="module")
def dark(browser: Browser, html: Path) -> Iterator[Visit]:
    """The page in dark mode; a test that changes it puts it back."""
    with visit(browser, html, scheme="dark", width=1040) as found:
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


IMAGE = "<img src='http://127.0.0.1:9/a.png' alt=''>"
FAULTS = "<script>console.error('a complaint'); undefined_name();</script>"


def write_with(path: Path, html: str, addition: str) -> None:
    """A page with something more at its end; scripts in it have such an end in their strings."""
    before, end, after = html.rpartition("</body>")
    path.write_text(before + addition + end + after)


def test_that_complaints_and_requests_are_seen_and_that_the_page_forbids_itself_the_network(
    browser: Browser, short_html: Path, tmp_path: Path
) -> None:
    write_with(tmp_path / "bench.html", short_html.read_text(), IMAGE)
    with visit(browser, tmp_path / "bench.html") as found:
        assert any("Content Security Policy" in complaint for complaint in found.complaints)
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", short_html.read_text())
    write_with(tmp_path / "bench.html", text, FAULTS + IMAGE)
    with visit(browser, tmp_path / "bench.html") as found:
        assert "a complaint" in found.complaints
        assert any("undefined_name" in complaint for complaint in found.complaints)
        assert "http://127.0.0.1:9/a.png" in found.requests


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


def test_the_mouse_over_a_point_shows_its_figures(light: Visit) -> None:
    case = sample_result().case(OURS, 1, 512)
    assert case is not None
    assert case.latency is not None
    light.page.locator("#chart-latency-1 g.mark-symbol.role-mark path").first.hover()
    tooltip = light.page.locator("#vg-tooltip-element")
    tooltip.wait_for()
    text = re.sub(r"\s+", " ", tooltip.inner_text())
    assert f"series {OURS} tokens 512 batch 1 p50 {case.latency.p50_ms:.6g} ms" in text
    assert contrasts(light.page, "#vg-tooltip-element")
    light.page.mouse.move(0, 0)


def test_what_failed_is_in_the_charts_and_in_the_tables_with_its_reason(light: Visit) -> None:
    failed = [case for case in sample_result().cases if case.status is not Status.OK]
    for batch in BATCHES:
        expected = sorted(case.status.value for case in failed if case.batch == batch)
        for key in ("latency", "throughput", "error"):
            words = light.page.locator(f"#chart-{key}-{batch} g.mark-text.role-mark text")
            assert sorted(words.all_text_contents()) == expected
    cells = light.page.locator("td.failed").all_inner_texts()
    assert sorted(cell.split(" ", 1)[0].split("\n")[0] for cell in cells) == sorted(
        case.status.value for case in failed
    )
    assert all(any((case.reason or "?") in cell for cell in cells) for case in failed)


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


def test_charts_have_descriptions_and_the_page_has_headings_in_order(light: Visit) -> None:
    for figure in FIGURES:
        label = light.page.locator(f"#chart-{figure.key}-8").get_attribute("aria-label")
        assert label is not None
        assert label.startswith(f"{figure.title}, batch 8, over tokens. {OURS}: ")
        assert f"{OPTIMUM}: " in label
    levels = light.page.eval_on_selector_all("h1,h2,h3", "nodes => nodes.map(node => Number(node.tagName[1]))")
    assert levels[0] == 1
    assert all(later <= level + 1 for level, later in itertools.pairwise(levels))
    assert light.page.locator("main table:not(:has(caption)):not(.glance)").count() == 0
    assert light.page.locator("html[lang=en]").count() == 1


CONTRAST_SCRIPT = """
([root, least]) => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const background = node => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  let seen = 0;
  for (const node of document.querySelectorAll(root + " *")) {
    const own = [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim());
    if (!own || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(node.tagName) || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    if (style.visibility === "hidden") continue;  // a tooltip that was shown before
    const colour = parse(node instanceof SVGElement ? style.fill : style.color);
    const pair = [luminance(colour), luminance(background(node))].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    seen += 1;
    if (contrast < least) poor.push(`${node.textContent.trim().slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return [seen, poor];
}
"""


def contrasts(page: Page, root: str = "body", least: float = LEAST_CONTRAST) -> bool:
    """Whether all text below an element can be read."""
    seen, poor = page.evaluate(CONTRAST_SCRIPT, [root, least])
    assert seen > 0
    assert poor == []
    return True


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_in_both_modes(request: pytest.FixtureRequest, scheme: str) -> None:
    page: Page = request.getfixturevalue(scheme).page
    assert contrasts(page)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    style = page.add_style_tag(content=":root { --soft: #888 !important; }")
    _, poor = page.evaluate(CONTRAST_SCRIPT, ["body", LEAST_CONTRAST + 1])
    style.evaluate("node => node.remove()")
    assert poor, "text of little contrast was not seen"


def series_colour(page: Page) -> str:
    path = page.locator("#chart-latency-1 g.mark-line path").first
    return str(path.evaluate("node => getComputedStyle(node).stroke"))


def test_paper_is_light_and_has_no_controls_even_from_dark_mode(dark: Visit) -> None:
    page = dark.page
    colour = series_colour(page)
    page.get_by_label(TORCH, exact=True).uncheck()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert series_colour(page) != colour
    assert not any(box.is_visible() for box in page.locator("input").all())
    shown = [label.inner_text() for label in page.locator(".legend label").all() if label.is_visible()]
    assert shown == [name for name in MEASURED if name != TORCH]
    assert contrasts(page)
    cut = "nodes => nodes.filter(node => node.scrollWidth > node.clientWidth).length"
    assert page.eval_on_selector_all(".scroll", cut) == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(media="screen", color_scheme="dark")
    page.get_by_label(TORCH, exact=True).check()


def test_series_are_distinguishable_without_colour(light: Visit) -> None:
    attributes = "nodes => nodes.map(node => node.getAttribute('stroke-dasharray'))"
    dashes = light.page.eval_on_selector_all("#chart-latency-8 g.mark-line path", attributes)
    assert len(set(dashes)) == len(MEASURED)
    swatches = light.page.eval_on_selector_all(
        ".legend .swatch path:last-child", "nodes => nodes.map(node => node.getAttribute('d'))"
    )
    assert len(set(swatches)) == len(MEASURED)


def assert_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == width
    wide = "nodes => nodes.filter(node => node.getBoundingClientRect().right > innerWidth + 1).length"
    assert page.eval_on_selector_all("figure, .chart svg, .scroll, .legend, h1, h2, pre, li", wide) == 0


def test_nothing_is_wider_than_a_screen(light: Visit) -> None:
    assert_nothing_is_wider_than_the_window(light.page, 1280)
    inside = "nodes => nodes.filter(node => node.scrollWidth > node.clientWidth).length"
    assert light.page.eval_on_selector_all(".scroll", inside) == 0


CUT_CELLS = """
nodes => nodes.filter(node => {
  const box = node.closest(".scroll"), edge = box.getBoundingClientRect().right;
  return node.getBoundingClientRect().right > edge + box.scrollWidth - box.clientWidth + 1;
}).length
"""


def test_on_a_telephone_nothing_is_cut_off_and_wide_tables_scroll_in_their_own_box(
    browser: Browser, html: Path
) -> None:
    with visit(browser, html, width=390) as found:
        page = found.page
        assert_nothing_is_wider_than_the_window(page, 390)
        assert page.eval_on_selector_all(".scroll td, .scroll th, caption", CUT_CELLS) == 0
        assert page.eval_on_selector(".scroll:has(.glance)", "box => box.scrollWidth - box.clientWidth") == 0
        wide = page.locator(".scroll:has(#table-1)")
        last = wide.locator("thead th").last
        assert (last.bounding_box() or {})["x"] > 390
        wide.evaluate("box => box.scrollLeft = box.scrollWidth")
        assert (last.bounding_box() or {})["x"] + (last.bounding_box() or {})["width"] <= 390
        assert (wide.locator("tbody .name").first.bounding_box() or {})["x"] >= 0


def test_the_headline_is_the_finding_with_the_models_name_and_a_caution_about_few_rounds(
    light: Visit, browser: Browser, tmp_path: Path
) -> None:
    page = light.page
    assert page.locator("h1").inner_text() == "4.2 times as fast as PyTorch at 8192 tokens, with 0.39 of its memory"
    assert page.locator(".eyebrow").inner_text() == "longformer-8192"
    assert page.locator(".caution").count() == 0
    write_page(tmp_path / "bench.html", of_one_batch(sample_result(lengths=(1024,), rounds=2)))
    with visit(browser, tmp_path / "bench.html", width=390) as found:
        assert found.page.locator(".caution").is_visible()
        assert found.page.locator(".caution").inner_text().startswith("Only 2 rounds measured:")
        assert contrasts(found.page, "header")


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


@pytest.mark.parametrize("kind", ["whole", "nothing ran", "nothing compared"])
def test_every_id_is_used_once_and_a_chart_without_figures_is_left_out(html: Path, tmp_path: Path, kind: str) -> None:
    result = of_one_batch(sample_result(lengths=(1024,)))
    if kind == "nothing ran":
        result = dataclasses.replace(result, cases=(), ceilings=(), largest_batches=(), environment={})
    if kind == "nothing compared":
        cases = tuple(dataclasses.replace(case, error=None, roofline=None) for case in result.cases)
        result = dataclasses.replace(result, cases=cases)
    if kind != "whole":
        write_page(html := tmp_path / "bench.html", result)
    ids = re.findall(r'<\w+ [^>]*\bid="([^"]+)"', html.read_text().partition("<script")[0])
    assert len(set(ids)) == len(ids) >= 2
    has_errors = any(name.startswith("chart-error") for name in ids)
    assert has_errors == (kind == "whole")
