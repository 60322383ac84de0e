"""The run's form as its schema makes it: each key of the configuration is a field, and the first are asked first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tipbench.plan.config import split_names
from tipbench.web.panel.run_values import LISTS, Schema, Values, default_values

FIRST = ("models", "prompts", "experiment", "suite", "n_scenarios", "n_tips")
_GROUPS = (
    (
        "Sampling",
        "What reaches the model. Scores are compared only where these agree.",
        ("temperature", "diversity", "repeats", "seed", "num_ctx", "num_predict"),
    ),
    (
        "Servers and patience",
        "Where it runs, where it is recorded, and how long it waits.",
        ("ollama_url", "mlflow_url", "concurrency", "timeout_s", "server_wait_s"),
    ),
    (
        "Memory and refusals",
        "Never two models at once; what may not run is refused before anything is generated.",
        ("max_model_b", "unload", "evict", "skip_refused", "allow_unknown_size", "wait"),
    ),
)
_REST = ("More", "")  # a key that is new in the schema shows up here by itself
_LABELS = {
    "n_tips": "Tips a cell",
    "n_scenarios": "Scenarios",
    "max_model_b": "Largest model, in billions",
    "ollama_url": "Ollama server",
    "mlflow_url": "MLflow server",
    "diversity": "Ask for different angles",
    "repeats": "Repeats of a cell",
    "num_ctx": "Context, in tokens",
    "num_predict": "Longest answer, in tokens",
    "concurrency": "Calls at a time",
    "timeout_s": "Longest call, in seconds",
    "server_wait_s": "Wait for a server, in seconds",
    "unload": "Free the weights after each",
    "evict": "Evict other clients' models",
    "skip_refused": "Skip what is refused",
    "allow_unknown_size": "Allow unknown sizes",
    "wait": "Queue behind other collects",
}

Kind = Literal["choices", "select", "check", "number", "text"]


@dataclass(frozen=True)
class Option:
    """Something to choose."""

    value: str
    label: str
    chosen: bool = False
    note: str = ""


@dataclass(frozen=True)
class Field:
    """One key of the configuration as a form shows it."""

    key: str
    kind: Kind
    label: str
    help: str
    value: str  # of `choices`, what is typed beside those that are ticked
    default: str
    error: str | None = None
    options: tuple[Option, ...] = ()  # to tick, to select, or suggested for a text
    minimum: float | None = None
    maximum: float | None = None
    step: str = "any"
    changed: bool = False


@dataclass(frozen=True)
class Group:
    """Fields that belong together, folded up until somebody wants them."""

    title: str
    about: str
    fields: tuple[Field, ...]

    @property
    def changed(self) -> int:
        """How many differ from their defaults."""
        return sum(field.changed for field in self.fields)

    @property
    def wrong(self) -> int:
        """How many have a message."""
        return sum(field.error is not None for field in self.fields)


@dataclass(frozen=True)
class RunForm:
    """All fields: what to ask first, and the rest in groups."""

    first: tuple[Field, ...]
    groups: tuple[Group, ...]
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[Field, ...]:
        """Every field, in the order of the page."""
        return (*self.first, *(each for group in self.groups for each in group.fields))


Offers = Mapping[str, Sequence[Option]]  # by key: what can be chosen, beyond what the schema knows


def make_form(schema: Schema, values: Values, errors: Mapping[str, str], offers: Offers) -> RunForm:
    """The form with these values in it, and what is wrong with them beside."""
    usual = default_values(schema)
    made = {
        key: _field(key, properties, values.get(key, usual[key]), usual[key], errors.get(key), offers.get(key, ()))
        for key, properties in schema["properties"].items()
    }
    groups = [(title, about, [key for key in keys if key in made]) for title, about, keys in _GROUPS]
    known = {*FIRST, *(key for _, _, keys in groups for key in keys)}
    groups.append((*_REST, [key for key in made if key not in known]))
    return RunForm(
        tuple(made[key] for key in FIRST if key in made),
        tuple(Group(title, about, tuple(made[key] for key in keys)) for title, about, keys in groups if keys),
        errors,
    )


def _field(
    key: str, properties: Mapping[str, Any], value: str, usual: str, error: str | None, offered: Sequence[Option]
) -> Field:
    kind = _kind(key, properties)
    plain: dict[str, Any] = {
        "key": key,
        "kind": kind,
        "label": _LABELS.get(key) or key.replace("_", " ").capitalize(),
        "help": properties.get("description", ""),
        "default": usual,
        "error": error,
        "changed": value != usual,
    }
    if kind == "choices":
        names = split_names(value)
        ticked = tuple(Option(each.value, each.label, each.value in names, each.note) for each in offered)
        typed = [name for name in names if all(name != each.value for each in offered)]
        return Field(**plain, value=", ".join(typed), options=ticked)
    if kind == "select":
        return Field(**plain, value=value, options=_selectable(properties, value))
    low, high = properties.get("minimum"), properties.get("maximum")
    step = "1" if properties.get("type") == "integer" else "any"
    return Field(**plain, value=value, options=tuple(offered), minimum=low, maximum=high, step=step)


def _kind(key: str, properties: Mapping[str, Any]) -> Kind:
    if key in LISTS:
        return "choices"
    if "enum" in properties:
        return "select"
    kinds: dict[str, Kind] = {"boolean": "check", "integer": "number", "number": "number"}
    return kinds.get(properties.get("type", ""), "text")


def _selectable(properties: Mapping[str, Any], value: str) -> tuple[Option, ...]:
    known = ["" if each is None else str(each) for each in properties["enum"]]
    if value not in known:  # kept, so that its message stands beside what was chosen
        known.append(value)
    return tuple(Option(each, each or "found by itself", each == value) for each in known)
