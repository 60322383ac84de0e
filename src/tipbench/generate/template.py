"""TemplateEngine: a reference that writes tips with templates instead of a language model.

It puts an open task and the time into a prewritten sentence. A model that is not better is not worth its memory.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from dataclasses import asdict, dataclass
from datetime import date
from itertools import count

from tipbench.errors import ModelRefused
from tipbench.generate.engine import (
    Completion,
    EngineFailure,
    FailureKind,
    GenerationRequest,
    InProcessEngine,
    ModelFacts,
)
from tipbench.plan.scenarios import MONTHS, Scenario, Task

MODEL = "baseline:template"
VERSION = "1"  # part of the digest; increase it if the choice of tasks changes, so that new cells are generated

_MAX_WORDS = 11  # of a task's title or a habit


@dataclass(frozen=True)
class _Kind:
    """One kind of advice. Its field names are part of the digest: do not rename them."""

    order: str  # sort order of the tasks; see `_sorted_tasks`
    wordings: tuple[str, ...]  # templates of the tip
    rationale: str
    minutes: tuple[int, ...]  # durations to choose from
    skip: int = 0  # tasks to skip, so that the first tips are not all about the same task
    hours: tuple[int, int] = (0, 24)  # start (included) and end (excluded); an end above 24 is on the next morning

    def is_for(self, hour: int) -> bool:
        start, end = self.hours
        return start <= hour < end or hour + 24 < end


_KINDS = (
    _Kind(
        "urgent",
        (
            "Set a timer for {minutes} minutes at {time} and work only on “{task}”; stop when it rings.",
            "Start “{task}” now, at {time}: give it {minutes} minutes, then write down the next step.",
            "Put everything else away and begin “{task}” with its smallest part; work {minutes} minutes, until {end}.",
        ),
        "It is {state} and has priority {priority} of 4.",
        (15, 20, 25),
    ),
    _Kind(
        "small",
        (
            "Use the {minutes} minutes from {time} to get “{task}” off your list; if it takes longer, stop at {end}.",
            "Do one small thing next: “{task}”. Give it {minutes} minutes, then tick it off or leave it.",
        ),
        "A small task done makes the list shorter.",
        (5, 10),
    ),
    _Kind(
        "urgent",
        (
            "Use a habit you have ({habit}): right after it, spend {minutes} minutes on “{task}”.",
            "Put “{task}” where you will see it after your habit ({habit}), and give it {minutes} minutes then.",
        ),
        "Something you do anyway is a good reminder.",
        (10, 15),
        skip=1,
    ),
    _Kind(
        "important",
        ("Take {minutes} minutes at {time} to write down three things for today, with “{task}” at the top.",),
        "The morning is the time to choose what the day is for.",
        (5, 10),
        hours=(4, 11),
    ),
    _Kind(
        "important",
        ("Block {minutes} minutes for “{task}” this afternoon: choose the hour now and write it down.",),
        "A task with an hour is more likely to be done than one without.",
        (20, 25, 30),
        hours=(11, 14),
    ),
    _Kind(
        "important",
        ("Do an easy part of “{task}” for {minutes} minutes from {time}, then stand up and stretch.",),
        "Easy steps suit the hours when energy is low.",
        (10, 15),
        hours=(14, 18),
    ),
    _Kind(
        "important",
        ("Spend {minutes} minutes laying out what “{task}” needs tomorrow, note the first step, then stop for today.",),
        "A note in the evening makes it easy to stop, and to start again.",
        (5, 10),
        hours=(18, 28),
    ),
    _Kind(
        "oldest",
        (
            "Take {minutes} minutes to decide about “{task}”: do it, give it a day, or take it off the list.",
            "Look at “{task}” for {minutes} minutes and write down its first step with a day and an hour.",
        ),
        "It has been on your list for {age}.",
        (5, 10),
    ),
)


class TemplateEngine(InProcessEngine):
    """Fills templates with values of the scenario; ignores the prompts."""

    name = "baseline"

    def facts(self, model: str) -> ModelFacts:
        """Return the facts of the template. Its digest covers all wordings, so a new wording is a new model."""
        if model != MODEL:
            raise ModelRefused(_unknown_model_message(model))
        content = {"version": VERSION, "kinds": [asdict(kind) for kind in _KINDS]}
        return ModelFacts(
            model=MODEL,
            engine=self.name,
            engine_version=VERSION,
            host=platform.node(),
            digest=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
            params_b=0.0,
            file_bytes=0,
            kv_bytes_per_token=0,
        )

    def list_models(self) -> list[str]:
        return [MODEL]

    def complete(self, request: GenerationRequest) -> Completion | EngineFailure:
        """Return exactly `n_tips` unique tips as a JSON array; deterministic for a scenario and seed."""
        if request.model != MODEL:
            return EngineFailure(FailureKind.MISSING_MODEL, _unknown_model_message(request.model))
        if request.cancel.is_set():
            return EngineFailure(FailureKind.CANCELLED, "stopped before it began")
        start = time.perf_counter()
        tips = write_tips(request.scenario, request.n_tips, int(request.options.get("seed", 0)))
        text = json.dumps(tips, ensure_ascii=False, indent=1)
        return Completion(text, done_reason="stop", latency_s=time.perf_counter() - start, load_s=0.0)


def write_tips(scenario: Scenario, n_tips: int, seed: int) -> list[dict[str, str]]:
    """Return `n_tips` unique tips for a scenario. Each round adds one tip of each kind.

    In each round, a kind uses its next task. After all tasks it uses its next wording, and after all wordings its
    duration grows by five minutes.
    """
    kinds = [kind for kind in _KINDS if kind.is_for(scenario.slot.time.hour)]
    tasks_by_title: dict[str, Task] = {}  # tasks with the same shortened title are used once
    for task in scenario.persona.tasks:
        tasks_by_title.setdefault(_shorten(task.title).casefold(), task)
    tasks = list(tasks_by_title.values()) or [Task("the first thing on your mind", priority=1, due=None, age_days=0)]
    habits = scenario.persona.habits or ("the next break",)
    tips: dict[str, dict[str, str]] = {}  # by case-folded text
    for index in count():  # also counts duplicates, which are left out
        if len(tips) >= n_tips:
            break
        round_number, kind_index = divmod(index, len(kinds))
        kind = kinds[kind_index]
        task = _sorted_tasks(tasks, kind.order, scenario.day)[(round_number + kind.skip) % len(tasks)]
        task_cycles = round_number // len(tasks)  # how often the kind has used all tasks
        wording_cycles, wording_index = divmod(task_cycles, len(kind.wordings))
        first_wording = _draw(seed, "wording", kind_index)
        wording = kind.wordings[(first_wording + wording_index) % len(kind.wordings)]
        if wording_cycles:
            minutes = kind.minutes[-1] + 5 * wording_cycles
        else:
            minutes = kind.minutes[_draw(seed, "minutes", index) % len(kind.minutes)]
        habit = habits[_draw(seed, "habit", index) % len(habits)]
        values = _placeholder_values(scenario, task, habit, minutes)
        tip = wording.format_map(values)
        tips.setdefault(tip.casefold(), {"tip": tip, "rationale": kind.rationale.format_map(values)})
    return list(tips.values())


def _sorted_tasks(tasks: list[Task], order: str, day: date) -> list[Task]:
    """Sort the tasks: `small` (low priority), `oldest`, `important` or `urgent` ones first. Ties keep their order."""
    if order == "small":
        return sorted(tasks, key=lambda task: (task.priority, task.age_days))
    if order == "oldest":
        return sorted(tasks, key=lambda task: -task.age_days)
    if order == "important":
        return sorted(tasks, key=lambda task: -task.priority)

    def urgency(task: Task) -> int:
        if task.overdue_on(day):
            return 0
        return 1 if task.due == day else 2

    return sorted(tasks, key=lambda task: (urgency(task), -task.priority, task.due or date.max))


def _placeholder_values(scenario: Scenario, task: Task, habit: str, minutes: int) -> dict[str, str | int]:
    start = scenario.slot.time.hour * 60 + scenario.slot.time.minute
    return {
        "task": _shorten(task.title),
        "habit": _shorten(habit),
        "minutes": minutes,
        "time": _clock_time(start),
        "end": _clock_time(start + minutes),
        "state": _due_text(task, scenario.day),
        "priority": task.priority,
        "age": "one day" if task.age_days == 1 else f"{task.age_days} days",
    }


def _clock_time(minute: int) -> str:
    """Format minutes since midnight as HH:MM."""
    return f"{minute // 60 % 24:02}:{minute % 60:02}"


def _due_text(task: Task, day: date) -> str:
    if task.due is None:
        return "open"
    if task.due == day:
        return "due today"
    prefix = "overdue since" if task.overdue_on(day) else "due on"
    return f"{prefix} {task.due.day} {MONTHS[task.due.month - 1]}"


def _shorten(text: str) -> str:
    words = text.split()
    ellipsis = "…" if len(words) > _MAX_WORDS else ""
    return " ".join(words[:_MAX_WORDS]) + ellipsis


def _draw(seed: int, purpose: str, number: int) -> int:
    """Return a pseudorandom number that is the same on every machine and Python version."""
    digest = hashlib.sha256(repr((seed, purpose, number)).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _unknown_model_message(model: str) -> str:
    return f"The baseline engine has one model, {MODEL}; the request names {model!r}. Write {MODEL} in --models."
