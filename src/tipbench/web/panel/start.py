"""Page that starts a collect: form fields from the schema, suggestions, validation, plan preview."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qsl

import httpx
from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from tipbench.errors import JobConflict, JobNotFound, ServerUnavailable, SuiteError, TipbenchError, UsageError
from tipbench.generate.engine import (
    ENGINES,
    Availability,
    AvailableModel,
    EngineDependencies,
    EngineType,
    available_models,
    build_engines,
    close_engines,
    engine_of,
    model_facts,
    refused_start,
)
from tipbench.http import http_client, read_body, strip_login
from tipbench.jobs.airflow import AirflowRunner
from tipbench.markup import NOTHING
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig, split_names
from tipbench.plan.grid import choose_prompts
from tipbench.plan.suite import builtin_suites, load_suite
from tipbench.record.reader import experiments
from tipbench.text import file_size, parameter_count
from tipbench.web.api.jobs import plan_of
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState
from tipbench.web.errors import Forbidden, Invalid, Json
from tipbench.web.forms import FORM, content_type
from tipbench.web.job_service import RunTarget, start_run
from tipbench.web.options import RunPolicy
from tipbench.web.panel.jobs import RUNNERS, new_idempotency_key
from tipbench.web.panel.pages import page

LISTS = ("models", "prompts")  # sent as several fields of one name: checkboxes and a text field
WHOLE = ""  # error key for the whole form
LONGEST = 4000
_YES, _NO = "true", "false"

Schema = Mapping[str, Any]
Values = Mapping[str, str]  # by configuration key, as form values; booleans are "true" and "false"


def default_values(schema: Schema) -> dict[str, str]:
    """Return the form's initial values."""
    return {key: _text(field.get("default")) for key, field in schema["properties"].items()}


def merge_values(schema: Schema, pairs: Iterable[tuple[str, Any]], over: Values | None = None) -> dict[str, str]:
    """Merge values from a URL or an earlier job into `over`, or into the defaults; unknown keys are ignored."""
    values = dict(over or default_values(schema))
    named = [(key, _text(value)[:LONGEST]) for key, value in pairs if key in values]
    for key, text in named:
        values[key] = ",".join(each for name, each in named if name == key) if key in LISTS else text
        if _is_switch(schema, key):
            values[key] = _YES if text.lower() in ("true", "on", "1", "yes") else _NO
    return values


