"""Suites: folders with scenarios, prompts, rubric, controls and sampling options."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tipbench.errors import SuiteError
from tipbench.plan.prompts import Prompt, parse_prompt
from tipbench.plan.rubric import Control, Rubric, load_controls, parse_rubric
from tipbench.plan.scenarios import Persona, Scenario, Slot, Task, build_scenarios
from tipbench.plan.toml_file import Id, Line, Schema, TomlText, is_id, read_text
from tipbench.text import fingerprint

_BUILT_IN = Path(__file__).resolve().parent.parent / "suites"


@dataclass(frozen=True)
class Suite:
    """A loaded suite, including the suites that it extends."""

    name: str
    title: str
    scenarios: tuple[Scenario, ...]
    prompts: Mapping[str, Prompt]
    rubric: Rubric
    controls: tuple[Control, ...]
    sampling: Mapping[str, float | int]  # a value for each field of SamplingSchema

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


def _parse_time(value: object) -> object:
    """Parse a time such as "07:30". TOML's own format, which requires seconds, is accepted too if they are 0."""
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
        return Persona(
            id=self.id,
            name=self.name,
            role=self.role,
            about=self.about,
            preferences=tuple(self.preferences),
            habits=tuple(self.habits),
            tasks=tuple(Task(**dict(task)) for task in self.tasks),
        )


class SlotSchema(Schema):
    id: Id
    label: Line
    time: Annotated[dt.time, BeforeValidator(_parse_time)]


class SamplingSchema(Schema):
    """Sampling options. Each must be set by the suite or by a suite that it extends."""

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


@dataclass(frozen=True)
class _Layer:
    """The folder and `suite.toml` of one suite, without those it extends."""

    folder: Path
    source: TomlText
    content: SuiteSchema


def builtin_suites() -> list[str]:
    """Return the names of the built-in suites."""
    return sorted(folder.name for folder in _BUILT_IN.iterdir() if (folder / "suite.toml").is_file())


def load_suite(name_or_path: str) -> Suite:
    """Load and validate a suite, given as a built-in name or a folder. Raises SuiteError with file, line and reason."""
    layers = _read_layers(_find_folder(name_or_path))
    scenarios = _combine_scenarios(layers)
    scenario_ids = [scenario.id for scenario in scenarios]
    # The last rubric applies. If there is none, reading the file of the first layer raises SuiteError.
    with_rubric = (index for index, layer in enumerate(layers) if (layer.folder / "rubric.md").exists())
    rubric_index = max(with_rubric, default=0)
    rubric_path = layers[rubric_index].folder / "rubric.md"
    rubric = parse_rubric(read_text(rubric_path), rubric_path, scenario_ids)
    # The controls of earlier layers do not apply, because their scores follow another rubric.
    controls: list[Control] = []
    for layer in layers[rubric_index:]:
        path = layer.folder / "controls.toml"
        if path.exists():
            controls += load_controls(path, rubric, scenario_ids)
    return Suite(
        name=layers[-1].content.name,
        title=layers[-1].content.title,
        scenarios=scenarios,
        prompts=_read_prompts(layers),
        rubric=rubric,
        controls=tuple(controls),
        sampling=_merge_sampling(layers),
    )


def _find_folder(name_or_path: str, relative_to: Path | None = None) -> Path:
    if name_or_path in builtin_suites():
        return _BUILT_IN / name_or_path
    return (relative_to or Path()) / Path(name_or_path).expanduser()


def _read_layers(folder: Path) -> list[_Layer]:
    """Return the layers of the suite and of the suites that it extends. The suite itself is the last one."""
    chain: list[_Layer] = []
    while True:
        try:
            is_folder = folder.is_dir()
        except OSError:  # for example, if the name is too long
            is_folder = False
        if not is_folder:
            hint = f"Built-in suites: {', '.join(builtin_suites())}; or give the path of a folder with a suite.toml."
            if not chain:
                raise SuiteError(folder, None, f"unknown suite: not a built-in name, and not a folder. {hint}")
            raise chain[-1].source.error(("extends",), f"'extends' must be a suite: {folder} is not a folder. {hint}")
        if any(layer.folder.samefile(folder) for layer in chain):
            raise chain[-1].source.error(("extends",), "'extends' leads back to the same suite.")
        source = TomlText.read(folder / "suite.toml")
        chain.append(_Layer(folder, source, source.parse(SuiteSchema)))
        parent = chain[-1].content.extends
        if parent is None:
            return chain[::-1]
        folder = _find_folder(parent, relative_to=folder)


def _combine_scenarios(layers: Sequence[_Layer]) -> tuple[Scenario, ...]:
    """Combine the personas and slots of all layers. The last date applies."""
    personas: dict[str, Persona] = {}  # by id
    slots: dict[str, Slot] = {}  # by id
    day: dt.date | None = None
    for layer in layers:
        _add_items(layer, "personas", [persona.build() for persona in layer.content.personas], to=personas)
        _add_items(layer, "slots", [Slot(**dict(slot)) for slot in layer.content.slots], to=slots)
        day = layer.content.date or day
    source = layers[-1].source
    if day is None:
        raise source.error((), "'date' is missing: the calendar day of all scenarios.")
    if not personas or not slots:
        missing = "personas" if not personas else "slots"
        raise source.error((), f"the suite has no scenario: it needs one or more [[{missing}]].")
    return build_scenarios(list(personas.values()), list(slots.values()), day)


def _add_items(layer: _Layer, table: str, items: Sequence[Persona | Slot], *, to: dict[str, Any]) -> None:
    """Add the items of a layer's table by id. Raises SuiteError if an id is already used."""
    for index, item in enumerate(items):
        if item.id in to:
            raise layer.source.error(
                (table, index, "id"), f"the id '{item.id}' is already taken in '{table}'. Ids must differ."
            )
        to[item.id] = item


def _merge_sampling(layers: Sequence[_Layer]) -> dict[str, float | int]:
    merged: dict[str, float | int] = {}
    for layer in layers:
        if layer.content.sampling:
            merged |= layer.content.sampling.model_dump(exclude_none=True)
    for name in SamplingSchema.model_fields:
        if name not in merged:
            raise layers[-1].source.error(("sampling",), f"'{name}' is missing in [sampling].")
    return merged


def _read_prompts(layers: Sequence[_Layer]) -> dict[str, Prompt]:
    prompts: dict[str, Prompt] = {}
    for layer in layers:
        for path in sorted((layer.folder / "prompts").glob("*.md")):
            version = path.stem
            if not is_id(version):
                raise SuiteError(path, None, "a prompt's file name may contain only a-z, 0-9 and '-' before '.md'.")
            if version in prompts:
                raise SuiteError(
                    path, None, f"the extended suite already has a prompt '{version}'. Choose another name."
                )
            prompts[version] = parse_prompt(version, read_text(path), path)
    if not prompts:
        raise SuiteError(
            layers[-1].folder / "prompts", None, "the suite has no prompt. Write one, such as prompts/v1.md."
        )
    return prompts
