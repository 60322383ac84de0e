"""Page of an experiment's runs, and the answer view shared with the page of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from tipbench.errors import CorruptText
from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.scores import NO_SCORES, RUBRIC, SCORES, CellScores, Judgement, read_scores
from tipbench.judge.sheet_store import KEY
from tipbench.record.run import RunKind, RunState
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.pages import page
from tipbench.web.queries import experiment_path, quote_path
from tipbench.web.run_queries import RunFilters, RunQueries, filters_of

PROMPT = "artifact:prompt.txt"
COUNTS, HELD, PROVISIONAL, EARLIER, OTHER_RUBRIC, REPLACED = (
    "counts", "held", "provisional", "provisional, earlier", "other rubric", "replaced",
)  # fmt: skip
_SHOWN_APART = (PROMPT, RAW, CANDIDATES, SCORES)  # texts with a separate section on a cell's page
_NOTE_TAG = "mlflow.note.content"
_NAME_TAG = "mlflow.runName"


@dataclass(frozen=True)
class JudgeScores:
    """A judge's scores for an answer."""

    judge: str
    standing: str  # counts, held, provisional, …
    at: str
    sheet: str
    rubric: str
    format_ok: bool
    means: Mapping[str, float]


@dataclass(frozen=True)
class TipScores:
    """A judge's scores for a tip."""

    judge: str
    standing: str
    scores: Mapping[str, int]
    overlong: bool
    note: str


@dataclass(frozen=True)
class TipView:
    """A tip of an answer."""

    number: int
    tip: str
    rationale: str
    judged: bool  # False for tips beyond the requested number, which are not judged
    marks: tuple[TipScores, ...]


@dataclass(frozen=True)
class AnswerView:
    """A cell's answer with all its scores."""

    tips: tuple[TipView, ...]
    given: tuple[JudgeScores, ...]
    history: tuple[JudgeScores, ...]  # oldest first
    scales: tuple[str, ...]
    faults: tuple[str, ...] = ()  # errors of texts that cannot be parsed


@dataclass(frozen=True)
class Notice:
    """A notice at the top of a run's page."""

    kind: str  # info, warn or bad
    title: str
    text: str = ""


def run_title(run: Mapping[str, Any]) -> str:
    """Returns the title of a run."""
    params, tags = run["params"], run["tags"]
    if tags.get("kind") == RunKind.CELL:
        return f"{params.get('model', '?')}/{params.get('prompt_version', '?')} · {params.get('scenario', '?')}"
    return str(tags.get(_NAME_TAG) or f"{tags.get('kind', 'run')} {run['run_id'][:8]}")


def run_note(run: Mapping[str, Any]) -> str:
    """Returns one line on a run other than a cell: its reason, or how it ended."""
    tags = run["tags"]
    if tags.get("kind") == RunKind.JUDGING:
        held = {"exported": "exported, no scores yet", "held": "scores are held"}
        return held.get(tags.get("sheet_status", ""), str(tags.get("sheet_status", "")))
    return str(tags.get(_NOTE_TAG) or tags.get("reason") or tags.get("evidence") or tags.get("ended") or "")


def answer_view(run: Mapping[str, Any]) -> AnswerView:
    """Returns a cell's answer with its scores; texts that cannot be parsed are left out and listed in `faults`."""
    faults: list[str] = []
    scores = NO_SCORES
    try:
        scores = read_scores(run["texts"].get(SCORES))
    except CorruptText as exc:
        faults.append(str(exc))
    tips: list[tuple[str, str]] = []
    try:
        listed = json.loads(run["texts"].get(CANDIDATES) or "[]")
        tips = [(str(tip["tip"]), str(tip["rationale"])) for tip in listed]
    except (ValueError, KeyError, TypeError, AttributeError):
        faults.append(f"The text {CANDIDATES} is not in tipbench's format; it is shown below unchanged.")
    standing = list(_standing(scores))
    n_judged = _whole(run["params"].get("n_tips")) or len(tips)
    views = tuple(
        TipView(at + 1, tip, why, at < n_judged, tuple(_marks(standing, at)))
        for at, (tip, why) in enumerate(tips)
    )  # fmt: skip
    everything = [given for _, given in standing] + list(scores.history)
    scales = dict.fromkeys(name for given in everything for tip in given.tips for name in tip.scores)
    return AnswerView(
        tips=views,
        given=tuple(_given(name, given) for name, given in standing),
        history=tuple(_given(REPLACED, given) for given in scores.history),
        scales=tuple(scales),
        faults=tuple(faults),
    )


