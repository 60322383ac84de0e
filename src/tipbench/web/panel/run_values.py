"""From what a form or a URL says to a run's configuration; each mistake is told at the field that made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tipbench.errors import SuiteError, UsageError
from tipbench.plan.config import CollectConfig, split_names
from tipbench.plan.grid import choose_prompts, choose_scenarios
from tipbench.plan.suite import load_suite
from tipbench.web.allowed import Allowed
from tipbench.web.errors import Forbidden, Invalid

LISTS = ("models", "prompts")  # several fields of one name: what is ticked, and what is typed beside it
WHOLE = ""  # the key of what is wrong with no one field
LONGEST = 4000
_YES, _NO = "true", "false"

Schema = Mapping[str, Any]
Values = Mapping[str, str]  # by key of the configuration, as a form shows them; yes and no are "true" and "false"


@dataclass(frozen=True)
class Checked:
    """A configuration, or why it is none: messages by key, `WHOLE` for what no one field can mend."""

    config: CollectConfig | None
    errors: Mapping[str, str]


def default_values(schema: Schema) -> dict[str, str]:
    """What the form shows before anybody has touched it."""
    return {key: _text(field.get("default")) for key, field in schema["properties"].items()}


def asked_values(schema: Schema, asked: Iterable[tuple[str, Any]], over: Values | None = None) -> dict[str, str]:
    """What a URL or an earlier job names, over other values or the defaults; what is no key of ours is left out."""
    values = dict(over or default_values(schema))
    named = [(key, _text(value)[:LONGEST]) for key, value in asked if key in values]
    for key, text in named:
        values[key] = ",".join(each for name, each in named if name == key) if key in LISTS else text
        if _is_switch(schema, key):
            values[key] = _YES if text.lower() in ("true", "on", "1", "yes") else _NO
    return values


def form_values(schema: Schema, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """What was submitted. A box that is not ticked is not sent, so what is missing is "no"."""
    sent: dict[str, list[str]] = {}
    for key, text in pairs:
        sent.setdefault(key, []).append(text.strip())
    values = {}
    for key in schema["properties"]:
        texts = sent.get(key, [])
        if _is_switch(schema, key):
            values[key] = _YES if texts and texts[-1] != _NO else _NO
        elif key in LISTS:
            values[key] = ",".join(split_names(",".join(texts)))
        else:
            values[key] = texts[-1] if texts else ""
    return values


def check_values(allowed: Allowed, schema: Schema, values: Values) -> Checked:
    """The configuration of these values, within what the operator allows and with what its suite has."""
    errors = dict(_unfit(schema, values))
    asked = {key: text or None for key, text in values.items() if key not in errors}
    try:
        config = allowed.config(asked)
    except (Invalid, Forbidden) as exc:
        return Checked(None, {**_refused(exc, values), **errors})
    errors = errors or _suite_errors(config)
    return Checked(None, errors) if errors else Checked(config, {})


def _unfit(schema: Schema, values: Values) -> Iterable[tuple[str, str]]:
    """What need not even be tried: nothing where something is needed, and far too much."""
    for key, text in values.items():
        if len(text) > LONGEST:
            yield key, f"At most {LONGEST} characters (got {len(text)})."
        elif not text and key in LISTS:
            yield key, "Choose at least one."
        elif not text and not _may_be_empty(schema, key):
            yield key, f"A value is needed; the usual one is {_text(schema['properties'][key].get('default'))}."


def _refused(exc: Invalid | Forbidden, values: Values) -> dict[str, str]:
    cause = exc.__cause__
    if not isinstance(cause, ValidationError):
        return {(exc.path or "").removeprefix("body."): str(exc)}
    told: dict[str, str] = {}
    for error in cause.errors(include_url=False):
        key = str(error["loc"][0]) if error["loc"] else _named_first(error["msg"], values)
        told.setdefault(key if key in values else WHOLE, _sentence(error))
    return told


def _named_first(message: str, values: Values) -> str:
    """A rule over two fields names them; its message belongs to the first."""
    words = message.removeprefix("Value error, ").split()
    return next((word for word in words if word in values), WHOLE)


def _sentence(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    seen = "" if error["type"] == "value_error" else f" (got {str(error.get('input'))[:80]!r})"
    return f"{message[:1].upper()}{message[1:]}{seen}."


def _suite_errors(config: CollectConfig) -> dict[str, str]:
    """Better told now, at the field, than by a job that fails at once."""
    try:
        suite = load_suite(config.suite)
    except SuiteError as exc:
        return {"suite": str(exc)}
    errors = {}
    try:
        choose_prompts(suite, config.prompt_versions)
    except UsageError as exc:
        errors["prompts"] = f"{str(exc)[:1].upper()}{str(exc)[1:]}"
    try:
        choose_scenarios(suite, config.n_scenarios)
    except UsageError as exc:
        errors["n_scenarios"] = f"{str(exc)[:1].upper()}{str(exc)[1:]}"
    return errors


def _is_switch(schema: Schema, key: str) -> bool:
    return bool(schema["properties"][key].get("type") == "boolean")


def _may_be_empty(schema: Schema, key: str) -> bool:
    return any(each.get("type") == "null" for each in schema["properties"][key].get("anyOf", ()))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return _YES if value else _NO
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)
