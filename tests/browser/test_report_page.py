"""The report in a real browser: light, dark, narrow and printed; it sends no request and runs no script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.boards import HOSTILE, TWELVE, answers, board, judging
from tipbench.charts import DARK, LIGHT
from tipbench.compare.html import html_report
from tipbench.compare.matrix import Pair

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

LONG = "hf.co/an-organisation/a-model-with-a-name-that-never-ends-instruct-GGUF:Q4_K_M"
NARROW = 360


@dataclass
class ReportTab:
    """A browser tab that records requests and console errors."""

    page: Page
    requests: list[str] = field(default_factory=list)
    console_errors: list[str] = field(default_factory=list)

    def evaluate(self, script: str) -> Any:
        return self.page.evaluate(script)

    def shown_charts(self) -> list[str]:
        """Return the classes of the visible charts."""
        script = "[...document.querySelectorAll('.chart')].filter(e => e.offsetParent).map(e => e.className)"
        return [str(name) for name in self.evaluate(script)]


ReportOpener = Callable[..., ReportTab]


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("altair")
    folder = tmp_path_factory.mktemp("reports")
    hostile = [*(Pair(name, "v1") for name in HOSTILE), Pair(LONG, "v2-mentor"), Pair(LONG + "2", "v" * 90)]
    boards = {
        "plain": board(),
        "gap": board(missing=lambda pair, scenario: pair == TWELVE[6] and scenario.startswith("nurse")),
        "hostile": board(hostile),
    }
    files = {}
    for name, leaderboard in boards.items():
        tips = HOSTILE if name == "hostile" else ()
        files[name] = folder / f"{name}.html"
        files[name].write_text(html_report(leaderboard, answers(leaderboard, tips=tips), judging()), "utf-8")
    return files


@pytest.fixture
def open_report(browser: Browser, reports: dict[str, Path]) -> Iterator[ReportOpener]:
    contexts = []

    def open_page(name: str = "plain", *, width: int = 1200, scheme: Any = "light") -> ReportTab:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        tab = ReportTab(context.new_page())

        def block_other_requests(route: Route) -> None:
            if route.request.url == reports[name].as_uri():
                route.continue_()
            else:
                tab.requests.append(route.request.url)
                route.abort()

        context.route("**/*", block_other_requests)
        tab.page.on("console", lambda message: tab.console_errors.append(message.text))
        tab.page.on("pageerror", lambda error: tab.console_errors.append(str(error)))
        tab.page.on("dialog", lambda dialog: tab.console_errors.append(f"dialog: {dialog.message}"))
        tab.page.goto(reports[name].as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["plain", "gap", "hostile"])
def test_nothing_leaves_the_page_and_nothing_is_run(open_report: ReportOpener, name: str) -> None:
    tab = open_report(name)
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    tab.page.wait_for_load_state("networkidle")
    assert tab.requests == []
    assert tab.console_errors == []
    assert tab.evaluate("document.scripts.length") == 0


def test_an_injected_request_is_blocked(open_report: ReportOpener) -> None:
    """The page's content security policy blocks it."""
    tab = open_report()
    with tab.page.expect_console_message(lambda line: "Content Security Policy" in line.text):
        tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"https://example.org/x.png\">')")
    assert tab.requests == []
    assert any("Content Security Policy" in line for line in tab.console_errors)


@pytest.mark.parametrize(
    ("scheme", "theme", "width", "kind"), [("light", LIGHT, 1200, "wide"), ("dark", DARK, NARROW, "narrow")]
)
def test_the_charts_that_fit_are_shown(
    open_report: ReportOpener, tmp_path: Path, scheme: str, theme: Any, width: int, kind: str
) -> None:
    tab = open_report(width=width, scheme=scheme)
    assert tab.shown_charts() == [f"chart {kind} {scheme}"] * 3
    red, green, blue = (int(theme.background[at : at + 2], 16) for at in (1, 3, 5))
    behind = "getComputedStyle(document.querySelector('.card:has(.chart)')).backgroundColor"
    assert tab.evaluate(behind) == f"rgb({red}, {green}, {blue})"
    picture = tmp_path / f"{scheme}-{width}.png"
    tab.page.screenshot(path=picture, full_page=True)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["gap", "hostile"])
def test_the_page_never_scrolls_sideways(open_report: ReportOpener, name: str) -> None:
    tab = open_report(name)
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    for width in (NARROW, 700, 1200):
        tab.page.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_at_1024_pixels_no_column_of_the_standings_is_cut_off(open_report: ReportOpener) -> None:
    tab = open_report("gap", width=1024)
    overflow = "(box => box.scrollWidth - box.clientWidth)(document.querySelector('.standings'))"
    assert tab.evaluate(overflow) == 0
    extra = tab.page.locator(".standings th.extra")
    assert (extra.count() > 0, extra.first.is_visible()) == (True, False)
    tab.page.get_by_label("All columns").check()
    assert extra.first.is_visible()


def test_on_a_narrow_page_rows_are_cards_and_still_a_table(open_report: ReportOpener) -> None:
    tab = open_report(width=NARROW)
    assert tab.evaluate("getComputedStyle(document.querySelector('.standings tbody tr')).display") == "grid"
    table = tab.page.get_by_role("region", name="Standings").get_by_role("table")
    assert table.get_by_role("rowheader").count() == 12


def test_texts_of_a_narrow_chart_stay_on_it(open_report: ReportOpener) -> None:
    tab = open_report("hostile", width=NARROW)
    script = """Math.max(...[...document.querySelectorAll('#forest .narrow.light svg text')]
        .map(each => each.getBoundingClientRect().right))"""
    assert tab.evaluate(script) <= NARROW


def test_hovering_over_a_mark_shows_its_values(open_report: ReportOpener) -> None:
    tab = open_report()
    marks = "#forest .wide.light svg [aria-roledescription=point] title"
    titles = tab.evaluate(f"[...document.querySelectorAll('{marks}')].map(each => each.textContent)")
    assert len(titles) == 12
    assert all(re.search(r"composite \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", title) for title in titles)


def test_answers_open_with_the_keyboard(open_report: ReportOpener) -> None:
    tab = open_report()
    details = tab.page.locator("#answers details").first
    assert not details.locator("article").first.is_visible()
    details.locator("summary").focus()
    tab.page.keyboard.press("Enter")
    details.locator("article").first.wait_for()
    assert details.locator("article").count() == 12


def test_model_output_is_shown_exactly(open_report: ReportOpener) -> None:
    tab = open_report("hostile")
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    tips = tab.page.locator("#answers article").first.locator("li p.tip:first-child").all_inner_texts()
    assert tips[0] == "<script>alert(1)</script>"
    assert tips[1] == "\"'><img src=x onerror=alert(2)>"
    assert len(tips[3]) == 10_000


def test_the_page_is_printed_in_light_colours(open_report: ReportOpener, tmp_path: Path) -> None:
    tab = open_report(scheme="dark")
    tab.page.emulate_media(media="print")
    assert tab.shown_charts() == ["chart wide light"] * 3
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 36)"
    paper = tmp_path / "report.pdf"
    tab.page.pdf(path=paper, format="A4")
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    assert 3 <= pages <= 12


def test_on_paper_no_table_is_cut_off(open_report: ReportOpener) -> None:
    tab = open_report("gap", width=718)  # A4 less its margins
    tab.page.emulate_media(media="print")
    assert tab.evaluate("Math.max(...[...document.querySelectorAll('table')].map(e => e.offsetWidth))") <= 718