def _standing(scores: CellScores) -> Iterator[tuple[str, Judgement]]:
    counted = {given.judge for given in scores.counted}
    for name, given in sorted(scores.judges.items()):
        yield (COUNTS if name in counted else OTHER_RUBRIC), given
    for _, given in sorted(scores.held.items()):
        yield HELD, given
    latest = scores.latest_provisional
    for _, given in sorted(scores.provisional.items()):
        yield (PROVISIONAL if given is latest else EARLIER), given


def _given(standing: str, given: Judgement) -> JudgeScores:
    rubric = given.rubric.partition("@")[0]
    return JudgeScores(given.judge, standing, given.at, given.sheet, rubric, given.format_ok, given.means)


def _marks(standing: list[tuple[str, Judgement]], at: int) -> Iterator[TipScores]:
    for name, given in standing:
        if at < len(given.tips):
            tip = given.tips[at]
            yield TipScores(given.judge, name, tip.scores, tip.overlong, tip.note)


def notices(run: Mapping[str, Any], *, stale: bool = False) -> list[Notice]:
    """Returns the notices for a run, most important first."""
    return [*_failure(run), *_age(run, stale=stale), *_scored(run), *_odd(run)]


def _failure(run: Mapping[str, Any]) -> Iterator[Notice]:
    tags = run["tags"]
    if run["state"] == "failed":
        reason = f"{tags.get('failure', 'unknown')}: {tags.get('failure_reason', 'no reason was stored')}"
        yield Notice("bad", "No complete answer, so nothing is scored. The next collect tries it again.", reason)
    elif run["status"] == "FAILED":
        yield Notice("bad", "The run failed.", tags.get("ended", ""))


def _age(run: Mapping[str, Any], *, stale: bool) -> Iterator[Notice]:
    if run["tags"].get("superseded") == "true":
        yield Notice("info", "Superseded: a later attempt at the same cell has replaced this run.")
    if stale:
        yield Notice(
            "warn",
            "Stale: the model's digest, the prompt's text or the scenario has changed since. The leaderboard uses "
            "the newer answer.",
        )


def _scored(run: Mapping[str, Any]) -> Iterator[Notice]:
    tags = run["tags"]
    if tags.get("floored") == "true":
        yield Notice("info", "No usable answer: it has the rubric's lowest scores.")
    if tags.get("held") == "true":
        yield Notice(
            "warn",
            "Some scores are held: their judge is too far off the reference scores, so they do not count.",
        )
    if run["state"] == "pending" and tags.get("provisional_judge"):
        yield Notice("info", "The scores are provisional: no person has judged this answer yet.")


def _odd(run: Mapping[str, Any]) -> Iterator[Notice]:
    tags, metrics = run["tags"], run["metrics"]
    if tags.get("foreign_resident") == "true":
        yield Notice(
            "warn", "Another client's model was in memory while this was generated: the times are not comparable."
        )
    if tags.get("truncated") == "true":
        yield Notice("warn", "The answer was cut off at the token limit (num_predict).")
    if tags.get("done_reason") == "aborted":
        yield Notice("warn", "The server stopped the model, which repeated itself; the text up to then is the answer.")
    if metrics.get("format_ok") == 0 and tags.get("floored") != "true" and run["state"] != "failed":
        yield Notice("info", "The answer is not in the requested format, but its tips could be extracted.")


def other_texts(run: Mapping[str, Any], *, with_key: bool = False) -> list[tuple[str, str]]:
    """Returns the texts without a separate section; the key of a blind sheet is included only with `with_key`."""
    apart = _SHOWN_APART if run["tags"].get("kind") == RunKind.CELL else ()
    kept = {name: text for name, text in run["texts"].items() if name not in apart and (with_key or name != KEY)}
    return sorted(kept.items(), key=lambda each: (each[0] == RUBRIC, each[0]))


def shown_params(run: Mapping[str, Any], *, with_key: bool = False) -> list[tuple[str, str]]:
    """Returns the params sorted by name; a sheet's seed reveals its key, so it requires `with_key` too."""
    hidden = ("seed",) if run["tags"].get("kind") == RunKind.JUDGING and not with_key else ()
    return sorted((name, value) for name, value in run["params"].items() if name not in hidden)


