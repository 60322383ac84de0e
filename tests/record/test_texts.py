from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tipbench.errors import CorruptText
from tipbench.record import mlflow_wire, texts
from tipbench.record.mlflow_wire import CurrentRun, change_batches, text_tags_after
from tipbench.record.run import RunChange, StoredRun
from tipbench.record.texts import MAX_TAG_CHARS, escape, from_tags, multi_request_tags, to_tags, unescape, unneeded_tags

ANY_TEXT = st.text(st.characters(exclude_categories=())) | st.text("\x00\ud83d\ude00␛0241bd8")
KEY = "artifact:raw.txt"
LONG = "abcdefghij" * 2500


@given(ANY_TEXT)
def test_any_text_round_trips(text: str) -> None:
    assert from_tags(to_tags(KEY, text)) == {KEY: text}


@given(ANY_TEXT.filter(bool), st.integers(1, 9))
def test_any_text_of_any_length_round_trips(text: str, thousands: int) -> None:
    long = text * (thousands * 9000 // len(text))
    assert from_tags(to_tags(KEY, long)) == {KEY: long}


@given(ANY_TEXT)
def test_stored_form_has_neither_nul_nor_surrogate(text: str) -> None:
    stored = "".join(to_tags(KEY, text * 500).values())
    assert "\x00" not in stored
    stored.encode("utf-8")


@given(ANY_TEXT, ANY_TEXT)
def test_different_texts_have_different_stored_forms(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(ANY_TEXT)
def test_a_foreign_tag_is_never_an_error_to_unescape(text: str) -> None:
    assert isinstance(unescape(text), str)


def test_an_ordinary_text_is_stored_as_it_is() -> None:
    text = 'Größe: "5 min" \\ 😀\r\n\ttail \x01 '
    assert to_tags(KEY, text) == {KEY: text}


def test_200_kb_with_emoji_and_nuls_round_trip() -> None:
    text = ("tip 😀\x00\ud800 — ok\n" * 20_000)[:200_000]
    tags = to_tags(KEY, text)
    assert max(map(len, tags.values())) <= MAX_TAG_CHARS
    back = from_tags(tags)[KEY]
    assert back.encode("utf-8", "surrogatepass") == text.encode("utf-8", "surrogatepass")


def test_a_text_takes_as_many_tags_as_it_needs() -> None:
    for length, count in [(0, 1), (8000, 1), (8001, 3), (16_000, 3), (16_001, 4)]:
        assert len(to_tags(KEY, "x" * length)) == count


def test_length_is_that_of_the_stored_form() -> None:
    assert len(to_tags(KEY, "\x00" * 1600)) == 1
    assert len(to_tags(KEY, "\x00" * 1601)) == 3


def test_meta_describes_the_original_text() -> None:
    meta = json.loads(to_tags(KEY, "\x00" * 5000)[KEY + ".meta"])
    assert (meta["parts"], meta["chars"]) == (4, 5000)
    assert len(meta["sha256"]) == 64


def test_more_than_999_parts_are_supported() -> None:
    text = "".join(f"{number:08d}" for number in range(1_000_500))
    tags = to_tags(KEY, text)
    assert KEY + ".1000" in tags
    assert from_tags(tags)[KEY] == text


def test_several_texts_are_read() -> None:
    tags = to_tags(KEY, LONG) | to_tags("artifact:prompt.txt", "hello")
    assert from_tags(tags) == {KEY: LONG, "artifact:prompt.txt": "hello"}


def test_an_ambiguous_key_is_refused() -> None:
    for key in ["raw.txt", "artifact:x.meta", "artifact:x.001", "artifact:x.1234"]:
        with pytest.raises(ValueError, match="key"):
            to_tags(key, "text")


TAGS = to_tags(KEY, LONG)
FIRST, LAST, META = TAGS[KEY + ".001"], TAGS[KEY + ".004"], TAGS[KEY + ".meta"]
DAMAGE: list[tuple[dict[str, str | None], str]] = [  # changed tags (None: deleted), and the problem in the message
    ({".002": None}, "part 002 of 4 is missing"),
    ({".004": None}, "part 004 of 4 is missing"),
    ({".004": None, ".0004": LAST}, "part 004 of 4 is missing"),
    ({".001": "y" + FIRST[1:], ".002": FIRST}, "changed places"),
    ({".004": LAST[:-1]}, "24999 characters but .meta has 25000"),
    ({".meta": None}, "no .meta"),
    ({".001": None, ".002": None, ".003": None, ".004": None}, "part 001 of 4 is missing"),
    ({".meta": "[" * 5000}, "cannot be read"),
    ({".meta": "[4]"}, "cannot be read"),
    ({".meta": json.dumps({"parts": 10**15, "chars": 10**16, "sha256": ""})}, "part 005 of"),
    ({".meta": META.replace('"sha256":"', '"sha256":"0')}, "SHA-256"),
    ({".meta": META.replace("{", '{"first":3,')}, "part 005 of 4 is missing"),
    ({".meta": META.replace("{", '{"first":0,')}, "is invalid"),
]


def test_damage_is_named_with_its_key() -> None:
    for changes, reason in DAMAGE:
        changed = TAGS | {KEY + suffix: value for suffix, value in changes.items()}
        with pytest.raises(CorruptText, match=reason) as caught:
            from_tags({tag: value for tag, value in changed.items() if value is not None})
        assert KEY in str(caught.value)


def test_an_escape_that_we_never_write_is_damage() -> None:
    for stored in ["␛", "␛12", "␛zzzz", "␛0041", "␛D800"]:
        with pytest.raises(CorruptText, match="escape sequence"):
            from_tags({KEY: stored})


@given(st.integers(1, 3), st.data())
def test_every_altered_character_is_detected(part: int, data: st.DataObject) -> None:
    tags = to_tags(KEY, LONG)
    key = f"{KEY}.{part:03d}"
    at = data.draw(st.integers(0, len(tags[key]) - 1))
    tags[key] = tags[key][:at] + "#" + tags[key][at + 1 :]
    with pytest.raises(CorruptText):
        from_tags(tags)


# What an interrupted update may leave


def test_unneeded_tags_are_not_read() -> None:
    for tags, text in [
        (to_tags(KEY, LONG) | {KEY: "an older, short text"}, LONG),
        (to_tags(KEY, LONG) | {KEY + ".005": "an older part", KEY + ".0004": "x"}, LONG),
        ({KEY: "short", KEY + ".meta": ""}, "short"),
        (to_tags(KEY, LONG) | {KEY: "short", KEY + ".meta": ""}, "short"),
        ({KEY: "short", KEY + ".001": "a part written before its meta tag"}, "short"),
        ({KEY + ".meta": "", KEY + ".001": "a part written before its meta tag"}, None),
    ]:
        assert from_tags(tags).get(KEY) == text
        for tag in unneeded_tags(KEY, tags):
            del tags[tag]
            assert from_tags(tags).get(KEY) == text
        assert tags == ({} if text is None else to_tags(KEY, text))


def test_a_damaged_text_that_is_not_requested_is_ignored() -> None:
    tags = to_tags(KEY, LONG) | to_tags("artifact:prompt.txt", "hello")
    del tags[KEY + ".002"]
    assert from_tags(tags, {"artifact:prompt.txt"}) == {"artifact:prompt.txt": "hello"}
    with pytest.raises(CorruptText):
        from_tags(tags, {KEY})


def test_no_tag_is_unneeded_if_the_meta_tag_is_invalid() -> None:
    assert unneeded_tags(KEY, {KEY: "x", KEY + ".meta": "nonsense", KEY + ".001": "y"}) == []
    huge = json.dumps({"parts": 10**15, "chars": 10**16, "sha256": ""})
    assert unneeded_tags(KEY, {KEY + ".meta": huge, KEY + ".001": "y"}) == []


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight characters a tag and five tags a request: many requests for little text."""
    monkeypatch.setattr(texts, "MAX_TAG_CHARS", 8)
    monkeypatch.setattr(mlflow_wire, "MAX_BATCH_TAGS", 5)


OTHER = "artifact:scores.json"
Change = tuple[dict[str, str], int]  # the new texts, and after how many steps the writer dies
CHANGES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from([KEY, OTHER]), st.text("ab\x00", max_size=100), min_size=1),
        st.integers(0, 40) | st.just(10_000),
    ),
    min_size=1,
    max_size=5,
)


def steps(new: Mapping[str, str], version: str, tags: dict[str, str]) -> Iterator[None]:
    """What `update` does to the tags, one request after the other."""
    run = StoredRun("r", "FINISHED", 0, 0, {}, {}, {})
    for batch in change_batches(RunChange(texts=new, tags={"version": version}, at_ms=0), CurrentRun(run, dict(tags))):
        tags.update({tag["key"]: tag["value"] for tag in batch.tags})
        yield
    for key in new:
        for tag in unneeded_tags(key, tags):
            del tags[tag]
            yield


@pytest.mark.usefixtures("small_limits")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(CHANGES)
def test_wherever_writers_die_each_text_reads_as_the_old_or_the_new_one(planned: list[Change]) -> None:
    tags: dict[str, str] = {}

    def read() -> dict[str, str]:
        return from_tags({key: value for key, value in tags.items() if key != "version"})

    for number, (new, dies_after) in enumerate(planned):
        before = read()
        died = False
        for at, _ in enumerate(steps(new, str(number), tags)):
            now = read()
            assert all(now.get(key) in {before.get(key), text} for key, text in new.items())
            assert now.keys() - new.keys() == before.keys() - new.keys()
            if tags.get("version") == str(number):
                assert now == before | new
            if died := at == dies_after:
                break
        if not died:
            assert read() == before | new
            assert tags["version"] == str(number)
            assert not [tag for key in new for tag in unneeded_tags(key, tags)]


@pytest.mark.usefixtures("small_limits")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.none() | st.text("ab", max_size=100), st.text("ab", max_size=100))
def test_a_text_written_tag_by_tag_is_the_old_or_the_new_one_throughout(old: str | None, new: str) -> None:
    tags = {} if old is None else to_tags(KEY, old)
    ahead, switch = multi_request_tags(KEY, new, dict(tags))
    for key, value in ahead.items():
        tags[key] = value
        assert from_tags(tags).get(KEY) == old
    for key, value in switch.items():
        tags[key] = value
        assert from_tags(tags).get(KEY) in {old, new}
    assert from_tags(tags) == {KEY: new}


@pytest.mark.usefixtures("small_limits")
def test_a_text_replaced_in_several_requests_begins_behind_the_old_one_and_then_at_one_again() -> None:
    tags = to_tags(KEY, "a" * 80)
    for text, first in [("b" * 88, 11), ("c" * 64, None), ("d" * 96, 9)]:
        for _ in steps({KEY: text}, "1", tags):
            pass
        assert json.loads(tags[KEY + ".meta"]).get("first") == first
        assert from_tags(tags, {KEY}) == {KEY: text}


@pytest.mark.usefixtures("small_limits")
def test_what_fits_into_one_request_is_one_request() -> None:
    run = StoredRun("r", "FINISHED", 0, 0, {}, {}, {})
    (sent,) = change_batches(
        RunChange(texts={KEY: "b" * 24}, tags={"x": "y"}, at_ms=0), CurrentRun(run, to_tags(KEY, "a" * 24))
    )
    assert text_tags_after({}, [sent]) == to_tags(KEY, "b" * 24)
