from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import CorruptText
from tipbench.record.texts import TAG_CHARS, escape, from_tags, to_tags, unescape

ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.text("\x00\ud83d\ude00␛0241bd8")
KEY = "artifact:raw.txt"
LONG = "abcdefghij" * 2500


@given(ANY_TEXT)
def test_any_text_comes_back_as_it_was(text: str) -> None:
    assert from_tags(to_tags(KEY, text)) == ({KEY: text}, {})


@given(ANY_TEXT.filter(bool), st.integers(1, 9))
def test_any_text_of_any_length_comes_back_as_it_was(text: str, thousands: int) -> None:
    long = text * (thousands * 9000 // len(text))
    assert from_tags(to_tags(KEY, long))[0] == {KEY: long}


@given(ANY_TEXT)
def test_stored_form_has_neither_nul_nor_surrogate(text: str) -> None:
    stored = "".join(to_tags(KEY, text * 500).values())
    assert "\x00" not in stored
    stored.encode("utf-8")


@given(ANY_TEXT, ANY_TEXT)
def test_two_texts_are_never_stored_alike(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(ANY_TEXT)
def test_a_foreign_tag_is_never_an_error_to_unescape(text: str) -> None:
    assert isinstance(unescape(text), str)


def test_an_ordinary_text_is_stored_as_it_is() -> None:
    text = 'Größe: "5 min" \\ 😀\r\n\ttail \x01 '
    assert to_tags(KEY, text) == {KEY: text}


def test_200_kb_with_emoji_and_nuls_come_back_byte_for_byte() -> None:
    text = ("tip 😀\x00\ud800 — ok\n" * 20_000)[:200_000]
    tags = to_tags(KEY, text)
    assert max(map(len, tags.values())) <= TAG_CHARS
    back = from_tags(tags)[0][KEY]
    assert back.encode("utf-8", "surrogatepass") == text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(("length", "count"), [(0, 1), (8000, 1), (8001, 3), (16_000, 3), (16_001, 4)])
def test_a_text_takes_as_many_tags_as_it_needs(length: int, count: int) -> None:
    assert len(to_tags(KEY, "x" * length)) == count


def test_length_is_that_of_the_stored_form() -> None:
    assert len(to_tags(KEY, "\x00" * 1600)) == 1
    assert len(to_tags(KEY, "\x00" * 1601)) == 3


def test_meta_describes_the_original_text() -> None:
    meta = json.loads(to_tags(KEY, "\x00" * 5000)[KEY + ".meta"])
    assert (meta["parts"], meta["chars"]) == (4, 5000)
    assert len(meta["sha256"]) == 64


def test_more_than_999_parts_are_fine() -> None:
    text = "".join(f"{number:08d}" for number in range(1_000_500))
    tags = to_tags(KEY, text)
    assert KEY + ".1000" in tags
    assert from_tags(tags)[0][KEY] == text


def test_other_tags_are_left_alone() -> None:
    tags = {"kind": "cell", "note": "␛0000"} | to_tags(KEY, LONG) | to_tags("artifact:prompt.txt", "hello")
    texts, rest = from_tags(tags)
    assert texts == {KEY: LONG, "artifact:prompt.txt": "hello"}
    assert rest == {"kind": "cell", "note": "␛0000"}


@pytest.mark.parametrize("key", ["raw.txt", "artifact:x.meta", "artifact:x.001", "artifact:x.1234"])
def test_a_key_that_could_be_mistaken_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        to_tags(key, "text")


def damage_missing(tags: dict[str, str]) -> None:
    del tags[KEY + ".002"]


def damage_missing_last(tags: dict[str, str]) -> None:
    del tags[KEY + ".004"]


def damage_extra(tags: dict[str, str]) -> None:
    tags[KEY + ".005"] = "x"


def damage_doubled(tags: dict[str, str]) -> None:
    tags[KEY + ".0004"] = tags[KEY + ".004"]


def damage_renumbered(tags: dict[str, str]) -> None:
    tags[KEY + ".0004"] = tags.pop(KEY + ".004")


def damage_order(tags: dict[str, str]) -> None:
    tags[KEY + ".001"], tags[KEY + ".002"] = "y" + tags[KEY + ".001"][1:], tags[KEY + ".001"]


def damage_cut(tags: dict[str, str]) -> None:
    tags[KEY + ".004"] = tags[KEY + ".004"][:-1]


def damage_meta_gone(tags: dict[str, str]) -> None:
    del tags[KEY + ".meta"]


def damage_meta_only(tags: dict[str, str]) -> None:
    for number in range(1, 5):
        del tags[f"{KEY}.{number:03d}"]


def damage_meta_garbage(tags: dict[str, str]) -> None:
    tags[KEY + ".meta"] = "[" * 5000


def damage_meta_huge(tags: dict[str, str]) -> None:
    tags[KEY + ".meta"] = json.dumps({"parts": 10**15, "chars": 10**16, "sha256": ""})


def damage_meta_hash(tags: dict[str, str]) -> None:
    tags[KEY + ".meta"] = tags[KEY + ".meta"].replace('"sha256":"', '"sha256":"0')


def damage_both(tags: dict[str, str]) -> None:
    tags[KEY] = "whole"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_missing, "part 002 of 4 is missing"),
        (damage_missing_last, "part 004 of 4 is missing"),
        (damage_extra, "5 parts where .meta says 4"),
        (damage_doubled, "5 parts where .meta says 4"),
        (damage_renumbered, "part 004 of 4 is missing"),
        (damage_order, "changed places"),
        (damage_cut, "24999 characters where .meta says 25000"),
        (damage_meta_gone, "no .meta"),
        (damage_meta_only, "part 001 of 4 is missing"),
        (damage_meta_garbage, "cannot be read"),
        (damage_meta_huge, "part 005 of"),
        (damage_meta_hash, "SHA-256"),
        (damage_both, "whole and in parts"),
    ],
)
def test_damage_is_named_with_its_key(damage: Callable[[dict[str, str]], None], reason: str) -> None:
    tags = to_tags(KEY, LONG)
    damage(tags)
    with pytest.raises(CorruptText, match=reason) as caught:
        from_tags(tags)
    assert KEY in str(caught.value)


@pytest.mark.parametrize("stored", ["␛", "␛12", "␛zzzz", "␛0041", "␛D800"])
def test_an_escape_that_we_never_write_is_damage(stored: str) -> None:
    with pytest.raises(CorruptText, match="escape sequence"):
        from_tags({KEY: stored})


@given(st.integers(1, 3), st.data())
def test_no_single_altered_character_goes_unnoticed(part: int, data: st.DataObject) -> None:
    tags = to_tags(KEY, LONG)
    key = f"{KEY}.{part:03d}"
    at = data.draw(st.integers(0, len(tags[key]) - 1))
    tags[key] = tags[key][:at] + "#" + tags[key][at + 1 :]
    with pytest.raises(CorruptText):
        from_tags(tags)