def form_values(schema: Schema, pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the submitted values; browsers do not send unchecked boxes, so a missing one is false."""
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


def check_values(allowed: RunPolicy, schema: Schema, values: Values) -> CollectConfig | dict[str, str]:
    """Return the configuration, or the errors by key, with `WHOLE` for those of no single field.

    The values are checked against the schema, the operator's policy and the suite, so that errors show in the form and
    not in a failed job.
    """
    errors = {}
    for key, text in values.items():
        properties = schema["properties"][key]
        if len(text) > LONGEST:
            errors[key] = f"At most {LONGEST} characters (got {len(text)})."
        elif not text and key in LISTS:
            errors[key] = "Choose at least one."
        elif not text and not any(each.get("type") == "null" for each in properties.get("anyOf", ())):
            errors[key] = f"A value is required; the default is {_text(properties.get('default'))}."
    try:
        config = allowed.config({key: text or None for key, text in values.items() if key not in errors})
    except (Invalid, Forbidden) as exc:
        return {**_refused(exc, values), **errors}
    if errors:
        return errors
    try:
        choose_prompts(load_suite(config.suite), config.prompt_versions)
    except SuiteError as exc:
        return {"suite": str(exc)}
    except UsageError as exc:
        return {"prompts": _capital(str(exc))}
    return config


def _refused(exc: Invalid | Forbidden, values: Values) -> dict[str, str]:
    cause = exc.__cause__
    if not isinstance(cause, ValidationError):
        return {(exc.path or "").removeprefix("body."): str(exc)}
    errors: dict[str, str] = {}
    for error in cause.errors(include_url=False):
        message = str(error["msg"]).removeprefix("Value error, ")
        named = [str(error["loc"][0])] if error["loc"] else message.split()  # a rule over several fields names them
        key = next((word for word in named if word in values), WHOLE)
        seen = "" if error["type"] == "value_error" else f" (got {str(error.get('input'))[:80]!r})"
        errors.setdefault(key, f"{_capital(message)}{seen}.")
    return errors


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


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
class Offered:
    """The models that the form offers; `pending` while Ollama has not responded, `away` if it does not."""

    models: tuple[AvailableModel, ...] = ()
    away: str | None = None
    pending: bool = False

    @property
    def preselected(self) -> tuple[str, ...]:
        """What is installed and may run: Ollama's models, else the embedded ones; and the reference."""
        fit = [each.model for each in self.models if each.refusal is None]
        served = [name for name in fit if engine_of(name).server]
        embedded = [name for name in fit if engine_of(name).server is None and engine_of(name).kind == "model"]
        return (*(served or embedded), *(name for name in fit if engine_of(name).kind == "baseline"))


async def offered_models(panel: Panel, values: Values, wait_s: float) -> Offered:
    """Return the models of all engines; wait at most `wait_s` for Ollama, which must be an allowed server."""
    limits = {key: values[key] for key in ("ollama_url", "max_model_b", "allow_unknown_size") if values.get(key)}
    config, valid = panel.allowed.config({}), True
    try:
        config = panel.allowed.config(limits)
    except (Forbidden, Invalid):  # the form reports the wrong value
        valid = False
    own = await run_in_threadpool(available_models, config, panel.settings.home, _engines(with_server=False))
    if not valid:
        return Offered(own.models)
    key = ("ollama models", config.ollama_url, config.max_model_b, config.allow_unknown_size)
    theirs = await _soon(panel, key, lambda: _ask_ollama(panel, config), wait_s)
    if theirs is None:
        return Offered(own.models, pending=True)
    # Names that can be part of a comma-separated list.
    fit = (each for each in theirs.models if 0 < len(each.model) <= _LONGEST_NAME and each.model.isprintable())
    known = tuple(each for each in fit if not set(each.model) & set(" ,"))[:_MOST_NAMES]
    return Offered((*known, *own.models), theirs.errors[0] if theirs.errors else None)


def _engines(*, with_server: bool) -> list[EngineType]:
    return [each for each in ENGINES.values() if bool(each.server) is with_server]


def _ask_ollama(panel: Panel, config: CollectConfig) -> Availability:
    """Return Ollama's models; a server that accepts connections and is silent costs a page no more than PATIENCE_S."""
    url = config.ollama_url.rstrip("/")
    try:
        with http_client(url, timeout=PATIENCE_S) as client, client.stream("GET", f"{url}/api/version") as response:
            read_body(response, limit=_MOST_BYTES, deadline=time.monotonic() + PATIENCE_S)
        return available_models(config, panel.settings.home, _engines(with_server=True))
    except (httpx.HTTPError, httpx.InvalidURL, TipbenchError, OSError):
        away = f"Ollama at {strip_login(url)} does not respond."
        return Availability(errors=(f"{away} Start it (ollama serve), or choose models that run without it.",))


async def experiment_names(panel: Panel, wait_s: float = GLANCE_S) -> tuple[str, ...]:
    """Return the names of the experiments; empty if MLflow does not respond within `wait_s`."""

    def ask_mlflow() -> tuple[str, ...]:
        try:
            found = experiments(panel.tracker.open().store)
        except TipbenchError:
            return ()
        return tuple(each.name for each in found if each.name.isprintable())[:_MOST_NAMES]

    return await _soon(panel, ("experiment names",), ask_mlflow, wait_s) or ()


async def _soon(panel: Panel, key: tuple[object, ...], make: Callable[[], _T | None], wait_s: float) -> _T | None:
    """Return the cached result, or None after `wait_s`; the call goes on in the background and fills the cache."""
    cache = panel.queries.small
    future = asyncio.ensure_future(run_in_threadpool(cache.get, key, None, make))
    done, _ = await asyncio.wait({future}, timeout=wait_s)
    return future.result() if done else None


FIRST = ("models", "prompts", "experiment", "suite", "n_scenarios", "n_tips", "temperature")
_GROUPS = (
    (
        "Sampling",
        "Options sent to the model. Only scores with the same options are compared.",
        ("diversity", "repeats", "seed", "num_ctx", "num_predict"),
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
    ("Statistics", "How often the leaderboard may decide before everything is judged.", ("looks",)),
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
    "looks": "Planned looks",
    "unload": "Unload after each",
    "evict": "Evict other clients' models",
    "skip_refused": "Skip refused models",
    "allow_unknown_size": "Allow unknown sizes",
    "wait": "Queue behind other collects",
}

Kind = Literal["choices", "select", "check", "number", "text"]
_KINDS: Mapping[str, Kind] = {"boolean": "check", "integer": "number", "number": "number"}


@dataclass(frozen=True)
class Option:
    """An option of a field."""

    value: str
    label: str
    chosen: bool = False
    note: str = ""
    refusal: str | None = None  # why it cannot be used


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

    @property
    def fields(self) -> tuple[Field, ...]:
        """All fields, in the order of the page."""
        return (*self.first, *(each for group in self.groups for each in group.fields))


Offers = Mapping[str, Sequence[Option]]  # by key: options that are not in the schema


def make_form(schema: Schema, values: Values, errors: Mapping[str, str], offers: Offers) -> RunForm:
    """Build the form with these values and errors."""
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
    )


def _field(
    key: str, properties: Mapping[str, Any], value: str, usual: str, error: str | None, offered: Sequence[Option]
) -> Field:
    made = Field(
        key=key,
        kind=_KINDS.get(properties.get("type", ""), "text"),
        label=_LABELS.get(key) or key.replace("_", " ").capitalize(),
        help=properties.get("description", ""),
        value=value,
        default=usual,
        error=error,
        options=tuple(offered),
        minimum=properties.get("minimum"),
        maximum=properties.get("maximum"),
        step="1" if properties.get("type") == "integer" else "any",
        changed=value != usual,
    )
    if key in LISTS:
        names = split_names(value)
        ticked = tuple(replace(each, chosen=each.value in names) for each in offered)
        typed = [name for name in names if all(name != each.value for each in offered)]
        about = made.help.removeprefix("Comma-separated ")
        return replace(made, kind="choices", help=about[:1].upper() + about[1:], value=", ".join(typed), options=ticked)
    if "enum" in properties:
        known = ["" if each is None else str(each) for each in properties["enum"]]
        if value not in known:  # kept, so that the error shows with the submitted value
            known.append(value)
        listed = tuple(Option(each, each or "found automatically", each == value) for each in known)
        return replace(made, kind="select", options=listed)
    return made


@dataclass(frozen=True)
class Outcome:
    """The result shown with the form."""

    errors: Mapping[str, str] = field(default_factory=dict)  # by field
    plan: Mapping[str, Any] | None = None
    trouble: str | None = None  # error that belongs to no field
    again: bool = False  # the form's key was already used with other values
    stopped: bool = False  # the run was not started, because it would have failed
    status: int = 200


def planned(panel: Panel, config: CollectConfig) -> Outcome:
    """Return the plan of a configuration, or the error if it cannot be made."""
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


def startable(panel: Panel, config: CollectConfig, where: RunTarget) -> Outcome | None:
    """Return None if the run can start, else why it would fail. Airflow's workers have their own servers."""
    if (where.runner or panel.jobs.default) == AirflowRunner.name:
        return None
    engines = build_engines(config.model_names, EngineDependencies(config, panel.settings.home, lambda _text: None))
    try:
        facts, refused = model_facts(engines, config)
    except ServerUnavailable as exc:
        return None if config.wait else Outcome({"ollama_url": str(exc)}, stopped=True, status=503)
    except TipbenchError as exc:
        return Outcome(trouble=str(exc), stopped=True, status=409)
    finally:
        close_engines(engines, lambda _text: None)
    if refused_start(facts, refused, config, "") is None:
        return None
    return replace(planned(panel, config), stopped=True, status=422)


router = APIRouter(include_in_schema=False, dependencies=[ADMINS_ONLY])
_KEY = "key"
_START, _SKIP = "start", "skip"  # buttons; the second leaves out refused models
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
    preselect: bool = False  # the models are not chosen yet


@router.get("/run")
async def run_page(
    request: Request, panel: PanelState, of: Annotated[str | None, Query(max_length=80, alias="from")] = None
) -> Response:
    """Show the form with the defaults, the values in the URL, or the options of an earlier job (?from=ID)."""
    schema, values, where, given = form_schema(panel), None, RunTarget(), set(request.query_params)
    if of is not None:
        with suppress(JobNotFound):
            job = await run_in_threadpool(panel.jobs.store.get, of)
            values, given = merge_values(schema, job.arguments.items()), given | set(job.arguments)
            runner = job.runner if job.runner in panel.jobs.runners else None  # it may no longer be configured
            where = RunTarget(runner, bool(job.arguments.get(WAIT_FOR_JUDGE)))
    values = merge_values(schema, request.query_params.multi_items(), values)
    preselect = "models" not in given and panel.settings.get("models") is None
    form = SubmittedForm(values, new_idempotency_key(), start=False, where=where, preselect=preselect)
    return await _form_page(request, panel, form, Outcome())


@router.post("/run")
async def submit_run(request: Request, panel: PanelState, admin: Admin) -> Response:
    """Show the plan or start the run, depending on the button; an invalid form is shown again with its errors."""
    schema = form_schema(panel)
    sent = await _read(request, schema)
    config = await run_in_threadpool(check_values, panel.allowed, schema, sent.values)
    if isinstance(config, dict):
        return await _form_page(request, panel, sent, Outcome(config, status=422))
    if not sent.start:
        return await _form_page(request, panel, sent, await run_in_threadpool(planned, panel, config))
    if failing := await run_in_threadpool(startable, panel, config, sent.where):
        return await _form_page(request, panel, sent, failing)
    # A form sends every field: what differs from the defaults was chosen.
    usual = panel.allowed.config({}).model_dump()
    named = frozenset(key for key, value in config.model_dump().items() if value != usual[key])
    where = replace(sent.where, named=named)
    try:
        submitted = await run_in_threadpool(start_run, panel, config, started_by=admin.name, key=sent.key, where=where)
    except Invalid as exc:  # conflicting runner options
        return await _form_page(request, panel, sent, Outcome({WHOLE: str(exc)}, status=422))
    except JobConflict:
        # The user went back and changed the form: show it with a new key, so that submitting it again starts the run.
        sent = replace(sent, key=new_idempotency_key())
        return await _form_page(request, panel, sent, Outcome(again=True, status=409))
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


@router.get("/run/models")
async def run_models(panel: PanelState, ollama_url: Annotated[str, Query(max_length=1000)] = "") -> Response:
    """Return the offered models for the form's script, when Ollama was too slow for the page."""
    found = await offered_models(panel, {"ollama_url": ollama_url}, PATIENCE_S + GLANCE_S)
    items = [
        {
            "name": each.model,
            "note": _note(each),
            "refusal": each.refusal,
            "preselected": each.model in found.preselected,
        }
        for each in found.models
    ]
    return Json({"items": items, "answered": not found.pending, "away": found.away})


async def _form_page(request: Request, panel: Panel, sent: SubmittedForm, outcome: Outcome) -> Response:
    offered = await offered_models(panel, sent.values, GLANCE_S)
    values = {**sent.values, **({"models": ",".join(offered.preselected)} if sent.preselect else {})}
    offers = {
        "models": [Option(each.model, each.model, note=_note(each), refusal=each.refusal) for each in offered.models],
        "prompts": await run_in_threadpool(_prompts, panel.allowed, values.get("suite", "")),
        "experiment": [Option(name, name) for name in await experiment_names(panel)],
        "suite": await run_in_threadpool(_suites, panel),
    }
    form = make_form(form_schema(panel), values, outcome.errors, offers)
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
        models_url="/run/models" if offered.pending else None,
        preselect=sent.preselect,
        away=offered.away,
        json_url="/api/bench/config",
    )


