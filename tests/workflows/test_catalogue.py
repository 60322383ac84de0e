"""The catalogue: selection of tips, its file format, and the candidates for an hour."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.judged import judge_at
from support.judging import SheetDriver, record_cells
from tipbench.compare.matrix import Pair
from tipbench.errors import NotEnoughData, UsageError
from tipbench.plan.grid import PlannedCell
from tipbench.record.store import MemoryStore
from tipbench.serve.catalogue import Catalogue, CatalogueFile, CatalogueTip, load_catalogue
from tipbench.workflows.catalogue import CATEGORIES, build_catalogue, category_of, effort_of

PAIR = Pair("alpha:135m", "v1")
SAME = "Drink a glass of water."
LONG = "walk " * 200


def answer(cell: PlannedCell, rng: random.Random) -> str:
    """A unique tip, one that every cell has, and one that is too long; the nurse's answers are not JSON."""
    tips = [f"Write the first line of note {rng.randrange(10**9)} for 5 minutes.", SAME, LONG]
    text = json.dumps([{"tip": tip, "rationale": "It is short."} for tip in tips])
    return f"Here you are: {text}" if cell.scenario.id.startswith("nurse") else text


@pytest.fixture(scope="module")
def judged() -> tuple[MemoryStore, CatalogueFile]:
    store = MemoryStore()
    found = record_cells(store, write=answer)
    judge_at(SheetDriver(store, found), lambda _run, number: 5 - number)
    return store, build_catalogue(store, found, PAIR)


def test_only_tips_with_a_valid_format_within_the_word_limit_become_candidates(
    judged: tuple[MemoryStore, CatalogueFile],
) -> None:
    catalogue = judged[1]
    own = [tip for tip in catalogue.tips if tip.tip != SAME]
    assert len(catalogue.tips) == 7  # one of each of the six other scenarios, and the one they share
    assert all(tip.tip.startswith("Write") for tip in own)
    assert {(tip.category, tip.effort_min, tip.composite) for tip in own} == {("start", 5.0, 17.0)}
    assert {tip.slot_hour for tip in own} == {7.5, 15.5}


def test_a_text_of_several_answers_is_one_tip_of_any_hour(judged: tuple[MemoryStore, CatalogueFile]) -> None:
    (shared,) = [tip for tip in judged[1].tips if tip.tip == SAME]
    assert (shared.slot_hour, shared.composite, shared.category) == (None, 14.0, "break")


def test_a_pair_without_scored_tips_is_not_enough_data() -> None:
    store = MemoryStore()
    found = record_cells(store)
    with pytest.raises(NotEnoughData, match="no scored tip"):
        build_catalogue(store, found, PAIR)
    with pytest.raises(UsageError, match="gamma"):
        build_catalogue(store, found, Pair("gamma", "v1"))


def test_the_file_reads_back_to_the_same_candidates(judged: tuple[MemoryStore, CatalogueFile], tmp_path: Path) -> None:
    path = tmp_path / "tips.toml"
    path.write_text(judged[1].to_toml(), encoding="utf-8")
    assert load_catalogue(path).candidates(9.0) == Catalogue(judged[1].tips).candidates(9.0)
    shared = next(tip for tip in judged[1].tips if tip.tip == SAME)
    assert shared.scores == {"relevance": 4.0, "actionability": 4.0, "tone": 4.0}
    assert {scale: tips[shared.tip_id] for scale, tips in load_catalogue(path).scores.items()} == shared.scores


TIP = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]) | st.just("\x7f"), min_size=1, max_size=80)


@given(TIP.filter(lambda text: text.strip() == text))
def test_any_text_round_trips_through_the_file(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(CatalogueFile(tips=[CatalogueTip(tip_id="t", tip=text, category=text[:64])]).to_toml(), "utf-8")
    assert load_catalogue(path).texts == {"t": text}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("composite = 17.5", "composite"),
        ("slot_hour = 24", "slot_hour"),
        ("colour = 1", "colour"),
        ('effort_min = "5"', "effort_min"),
        ('[[tips]]\ntip_id = "t"\ntip = "y"\ncategory = "focus"', "unique"),
    ],
)
def test_an_invalid_line_is_refused_with_its_place(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "tips.toml"
    path.write_text(f'format = "tipbench-catalogue/1"\n[[tips]]\ntip_id = "t"\ntip = "x"\ncategory = "focus"\n{line}\n')
    with pytest.raises(UsageError, match=reason) as caught:
        load_catalogue(path)
    assert f"{path}:{7 if 'tips' in line else 6}" in str(caught.value)


def test_the_nearest_slots_come_first_round_midnight() -> None:
    hours = (23.0, 1.0, 12.0, 6.0, None)
    tips = [CatalogueTip(tip_id=f"{hour}", tip="x", category="focus", slot_hour=hour) for hour in hours]
    order = [candidate["tip_id"] for candidate in Catalogue(tips).candidates(0.5)]
    assert order == ["None", "1.0", "23.0", "6.0", "12.0"]


def test_at_most_200_tips_of_a_catalogue_are_candidates() -> None:
    tips = [CatalogueTip(tip_id=f"{number}", tip="x", category="focus") for number in range(201)]
    assert len(Catalogue(tips).candidates(0.5)) == 200


@pytest.mark.parametrize("category", CATEGORIES)
def test_each_category_is_found_by_its_own_words(category: str) -> None:
    assert category_of(" and ".join(CATEGORIES[category][:3])) == category


def test_a_tip_without_known_words_is_general() -> None:
    assert category_of("Be yourself!") == "general"


@pytest.mark.parametrize(
    ("tip", "minutes"),
    [
        ("Set a 10-minute timer.", 10),
        ("Breathe for 90 seconds.", 2),
        ("Take half a day.", None),
        ("for an hour", 60),
        ("half an hour", None),
    ],
)
def test_the_first_duration_is_the_effort(tip: str, minutes: float | None) -> None:
    assert effort_of(tip) == minutes
