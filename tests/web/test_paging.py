"""Pages: every item once, in order, while items are added."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.web.errors import Invalid
from tipbench.web.forms import SortKey, decode_cursor, encode_cursor, page_of

sort_keys = st.lists(
    st.builds(SortKey, st.integers(-50, 50), st.from_regex(r"[a-f0-9]{2}", fullmatch=True)), unique=True, max_size=40
).map(sorted)


def read_all_pages(items: list[SortKey], limit: int, added: list[SortKey] | None = None) -> list[SortKey]:
    """Return all pages in order; after the first, items are added in front."""
    page, after = page_of(items, lambda each: each, limit=limit, after=None)
    found = list(page)
    items = sorted({*items, *(added or [])})
    for _ in range(100):
        if after is None:
            return found
        page, after = page_of(items, lambda each: each, limit=limit, after=after)
        found += page
    raise AssertionError("the pages have no end")


@given(sort_keys, st.integers(1, 20))
def test_the_pages_together_are_the_list(items: list[SortKey], limit: int) -> None:
    assert read_all_pages(items, limit) == items


@given(sort_keys, st.integers(1, 20), st.integers(1, 10))
def test_new_rows_neither_shift_nor_repeat_rows_of_a_page(items: list[SortKey], limit: int, count: int) -> None:
    newer = [SortKey(-1000 - number, "00") for number in range(count)]
    assert read_all_pages(items, limit, newer) == items


@given(sort_keys, st.integers(1, 20))
def test_no_page_is_longer_than_requested_and_only_the_first_may_be_empty(items: list[SortKey], limit: int) -> None:
    page, after = page_of(items, lambda each: each, limit=limit, after=None)
    assert len(page) == min(limit, len(items))
    assert (after is None) == (len(items) <= limit)


@given(st.builds(SortKey, st.integers(), st.text(max_size=40)))
def test_a_cursor_finds_its_position(place: SortKey) -> None:
    assert decode_cursor(encode_cursor(place)) == place


@given(st.text(max_size=60))
def test_any_other_text_is_a_cursor_or_refused(text: str) -> None:
    with contextlib.suppress(Invalid):
        assert isinstance(decode_cursor(text), SortKey)


def test_a_text_that_only_resembles_a_cursor_is_refused() -> None:
    for text in ["", "x", "W10", "WzEsMl0", "W3RydWUsIngiXQ", "é", "bnVsbA"]:
        with pytest.raises(Invalid):
            decode_cursor(text)
