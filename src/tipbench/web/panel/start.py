"""Page that starts a collect: form fields from the schema, suggestions, validation, plan preview."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

import httpx
from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from tipbench.errors import JobConflict, JobNotFound, ServerUnavailable, SuiteError, TipbenchError, UsageError
from tipbench.generate.template import MODEL as TEMPLATE
from tipbench.generate.weights import EMBEDDED_MODELS, is_fetched
from tipbench.http import http_client, read_body
from tipbench.plan.config import EXPERIMENT_PREFIX, WAIT_FOR_JUDGE, CollectConfig, split_names
from tipbench.plan.grid import choose_prompts, choose_scenarios
from tipbench.plan.suite import builtin_suites, load_suite
from tipbench.text import file_size, parameter_count
from tipbench.web.api.plan import plan_of
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState
from tipbench.web.errors import Forbidden, Invalid, Json
from tipbench.web.forms import FORM, content_type
from tipbench.web.job_service import RunTarget, start_run
from tipbench.web.options import RunPolicy
from tipbench.web.panel.jobs import RUNNERS, new_idempotency_key
from tipbench.web.panel.pages import NOTHING, page

LISTS = ("models", "prompts")  # sent as several fields of one name: checkboxes and a text field
WHOLE = ""  # error key for the whole form
LONGEST = 4000
_YES, _NO = "true", "false"

Schema = Mapping[str, Any]
Values = Mapping[str, str]  # by configuration key, as form values; booleans are "true" and "false"


@dataclass(frozen=True)
class Validation:
    """A valid configuration, or its errors by key, with `WHOLE` for those of no single field."""

    config: CollectConfig | None
    errors: Mapping[str, str]


def default_values(schema: Schema) -> dict[str, str]:
    """Returns the form's initial values."""
    return {key: _text(field.get("default")) for key, field in schema["properties"].items()}


def merge_values(schema: Schema, asked: Iterable[tuple[str, Any]], over: Values | None = None) -> dict[str, str]:
    """Merges values from a URL or an earlier job into `over`, or into the defaults; unknown keys are ignored."""
    values = dict(over or default_values(schema))
    named = [(key, _text(value)[:LONGEST]) for key, value in asked if key in values]
    for key, text in named:
        values[key] = ",".join(each for name, each in named if name == key) if key in LISTS else text
        if _is_switch(schema, key):
            values[key] = _YES if text.lower() in ("true", "on", "1", "yes") else _NO
    return values


