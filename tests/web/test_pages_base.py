"""Every page: escaped by construction, no inline script or style, one head and foot, failures with a next step."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from tipbench import markup
from tipbench.errors import TipbenchError
from tipbench.web import queries
from tipbench.web.panel import pages
from tipbench.web.panel.pages import JobsLink, environment, here, render_error
from web.panels import EXPERIMENT, ServedPanel

PAGE = {"Accept": "text/html,*/*"}
PACKAGES = ("tipbench.markup", "tipbench.compare", "tipbench.web.panel")
TEMPLATES = [path for each in PACKAGES for path in Path(str(files(each).joinpath("templates"))).rglob("*.html")]
PATHS = ("/login", "/", "/settings", "/judge", f"/judge?experiment={EXPERIMENT}", "/judge?experiment=x", "/nowhere")
HOSTILE = "<script>alert(1)</script>\"'&\u202e\u200b\x00\ud800"


class PageElements(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.elements if each == tag]


def get_page(served: ServedPanel, path: str, **options: Any) -> Any:
    return served.get(path, headers=PAGE, **options)


# templates


def test_every_template_compiles() -> None:
    names = environment().list_templates()
    assert len(names) > 5
    for name in names:
        environment().get_template(name)


def test_no_template_switches_escaping_off() -> None:
    for path in TEMPLATES:
        text = path.read_text("utf-8")
        assert not re.search(r"\|\s*safe\b|autoescape|\bMarkup\b", text), path.name


def test_no_template_has_inline_script_style_or_handlers() -> None:
    for path in TEMPLATES:
        text = path.read_text("utf-8")
        if path.name != "report.html":  # one file, whose style sheet is inside
            assert "<style" not in text, path.name
        assert not re.search(r"\sstyle=|\son[a-z]+=|javascript:", text), path.name
        assert not re.search(r"<script(?![^>]*\ssrc=)", text), path.name


def test_every_form_that_changes_something_has_the_csrf_token() -> None:
    for path in TEMPLATES:
        for found in re.findall(r"<form\b[^>]*>.*?</form>", path.read_text("utf-8"), re.DOTALL):
            if 'method="post"' in found and 'action="/login"' not in found:
                field = (
                    "{{ csrf }}" if path.parent.name == "macros" else "{{ csrf() }}"
                )  # a macro gets it as a parameter
                assert field in found, (path.name, found[:120])
        assert all(found == "csrf()" for found in re.findall(r"judge_ui\.open_batch\((.*?),", path.read_text("utf-8")))


def test_an_undefined_template_variable_is_an_error() -> None:
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        environment().from_string("{{ nothing }}").render()


def test_no_macro_lets_text_become_markup() -> None:
    for source in [
        "{{ text }}",
        "{{ text|visible }}",
        "{{ text|lines }}",
        "{{ ui.badge(text) }}",
        "{{ ui.name(text, text) }}",
        "{{ ui.fenced(text, text) }}",
        "{{ ui.facts([(text, text)]) }}",
        "{{ ui.crumbs([(text, text)]) }}",
        "{{ ui.tabs([(text, text, text)], text, text) }}",
        "{{ ui.segments([(text, text, true), (text, none, false)], text) }}",
        "{{ ui.experiment_tabs(text, 'runs') }}",
        "{{ ui.chips([(text, text)]) }}",
        "{{ ui.outside(text, text) }}",
        "{{ ui.progress(1, 2, text) }}",
        "{{ ui.bar([(1, 'good')], text) }}",
        "{% call ui.alert('bad', text) %}{{ text }}{% endcall %}",
        "{{ form.field(text, text, value=text, help=text, error=text, attrs={'placeholder': text}) }}",
        "{{ form.select(text, text, [(text, text)], value=text) }}",
        "{{ form.checkbox(text, text, help=text, error=text) }}",
        "{{ form.choices(text, text, [(text, text, text)]) }}",
        "{{ judge_ui.open_batch(text, text, text, text) }}",
    ]:
        page = environment().from_string(source).render(text=HOSTILE)
        assert "<script" not in page
        assert "alert(1)&lt;/script" in page or "alert%281%29" in page
        assert all("onerror" not in attributes for _, attributes in PageElements(page).elements)


# filters for texts and numbers


@given(st.text(max_size=40))
def test_visible_text_has_no_invisible_or_direction_characters(text: str) -> None:
    shown = str(markup.visible(text))
    assert not re.search("[\x00-\x08\x0b-\x1f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069<>\"']", shown)


def test_every_character_that_is_replaced_is_not_printable() -> None:
    characters = map(chr, range(sys.maxunicode + 1))
    replaced = [each for each in characters if markup._INVISIBLE.match(each) or markup._NOT_TEXT.match(each)]
    assert "\u202e" in replaced
    assert "\x00" in replaced
    assert not any(each.isprintable() for each in replaced)


def test_ordinary_text_of_any_script_stays_as_it_is() -> None:
    for text in ("Grüße", "שלום", "مرحبا", "日本語", "👩‍💻", "a\n\tb"):
        assert str(markup.visible(text)) == text


def test_text_in_backticks_is_code_and_nothing_is_escaped_twice() -> None:
    assert markup.lines("see `a & b`\n<b>") == "see <code>a &amp; b</code><br>&lt;b&gt;"


def test_unknown_numbers_are_a_dash() -> None:
    cases: list[float | None] = [None, math.nan, math.inf]
    for unknown in cases:
        for shown in (markup.number, markup.signed, markup.percent, markup.duration):
            assert shown(unknown) == "–"


def test_values_are_shown_as_people_read_them() -> None:
    for shown, expected in [
        (markup.number(1234.5), "1,234.50"),
        (markup.number(-3), "−3"),
        (markup.number(0.0, 1), "0.0"),
        (markup.signed(0.5), "+0.50"),
        (markup.signed(-0.004), "±0.00"),
        (markup.signed(-2.0, 1), "−2.0"),
        (markup.percent(0.425), "42\u00a0%"),
        (markup.duration(0.34), "340\u00a0ms"),
        (markup.duration(2.44), "2.4\u00a0s"),
        (markup.duration(9.99), "10\u00a0s"),
        (markup.duration(59.7), "1\u00a0min"),
        (markup.duration(200), "3\u00a0min 20\u00a0s"),
        (markup.duration(7500), "2\u00a0h 5\u00a0min"),
        (markup.duration(90_000), "1\u00a0d 1\u00a0h"),
        (queries.experiment_path("tip-bench-a/b?", "runs"), "/experiments/tip-bench-a%2Fb%3F/runs"),
    ]:
        assert shown == expected


def test_a_time_is_shown_in_utc_with_its_exact_value() -> None:
    cases: list[str | int] = ["2026-01-02T03:04:05+00:00", 1767323045, "2026-01-02T05:04:05+02:00"]
    for value in cases:
        assert str(markup.when(value)) == (
            '<time datetime="2026-01-02T03:04:05Z" data-style="minutes">2\u00a0Jan\u00a02026,\u00a003:04 UTC</time>'
        )


def test_an_unknown_time_is_a_dash() -> None:
    cases: list[Any] = [None, "soon", 1e30, ""]
    for value in cases:
        assert markup.when(value) == "–"


def test_a_time_without_zone_is_taken_as_utc() -> None:
    assert markup.when("2026-01-02T03:04:05") == markup.when("2026-01-02T03:04:05Z")


def test_here_changes_only_the_given_query_parameters() -> None:
    scope = {"type": "http", "path": "/experiments/tip-bench-a?b", "query_string": b"a=1&b=2&b=3", "headers": []}
    request = Request(scope)
    assert here(request) == "/experiments/tip-bench-a%3Fb?a=1&b=2&b=3"
    assert here(request, b=None, c="x y") == "/experiments/tip-bench-a%3Fb?a=1&c=x+y"
    assert here(request, a=["4", "5"], b=None) == "/experiments/tip-bench-a%3Fb?a=4&a=5"


# pages


def test_every_page_has_a_language_a_title_landmarks_and_nothing_inline(served: ServedPanel) -> None:
    responses = [get_page(served, path, token=None if path == "/login" else "") for path in PATHS]
    for response in responses:
        page = PageElements(response.text)
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"
        assert page.all("html") == [{"lang": "en"}]
        assert re.search(r"<title>[^<]+ · tipbench</title>", response.text)
        assert len(page.all("main")) == len(page.all("h1")) == len(page.all("header")) == len(page.all("footer")) == 1
        assert any(link.get("href") == "#main" for link in page.all("a"))
        assert not page.all("style")
        assert all(script.get("src", "") for script in page.all("script"))
        assert all(not {"style", "onclick", "onload"} & set(attributes) for _, attributes in page.elements)


def test_a_bearer_client_and_a_cookie_client_see_the_same_page(served: ServedPanel) -> None:
    for path in PATHS[1:6]:
        by_token = get_page(served, path)
        served.log_in(served.admin)
        by_cookie = get_page(served, path, token=None)
        assert by_token.status_code == by_cookie.status_code
        title = re.compile("<title>.*</title>")
        assert title.findall(by_token.text) == title.findall(by_cookie.text)
        assert "Log out" in by_cookie.text
        assert "Log out" not in by_token.text  # there is no session to end


def test_ids_are_there_once_and_labels_lead_to_fields(served: ServedPanel) -> None:
    for path in PATHS:
        page = PageElements(get_page(served, path).text)
        ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
        assert len(ids) == len(set(ids)), path
        assert {label["for"] for label in page.all("label") if "for" in label} <= set(ids), path


def test_the_page_links_to_its_json(served: ServedPanel) -> None:
    for path, json_url in (("/", "/api/bench/experiments"), ("/settings", "/api/bench/tokens")):
        page = get_page(served, path).text
        assert f'href="{json_url}">JSON' in page
        assert served.get(json_url).status_code == 200


# logging in


def test_the_login_page_explains_tokens(served: ServedPanel) -> None:
    assert "tipbench token create" in get_page(served, "/login", token=None).text


def test_a_judge_lands_on_the_judging_page(served: ServedPanel) -> None:
    response = served.client.post("/login", data={"token": served.judge, "next": "/"}, follow_redirects=False)
    assert (response.status_code, response.headers["location"]) == (303, "/judge")
    assert get_page(served, "/login", token=None).headers["location"] == "/judge"


def test_an_admin_lands_on_the_experiments(served: ServedPanel) -> None:
    response = served.client.post("/login", data={"token": served.admin}, follow_redirects=False)
    assert response.headers["location"] == "/"


def test_the_log_out_button_ends_the_session(served: ServedPanel) -> None:
    served.log_in(served.admin)
    page = get_page(served, "/", token=None).text
    found = re.search(r'action="/logout"><input type="hidden" name="csrf" value="([^"]+)"', page)
    assert found
    response = served.client.post("/logout", data={"csrf": found[1]}, follow_redirects=False)
    assert response.headers["location"] == "/login"
    assert get_page(served, "/", token=None).headers["location"].startswith("/login")


# failures


def test_a_missing_page_is_html_for_people_and_json_for_programs(served: ServedPanel) -> None:
    page = get_page(served, "/nowhere")
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "Not found: /nowhere." in page.text
    assert served.error(served.get("/nowhere")) == (404, "not_found")


def test_a_judge_gets_an_error_page_with_a_link_back(served: ServedPanel) -> None:
    served.log_in(served.judge)
    page = get_page(served, "/settings", token=None)
    assert page.status_code == 403
    assert "A judge&#39;s token may" in page.text or "A judge&#x27;s token may" in page.text
    assert 'href="/judge"' in page.text
    for hidden in ('href="/settings"', 'href="/run"', 'href="/jobs"', EXPERIMENT):
        assert hidden not in page.text


def test_a_missing_page_keeps_the_header_of_the_user(served: ServedPanel) -> None:
    served.log_in(served.admin)
    page = get_page(served, "/nowhere", token=None).text
    assert 'href="/settings"' in page
    assert "Log out" in page


def test_the_requested_path_is_shown_as_text(served: ServedPanel) -> None:
    page = get_page(served, "/%3Cscript%3Ealert(1)%3C/script%3E%E2%80%AE").text
    assert "<script>alert" not in page
    assert "\u202e" not in page


def test_a_failure_names_its_request(served: ServedPanel) -> None:
    page = get_page(served, "/nowhere")
    assert page.headers["x-request-id"] in page.text


def test_a_failing_header_chip_does_not_break_the_page(served: ServedPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_request: Request) -> JobsLink | None:
        raise TipbenchError("the list of jobs cannot be read")

    monkeypatch.setattr(pages, "jobs_link", failing)
    assert get_page(served, "/settings").status_code == 200


def test_header_chips_are_shown_to_admins_only(served: ServedPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "jobs_link", lambda _request: JobsLink("2 running", "/jobs", "running"))
    assert "2 running" in get_page(served, "/").text
    assert "2 running" not in get_page(served, "/judge", token=served.judge).text


def test_a_form_that_fails_leads_back_to_its_page(served: ServedPanel) -> None:
    cases: list[tuple[str | None, str]] = [
        ("http://localhost/settings?a=1", "/settings?a=1"),
        ("http://evil.example/settings", "/"),
        ("http://localhost//evil.example", "/"),
        ("http://[", "/"),
        (None, "/"),
    ]
    for referer, back in cases:
        headers = [(b"host", b"localhost"), *([(b"referer", referer.encode())] if referer else [])]
        scope = {"type": "http", "method": "POST", "path": "/run", "query_string": b"", "headers": headers}
        request = Request({**scope, "app": served.app, "state": {}})
        page = render_error(request, 403, {"code": "csrf", "message": "Load the page again.", "path": None})
        assert f'href="{back}">Back to the form' in bytes(page.body).decode()
