"""Prompts: a system and a user template per version, parsed from files and rendered for a scenario."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tipbench.errors import SuiteError
from tipbench.plan.scenarios import MONTHS, Scenario, Task
from tipbench.text import fingerprint

SECTIONS = ("system", "user")
NO_PROMPT_VERSION = "none"  # prompt version of cells whose engine uses no prompt
DIVERSITY_SENTENCE = "Make every tip come from a different angle: another task, habit, place or length of time."

_HEADING = re.compile(rf"#\s+({'|'.join(SECTIONS)})\s*", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\{\{([^{}\n]*)\}\}")


@dataclass(frozen=True)
class Prompt:
    """One prompt version: two templates with `{{ placeholders }}`."""

    version: str
    system: str
    user: str

    @property
    def hash(self) -> str:
        """SHA-256 of the templates, to detect a changed text under the same version."""
        return fingerprint([self.system, self.user])


@dataclass(frozen=True)
class RenderedPrompt:
    """The messages sent to the model."""

    system: str
    user: str


WITHOUT_PROMPT = Prompt(NO_PROMPT_VERSION, "", "")

PLACEHOLDERS = (
    "n_tips", "diversity", "name", "role", "about", "preferences", "habits", "tasks", "weekday", "date", "time", "slot",
)  # fmt: skip


def render(prompt: Prompt, scenario: Scenario, *, n_tips: int, ask_for_diversity: bool) -> RenderedPrompt:
    """Fill in both templates. `ask_for_diversity` adds DIVERSITY_SENTENCE even to templates without the placeholder."""
    user = prompt.user
    if ask_for_diversity and "diversity" not in _placeholders_in(prompt.system + prompt.user):
        user += "\n\n{{ diversity }}"
    persona, slot, day = scenario.persona, scenario.slot, scenario.day
    values = {
        "n_tips": str(n_tips),
        "diversity": DIVERSITY_SENTENCE if ask_for_diversity else "",
        "name": persona.name,
        "role": persona.role,
        "about": persona.about,
        "preferences": "; ".join(persona.preferences) or "none known",
        "habits": "; ".join(persona.habits) or "none known",
        "tasks": "\n".join(
            f"- {task.title} (priority {task.priority} of 4, {_due_text(task, day)}, {_days_text(task.age_days)} old)"
            for task in persona.tasks
        ),
        "weekday": scenario.weekday,
        "date": f"{day.day} {MONTHS[day.month - 1]} {day.year}",
        "time": f"{slot.time:%H:%M}",
        "slot": slot.label,
    }

    def fill_in(template: str) -> str:
        text = _PLACEHOLDER.sub(lambda match: values[match[1].strip()], template)
        text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)  # empty placeholders leave whitespace
        return re.sub(r"\n{3,}", "\n\n", text).strip()

    return RenderedPrompt(fill_in(prompt.system), fill_in(user))


def parse_prompt(version: str, text: str, path: Path) -> Prompt:
    """Parse the two sections of a prompt file. Text before the first heading is a comment."""
    sections: dict[str, tuple[int, list[str]]] = {}  # name → line number of its heading, its lines
    current: list[str] = []  # lines of the current section; those before the first heading are dropped
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if heading := _HEADING.fullmatch(line):
            name = heading[1].lower()
            if name in sections:
                raise SuiteError(path, number, f"a second '# {name}' section; a prompt has one of each.")
            current = []
            sections[name] = (number, current)
        else:
            current.append(line)
    for name in SECTIONS:
        if name not in sections:
            raise SuiteError(path, None, f"the '# {name}' section is missing. A prompt needs '# system' and '# user'.")
    templates: dict[str, str] = {}
    for name, (heading_line, lines) in sections.items():
        for number, line in enumerate(lines, start=heading_line + 1):
            for placeholder in _placeholders_in(line):
                if placeholder not in PLACEHOLDERS:
                    known = ", ".join(PLACEHOLDERS)
                    raise SuiteError(path, number, f"unknown placeholder '{{{{ {placeholder} }}}}'. Known: {known}.")
            if "{{" in _PLACEHOLDER.sub("", line):
                raise SuiteError(
                    path, number, "a placeholder opens with '{{' and is not closed with '}}' on the same line."
                )
        templates[name] = "\n".join(lines).strip()
        if not templates[name]:
            raise SuiteError(path, heading_line, f"the '# {name}' section is empty.")
    if "n_tips" not in _placeholders_in("".join(templates.values())):
        raise SuiteError(path, None, "the prompt does not give the number of tips. Use {{ n_tips }}.")
    return Prompt(version, templates["system"], templates["user"])


def _placeholders_in(template: str) -> list[str]:
    return [name.strip() for name in _PLACEHOLDER.findall(template)]


def _due_text(task: Task, day: date) -> str:
    if task.due is None:
        return "no due date"
    days_left = (task.due - day).days
    if days_left < 0:
        return f"overdue by {_days_text(-days_left)}"
    if days_left == 0:
        return "due today"
    if days_left == 1:
        return "due tomorrow"
    return f"due in {days_left} days"


def _days_text(count: int) -> str:
    return "1 day" if count == 1 else f"{count} days"