def _note(model: AvailableModel) -> str:
    """Return what is known about a model in a few words."""
    engine = engine_of(model.model)
    if engine.kind == "baseline":
        return "no model: tips from templates, the reference to beat"
    size = parameter_count(model.facts.params_b) if model.facts else None
    return ", ".join(filter(None, (size, "Ollama" if engine.server else "inside tipbench")))


def form_schema(panel: Panel) -> dict[str, Any]:
    """Return the configuration's schema; without allowed suite folders, the suite is an enum of the known ones.

    Of MLflow servers the form offers the configured ones: the others are found automatically.
    """
    schema = panel.allowed.schema()
    schema["properties"]["mlflow_url"]["enum"] = [None, *map(strip_login, panel.allowed.urls["mlflow_url"])]
    if not panel.options.suites:
        schema["properties"]["suite"]["enum"] = [each.value for each in _suites(panel)]
    return schema


def _prompts(allowed: RunPolicy, suite: str) -> list[Option]:
    """Return the prompts of the selected suite; empty if it is invalid, which the suite field reports."""
    try:
        allowed.check_suite(suite)
        return [Option(version, version) for version in load_suite(suite).prompts]
    except (Forbidden, SuiteError):
        return []


def _suites(panel: Panel) -> list[Option]:
    """Return the built-in and configured suites and those in the allowed folders."""
    names = [*builtin_suites(), panel.settings.get("suite") or ""]
    for folder in panel.options.suites:
        with suppress(OSError):
            inside = [folder, *sorted(folder.iterdir())[:1000]]
            names += [str(each) for each in inside if (each / "suite.toml").is_file()]
    return [Option(name, name) for name in dict.fromkeys(filter(None, names))][:_MOST_SUITES]


async def _read(request: Request, schema: Schema) -> SubmittedForm:
    """Parse the form; into pairs first, since checkboxes of one name are sent several times."""
    if content_type(request) != FORM:
        raise Invalid(f"The form must have the content type {FORM} (got {content_type(request)[:80]!r}).", path="body")
    text = (await request.body()).decode("utf-8", "replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as exc:
        raise Invalid(f"A form has at most {_MOST_FIELDS} fields.", path="body") from exc
    named, values = dict(pairs), form_values(schema, pairs)
    button, key = named.get("do"), named.get(_KEY, "")
    if button == _SKIP:
        values["skip_refused"] = _YES
    fit = 0 < len(key) <= _MOST_KEY and key.isascii() and key.isprintable() and key.strip() == key
    waits = named.get(WAIT_FOR_JUDGE, "").lower() in ("true", "on", "1")
    where = RunTarget(named.get("runner", "")[:40] or None, waits)
    return SubmittedForm(values, key if fit else new_idempotency_key(), button in (_START, _SKIP), where)
