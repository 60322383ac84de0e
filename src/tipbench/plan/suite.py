"""Suites: scenarios, prompts, rubric, controls and sampling, loaded and validated from a folder."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tipbench.errors import SuiteError
from tipbench.plan.prompts import Prompt, parse_prompt
from tipbench.plan.rubric import Control, Rubric, load_controls, load_rubric
from tipbench.plan.scenarios import Persona, Scenario, Slot, Task, build_scenarios
from tipbench.plan.toml_file import Id, Line, Schema, TomlText, is_id, read_text
from tipbench.text import fingerprint

SAMPLING = ("top_k", "top_p", "min_p", "repeat_penalty")
_BUILT_IN = Path(__file__).resolve().parent.parent / "suites"


@dataclass(frozen=True)
class Suite:
    """The scenarios, prompts, rubric, controls and sampling options of a collect."""

    name: str
    title: str
    scenarios: tuple[Scenario, ...]
    prompts: Mapping[str, Prompt]
    rubric: Rubric
    controls: tuple[Control, ...]
    sampling: Mapping[str, float | int]  # the options of SAMPLING

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the suite's content, except its title."""
        return fingerprint(
            {
                "name": self.name,
                "scenarios": [[scenario.id, scenario.content_hash] for scenario in self.scenarios],
                "prompts": {version: prompt.hash for version, prompt in self.prompts.items()},
                "rubric": self.rubric.tag,
                "controls": [vars(control) for control in self.controls],
                "sampling": dict(self.sampling),
            }
        )


def builtin_suites() -> list[str]:
    """Return the names of the built-in suites."""
    return sorted(folder.name for folder in _BUILT_IN.iterdir() if (folder / "suite.toml").is_file())


def load_suite(reference: str) -> Suite:
    """Load and validate a built-in suite or a suite folder; raises SuiteError with file, line and reason."""
    layers = _layers(_folder(reference))
    personas, slots, day = _scenario_parts(layers)
    scenarios = build_scenarios(personas, slots, day)
    scenario_ids = [scenario.id for scenario in scenarios]
    # The last layer with a rubric. Without any, layer 0 is used, and its missing file raises the error.
    rubric_at = max((at for at, layer in enumerate(layers) if (layer.folder / "rubric.md").exists()), default=0)
    rubric = load_rubric(layers[rubric_at].folder / "rubric.md", scenario_ids)
    # Controls have scores under one rubric: the controls of layers before it do not apply.
    files = [layer.folder / "controls.toml" for layer in layers[rubric_at:]]
    controls = [load_controls(path, rubric, scenario_ids) for path in files if path.exists()]
    return Suite(
        name=layers[-1].content.name,
        title=layers[-1].content.title,
        scenarios=scenarios,
        prompts=_prompts(layers),
        rubric=rubric,
        controls=tuple(control for group in controls for control in group),
        sampling=_sampling(layers),
    )


@dataclass(frozen=True)
class _Layer:
    """The folder and suite.toml of a suite, or of one that it extends."""

    folder: Path
    source: TomlText
    content: SuiteSchema


def _folder(reference: str, relative_to: Path | None = None) -> Path:
    if reference in builtin_suites():
        return _BUILT_IN / reference
    return (relative_to or Path()) / Path(reference).expanduser()


def _layers(folder: Path) -> list[_Layer]:
    """Return the suite and all suites that it extends, the most basic first."""
    chain: list[_Layer] = []
    while True:
        try:
            found = folder.is_dir()
        except OSError:  # such as a name that is too long
            found = False
        if not found:
            known = f"Built-in suites: {', '.join(builtin_suites())}; or give the path of a folder with a suite.toml."
            if not chain:
                raise SuiteError(folder, None, f"unknown suite: not a built-in name, and not a folder. {known}")
            raise chain[-1].source.error(("extends",), f"'extends' must be a suite: {folder} is not a folder. {known}")
        if any(layer.folder.samefile(folder) for layer in chain):
            raise chain[-1].source.error(("extends",), "'extends' leads back to the same suite.")
        source = TomlText.read(folder / "suite.toml")
        chain.append(_Layer(folder, source, source.validated(SuiteSchema)))
        parent = chain[-1].content.extends
        if parent is None:
            return chain[::-1]
        folder = _folder(parent, relative_to=folder)


def _scenario_parts(layers: Sequence[_Layer]) -> tuple[list[Persona], list[Slot], date]:
    personas: dict[str, Persona] = {}
    slots: dict[str, Slot] = {}
    day: date | None = None
    for layer in layers:
        _add_new(personas, [persona.build() for persona in layer.content.personas], layer, "personas")
        _add_new(slots, [Slot(**dict(slot)) for slot in layer.content.slots], layer, "slots")
        day = layer.content.date or day
    source = layers[-1].source
    if day is None:
        raise source.error((), "'date' is missing: the calendar day of all scenarios.")
    if not personas or not slots:
        missing = "personas" if not personas else "slots"
        raise source.error((), f"the suite has no scenario: it needs one or more [[{missing}]].")
    return list(personas.values()), list(slots.values()), day


def _add_new(known: dict[str, Any], items: Sequence[Persona | Slot], layer: _Layer, table: str) -> None:
    for index, item in enumerate(items):
        if item.id in known:
            raise layer.source.error(
                (table, index, "id"), f"the id '{item.id}' is already taken in '{table}'. Ids must differ."
            )
        known[item.id] = item


def _sampling(layers: Sequence[_Layer]) -> dict[str, float | int]:
    merged: dict[str, float | int] = {}
    for layer in layers:
        if layer.content.sampling:
            merged |= layer.content.sampling.model_dump(exclude_none=True)
    for name in SAMPLING:
        if name not in merged:
            raise layers[-1].source.error(("sampling",), f"'{name}' is missing in [sampling].")
    return {name: merged[name] for name in SAMPLING}


def _prompts(layers: Sequence[_Layer]) -> dict[str, Prompt]:
    prompts: dict[str, Prompt] = {}
    for layer in layers:
        for path in sorted((layer.folder / "prompts").glob("*.md")):
            version = path.stem
            if not is_id(version):
                raise SuiteError(path, None, "a prompt's file name may contain only a-z, 0-9 and '-' before '.md'.")
            if version in prompts:
                raise SuiteError(path, None, f"the suite it extends has a prompt '{version}'. Choose another name.")
            prompts[version] = parse_prompt(version, read_text(path), path)
    if not prompts:
        raise SuiteError(
            layers[-1].folder / "prompts", None, "the suite has no prompt. Write one, such as prompts/v1.md."
        )
    return prompts


def _parse_time(value: object) -> object:
    """Accept times such as "07:30"; TOML's own times need seconds."""
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


class PersonaSchema(Schema):
    id: Id
    name: Line
    role: Line
    about: Line
    preferences: Annotated[list[Line], Field(default_factory=list)]
    habits: Annotated[list[Line], Field(default_factory=list)]
    tasks: Annotated[list[TaskSchema], Field(min_length=3, max_length=6)]

    def build(self) -> Persona:
        tasks = tuple(Task(**dict(task)) for task in self.tasks)
        lists = {"preferences": tuple(self.preferences), "habits": tuple(self.habits), "tasks": tasks}
        return Persona(**{**dict(self), **lists})


class SlotSchema(Schema):
    id: Id
    label: Line
    time: Annotated[dt.time, BeforeValidator(_parse_time)]


class SamplingSchema(Schema):
    """Sampling options; a suite and the suites that it extends must set all four together."""

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
