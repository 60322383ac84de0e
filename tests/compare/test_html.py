"""The report: one file that loads nothing and runs nothing, with the text of models shown as text."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.boards import HOSTILE, PAIRS, answers, board, judging
from tipbench.compare.answers import Answer, AnswerTip, ScenarioAnswers
from tipbench.compare.card import summary_card
from tipbench.compare.duels import Duel, duel_table
from tipbench.compare.html import CSP, html_report, inline_svg
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import Pair

pytest.importorskip("altair")


class Page(HTMLParser):
    """The elements, attributes and texts of a page; fails unless every element is closed in order."""

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
        if tag not in {"meta", "br", "hr", "input"}:
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
def leaderboard() -> Leaderboard:
    return board(
        missing=lambda pair, scenario: pair == Pair("gemma3:1b", "v1") and scenario.endswith(("morning", "evening"))
    )


@pytest.fixture(scope="module")
def source(leaderboard: Leaderboard) -> str:
    return html_report(leaderboard, answers(leaderboard), judging())


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


@pytest.fixture(scope="module")
def hostile_report() -> tuple[str, Page]:
    leaderboard = board([Pair(name, "v1") for name in HOSTILE], experiment="tip-bench-<b>", hosts=("<i>box</i>", "b"))
    source = html_report(leaderboard, answers(leaderboard, tips=HOSTILE), judging())
    return source, Page(source)


def test_every_element_is_closed(page: Page) -> None:
    assert page.open == []
    assert page.tags["html"] == page.tags["body"] == page.tags["h1"] == 1


def test_the_page_has_verdict_charts_tables_judging_and_answers(leaderboard: Leaderboard, page: Page) -> None:
    text = "".join(page.texts)
    assert summary_card(leaderboard).title in text
    assert leaderboard.verdict in text
    for title in ("Standings", "Model × prompt", "Quality against latency", "Judging", "Answers, side by side"):
        assert title in text
    assert page.tags["figure"] == 3
    assert "Attribution needs every model with every prompt" in text
    assert page.tags["svg"] == 4 * page.tags["figure"]
    assert page.tags["details"] == 2 + 3  # conditions, numbers of the heat map, scenarios


def test_a_complete_board_shows_attribution_duels_filter_and_baseline() -> None:
    duels = duel_table([Duel(PAIRS[0], PAIRS[1], f"s{at}", "first") for at in range(6)])
    leaderboard = board(duels=duels, where={"params.model": "a"}, judge="anna", baseline=PAIRS[0])
    page = Page(html_report(leaderboard, judging=judging()))
    text = "".join(page.texts)
    assert page.tags["figure"] == 3
    for part in (
        "Prompts, over all models",
        "Bradley–Terry",
        "only cells with params.model=a; only anna's scores",
        "for the whole experiment",
        "are unlikely to be detected with 8 scenarios",
    ):
        assert part in text
    heads = [text for text in page.texts if text in ("to baseline", "to leader", "standing")]
    assert heads == ["to baseline", "to leader", "standing"]


def test_a_small_provisional_board_has_a_badge_and_no_empty_parts() -> None:
    source = html_report(board(PAIRS[:1], provisional=True))
    page = Page(source)
    assert "provisional" in "".join(page.texts).partition("For now")[0]
    assert not {"Answers, side by side", "Judging"} & set(page.texts)
    assert page.open == []


def test_the_judging_section_shows_judges_agreement_drift_and_rubric(page: Page) -> None:
    text = " ".join(page.texts)
    for label in ("anna", "ben", "rules", "relevance 0.81", "tone unknown", "20 of 96 (21 %)"):
        assert label in text
    assert "+0.62, too far off" in text
    assert "count, drift accepted" in text
    assert "beyond the limit" not in text
    assert "tip-v1 (abababababab)" in text


def test_nothing_is_loaded_and_nothing_is_run(page: Page, hostile_report: tuple[str, Page]) -> None:
    for each in (page, hostile_report[1]):
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


def test_hostile_names_and_tips_show_as_text(hostile_report: tuple[str, Page]) -> None:
    source, page = hostile_report
    assert page.open == []
    text = "".join(page.texts)
    assert "<script>alert(1)</script>" in text
    assert "\"'><img src=x onerror=alert(2)>" in text
    assert "]]>--><!-- </style></svg></title> &amp; &lt;" in text
    assert "x" * 10_000 in text  # a tip is never cut
    assert not re.search("[\x00\x1b]", source)
    source.encode()


def test_invisible_and_direction_characters_are_shown_by_their_names(hostile_report: tuple[str, Page]) -> None:
    source, page = hostile_report
    assert "\u202e" not in re.sub(r"<svg.*?</svg>", "", source, flags=re.DOTALL)
    assert "⟨U+202E⟩right to left" in "".join(page.texts)


def test_ids_are_unique_and_every_reference_has_its_target(page: Page) -> None:
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    targets = [value.lstrip("#") for value in page.values("href") + page.values("aria-labelledby")]
    assert set(targets) <= set(ids)


def test_tables_have_a_name_and_headers_with_scope(page: Page) -> None:
    assert page.tags["table"] == page.tags["thead"]
    assert len([value for value in page.values("class") if value.startswith("table-box")]) == page.tags["table"]
    assert len(page.values("scope")) == page.tags["th"]
    assert page.tags["figcaption"] == page.tags["figure"]


def test_values_can_be_read_on_hover(page: Page, leaderboard: Leaderboard) -> None:
    assert page.tags["title"] > 4 * len(leaderboard.standings)
    label = f"{leaderboard.ranking.leader}: composite"
    assert any(text.startswith(label) for text in page.texts)


def test_an_unjudged_board_is_a_valid_page() -> None:
    leaderboard = board(PAIRS[:3], missing=lambda _pair, _scenario: True)
    page = Page(html_report(leaderboard, answers(leaderboard), judging()))
    assert leaderboard.verdict in "".join(page.texts)


def test_an_answer_without_tips_shows_the_reason() -> None:
    pair = PAIRS[0]
    given_answers = (Answer(pair, "failed", None, None, ()), Answer(pair, "judged", 3.0, False, ()))
    text = "".join(_answers(ScenarioAnswers("a@b", None, given_answers)).texts)
    for part in ("No complete answer.", "No usable tip.", "not the requested format", "its card is not shown"):
        assert part in text


any_text = st.text() | st.sampled_from(HOSTILE)


@settings(max_examples=15, deadline=None)
@given(any_text, any_text, any_text)
def test_no_tip_becomes_markup(tip: str, why: str, scenario: str) -> None:
    answer = Answer(_bare().standings[0].pair, "judged", 3.0, True, (AnswerTip(tip, why, {"tone": 2.0}),))
    text = _answers(ScenarioAnswers(scenario, None, (answer,)))
    assert text.open == []
    assert text.values("class").count("tip") == 1
    assert not {"script", "img", "b", "i"} & set(text.tags)


@cache
def _bare() -> Leaderboard:
    """A board without scores, hence without charts, which take time."""
    return board(PAIRS[:2], n=2, missing=lambda _pair, _scenario: True)


def _answers(found: ScenarioAnswers) -> Page:
    return Page(html_report(_bare(), [found]))


def test_ids_of_two_charts_do_not_collide() -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><clipPath id="c1"></clipPath><g clip-path="url(#c1)"></g></svg>'
    one = inline_svg(svg, "one", "caption")
    assert 'id="one-c1"' in one
    assert "url(#one-c1)" in one
    assert "http" not in one
