"""What may stand in a suite.toml."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from tipbench.plan.scenarios import Persona, Slot, Task
from tipbench.plan.suite_files import Id, Line, Schema

SAMPLING = ("top_k", "top_p", "min_p", "repeat_penalty")


def _clock(value: object) -> object:
    """TOML's own times need seconds; people write "07:30"."""
    if isinstance(value, str) and re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", value):
        return dt.time.fromisoformat(value)
    if isinstance(value, dt.time) and not value.second and not value.microsecond:
        return value
    raise ValueError('must be a time of day such as "07:30"')


class TaskSchema(Schema):
    title: Line
    priority: Annotated[int, Field(ge=1, le=4)]
    due: dt.date | None = None
    age_days: Annotated[int, Field(ge=0, le=36500)]

    def build(self) -> Task:
        return Task(self.title, self.priority, self.due, self.age_days)


class PersonaSchema(Schema):
    id: Id
    name: Line
    role: Line
    about: Line
    preferences: Annotated[list[Line], Field(default_factory=list)]
    habits: Annotated[list[Line], Field(default_factory=list)]
    tasks: Annotated[list[TaskSchema], Field(min_length=3, max_length=6)]

    def build(self) -> Persona:
        return Persona(
            id=self.id,
            name=self.name,
            role=self.role,
            about=self.about,
            preferences=tuple(self.preferences),
            habits=tuple(self.habits),
            tasks=tuple(task.build() for task in self.tasks),
        )


class SlotSchema(Schema):
    id: Id
    label: Line
    time: Annotated[dt.time, BeforeValidator(_clock)]

    def build(self) -> Slot:
        return Slot(self.id, self.label, self.time)


class SamplingSchema(Schema):
    """All four in the end; a suite that extends another writes only those that differ."""

    top_k: Annotated[int, Field(ge=0, le=100_000)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0, le=10)] | None = None


class SuiteSchema(Schema):
    name: Id
    title: Line
    extends: Line | None = None
    date: dt.date | None = None
    sampling: SamplingSchema | None = None
    slots: Annotated[list[SlotSchema], Field(default_factory=list)]
    personas: Annotated[list[PersonaSchema], Field(default_factory=list)]