def form_values(schema: Schema, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the submitted values; browsers do not send unchecked boxes, so a missing one is false."""
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


def check_values(allowed: RunPolicy, schema: Schema, values: Values) -> Validation:
    """Validates the values against the schema, the operator's policy and the suite."""
    errors = dict(_unfit(schema, values))
    asked = {key: text or None for key, text in values.items() if key not in errors}
    try:
        config = allowed.config(asked)
    except (Invalid, Forbidden) as exc:
        return Validation(None, {**_refused(exc, values), **errors})
    errors = errors or _suite_errors(config)
    return Validation(None, errors) if errors else Validation(config, {})


def _unfit(schema: Schema, values: Values) -> Iterable[tuple[str, str]]:
    """Yields errors for missing and overlong values."""
    for key, text in values.items():
        if len(text) > LONGEST:
            yield key, f"At most {LONGEST} characters (got {len(text)})."
        elif not text and key in LISTS:
            yield key, "Choose at least one."
        elif not text and not any(each.get("type") == "null" for each in schema["properties"][key].get("anyOf", ())):
            yield key, f"A value is required; the default is {_text(schema['properties'][key].get('default'))}."


def _refused(exc: Invalid | Forbidden, values: Values) -> dict[str, str]:
    cause = exc.__cause__
    if not isinstance(cause, ValidationError):
        return {(exc.path or "").removeprefix("body."): str(exc)}
    errors: dict[str, str] = {}
    for error in cause.errors(include_url=False):
        key = str(error["loc"][0]) if error["loc"] else _named_first(error["msg"], values)
        errors.setdefault(key if key in values else WHOLE, _sentence(error))
    return errors


def _named_first(message: str, values: Values) -> str:
    """Returns the first field named in the error of a rule over several fields."""
    words = message.removeprefix("Value error, ").split()
    return next((word for word in words if word in values), WHOLE)


def _sentence(error: Any) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    seen = "" if error["type"] == "value_error" else f" (got {str(error.get('input'))[:80]!r})"
    return f"{message[:1].upper()}{message[1:]}{seen}."


def _suite_errors(config: CollectConfig) -> dict[str, str]:
    """Checks prompts and scenarios against the suite, so that errors show in the form and not in a failed job."""
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


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return _YES if value else _NO
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


PATIENCE_S = 1.5  # timeout for Ollama's list in total
GLANCE_S = 0.3  # how long a page waits for it; a local server is much faster
_MOST_BYTES = 2_000_000
_MOST_NAMES = 200
_LONGEST_NAME = 200

_T = TypeVar("_T")


@dataclass(frozen=True)
class Suggestion:
    """A suggested model with a short note."""

    name: str
    note: str


def builtin_models(panel: Panel) -> tuple[Suggestion, ...]:
    """Returns the models that run without Ollama."""
    embedded = [
        Suggestion(
            name,
            f"inside tipbench, {model.params_b * 1000:.0f}M"
            + ("" if is_fetched(panel.settings.home, name) else "; first run `tipbench models fetch`"),
        )
        for name, model in EMBEDDED_MODELS.items()
    ]
    return (*embedded, Suggestion(TEMPLATE, "no model: tips from templates, the reference to beat"))


async def ollama_models(panel: Panel, url: str, wait_s: float) -> tuple[Suggestion, ...] | None:
    """Returns the models of an allowed Ollama server, or None if it has not responded within `wait_s`."""
    return await _soon(panel, ("ollama models", url), lambda: _ask_ollama(url), wait_s)


async def experiment_names(panel: Panel, wait_s: float = GLANCE_S) -> tuple[str, ...]:
    """Returns the names of the experiments; empty if MLflow does not respond within `wait_s`."""
    return await _soon(panel, ("experiment names",), lambda: _ask_mlflow(panel), wait_s) or ()


async def _soon(panel: Panel, key: tuple[str, ...], make: Callable[[], _T | None], wait_s: float) -> _T | None:
    """Returns the cached result, or None after `wait_s`; the call goes on in the background and fills the cache."""
    cache = panel.queries.small
    asked = asyncio.ensure_future(run_in_threadpool(cache.get, key, None, make))
    done, _ = await asyncio.wait({asked}, timeout=wait_s)
    return asked.result() if done else None


def _ask_ollama(url: str) -> tuple[Suggestion, ...] | None:
    """Returns None on any error, since suggestions are optional."""
    deadline = time.monotonic() + PATIENCE_S
    try:
        with (
            http_client(url, timeout=PATIENCE_S) as client,
            client.stream("GET", f"{url.rstrip('/')}/api/tags") as response,
        ):
            content = read_body(response, limit=_MOST_BYTES, deadline=deadline)
            return _suggestions(content) if content is not None and response.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, TipbenchError, OSError, ValueError, RecursionError):
        return None


def _suggestions(content: bytes | bytearray) -> tuple[Suggestion, ...]:
    raw = json.loads(content)
    listed = raw.get("models") if isinstance(raw, dict) else None
    found: dict[str, Suggestion] = {}
    for entry in listed if isinstance(listed, list) else []:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not _fit(name):
            continue
        details = entry.get("details")
        size = details.get("parameter_size") if isinstance(details, dict) else None
        note = f"Ollama, {size[:20]}" if isinstance(size, str) and size and size.isprintable() else "Ollama"
        found.setdefault(name, Suggestion(name, note))
    return tuple(sorted(found.values(), key=lambda each: each.name))[:_MOST_NAMES]


def _fit(name: str) -> bool:
    """Returns whether a name can be part of a comma-separated list."""
    return 0 < len(name) <= _LONGEST_NAME and name.isprintable() and not set(name) & set(" ,")


def _ask_mlflow(panel: Panel) -> tuple[str, ...]:
    try:
        found = panel.tracker.open().store.experiments()
    except TipbenchError:
        return ()
    ours = [each.name for each in found if each.name.startswith(EXPERIMENT_PREFIX) and each.name.isprintable()]
    return tuple(sorted(ours))[:_MOST_NAMES]


