"""Scenarios: one persona at one time slot with its open tasks, on a fixed calendar date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from math import lcm
from typing import Any

from tipbench.text import fingerprint

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")  # independent of the locale
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """An open task of a persona."""

    title: str
    priority: int  # 1 to 4; 4 is the most important
    due: date | None
    age_days: int  # days since the task was created

    def overdue_on(self, day: date) -> bool:
        """Return whether the task is overdue; a task due on `day` is not."""
        return self.due is not None and self.due < day


@dataclass(frozen=True)
class Persona:
    """The person a tip is for, with preferences, habits and open tasks."""

    id: str
    name: str
    role: str
    about: str
    preferences: tuple[str, ...]
    habits: tuple[str, ...]
    tasks: tuple[Task, ...]


@dataclass(frozen=True)
class Slot:
    """A time of day at which a tip is shown."""

    id: str
    label: str
    time: time


@dataclass(frozen=True)
class Scenario:
    """One persona at one slot on one day: the input of a cell."""

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
        """SHA-256 of the scenario's content, independent of its suite."""
        return fingerprint(self._content())

    def to_card(self) -> dict[str, Any]:
        """Return the scenario as JSON values for judges: its content, the weekday, and which tasks are overdue."""
        content = self._content()
        for task_content, task in zip(content["persona"]["tasks"], self.persona.tasks, strict=True):
            task_content["overdue"] = task.overdue_on(self.day)
        return {"id": self.id, "weekday": self.weekday, **content}

    def _content(self) -> dict[str, Any]:
        persona, slot = self.persona, self.slot
        return {
            "day": self.day.isoformat(),
            "slot": {**vars(slot), "time": f"{slot.time:%H:%M}"},
            "persona": {
                **vars(persona),
                "preferences": list(persona.preferences),
                "habits": list(persona.habits),
                "tasks": [{**vars(task), "due": task.due.isoformat() if task.due else None} for task in persona.tasks],
            },
        }


def build_scenarios(personas: Sequence[Persona], slots: Sequence[Slot], day: date) -> tuple[Scenario, ...]:
    """Combine every persona with every slot.

    Among the first k scenarios, for any k, all personas and all slots occur equally often (± 1).
    """
    period = lcm(len(personas), len(slots))
    scenarios = []
    for index in range(len(personas) * len(slots)):
        shift = index // period  # without it, the combinations would repeat after each period
        scenarios.append(Scenario(personas[index % len(personas)], slots[(index + shift) % len(slots)], day))
    return tuple(scenarios)
