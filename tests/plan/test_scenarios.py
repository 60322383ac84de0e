from __future__ import annotations

import dataclasses
import json
from collections import Counter
from datetime import date, time

from hypothesis import given
from hypothesis import strategies as st

from tipbench.plan.scenarios import Persona, Scenario, Slot, Task, build_scenarios

DAY = date(2026, 4, 27)
TASK = Task("Water the plants", 2, date(2026, 4, 28), 3)


def a_persona(number: int = 0) -> Persona:
    return Persona(f"p{number}", "Ada", "gardener", "Works outside.", ("plain words",), ("tea at four",), (TASK,) * 3)


def a_slot(number: int = 0) -> Slot:
    return Slot(f"s{number}", "some hour", time(number % 24, 30))


def a_scenario() -> Scenario:
    return Scenario(a_persona(), a_slot(), DAY)


sizes = st.integers(1, 12)


def combine(n_personas: int, n_slots: int) -> tuple[Scenario, ...]:
    return build_scenarios([a_persona(n) for n in range(n_personas)], [a_slot(n) for n in range(n_slots)], DAY)


@given(sizes, sizes)
def test_every_persona_is_combined_with_every_slot_once(n_personas: int, n_slots: int) -> None:
    ids = [scenario.id for scenario in combine(n_personas, n_slots)]
    assert sorted(ids) == sorted(f"p{p}@s{s}" for p in range(n_personas) for s in range(n_slots))


@given(sizes, sizes, st.data())
def test_any_prefix_uses_personas_and_slots_almost_equally_often(p: int, s: int, data: st.DataObject) -> None:
    prefix = combine(p, s)[: data.draw(st.integers(0, p * s))]
    for counts, size in (
        (Counter(scenario.persona.id for scenario in prefix), p),
        (Counter(scenario.slot.id for scenario in prefix), s),
    ):
        least = min(counts.values()) if len(counts) == size else 0
        assert max(counts.values(), default=0) - least <= 1


@given(sizes, sizes)
def test_first_scenarios_all_have_different_personas(n_personas: int, n_slots: int) -> None:
    first = combine(n_personas, n_slots)[:n_personas]
    assert len({scenario.persona.id for scenario in first}) == n_personas


def test_task_is_overdue_only_after_its_day() -> None:
    assert not TASK.overdue_on(date(2026, 4, 27))
    assert not TASK.overdue_on(date(2026, 4, 28))
    assert TASK.overdue_on(date(2026, 4, 29))


def test_task_without_due_date_is_never_overdue() -> None:
    assert not dataclasses.replace(TASK, due=None).overdue_on(date.max)


def test_equal_scenarios_have_equal_hashes() -> None:
    assert a_scenario().content_hash == a_scenario().content_hash
    assert len(a_scenario().content_hash) == 64


def test_any_change_of_content_changes_the_hash() -> None:
    scenario = a_scenario()
    persona, slot, task = scenario.persona, scenario.slot, scenario.persona.tasks[0]
    tasks = [
        dataclasses.replace(task, title="Water the tree"),
        dataclasses.replace(task, priority=3),
        dataclasses.replace(task, due=None),
        dataclasses.replace(task, age_days=4),
    ]
    personas = [
        dataclasses.replace(persona, id="other"),
        dataclasses.replace(persona, name="Other"),
        dataclasses.replace(persona, role="other"),
        dataclasses.replace(persona, about="Other."),
        dataclasses.replace(persona, preferences=()),
        dataclasses.replace(persona, habits=("tea at five",)),
        dataclasses.replace(persona, tasks=persona.tasks[:2]),
        *(dataclasses.replace(persona, tasks=(changed, *persona.tasks[1:])) for changed in tasks),
    ]
    slots = [
        dataclasses.replace(slot, id="other"),
        dataclasses.replace(slot, label="other"),
        dataclasses.replace(slot, time=time(9)),
    ]
    variants = [
        scenario,
        *(dataclasses.replace(scenario, persona=changed) for changed in personas),
        *(dataclasses.replace(scenario, slot=changed) for changed in slots),
        dataclasses.replace(scenario, day=date(2026, 4, 28)),
    ]
    assert len({variant.content_hash for variant in variants}) == len(variants) == 16


def test_hash_of_a_fixed_scenario_never_changes() -> None:
    """Recorded runs contain the hash: with another one, no old cell would be found again."""
    assert a_scenario().content_hash == "a2a5d7870307fcf43468c180b4914d7aee7d02dc529318e07d961e69e09cdd40"


def test_card_is_plain_json_and_marks_overdue_tasks() -> None:
    card = dataclasses.replace(a_scenario(), day=date(2026, 4, 30)).to_card()
    assert json.loads(json.dumps(card)) == card
    assert (card["id"], card["weekday"], card["slot"]["time"]) == ("p0@s0", "Thursday", "00:30")
    assert [task["overdue"] for task in card["persona"]["tasks"]] == [True] * 3