FIRST = ("models", "prompts", "experiment", "suite", "n_scenarios", "n_tips")
_GROUPS = (
    (
        "Sampling",
        "Options sent to the model. Only scores with the same options are compared.",
        ("temperature", "diversity", "repeats", "seed", "num_ctx", "num_predict"),
    ),
    (
        "Servers and timeouts",
        "Where models run, where results are recorded, and timeouts.",
        ("ollama_url", "mlflow_url", "concurrency", "timeout_s", "server_wait_s"),
    ),
    (
        "Memory and limits",
        "Never two models at once. Models over the limit are refused before anything is generated.",
        ("max_model_b", "unload", "evict", "skip_refused", "allow_unknown_size", "wait"),
    ),
)
_REST = ("More", "")  # keys of the schema that are in no other group
_LABELS = {
    "n_tips": "Tips per answer",
    "n_scenarios": "Number of scenarios (0 = all)",
    "max_model_b": "Largest model, in billions",
    "ollama_url": "Ollama server",
    "mlflow_url": "MLflow server",
    "diversity": "Request different angles",
    "repeats": "Repeats per cell",
    "num_ctx": "Context, in tokens",
    "num_predict": "Longest answer, in tokens",
    "concurrency": "Concurrent calls",
    "timeout_s": "Timeout per call, in seconds",
    "server_wait_s": "Wait for a server, in seconds",
    "unload": "Unload after each",
    "evict": "Evict other clients' models",
    "skip_refused": "Skip refused models",
    "allow_unknown_size": "Allow unknown sizes",
    "wait": "Queue behind other collects",
}

Kind = Literal["choices", "select", "check", "number", "text"]


@dataclass(frozen=True)
class Option:
    """An option of a field."""

    value: str
    label: str
    chosen: bool = False
    note: str = ""


@dataclass(frozen=True)
class Field:
    """A form field for one configuration key."""

    key: str
    kind: Kind
    label: str
    help: str
    value: str  # for `choices`, the names typed in addition to the checked ones
    default: str
    error: str | None = None
    options: tuple[Option, ...] = ()  # checkboxes, select options, or suggestions for a text
    minimum: float | None = None
    maximum: float | None = None
    step: str = "any"
    changed: bool = False


@dataclass(frozen=True)
class Group:
    """A group of fields, collapsed by default."""

    title: str
    about: str
    fields: tuple[Field, ...]

    @property
    def changed(self) -> int:
        """Number of fields that differ from their defaults."""
        return sum(field.changed for field in self.fields)

    @property
    def wrong(self) -> int:
        """Number of fields with an error."""
        return sum(field.error is not None for field in self.fields)


