"""Scenarios: one persona at one time slot with its open tasks, on a fixed calendar date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from math import lcm
from typing import Any

from tipbench.plan.fingerprint import fingerprint

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")  # whatever the locale


@dataclass(frozen=True)
class Task:
    """Something a persona still has to do."""

    title: str
    priority: int  # 1 to 4; 4 is the most important
    due: date | None
    age_days: int  # since it was written down

    def overdue_on(self, day: date) -> bool:
        """Due today is not overdue yet."""
        return self.due is not None and self.due < day


@dataclass(frozen=True)
class Persona:
    """Who the tip is for: a person, what they like, what they do anyway, and what they have to do."""

    id: str
    name: str
    role: str
    about: str
    preferences: tuple[str, ...]
    habits: tuple[str, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Slot:
    """A moment of the day at which a tip is shown."""

    id: str
    label: str
    time: time


@dataclass(frozen=True)
class Scenario:
    """One persona at one slot on one day: what a cell asks about."""

    persona: Persona
    slot: Slot
    day: date

    @property
    def id(self) -> str:
        return f"{self.persona.id}@{self.slot.id}"

    @property
    def weekday(self) -> str:
        return WEEKDAYS[self.day.weekday()]

    @property
    def content_hash(self) -> str:
        """SHA-256 over everything the scenario says: equal hash, equal scenario, whichever suite it came from."""
        return fingerprint(self._content())

    def to_card(self) -> dict[str, Any]:
        """Plain JSON for whoever judges: the content, and what follows from it."""
        content = self._content()
        for card, task in zip(content["persona"]["tasks"], self.persona.tasks, strict=True):
            card["overdue"] = task.overdue_on(self.day)
        return {"id": self.id, "weekday": self.weekday, **content}

    def _content(self) -> dict[str, Any]:
        persona, slot = self.persona, self.slot
        return {
            "day": self.day.isoformat(),
            "slot": {"id": slot.id, "label": slot.label, "time": f"{slot.time:%H:%M}"},
            "persona": {
                "id": persona.id,
                "name": persona.name,
                "role": persona.role,
                "about": persona.about,
                "preferences": list(persona.preferences),
                "habits": list(persona.habits),
                "tasks": [
                    {
                        "title": task.title,
                        "priority": task.priority,
                        "due": task.due.isoformat() if task.due else None,
                        "age_days": task.age_days,
                    }
                    for task in persona.tasks
                ],
            },
        }


def build_scenarios(personas: Sequence[Persona], slots: Sequence[Slot], day: date) -> tuple[Scenario, ...]:
    """Every persona at every slot; any first k use every persona, and every slot, equally often, give or take one.

    Both indices run on together; after each common multiple of the two lengths the slots move on by one, so that no
    combination comes twice.
    """
    if not personas or not slots:
        return ()
    common = lcm(len(personas), len(slots))
    return tuple(
        Scenario(personas[k % len(personas)], slots[(k + k // common) % len(slots)], day)
        for k in range(len(personas) * len(slots))
    )
