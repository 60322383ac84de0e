"""Page that starts a collect, with a form built from the configuration's schema."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
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
    available_models,
    build_engines,
    close_engines,
    engine_type_of,
    model_facts,
    refusal_error,
)
from tipbench.http import http_client, read_body, strip_login
from tipbench.jobs.airflow import AirflowRunner
from tipbench.jobs.store import Submitted
from tipbench.markup import NOTHING
from tipbench.plan.collect_config import WAIT_FOR_JUDGE, CollectConfig, split_names
from tipbench.plan.grid import choose_prompts
from tipbench.plan.suite import builtin_suites, load_suite
from tipbench.record.reader import list_experiments
from tipbench.text import capitalized, file_size, parameter_count
from tipbench.web.api.jobs import plan_of
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState
from tipbench.web.errors import Forbidden, Invalid, SafeJsonResponse
from tipbench.web.forms import FORM_TYPE, content_type
from tipbench.web.job_service import CollectTarget, start_collect
from tipbench.web.options import OperatorPermissions
from tipbench.web.panel.jobs import RUNNERS, new_idempotency_key
from tipbench.web.panel.pages import page

LIST_KEYS = ("models", "prompts")  # of lists, shown as checkboxes and a text field for other names
WHOLE_FORM = ""  # key of an error that belongs to no single field
MAX_VALUE_CHARS = 4000
_YES, _NO = "true", "false"
_TRUE_TEXTS = ("true", "on", "1", "yes")  # in a URL or a submitted form

Schema = Mapping[str, Any]  # JSON schema of the configuration, or of one key
Values = Mapping[str, str]  # form values by configuration key; booleans are "true" and "false"


def default_values(schema: Schema) -> dict[str, str]:
    """Return the form's initial values."""
    return {key: _form_value(key_schema.get("default")) for key, key_schema in schema["properties"].items()}