@dataclass(frozen=True)
class RunForm:
    """The form: the main fields, and the others in groups."""

    first: tuple[Field, ...]
    groups: tuple[Group, ...]
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields, in the order of the page."""
        return (*self.first, *(each for group in self.groups for each in group.fields))


Offers = Mapping[str, Sequence[Option]]  # by key: options that are not in the schema


def make_form(schema: Schema, values: Values, errors: Mapping[str, str], offers: Offers) -> RunForm:
    """Builds the form with these values and errors."""
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
    if value not in known:  # kept, so that the error shows with the submitted value
        known.append(value)
    return tuple(Option(each, each or "found automatically", each == value) for each in known)


@dataclass(frozen=True)
class Outcome:
    """The result shown with the form."""

    errors: Mapping[str, str] = field(default_factory=dict)  # by field
    plan: Mapping[str, Any] | None = None
    trouble: str | None = None  # error that belongs to no field
    again: bool = False  # the form's key was already used with other values
    status: int = 200


def planned(panel: Panel, config: CollectConfig) -> Outcome:
    """Returns the plan of a configuration, or the error if it cannot be made."""
    try:
        plan = plan_of(panel, config)
    except ServerUnavailable as exc:
        return Outcome({"ollama_url": str(exc)}, status=503)
    except TipbenchError as exc:
        return Outcome(trouble=str(exc), status=409)
    models = [
        {
            **model,
            "size": parameter_count(model["params_b"]) or NOTHING,
            "memory": file_size(model["memory_bytes"]) or NOTHING,
        }
        for model in plan["models"]
    ]
    return Outcome(plan={**plan, "models": models, "skip_refused": config.skip_refused})


router = APIRouter(include_in_schema=False, dependencies=[ADMINS_ONLY])
_KEY = "key"
_MOST_FIELDS = 200
_MOST_KEY = 100
_MOST_SUITES = 50


@dataclass(frozen=True)
class SubmittedForm:
    """A submitted form: its values, its idempotency key, and whether the start button was pressed."""

    values: Values
    key: str
    start: bool
    where: RunTarget = field(default_factory=RunTarget)


@router.get("/run")
async def run_page(
    request: Request, panel: PanelState, of: Annotated[str | None, Query(max_length=80, alias="from")] = None
) -> Response:
    """Shows the form with the defaults, the values in the URL, or the options of an earlier job (?from=ID)."""
    schema = form_schema(panel)
    earlier = await run_in_threadpool(_of_job, panel, of) if of is not None else []
    values = merge_values(schema, request.query_params.multi_items(), merge_values(schema, earlier))
    where = await run_in_threadpool(_where_of, panel, of)
    return await _form_page(
        request, panel, SubmittedForm(values, new_idempotency_key(), start=False, where=where), Outcome()
    )


@router.post("/run")
async def submit_run(request: Request, panel: PanelState, admin: Admin) -> Response:
    """Shows the plan or starts the run, depending on the button; an invalid form is shown again with its errors."""
    schema = form_schema(panel)
    sent = _read(schema, await _pairs(request))
    checked = await run_in_threadpool(check_values, panel.allowed, schema, sent.values)
    if checked.config is None:
        return await _form_page(request, panel, sent, Outcome(checked.errors, status=422))
    if not sent.start:
        outcome = await run_in_threadpool(planned, panel, checked.config)
        return await _form_page(request, panel, sent, outcome)
    return await _start(request, panel, checked.config, sent, admin.name)


@router.get("/run/models")
async def run_models(panel: PanelState, ollama_url: Annotated[str, Query(max_length=1000)] = "") -> Response:
    """Returns the models of an allowed Ollama server for the form's script; empty if it does not respond quickly."""
    url = _allowed_url(panel.allowed, ollama_url)
    found = await ollama_models(panel, url, PATIENCE_S + GLANCE_S) if url else None
    return Json({"items": [vars(each) for each in found or ()], "answered": found is not None})


async def _start(
    request: Request, panel: Panel, config: CollectConfig, sent: SubmittedForm, started_by: str
) -> Response:
    try:
        where = replace(sent.where, named=_named(panel, config))
        submitted = await run_in_threadpool(start_run, panel, config, started_by=started_by, key=sent.key, where=where)
    except Invalid as exc:  # conflicting runner options
        return await _form_page(request, panel, sent, Outcome({WHOLE: str(exc)}, status=422))
    except JobConflict:
        # The user went back and changed the form: show it with a new key, so that submitting it again starts the run.
        return await _form_page(
            request, panel, replace(sent, key=new_idempotency_key()), Outcome(again=True, status=409)
        )
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


def _named(panel: Panel, config: CollectConfig) -> frozenset[str]:
    """Returns the keys that differ from the defaults, since a form sends every field."""
    usual = panel.allowed.config({}).model_dump()
    return frozenset(key for key, value in config.model_dump().items() if value != usual[key])


async def _form_page(request: Request, panel: Panel, sent: SubmittedForm, outcome: Outcome) -> Response:
    form, waiting = await _form(panel, sent.values, outcome.errors)
    return await run_in_threadpool(
        page,
        request,
        "run.html",
        status=outcome.status,
        form_fields=form,
        outcome=outcome,
        whole=outcome.errors.get(WHOLE),
        key=sent.key,
        runners=list(panel.jobs.runners),
        where_options=[(name, RUNNERS.get(name, name)) for name in panel.jobs.runners],
        runner=sent.where.runner or panel.jobs.default,
        wait_for_judge=sent.where.wait_for_judge,
        models_url="/run/models" if waiting else None,
        json_url="/api/bench/config",
    )