def readable(text: str) -> str:
    """Returns JSON indented, and any other text unchanged."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(value, ensure_ascii=False, indent=2) if isinstance(value, dict | list) else text


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None


router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)

Options = list[tuple[str, str]]
_ANY = ("", "any")
_CHOSEN = {"model": "model", "prompt": "prompt_version", "scenario": "scenario", "persona": "persona"}
_CHIPS = ("model", "prompt", "scenario", "persona", "state", "judge_pending")


@dataclass(frozen=True)
class RunLine:
    """A row of the list."""

    run: Mapping[str, Any]
    href: str
    title: str
    note: str
    stale: bool
    composite: float | None
    provisional: bool  # the composite is provisional

    @property
    def superseded(self) -> bool:
        return bool(self.run["tags"].get("superseded") == "true")


@router.get("/experiments/{experiment:path}/runs")
def runs_page(request: Request, experiment: ExperimentPath, panel: PanelState, store: Store) -> Response:
    """Shows one page of the list."""
    filters = read_filters(request)
    if any(not value.strip() for _, value in request.query_params.multi_items()):
        return RedirectResponse(_url(experiment_path(experiment, "runs"), filters.query()), 303)  # without empty fields
    book = RunQueries(panel.queries, store, experiment)
    found = panel.queries.runs(store, experiment, filters.ask)
    stale = book.stale() if filters.kind is RunKind.CELL else frozenset()
    path, query = experiment_path(experiment, "runs"), filters.query(next=None)
    api = f"/api/bench/runs/{quote_path(experiment)}"
    return page(
        request,
        "runs.html",
        experiment=experiment,
        filters=filters,
        kind=str(filters.kind),
        lines=[_line(experiment, run, filters, stale) for run in found["items"]],
        total=found["total"],
        next_url=_url(path, filters.query(next=found["next"])) if found["next"] else None,
        first_url=_url(path, query) if filters.next else None,
        clear_url=path,
        chips=_chips(path, filters),
        options=_options(book.choices(str(filters.kind)), filters),
        csv_url=_url(f"{api}/runs.csv", filters.query(next=None, limit=RunFilters().limit)),
        json_url=_url(api, filters.query()),
        mlflow_url=book.experiment.url,
    )


def read_filters(request: Request) -> RunFilters:
    """Parses the filters from the URL; empty form fields are ignored."""
    query = request.query_params
    return filters_of({**query, "where": query.getlist("where")})


def _line(experiment: str, run: Mapping[str, Any], filters: RunFilters, stale: frozenset[str]) -> RunLine:
    metrics = run["metrics"]
    counted = metrics.get("composite")
    return RunLine(
        run=run,
        href=_url(
            experiment_path(experiment, "runs", run["run_id"]), filters.query(next=None, limit=RunFilters().limit)
        ),
        title=run_title(run),
        note=run_note(run),
        stale=run["run_id"] in stale,
        composite=counted if counted is not None else metrics.get("provisional_composite"),
        provisional=counted is None,
    )


def _options(choices: Mapping[str, list[str]], filters: RunFilters) -> dict[str, Options]:
    """Returns the options of each select field, including the selected value even if no run has it."""
    found: dict[str, Options] = {}
    for name, param in _CHOSEN.items():
        values = choices[param]
        asked = getattr(filters, name)
        if asked is not None and asked not in values:
            values = [asked, *values]
        found[name] = [_ANY, *((value, value) for value in values)]
    found["state"] = [_ANY, *((str(state), str(state)) for state in RunState)]
    found["kind"] = [(str(kind), str(kind)) for kind in RunKind]
    found["judge_pending"] = [_ANY, ("true", "yes"), ("false", "no")]
    return found


def _chips(path: str, filters: RunFilters) -> list[tuple[str, str]]:
    """Returns each active filter with the URL that removes it."""
    chips = [
        (
            f"{name.replace('_', ' ')} = {_word(getattr(filters, name))}",
            _url(path, filters.query(next=None, **{name: None})),
        )
        for name in _CHIPS
        if getattr(filters, name) is not None
    ]
    for at, text in enumerate(filters.where):
        rest = [*filters.where[:at], *filters.where[at + 1 :]]
        chips.append((text, _url(path, filters.query(next=None, where=rest))))
    if filters.superseded:
        chips.append(("superseded shown", _url(path, filters.query(next=None, superseded=False))))
    return chips


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _url(path: str, query: str) -> str:
    return f"{path}?{query}" if query else path