def merge_values(schema: Schema, values: Values, pairs: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return `values` overridden by the pairs of a URL, a submitted form or an earlier job. Ignores unknown keys."""
    sent: dict[str, list[str]] = defaultdict(list)
    for key, value in pairs:
        sent[key].append(_form_value(value).strip())
    merged = dict(values)
    for key, texts in sent.items():
        if key in LIST_KEYS:
            merged[key] = ",".join(split_names(",".join(texts)))
        elif key in merged:
            merged[key] = texts[-1]
            if _is_boolean(schema["properties"][key]):
                merged[key] = _YES if texts[-1].lower() in _TRUE_TEXTS else _NO
    return merged


def check_values(permissions: OperatorPermissions, schema: Schema, values: Values) -> CollectConfig | dict[str, str]:
    """Return the configuration, or the errors by key if the schema, the operator or the suite forbids a value."""
    errors = {}
    for key, text in values.items():
        key_schema = schema["properties"][key]
        if len(text) > MAX_VALUE_CHARS:
            errors[key] = f"At most {MAX_VALUE_CHARS} characters (got {len(text)})."
        elif not text and key in LIST_KEYS:
            errors[key] = "Choose at least one."
        elif not text and not _is_optional(key_schema):
            errors[key] = f"A value is required; the default is {_form_value(key_schema.get('default'))}."
    try:
        # The other values are validated even if there are errors, so that the form reports all errors at once.
        config = permissions.config({key: text or None for key, text in values.items() if key not in errors})
    except (Invalid, Forbidden) as exc:
        return {**_errors_by_key(exc, values), **errors}
    if errors:
        return errors
    try:
        choose_prompts(load_suite(config.suite), config.prompt_versions)
    except SuiteError as exc:
        return {"suite": str(exc)}
    except UsageError as exc:
        return {"prompts": capitalized(str(exc))}
    return config


def _errors_by_key(exc: Invalid | Forbidden, values: Values) -> dict[str, str]:
    cause = exc.__cause__
    if not isinstance(cause, ValidationError):  # a forbidden value
        key = (exc.path or WHOLE_FORM).removeprefix("body.")
        return {key: str(exc)}
    errors: dict[str, str] = {}
    for error in cause.errors(include_url=False):
        message = str(error["msg"]).removeprefix("Value error, ")
        # The error of a rule for several fields has no location, but its message contains their names.
        possible_keys = [str(error["loc"][0])] if error["loc"] else message.split()
        key = next((possible_key for possible_key in possible_keys if possible_key in values), WHOLE_FORM)
        # The message of our own validators (`value_error`) is complete.
        got = "" if error["type"] == "value_error" else f" (got {str(error.get('input'))[:80]!r})"
        errors.setdefault(key, f"{capitalized(message)}{got}.")
    return errors


def _is_boolean(key_schema: Schema) -> bool:
    return bool(key_schema.get("type") == "boolean")


def _is_optional(key_schema: Schema) -> bool:
    return any(each.get("type") == "null" for each in key_schema.get("anyOf", ()))


def _form_value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return _YES if value else _NO
    if isinstance(value, list):
        return ",".join(map(_form_value, value))
    if isinstance(value, float):
        return f"{value:.15g}"  # 1, not 1.0, for a whole number
    return str(value)


OLLAMA_TIMEOUT_S = 1.5  # for listing the models
PAGE_WAIT_S = 0.3  # how long a page waits for Ollama and MLflow; local servers are much faster
_MAX_RESPONSE_BYTES = 2_000_000
_MAX_NAMES = 200  # models or experiments offered
_MAX_NAME_CHARS = 200

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class OfferedModels:
    """The models that the form offers."""

    models: tuple[AvailableModel, ...]
    error: str | None = None  # why Ollama's models are missing
    pending: bool = False  # Ollama has not responded yet

    @property
    def preselected(self) -> tuple[str, ...]:
        """Ollama's models that may run, or the embedded models if there are none; and the reference."""
        accepted = [each.model for each in self.models if each.refusal is None]
        served = [name for name in accepted if engine_type_of(name).server]
        embedded = [
            name for name in accepted if not engine_type_of(name).server and not engine_type_of(name).is_reference
        ]
        references = [name for name in accepted if engine_type_of(name).is_reference]
        return (*(served or embedded), *references)


async def offered_models(panel: Panel, values: Values, wait_s: float) -> OfferedModels:
    """Return the models of all engines.

    Ollama's are missing if Ollama takes longer than `wait_s`, or if the values are invalid or not allowed.
    """
    options = {key: values[key] for key in ("ollama_url", "max_model_b", "allow_unknown_size") if values.get(key)}
    try:
        config = panel.permissions.config(options)
    except (Forbidden, Invalid):  # the form reports the error
        defaults = panel.permissions.config({})
        local = await run_in_threadpool(_models_of_engines, panel, defaults, with_server=False)
        return OfferedModels(local.models)
    local = await run_in_threadpool(_models_of_engines, panel, config, with_server=False)
    key = ("ollama models", config.ollama_url, config.max_model_b, config.allow_unknown_size)
    served = await _cached_with_timeout(panel, key, lambda: _ollama_models(panel, config), wait_s)
    if served is None:
        return OfferedModels(local.models, pending=True)
    listed = [each for each in served.models if _fits_in_list(each.model)][:_MAX_NAMES]
    return OfferedModels((*listed, *local.models), error=served.errors[0] if served.errors else None)


def _models_of_engines(panel: Panel, config: CollectConfig, *, with_server: bool) -> Availability:
    """Return the models of the engines with a server, or of those without one."""
    engines = [each for each in ENGINES.values() if bool(each.server) is with_server]
    return available_models(config, panel.settings.home, engines)


def _fits_in_list(name: str) -> bool:
    return 0 < len(name) <= _MAX_NAME_CHARS and name.isprintable() and not set(name) & set(" ,")


def _ollama_models(panel: Panel, config: CollectConfig) -> Availability:
    url = config.ollama_url.rstrip("/")
    try:
        # The version is requested first, with a deadline: a server that never responds must not block the list.
        with (
            http_client(url, timeout=OLLAMA_TIMEOUT_S) as client,
            client.stream("GET", f"{url}/api/version") as response,
        ):
            read_body(response, limit=_MAX_RESPONSE_BYTES, deadline=time.monotonic() + OLLAMA_TIMEOUT_S)
        return _models_of_engines(panel, config, with_server=True)
    except (httpx.HTTPError, httpx.InvalidURL, TipbenchError, OSError):
        error = f"Ollama at {strip_login(url)} does not respond."
        return Availability(errors=(f"{error} Start it (ollama serve), or choose models that run without it.",))


async def offered_experiments(panel: Panel) -> tuple[str, ...]:
    """Return the names of the experiments; empty if MLflow does not respond in time."""

    def read_names() -> tuple[str, ...]:
        try:
            recorded = list_experiments(panel.mlflow.open().store)
        except TipbenchError:
            return ()
        return tuple(each.name for each in recorded if each.name.isprintable())[:_MAX_NAMES]

    return await _cached_with_timeout(panel, ("experiment names",), read_names, PAGE_WAIT_S) or ()


async def _cached_with_timeout(
    panel: Panel, key: tuple[object, ...], make: Callable[[], _Result | None], wait_s: float
) -> _Result | None:
    """Return the cached or computed result, or None after `wait_s`; the result is then cached once it is ready."""
    cache = panel.queries.small_cache
    future = asyncio.ensure_future(run_in_threadpool(cache.get, key, version=None, compute=make))
    done, _ = await asyncio.wait({future}, timeout=wait_s)
    return future.result() if done else None


_GROUPS = (  # title, explanation and configuration keys; on the page, all but the first are collapsed
    ("Models and prompts", "", ("models", "prompts", "experiment", "suite", "n_scenarios", "n_tips", "temperature")),
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
    """A value that a field offers."""

    value: str
    note: str = ""
    refusal: str | None = None  # why it cannot be used
    chosen: bool = False  # whether its checkbox is checked


@dataclass(frozen=True)
class Field:
    """A form field for one configuration key."""

    key: str
    kind: Kind
    label: str
    help: str
    value: str  # if `kind` is `choices`, only the names without a checkbox
    default: str
    changed: bool
    error: str | None = None
    options: tuple[Option, ...] = ()  # checkboxes, select options, or suggestions for a text
    limits: Mapping[str, Any] = field(default_factory=dict)  # HTML attributes of a number


Offers = Mapping[str, Sequence[Option]]  # options by configuration key, in addition to the schema's


def make_form(schema: Schema, values: Values, errors: Mapping[str, str], offers: Offers) -> list[dict[str, Any]]:
    """Return the form's fields with these values and errors, in titled groups."""
    fields = {
        key: _field(key, key_schema, values[key], errors.get(key), offers.get(key, ()))
        for key, key_schema in schema["properties"].items()
    }
    return [{"title": title, "about": about, "fields": [fields[key] for key in keys]} for title, about, keys in _GROUPS]


def _field(key: str, key_schema: Schema, value: str, error: str | None, offered: Sequence[Option]) -> Field:
    default = _form_value(key_schema.get("default"))
    form_field = Field(
        key=key,
        kind=_KINDS.get(key_schema.get("type", ""), "text"),
        label=_LABELS.get(key) or key.replace("_", " ").capitalize(),
        help=key_schema.get("description", ""),
        value=value,
        default=default,
        changed=value != default,
        error=error,
        options=tuple(offered),
        limits={
            "min": key_schema.get("minimum"),
            "max": key_schema.get("maximum"),
            "step": "1" if key_schema.get("type") == "integer" else "any",
        },
    )
    if key in LIST_KEYS:
        names = split_names(value)
        checkboxes = tuple(replace(each, chosen=each.value in names) for each in offered)
        offered_names = {each.value for each in offered}
        other_names = [name for name in names if name not in offered_names]
        help_text = capitalized(form_field.help.removeprefix("Comma-separated "))
        return replace(form_field, kind="choices", help=help_text, value=", ".join(other_names), options=checkboxes)
    if "enum" in key_schema:
        listed_values = ["" if each is None else str(each) for each in key_schema["enum"]]
        if value not in listed_values:  # the form shows an invalid value with its error
            listed_values.append(value)
        return replace(form_field, kind="select", options=tuple(map(Option, listed_values)))
    return form_field


@dataclass(frozen=True)
class FormResult:
    """The result of a submitted form, shown with it."""

    errors: Mapping[str, str] = field(default_factory=dict)  # by key
    plan: Mapping[str, Any] | None = None
    failure: str | None = None  # why there is no plan
    key_reused: bool = False  # the form's idempotency key has already started a job with other values
    not_started: bool = False  # a start was requested, but the collect would fail
    status: int = 200


def plan_result(panel: Panel, config: CollectConfig) -> FormResult:
    """Return the plan of a configuration, or the error if there is no plan."""
    try:
        plan = plan_of(panel, config)
    except ServerUnavailable as exc:
        return FormResult(errors={"ollama_url": str(exc)}, status=503)
    except TipbenchError as exc:
        return FormResult(failure=str(exc), status=409)
    models = [
        {
            **model,
            "size": parameter_count(model["params_b"]) or NOTHING,
            "memory": file_size(model["memory_bytes"]) or NOTHING,
        }
        for model in plan["models"]
    ]
    return FormResult(plan={**plan, "models": models, "skip_refused": config.skip_refused})


def start_problem(panel: Panel, config: CollectConfig, target: CollectTarget) -> FormResult | None:
    """Return the result to show if the collect would fail, or None if it can start."""
    if (target.runner or panel.jobs.default_runner) == AirflowRunner.name:
        return None  # not checked, because Airflow's workers have their own servers

    def ignore(_message: str) -> None: ...

    engines = build_engines(config.model_names, EngineDependencies(config, panel.settings.home, ignore))
    try:
        facts, refused = model_facts(engines, config)
    except ServerUnavailable as exc:
        if config.wait:  # the collect then waits for servers too, not only for other collects
            return None
        return FormResult(errors={"ollama_url": str(exc)}, not_started=True, status=503)
    except TipbenchError as exc:
        return FormResult(failure=str(exc), not_started=True, status=409)
    finally:
        close_engines(engines, ignore)
    if refusal_error(facts, refused, config) is None:
        return None
    # The plan lists the refused models.
    return replace(plan_result(panel, config), not_started=True, status=422)


router = APIRouter(include_in_schema=False, dependencies=[ADMINS_ONLY])
_START, _SKIP = "start", "skip"  # buttons that start a collect; _SKIP leaves out refused models
_MAX_FIELDS = 200
_MAX_KEY_CHARS = 100
_MAX_SUITES = 50  # offered
_MAX_SUITE_PATHS = 1000  # examined in an allowed folder, which may be large


@dataclass(frozen=True)
class StartForm:
    """The content of a form, as shown or as submitted."""

    values: Values
    idempotency_key: str
    starts_collect: bool = False  # otherwise only the plan is shown
    target: CollectTarget = field(default_factory=CollectTarget)
    preselect: bool = False  # no models were chosen, so the boxes of `OfferedModels.preselected` are checked


@router.get("/run")
async def start_page(
    request: Request, panel: PanelState, job_id: Annotated[str | None, Query(max_length=80, alias="from")] = None
) -> Response:
    """Show the form with the defaults, the values in the URL, or the options of an earlier job (?from=ID)."""
    schema = form_schema(panel)
    values = default_values(schema)
    chosen_keys = set(request.query_params)
    target = CollectTarget()
    if job_id is not None:
        with suppress(JobNotFound):
            job = await run_in_threadpool(panel.jobs.store.get, job_id)
            values = merge_values(schema, values, job.arguments.items())
            chosen_keys |= set(job.arguments)
            runner = job.runner if job.runner in panel.jobs.runners else None  # None is the default runner
            target = CollectTarget(runner, bool(job.arguments.get(WAIT_FOR_JUDGE)))
    values = merge_values(schema, values, request.query_params.multi_items())
    preselect = "models" not in chosen_keys and panel.settings.get("models") is None
    form = StartForm(values, new_idempotency_key(), target=target, preselect=preselect)
    return await _form_page(request, panel, form, FormResult())


@router.post("/run")
async def submit_form(request: Request, panel: PanelState, admin: Admin) -> Response:
    """Show the plan or start the collect, depending on the button. An invalid form is shown again with its errors."""
    schema = form_schema(panel)
    form = await _read_form(request, schema)
    result = await run_in_threadpool(_submit, panel, schema, form, admin.name)
    if isinstance(result, Submitted):
        return RedirectResponse(f"/jobs/{result.job.id}", status_code=303)
    if result.key_reused:
        # The user went back and changed the form. With a new key, submitting it again starts the collect.
        form = replace(form, idempotency_key=new_idempotency_key())
    return await _form_page(request, panel, form, result)


def _submit(panel: Panel, schema: Schema, form: StartForm, started_by: str) -> Submitted | FormResult:
    config = check_values(panel.permissions, schema, form.values)
    if isinstance(config, dict):
        return FormResult(errors=config, status=422)
    if not form.starts_collect:
        return plan_result(panel, config)
    if problem := start_problem(panel, config, form.target):
        return problem
    # A form sends every field. Only the values that differ from the defaults count as set by the user.
    defaults = panel.permissions.config({}).model_dump()
    explicit_keys = frozenset(key for key, value in config.model_dump().items() if value != defaults[key])
    try:
        target = replace(form.target, explicit_keys=explicit_keys)
        return start_collect(panel, config, started_by=started_by, idempotency_key=form.idempotency_key, target=target)
    except Invalid as exc:  # conflicting runner options
        return FormResult(errors={WHOLE_FORM: str(exc)}, status=422)
    except JobConflict:
        return FormResult(key_reused=True, status=409)


@router.get("/run/models")
async def late_models(panel: PanelState, ollama_url: Annotated[str, Query(max_length=1000)] = "") -> Response:
    """Return the offered models as JSON. The form's script requests them if Ollama was too slow for the page."""
    offered = await offered_models(panel, {"ollama_url": ollama_url}, OLLAMA_TIMEOUT_S + PAGE_WAIT_S)
    items = [
        {
            "name": each.model,
            "note": _model_note(each),
            "refusal": each.refusal,
            "preselected": each.model in offered.preselected,
        }
        for each in offered.models
    ]
    return SafeJsonResponse({"items": items, "answered": not offered.pending, "away": offered.error})


async def _form_page(request: Request, panel: Panel, form: StartForm, result: FormResult) -> Response:
    offered = await offered_models(panel, form.values, PAGE_WAIT_S)
    experiment_names = await offered_experiments(panel)
    return await run_in_threadpool(_render_form, request, panel, form, result, offered, experiment_names)


def _render_form(
    request: Request,
    panel: Panel,
    form: StartForm,
    result: FormResult,
    offered: OfferedModels,
    experiment_names: Sequence[str],
) -> Response:
    values = dict(form.values)
    if form.preselect:
        values["models"] = ",".join(offered.preselected)
    offers = {
        "models": [Option(each.model, _model_note(each), each.refusal) for each in offered.models],
        "prompts": list(map(Option, _prompt_names(panel.permissions, values["suite"]))),
        "experiment": list(map(Option, experiment_names)),
        "suite": list(map(Option, _suite_names(panel))),
    }
    return page(
        request,
        "start.html",
        status=result.status,
        groups=make_form(form_schema(panel), values, result.errors, offers),
        result=result,
        form_error=result.errors.get(WHOLE_FORM),
        key=form.idempotency_key,
        runners=[(name, RUNNERS.get(name, name)) for name in panel.jobs.runners],
        runner=form.target.runner or panel.jobs.default_runner,
        wait_for_judge=form.target.wait_for_judge,
        models_url="/run/models" if offered.pending else None,
        preselect=form.preselect,
        models_error=offered.error,
        json_url="/api/bench/config",
    )


def _model_note(model: AvailableModel) -> str:
    engine = engine_type_of(model.model)
    if engine.is_reference:
        return "no model: tips from templates, the reference to beat"
    size = parameter_count(model.facts.params_b) if model.facts else None
    place = "Ollama" if engine.server else "inside tipbench"
    return f"{size}, {place}" if size else place


def form_schema(panel: Panel) -> dict[str, Any]:
    """Return the configuration's schema with the values that the form offers."""
    schema = panel.permissions.schema()
    # Only configured servers, not those that are found automatically.
    schema["properties"]["mlflow_url"]["enum"] = [None, *map(strip_login, panel.permissions.urls["mlflow_url"])]
    if not panel.options.suites:  # the operator allows no suite folders
        schema["properties"]["suite"]["enum"] = _suite_names(panel)
    return schema


def _prompt_names(permissions: OperatorPermissions, suite: str) -> list[str]:
    try:
        permissions.check_suite(suite)
        return list(load_suite(suite).prompts)
    except (Forbidden, SuiteError):  # the field of the suite shows the error
        return []


def _suite_names(panel: Panel) -> list[str]:
    """Return the built-in suites, the configured suite, and the suites in the allowed folders."""
    names = [*builtin_suites(), panel.settings.get("suite") or ""]
    for folder in panel.options.suites:
        with suppress(OSError):
            paths = [folder, *sorted(folder.iterdir())[:_MAX_SUITE_PATHS]]
            names += [str(path) for path in paths if (path / "suite.toml").is_file()]
    return list(dict.fromkeys(filter(None, names)))[:_MAX_SUITES]


async def _read_form(request: Request, schema: Schema) -> StartForm:
    if content_type(request) != FORM_TYPE:
        raise Invalid(
            f"The form must have the content type {FORM_TYPE} (got {content_type(request)[:80]!r}).", path="body"
        )
    text = (await request.body()).decode("utf-8", "replace")
    try:
        # Pairs, because the checkboxes of a list have the same name.
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError as exc:
        raise Invalid(f"A form has at most {_MAX_FIELDS} fields.", path="body") from exc
    fields = dict(pairs)
    # Browsers do not send unchecked checkboxes, so a missing boolean is false.
    missing_values = {key: _NO if _is_boolean(each) else "" for key, each in schema["properties"].items()}
    values = merge_values(schema, missing_values, pairs)
    button = fields.get("do")
    if button == _SKIP:
        values["skip_refused"] = _YES
    sent_key = fields.get("key", "")
    has_valid_length = 0 < len(sent_key) <= _MAX_KEY_CHARS
    is_valid = has_valid_length and sent_key.isascii() and sent_key.isprintable() and sent_key.strip() == sent_key
    idempotency_key = sent_key if is_valid else new_idempotency_key()
    wait_for_judge = fields.get(WAIT_FOR_JUDGE, "").lower() in _TRUE_TEXTS
    target = CollectTarget(fields.get("runner", "")[:40] or None, wait_for_judge)
    return StartForm(values, idempotency_key, starts_collect=button in (_START, _SKIP), target=target)