async def _form(panel: Panel, values: Values, errors: Mapping[str, str]) -> tuple[RunForm, bool]:
    """Returns the form, and whether Ollama's models are still pending."""
    url = _allowed_url(panel.allowed, values.get("ollama_url", ""))
    theirs = await ollama_models(panel, url, GLANCE_S) if url else ()
    names = await experiment_names(panel)
    offers = {
        "models": [*map(_offer, await run_in_threadpool(builtin_models, panel)), *map(_offer, theirs or ())],
        "prompts": await run_in_threadpool(_prompts, panel.allowed, values.get("suite", "")),
        "experiment": [Option(name, name) for name in names],
        "suite": await run_in_threadpool(_suites, panel),
    }
    return make_form(form_schema(panel), values, errors, offers), theirs is None


def form_schema(panel: Panel) -> dict[str, Any]:
    """Returns the configuration's schema; without allowed suite folders, the suite is an enum of the known ones."""
    schema = panel.allowed.schema()
    if not panel.options.suites:
        schema["properties"]["suite"]["enum"] = [each.value for each in _suites(panel)]
    return schema


def _offer(model: Suggestion) -> Option:
    return Option(model.name, model.name, note=model.note)


def _prompts(allowed: RunPolicy, suite: str) -> list[Option]:
    """Returns the prompts of the selected suite; empty if it is invalid, which the suite field reports."""
    try:
        allowed.check_suite(suite)
        return [Option(version, version) for version in load_suite(suite).prompts]
    except (Forbidden, SuiteError):
        return []


def _suites(panel: Panel) -> list[Option]:
    """Returns the built-in and configured suites and those in the allowed folders."""
    names = [*builtin_suites(), panel.settings.get("suite") or ""]
    for folder in panel.options.suites:
        names += map(str, _with_suite(folder))
    return [Option(name, name) for name in dict.fromkeys(filter(None, names))][:_MOST_SUITES]


def _with_suite(folder: Path) -> list[Path]:
    try:
        inside = [folder, *sorted(folder.iterdir())[:1000]]
        return [each for each in inside if (each / "suite.toml").is_file()]
    except OSError:
        return []


def _of_job(panel: Panel, job_id: str) -> list[tuple[str, Any]]:
    """Returns an earlier job's options; empty if the job no longer exists."""
    try:
        return list(panel.jobs.store.get(job_id).arguments.items())
    except JobNotFound:
        return []


def _where_of(panel: Panel, job_id: str | None) -> RunTarget:
    """Returns the runner options of an earlier job, without a runner that is no longer configured."""
    if job_id is None:
        return RunTarget()
    try:
        job = panel.jobs.store.get(job_id)
    except JobNotFound:
        return RunTarget()
    return RunTarget(job.runner if job.runner in panel.jobs.runners else None, bool(job.arguments.get(WAIT_FOR_JUDGE)))


def _allowed_url(allowed: RunPolicy, url: str) -> str | None:
    """Returns the URL as configured by the operator, or None if it is not allowed."""
    try:
        return allowed.config({"ollama_url": url} if url else {}).ollama_url
    except (Forbidden, Invalid):
        return None


async def _pairs(request: Request) -> list[tuple[str, str]]:
    """Parses the form into pairs, since checkboxes of one name are sent several times."""
    if content_type(request) != FORM:
        raise Invalid(f"The form must have the content type {FORM} (got {content_type(request)[:80]!r}).", path="body")
    text = (await request.body()).decode("utf-8", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as exc:
        raise Invalid(f"A form has at most {_MOST_FIELDS} fields.", path="body") from exc


def _read(schema: Schema, pairs: list[tuple[str, str]]) -> SubmittedForm:
    named = dict(pairs)
    key = named.get(_KEY, "")
    fit = 0 < len(key) <= _MOST_KEY and key.isascii() and key.isprintable() and key.strip() == key
    where = RunTarget(
        named.get("runner", "")[:40] or None, named.get(WAIT_FOR_JUDGE, "").lower() in ("true", "on", "1")
    )
    return SubmittedForm(
        form_values(schema, pairs), key if fit else new_idempotency_key(), named.get("do") == "start", where
    )
