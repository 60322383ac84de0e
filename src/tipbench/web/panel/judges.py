"""/experiments/{experiment}/judges: who judges, how far they can be trusted, their batches and sheets; held ones."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.errors import LockHeld, NotEnoughData, TipbenchError, UsageError
from tipbench.judge.command import default_name
from tipbench.judge.drift_drawing import HEIGHT, WIDTH
from tipbench.judge.exporting import Request as ExportRequest
from tipbench.record.store import RunStore
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY, Identity
from tipbench.web.batch_shapes import LONGEST_ACCEPTANCE, LONGEST_RETURN
from tipbench.web.batches import BatchDesk, Conflict, desk_of
from tipbench.web.deps import Admin, Panel, PanelState, Store
from tipbench.web.downloads import attachment
from tipbench.web.errors import Forbidden, Invalid, NotFound, WebError
from tipbench.web.forms import JSON, Parts, read_parts
from tipbench.web.judge_queries import DriftAsk, ThemeName, accept_drift, drift_svg, sheet_of
from tipbench.web.judging import SheetRequest, alone, sheet_file, sheet_for, wish_of
from tipbench.web.panel.board_charts import charts_there
from tipbench.web.panel.judge_batch import home_of
from tipbench.web.panel.judges_view import alpha_words, batch_views, judge_views, sheet_views
from tipbench.web.panel.pages import page
from tipbench.web.panel.showing import experiment_path, quote_path
from tipbench.web.queries import existing
from tipbench.web.running import start_judge
from tipbench.web.snapshots import revision
from tipbench.web.tokens import EVERYBODY
from tipbench.web.turns import IN_TURN

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

CSV, SVG = "text/csv", "image/svg+xml"
_PLACE = "/experiments/{experiment:path}/judges"
_KEEP_PICTURE = "private, max-age=3600"  # its address has the revision in it
_TICKED = ("all", "rejudge", "focus")
_CHANGED = ("made", "accepted", "returned")
_MOST = {"reason": LONGEST_ACCEPTANCE, "note": LONGEST_RETURN}  # characters
_USUAL: Mapping[str, str] = {"judge": "", "limit": "", "overlap": "20", "format": "json"}
_SheetId = Annotated[str | None, Query(max_length=64)]
_Failures = (WebError, TipbenchError)
_Undecided = (Invalid, Conflict, LockHeld)


async def sent_form(request: Request, _admin: Admin) -> Parts:
    """What a form of the page has sent, read once it is known who sends it."""
    return await read_parts(request)


SentForm = Annotated[Parts, Depends(sent_form)]


@router.get(_PLACE)
def judges_page(
    request: Request,
    experiment: ExperimentPath,
    panel: PanelState,
    store: Store,
    made: _SheetId = None,
    accepted: _SheetId = None,
    returned: _SheetId = None,
    made_as: Annotated[Literal["json", "csv"], Query(alias="as")] = "json",
) -> HTMLResponse:
    """How the judging stands; `made`, `accepted` and `returned` are sheets that a form has just changed."""
    return judges_response(
        request, experiment, panel, store, made=made, accepted=accepted, returned=returned, made_as=made_as
    )


def judges_response(
    request: Request,
    experiment: str,
    panel: Panel,
    store: RunStore,
    *,
    status: int = 200,
    values: Mapping[str, Any] | None = None,
    errors: Mapping[str, str] | None = None,
    **shown: Any,
) -> HTMLResponse:
    """The page, also after a form that was wrong: with what was filled in and what is wrong with it."""
    found = existing(store, experiment)
    judging = panel.queries.judging_of(store, found)
    sheets, desk = sheet_views(judging), desk_of(request.app)
    batches, minutes = desk.listed(request.state.identity, experiment, EVERYBODY), desk.minutes_per_item(experiment)
    in_browser = {batch["sheet"] for batch in batches}
    known = in_browser | {sheet.sheet for sheet in sheets}
    told = {name: each if each in known else None for name in _CHANGED for each in (shown.get(name),)}
    return page(
        request,
        "judges.html",
        status=status,
        experiment=experiment,
        judging=judging,
        judges=judge_views(judging),
        sheets=sheets,
        batches=batch_views(batches, desk.skips, minutes, judging),
        in_browser=in_browser,
        minutes=minutes,
        alphas=[(name, value, alpha_words(value)) for name, value in judging.alpha.items()],
        revision=revision(found) or "",
        charts=charts_there(),
        chart_size=(WIDTH, HEIGHT),
        values={**_USUAL, **(values or {})},
        errors=errors or {},
        made_as=shown.get("made_as", "json"),
        again=secrets.token_hex(16),  # one order for one look at the page
        program=_program(panel),
        judge_url=home_of(experiment),
        judge_link=str(request.base_url).rstrip("/") + home_of(experiment),
        batches_url=f"/api/bench/judge/{quote_path(experiment)}/batches?judge=*",
        here_path=experiment_path(experiment, "judges"),
        json_url=f"/api/bench/judges/{quote_path(experiment)}",
        mlflow_url=found.url,
        **told,
    )


@router.get(_PLACE + "/drift.svg")
def drift_picture(
    experiment: ExperimentPath,
    panel: PanelState,
    store: Store,
    judge: Annotated[str, Query(max_length=200)],
    scale: Annotated[str, Query(max_length=100)],
    provisional: bool = False,
    theme: ThemeName = "light",
) -> Response:
    """One judge on one scale over time."""
    picture = drift_svg(panel.queries, store, experiment, DriftAsk(judge, scale, provisional, theme))
    content = picture.encode("utf-8", "backslashreplace")
    return Response(content, media_type=SVG, headers={"Cache-Control": _KEEP_PICTURE})


@router.get(_PLACE + "/sheets/{sheet}.{form}")
def sheet_download(
    experiment: ExperimentPath, sheet: str, form: Literal["json", "csv"], store: Store, filled: bool = False
) -> Response:
    """A sheet once more, blank or with the scores that have come back."""
    judging = sheet_of(store, experiment, sheet)
    ask = SheetRequest(ExportRequest(), sheet=sheet, filled=filled, format=form)
    name = f"sheet-{judging.sheet.id}{'-filled' if filled else ''}"
    return Response(
        sheet_file(judging, ask).encode("utf-8", "backslashreplace"),
        media_type=CSV if form == "csv" else JSON,
        headers=attachment(name, form),
    )


@router.post(_PLACE + "/export", dependencies=[IN_TURN])
def export(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """A new sheet; the page then hands it out."""
    try:
        ask = wish_of(_wish(form.fields), who, panel.allowed)
        judging = sheet_for(store, experiment, ask)
    except (Invalid, NotEnoughData) as exc:
        return _wrong(request, experiment, panel, store, "export", form.fields, exc)
    there = experiment_path(experiment, "judges")
    return RedirectResponse(f"{there}?made={judging.sheet.id}&as={ask.format}#made", 303)


@router.post(_PLACE + "/accept", dependencies=[IN_TURN])
def accept(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Count held scores all the same; the reason is kept with the sheet."""
    sheet, desk = form.fields.get("sheet", ""), desk_of(request.app)
    try:
        reason = _said(form.fields, "reason")
        if _is_batch(desk, who, sheet, experiment):
            desk.accept(who, sheet, reason, experiment)
        else:
            with alone(panel.settings.home, panel.tracker.open().place):
                accept_drift(store, experiment, sheet, reason, who)
    except _Undecided as exc:
        return _wrong(request, experiment, panel, store, "accept", form.fields, exc)
    return RedirectResponse(f"{experiment_path(experiment, 'judges')}?accepted={quote_path(sheet)}#accepted", 303)


