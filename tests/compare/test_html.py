"""The report: one file, nothing loaded, nothing run, and whatever a model wrote shows as text."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.boards import HOSTILE, TWELVE, answers, board, judging
from tipbench.compare.answers import Answer, AnswerTip, ScenarioAnswers
from tipbench.compare.duels import Duel, duel_table
from tipbench.compare.html import CSP, Html, answers_section, element, html_report, inline_svg, joined, text
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair

pytest.importorskip("altair")


class Page(HTMLParser):
    """What a browser would see: elements, attributes, text; and whether every element is closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in {"meta", "br", "hr"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def values(self, name: str) -> list[str]:
        return [value or "" for _, attribute, value in self.attributes if attribute == name]


@pytest.fixture(scope="module")
def made() -> Leaderboard:
    return board(missing=lambda pair, scenario: pair == Pair("gemma3:1b", "v1") and scenario.startswith("nurse"))


@pytest.fixture(scope="module")
def source(made: Leaderboard) -> str:
    return html_report(made, answers(made), judging())


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


@pytest.fixture(scope="module")
def hostile() -> tuple[str, Page]:
    made = board([Pair(name, "v1") for name in HOSTILE], experiment="tip-bench-<b>", hosts=("<i>box</i>", "b"))
    source = html_report(made, answers(made, tips=HOSTILE), judging())
    return source, Page(source)


def test_every_element_is_closed(page: Page) -> None:
    assert page.open == []
    assert page.tags["html"] == page.tags["body"] == page.tags["h1"] == 1


def test_the_page_has_verdict_charts_tables_judging_and_answers(made: Leaderboard, page: Page) -> None:
    whole = "".join(page.texts)
    assert made.verdict in whole
    for title in ("Standings", "Model × prompt", "Quality against latency", "Judging", "Answers, side by side"):
        assert title in whole
    assert page.tags["figure"] == 3  # no attribution while a pair is incomplete, and the reason instead
    assert "Attribution needs every model with every prompt" in whole
    assert page.tags["svg"] == 4 * page.tags["figure"]
    assert page.tags["details"] == 1 + 3


def test_a_complete_board_shows_attribution_duels_filter_and_baseline() -> None:
    duels = duel_table([Duel(TWELVE[0], TWELVE[1], f"s{at}", "first") for at in range(6)])
    made = board(duels=duels, where={"params.model": "a"}, judge="anna", baseline=TWELVE[0])
    page = Page(html_report(made, judging=judging()))
    whole = "".join(page.texts)
    assert page.tags["figure"] == 4
    for part in (
        "Prompts, over all models.",
        "Bradley–Terry",
        "only cells with params.model=a; only anna's scores",
        "whole experiment",
        "are unlikely to be detected with 8 scenarios",
    ):
        assert part in whole
    heads = [text for text in page.texts if text in ("to leader", "standing", "p", "to baseline", "p (baseline)")]
    assert heads[:5] == ["to leader", "standing", "p", "to baseline", "p (baseline)"]


def test_a_small_provisional_board_has_a_badge_and_no_empty_parts() -> None:
    source = html_report(board(TWELVE[:1], provisional=True))
    assert re.search(r"<h1>[^<]*<span class=\"badge warning\">provisional</span></h1>", source)
    page = Page(source)
    assert not {"Answers, side by side", "Judging"} & set(page.texts)
    assert page.open == []


def test_the_judging_strip_names_who_how_well_and_under_what(page: Page) -> None:
    whole = " ".join(page.texts)
    for said in ("anna", "ben", "rules", "Krippendorff's alpha: relevance 0.81", "tone unknown", "20 of 96 (21 %)"):
        assert said in whole
    assert "+0.62 (+0.32 to +0.92), too far off" in whole
    assert f"tip-v1@{'ab' * 32}" in whole


def test_nothing_is_loaded_and_nothing_is_run(page: Page, hostile: tuple[str, Page]) -> None:
    for each in (page, hostile[1]):
        assert not {"script", "link", "img", "iframe", "object", "embed", "form", "image", "use"} & set(each.tags)
        assert all(value.startswith("#") for value in each.values("href") + each.values("xlink:href"))
        assert each.values("src") == []
        assert not [name for _, name, _ in each.attributes if name.startswith("on")]
        assert CSP in each.values("content")


def test_the_page_has_no_address_and_no_heading_level_is_skipped(source: str) -> None:
    assert not re.search(r"https?:|url\((?!#)|@import|javascript:", source)
    assert "whole experiment" not in source
    levels = [int(level) for level in re.findall(r"<h(\d)", source)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_hostile_names_and_tips_show_as_text(hostile: tuple[str, Page]) -> None:
    source, page = hostile
    assert page.open == []
    whole = "".join(page.texts)
    assert "<script>alert(1)</script>" in whole
    assert "\"'><img src=x onerror=alert(2)>" in whole
    assert "]]>--><!-- </style></svg></title> &amp; &lt;" in whole
    assert "x" * 10_000 in whole  # a tip is never cut
    assert not re.search("[\x00\x1b]", source)
    source.encode()


def test_direction_marks_cannot_leave_their_tip(hostile: tuple[str, Page]) -> None:
    source, _ = hostile
    found = [source[: match.start()] for match in re.finditer("\u202e", source)]
    assert found
    assert all(before.rpartition("<")[2].startswith('p class="tip" dir="auto">') for before in found)


def test_ids_are_unique_and_every_reference_has_its_target(page: Page) -> None:
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    wanted = [value.lstrip("#") for value in page.values("href") + page.values("aria-labelledby")]
    assert set(wanted) <= set(ids)


def test_tables_have_captions_and_headers_with_scope(page: Page) -> None:
    assert page.tags["table"] == page.tags["caption"] == page.tags["thead"]
    assert len(page.values("scope")) == page.tags["th"]
    assert page.tags["figcaption"] == page.tags["figure"]


def test_values_can_be_read_on_hover(page: Page, made: Leaderboard) -> None:
    assert page.tags["title"] > 4 * len(made.standings)
    said = f"{made.ranking.leader}: composite"
    assert any(text.startswith(said) for text in page.texts)


def test_a_board_that_nobody_judged_is_still_a_page() -> None:
    made = board(TWELVE[:3], missing=lambda _pair, _scenario: True)
    page = Page(html_report(made, answers(made), judging()))
    assert made.verdict in "".join(page.texts)


def test_an_answer_without_tips_says_why() -> None:
    made = board(TWELVE[:2])
    pair = TWELVE[0]
    given_answers = (Answer(pair, "failed", None, None, ()), Answer(pair, "judged", 3.0, False, ()))
    shown = str(answers_section(made, [ScenarioAnswers("a@b", None, given_answers)]))
    assert "No answer." in shown
    assert "No usable tip." in shown
    assert "not the requested format" in shown
    assert "its card is not shown" in shown


any_text = st.text() | st.sampled_from(HOSTILE)


@settings(max_examples=15)
@given(any_text, any_text, any_text)
def test_no_tip_becomes_markup(tip: str, why: str, scenario: str) -> None:
    made = _small()
    answer = Answer(made.standings[0].pair, "judged", 3.0, True, (AnswerTip(tip, why, {"tone": 2.0}),))
    shown = Page(str(answers_section(made, [ScenarioAnswers(scenario, None, (answer,))])))
    assert shown.open == []
    assert set(shown.tags) <= {"p", "details", "summary", "span", "div", "article", "h3", "bdi", "ol", "li"}


def _small(kept: dict[str, Any] = {}) -> Leaderboard:  # noqa: B006 - made once
    return kept.setdefault("board", board(TWELVE[:2], n=2))  # type: ignore[no-any-return]


@settings(max_examples=30)
@given(any_text)
def test_text_comes_back_as_it_was_but_for_what_html_cannot_hold(value: str) -> None:
    page = Page(str(element("p", value, title=value)))
    same = re.sub("\r\n?", "\n", value)
    assert len("".join(page.texts)) == len(same)
    assert page.values("title") == ["".join(page.texts)]
    assert page.tags == Counter(p=1)


def test_markup_is_put_in_as_it_is_and_text_is_not() -> None:
    assert joined(Html("<b>"), "<b>", None, 3) == "<b>&lt;b&gt;3"
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert element("td", "x", hidden=True, class_=None, data_label='"') == '<td hidden data-label="&quot;">x</td>'
    assert text("\x00") == "\ufffd"


def test_ids_of_two_charts_do_not_meet() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><clipPath id="c1"></clipPath><g clip-path="url(#c1)"></g></svg>'
    one = inline_svg(svg, "one")
    assert 'id="one-c1"' in one
    assert "url(#one-c1)" in one
    assert "http" not in one
