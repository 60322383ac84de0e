"""/run: what to collect, the plan of it, and the start. Works without a script: forms in, pages out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from tipbench.errors import JobConflict, JobMissing, SuiteError
from tipbench.plan.config import WAIT_FOR_JUDGE, CollectConfig
from tipbench.plan.suite import builtin_suites, load_suite
from tipbench.web.allowed import Allowed
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import Admin, Panel, PanelState
from tipbench.web.errors import Forbidden, Invalid
from tipbench.web.forms import FORM, content_type
from tipbench.web.panel.job_words import RUNNERS
from tipbench.web.panel.pages import page
from tipbench.web.panel.run_fields import Option, RunForm, make_form
from tipbench.web.panel.run_models import GLANCE_S, PATIENCE_S, Suggestion, experiment_names, ollama_models, own_models
from tipbench.web.panel.run_plan import Outcome, planned
from tipbench.web.panel.run_values import WHOLE, Schema, Values, asked_values, check_values, form_values
from tipbench.web.rendering import Json
from tipbench.web.running import Where, start_run

router = APIRouter(include_in_schema=False, dependencies=[ADMINS_ONLY])
_KEY = "key"
_MOST_FIELDS = 200
_MOST_KEY = 100
_MOST_SUITES = 50


@dataclass(frozen=True)
class Sent:
    """A form as it came: its values, its idempotency key, and which button was pressed."""

    values: Values
    key: str
    start: bool
    where: Where = field(default_factory=Where)


@router.get("/run")
async def run_page(
    request: Request, panel: PanelState, of: Annotated[str | None, Query(max_length=80, alias="from")] = None
) -> Response:
    """The form: with the defaults, with what the URL names, or with the options of an earlier job (?from=ID)."""
    schema = form_schema(panel)
    earlier = await run_in_threadpool(_of_job, panel, of) if of is not None else []
    values = asked_values(schema, request.query_params.multi_items(), asked_values(schema, earlier))
    where = await run_in_threadpool(_where_of, panel, of)
    return await _form_page(request, panel, Sent(values, fresh_key(), start=False, where=where), Outcome())


@router.post("/run")
async def run_asked(request: Request, panel: PanelState, admin: Admin) -> Response:
    """Show the plan, or start: by which button was pressed. A form that is wrong comes back with what is wrong."""
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
    """What Ollama has, for the form's script: a server of the allowed ones, and only as long as it answers quickly."""
    url = _allowed_url(panel.allowed, ollama_url)
    found = await ollama_models(panel, url, PATIENCE_S + GLANCE_S) if url else None
    return Json({"items": [vars(each) for each in found or ()], "answered": found is not None})


async def _start(request: Request, panel: Panel, config: CollectConfig, sent: Sent, started_by: str) -> Response:
    try:
        where = replace(sent.where, named=_named(panel, config))
        submitted = await run_in_threadpool(start_run, panel, config, started_by=started_by, key=sent.key, where=where)
    except Invalid as exc:  # where it shall run does not go together
        return await _form_page(request, panel, sent, Outcome({WHOLE: str(exc)}, status=422))
    except JobConflict:
        # Gone back, changed and sent again: perhaps meant. The form comes with a new key, so pressing again starts it.
        return await _form_page(request, panel, replace(sent, key=fresh_key()), Outcome(again=True, status=409))
    return RedirectResponse(f"/jobs/{submitted.job.id}", status_code=303)


def _named(panel: Panel, config: CollectConfig) -> frozenset[str]:
    """What somebody chose: a form sends every field, so what is as usual counts as not named."""
    usual = panel.allowed.config({}).model_dump()
    return frozenset(key for key, value in config.model_dump().items() if value != usual[key])


async def _form_page(request: Request, panel: Panel, sent: Sent, outcome: Outcome) -> Response:
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
        runner=sent.where.runner or panel.jobs.usual,
        wait_for_judge=sent.where.wait_for_judge,
        models_url="/run/models" if waiting else None,
        json_url="/api/bench/config",
    )


async def _form(panel: Panel, values: Values, errors: Mapping[str, str]) -> tuple[RunForm, bool]:
    """The form, and whether Ollama's models are still being waited for."""
    url = _allowed_url(panel.allowed, values.get("ollama_url", ""))
    theirs = await ollama_models(panel, url, GLANCE_S) if url else ()
    names = await experiment_names(panel)
    offers = {
        "models": [*map(_offer, await run_in_threadpool(own_models, panel)), *map(_offer, theirs or ())],
        "prompts": await run_in_threadpool(_prompts, panel.allowed, values.get("suite", "")),
        "experiment": [Option(name, name) for name in names],
        "suite": await run_in_threadpool(_suites, panel),
    }
    return make_form(form_schema(panel), values, errors, offers), theirs is None


def form_schema(panel: Panel) -> dict[str, Any]:
    """The configuration's schema; where no folder of suites is allowed there are few suites, to be chosen from."""
    schema = panel.allowed.schema()
    if not panel.options.suites:
        schema["properties"]["suite"]["enum"] = [each.value for each in _suites(panel)]
    return schema


def _offer(model: Suggestion) -> Option:
    return Option(model.name, model.name, note=model.note)


def _prompts(allowed: Allowed, suite: str) -> list[Option]:
    """The prompts of the suite that is chosen; of one that cannot be read, none: its own field says why."""
    try:
        allowed.check_suite(suite)
        return [Option(version, version) for version in load_suite(suite).prompts]
    except (Forbidden, SuiteError):
        return []


def _suites(panel: Panel) -> list[Option]:
    """Built in, configured, and those in the folders that the operator allows."""
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
    """An earlier job's options; a job that is gone is no reason to show no form."""
    try:
        return list(panel.jobs.store.get(job_id).arguments.items())
    except JobMissing:
        return []


def _where_of(panel: Panel, job_id: str | None) -> Where:
    """Where an earlier job ran, as long as that is still configured."""
    if job_id is None:
        return Where()
    try:
        job = panel.jobs.store.get(job_id)
    except JobMissing:
        return Where()
    return Where(job.runner if job.runner in panel.jobs.runners else None, bool(job.arguments.get(WAIT_FOR_JUDGE)))


def _allowed_url(allowed: Allowed, url: str) -> str | None:
    """The server as the operator wrote it; None when it is not one of theirs."""
    try:
        return allowed.config({"ollama_url": url} if url else {}).ollama_url
    except (Forbidden, Invalid):
        return None


async def _pairs(request: Request) -> list[tuple[str, str]]:
    """Every field of the form: boxes of one name come several times."""
    if content_type(request) != FORM:
        raise Invalid(f"The form is sent as {FORM} (got {content_type(request)[:80]!r}).", path="body")
    text = (await request.body()).decode("utf-8", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as exc:
        raise Invalid(f"A form has at most {_MOST_FIELDS} fields.", path="body") from exc


def _read(schema: Schema, pairs: list[tuple[str, str]]) -> Sent:
    named = dict(pairs)
    key = named.get(_KEY, "")
    fit = 0 < len(key) <= _MOST_KEY and key.isascii() and key.isprintable() and key.strip() == key
    where = Where(named.get("runner", "")[:40] or None, named.get(WAIT_FOR_JUDGE, "").lower() in ("true", "on", "1"))
    return Sent(form_values(schema, pairs), key if fit else fresh_key(), named.get("do") == "start", where)


def fresh_key() -> str:
    """For one form: sent twice, it starts one job."""
    return f"form-{secrets.token_urlsafe(18)}"