@router.post(_PLACE + "/return")
def send_back(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """Give a held batch back to its judge, who sees the note."""
    sheet = form.fields.get("sheet", "")
    try:
        desk_of(request.app).send_back(who, sheet, _said(form.fields, "note"), experiment)
    except _Undecided as exc:
        return _wrong(request, experiment, panel, store, "return", form.fields, exc)
    return RedirectResponse(f"{experiment_path(experiment, 'judges')}?returned={quote_path(sheet)}#returned", 303)


@router.post(_PLACE + "/run")
def run_judge(
    request: Request, experiment: ExperimentPath, form: SentForm, who: Admin, panel: PanelState, store: Store
) -> Response:
    """A judge that is no person, as a job."""
    wanted, key = form.fields.get("with", "rules"), form.fields.get("again") or None
    if wanted == "ollama":
        wanted = f"ollama:{form.fields.get('model', '').strip()}"
    try:
        started = start_judge(panel, experiment, {"with": wanted}, started_by=who.name, key=key)
    except _Failures as exc:
        return _wrong(request, experiment, panel, store, "run", form.fields, exc)
    return RedirectResponse(f"/jobs/{quote_path(started.job.id)}", 303)


def _wish(fields: Mapping[str, str]) -> dict[str, Any]:
    """The form's fields as the API takes them; what is empty is not asked for."""
    wish: dict[str, Any] = {name: fields[name].strip() for name in ("judge", "limit", "format") if fields.get(name)}
    wish = {name: value for name, value in wish.items() if value}
    if overlap := fields.get("overlap", "").strip():
        try:
            wish["overlap"] = float(overlap) / 100
        except ValueError:
            wish["overlap"] = overlap
    return wish | {name: True for name in _TICKED if name in fields}


def _wrong(
    request: Request,
    experiment: str,
    panel: Panel,
    store: RunStore,
    which: str,
    fields: Mapping[str, str],
    exc: Exception,
) -> HTMLResponse:
    """The page again: the message at the field it is about, or above the form."""
    place = str(getattr(exc, "path", None) or "").rpartition(".")[2]
    message = str(exc).partition(": ")[2] if str(exc).startswith(("body.", "query.")) else str(exc)
    named = place if place in ("judge", "limit", "overlap", "format") and which == "export" else which
    if place == "overlap":
        message = f"A share from 0 to 100 % (got {fields.get('overlap', '')[:40]!r})."
    kept = (*_USUAL, *_TICKED, *_MOST, "sheet", "model")
    values = {name: fields[name][: _MOST.get(name, 200)] for name in kept if name in fields}
    status = getattr(exc, "status", 409)
    return judges_response(
        request, experiment, panel, store, status=status, values=values, errors={named or which: message or str(exc)}
    )


def _said(fields: Mapping[str, str], name: str) -> str:
    """What was written into a field, as long as it may be."""
    text = fields.get(name, "").replace("\r\n", "\n").strip()
    if len(text) > _MOST[name]:
        raise Invalid(f"{name} has at most {_MOST[name]} characters (got {len(text)}).", path=f"body.{name}")
    return text


def _is_batch(desk: BatchDesk, who: Identity, sheet: str, experiment: str) -> bool:
    """Whether a sheet is judged in the browser, by whomever."""
    try:
        desk.own(who, sheet, experiment)
    except Forbidden:
        return True
    except NotFound:
        return False
    return True


def _program(panel: Panel) -> str | None:
    """The name of the operator's judging program: nothing else of its command line, which may hold secrets."""
    command = panel.settings.get("judge_command")
    if not command:
        return None
    try:
        return default_name(command)
    except UsageError:
        return "the program"
