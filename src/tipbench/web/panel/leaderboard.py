"""Leaderboard page: the answer card, filters, standings, charts, attribution, duels, decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.compare.charts import CHARTS, HEIGHT, NARROW, WIDE, WIDTH, ChartKind, heat_rows, kinds_of
from tipbench.compare.decision import decide, latest_decision
from tipbench.compare.html import Figure, Picture, board_context, judging_summary
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import ALL, Pair, parse_pair
from tipbench.compare.report import state_of
from tipbench.compare.standings import LONGEST
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError
from tipbench.judge.sheet_store import now_iso
from tipbench.judge.status import JudgingStatus
from tipbench.plan.design import MIN_SCENARIOS
from tipbench.plan.prompts import NO_PROMPT_VERSION
from tipbench.record.store import Experiment, RunStore
from tipbench.text import one_line, plural, short_name
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import (
    BoardUrl,
    ChartQuery,
    Facets,
    PageQuery,
    ThemeName,
    baseline_text,
    chart,
    facets,
    row_text,
    tidy_url,
)
from tipbench.web.deps import Panel, PanelState, Store
from tipbench.web.errors import NotFound
from tipbench.web.panel.pages import SentForm, charts_installed, environment, page
from tipbench.web.queries import Queries, experiment_path, get_experiment, revision
from tipbench.workflows.board import BoardQuery

_PERSONA, _SUITE, _CONDITIONS = "params.persona", "params.suite", "conditions"
_LETTER_PX = 6.2  # approximate width of a label's character in a chart
_SLANT = 0.64  # height of a slanted label, relative to its length
# Charts contain untrusted names: sandboxed, so that they have no scripts and no origin when opened directly.
_CHART_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
_IMMUTABLE = "private, max-age=31536000, immutable"


@dataclass(frozen=True)
class Choice:
    """A select field; its first option is the empty choice."""

    id: str
    name: str
    label: str
    options: tuple[tuple[str, str], ...]  # value, label
    value: str


def options_of(url: BoardUrl, board: Leaderboard | None, found: Facets, judging: JudgingStatus) -> dict[str, Any]:
    """Return the page's forms with the current selection; each carries the other parameters as hidden fields."""
    query = url.query
    names = [each.judge for each in judging.judges if not each.provisional and each.cells]
    if query.judge is not None and query.judge not in names:
        names.append(query.judge)
    filters = [*_filters(query, found)]
    if len(names) > 1 or query.judge is not None:
        filters.append(Choice("judge", "judge", "Judge", _listed("all judges", names), query.judge or ""))
    offered = {_PERSONA, _SUITE, _CONDITIONS} & {each.id for each in filters}
    others = tuple(("where", f"{key}={value}") for key, value in query.where if key not in offered)
    rows = [row_text(standing.pair, board.by) for standing in (*board.standings, *board.references)] if board else []
    baseline = Choice("baseline", "baseline", "Baseline", _listed("none", rows), baseline_text(query))
    return {
        "baseline": baseline if len(rows) > 1 else None,
        "baseline_hidden": url.hidden("baseline"),
        "filters": filters,
        "filters_hidden": (*others, *url.hidden("where", "judge", "cluster", "provisional", "exclude")),
        "cluster": query.cluster is not None,
        "provisional": query.provisional,
        "has_provisional": any(each.provisional and each.cells for each in judging.judges),
        "views": [  # what is ranked: key, label, URL
            ("pair", "Pairs", url.with_changes(by=None)),
            ("model", "Models", url.with_changes(by="model")),
            ("prompt", "Prompts", url.with_changes(by="prompt")),
        ],
        "view": query.by or "pair",
        "included": [  # label, then what can be left out: value, label, whether it is included
            (label, [(value, _short(words), value not in query.exclude) for value, words in choices])
            for label, choices in _excludable(found)
        ],
    }


def _excludable(found: Facets) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the models, and the prompts as `*/PROMPT`, if there are several of which some can be left out."""
    models = [(model, model) for model in found.models]
    prompts = [(str(Pair(ALL, prompt)), prompt) for prompt in found.prompts if prompt != NO_PROMPT_VERSION]
    return [(label, choices) for label, choices in (("Models", models), ("Prompts", prompts)) if len(choices) > 1]


def _filters(query: BoardQuery, found: Facets) -> Iterable[Choice]:
    chosen = dict(query.where)
    personas = [(each, _short(each)) for each in found.personas]
    suites = [(each, _short(each)) for each in found.suites]
    conditions = [(each, f"{_short(each)} ({n} cells)") for each, n in found.conditions]
    if len(personas) > 1 or (personas and _PERSONA in chosen):
        yield _where(_PERSONA, "Persona", personas, chosen.get(_PERSONA))
    if len(suites) > 1:
        yield _where(_SUITE, "Suite", suites, chosen.get(_SUITE))
    if len(conditions) > 1:
        yield _where(_CONDITIONS, "Conditions", conditions, chosen.get(_CONDITIONS), "the newest")


def _where(key: str, label: str, values: Iterable[tuple[str, str]], chosen: str | None, nothing: str = "all") -> Choice:
    options = [("", nothing), *((f"{key}={value}", words) for value, words in values)]
    now = "" if chosen is None else f"{key}={chosen}"
    if now not in dict(options):  # the selected value is listed even if no run has it
        options.append((now, _short(chosen or "")))
    return Choice(key, "where", label, tuple(options), now)


def _listed(nothing: str, values: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return (("", nothing), *((value, _short(value)) for value in values))


def _short(text: str) -> str:
    return short_name(text.removesuffix(f"/{NO_PROMPT_VERSION}"), LONGEST)  # a reference has no prompt


INSTALL = 'pip install "tipbench[charts]"'
Sort = Annotated[str | None, Query(max_length=60)]

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)  # longer paths first


@dataclass(frozen=True)
class BoardResult:
    """The board of a query, and the problem if it could not be made or lacks its baseline."""

    query: BoardQuery
    board: Leaderboard | None
    problem: str | None = None


@router.get("/experiments/{experiment:path}/charts/{kind}.svg")
def chart_picture(
    experiment: ExperimentPath,
    kind: ChartKind,
    query: PageQuery,
    panel: PanelState,
    store: Store,
    theme: ThemeName = "light",
    narrow: bool = False,
    of_revision: Annotated[str | None, Query(max_length=200, alias="revision")] = None,
) -> Response:
    """Return a chart as SVG; cacheable indefinitely if the URL contains the current revision."""
    found = get_experiment(store, experiment)
    svg = chart(panel.queries, store, found, query, ChartQuery(kind, theme, narrow))
    if svg is None:
        raise NotFound(f"This board has no {kind} chart: no row has the data for it.", path="path.kind")
    headers = {"Content-Security-Policy": _CHART_POLICY}
    if of_revision is not None and of_revision == revision(found):
        headers["Cache-Control"] = _IMMUTABLE
    return Response(svg.encode("utf-8", "backslashreplace"), media_type="image/svg+xml", headers=headers)


@router.get("/experiments/{experiment:path}")
def leaderboard_page(
    request: Request, experiment: ExperimentPath, query: PageQuery, panel: PanelState, store: Store, sort: Sort = None
) -> Response:
    """Show the leaderboard; charts are separate requests, so the page does not wait for them."""
    if (tidy := tidy_url(request, experiment_path(experiment))) is not None:
        return RedirectResponse(tidy, 303)
    found = get_experiment(store, experiment)
    if "choosing" in request.query_params:  # the form sends what is checked, the URL has what is left out
        checked = set(request.query_params.getlist("keep"))
        offered = _excludable(facets(panel.queries, store, found))
        unchecked = sorted(value for _, choices in offered for value, _ in choices if value not in checked)
        return RedirectResponse(BoardUrl(experiment, replace(query, exclude=tuple(unchecked))).page(sort=sort), 303)
    return _board_page(request, panel, store, found, query, sort)


@router.post("/experiments/{experiment:path}/decisions")
def record_decision(
    request: Request, experiment: ExperimentPath, form: SentForm, panel: PanelState, store: Store
) -> Response:
    """Record a decision like `tipbench decide`, on the whole board, and show it there."""
    found, fields = get_experiment(store, experiment), form.fields
    try:
        chosen = parse_pair(fields.get("choose", "")) or Pair("", "")  # which is on no board
        decide(store, found, chosen, fields.get("because", ""), at=now_iso())
    except (UsageError, NotEnoughData, MixedRubrics) as exc:
        fault = str(exc).replace("--because", "The reason")
        return _board_page(request, panel, store, found, BoardQuery(), None, fault=fault, fields=fields)
    return RedirectResponse(experiment_path(experiment), 303)


def _board_page(
    request: Request,
    panel: Panel,
    store: RunStore,
    found: Experiment,
    query: BoardQuery,
    sort: str | None,
    *,
    fault: str | None = None,
    fields: Mapping[str, str] | None = None,
) -> HTMLResponse:
    experiment, fields = found.name, fields or {}
    with ThreadPoolExecutor(max_workers=1) as background:  # reads and parses the sheets while MLflow prepares the cells
        decision = background.submit(latest_decision, panel.queries.view(store, found), found.experiment_id)
        judging_status = background.submit(panel.queries.judging_of, store, found)
        result = load_board(panel.queries, store, found, query)
    url = BoardUrl(experiment, result.query, {"sort": sort} if sort else {})
    judging = judging_status.result()
    available = facets(panel.queries, store, found)
    leader, weakest = result.board.ranking.leader if result.board else None, None
    if leader and not result.query.by:
        lowest = urlencode({"model": leader.model, "prompt": leader.prompt, "sort": "composite"})
        weakest = f"{experiment_path(experiment, 'runs')}?{lowest}"
    context: dict[str, Any] = {
        "experiment": experiment,
        "board": result.board,
        "problem": result.problem,
        "url": url,
        "chips": [(f"{chip.label}: {_short(chip.value)}", chip.remove) for chip in url.chips()],
        "options": options_of(url, result.board, available, judging),
        "recorded": available.cells,
        "pending": judging.pending,
        "held": judging.held,
        "judging": judging_summary(result.board, judging),
        "revision": revision(found),
        "revision_url": BoardUrl(experiment).api("revision"),
        "json_url": url.api(),
        "mlflow_url": found.url,
        "links": url,
        "source": _source(url, result.board) if result.board else [],
        "weakest": weakest,
        "decision": decision.result(),
        "leader": leader,
        "choices": [],
        "chosen": fields.get("choose", ""),
        "because": fields.get("because", ""),
        "decide_fault": fault,
        **_cached_parts(panel.queries, found, result, url),
    }
    return page(request, "leaderboard.html", status=422 if fault else 200, **context)


def _source(url: BoardUrl, board: Leaderboard) -> list[tuple[str, str | None, bool]]:
    """Return the two sources of scores: label, URL if it can be chosen, whether it is the current one."""
    covered = board.covered
    if covered is None or not covered.rules:
        return []
    enough = covered.people >= min(MIN_SCENARIOS, covered.scenarios)
    people = f"People: {covered.people} of {plural(covered.scenarios, 'scenario')}"
    rules = f"Rules: {covered.rules} of {covered.scenarios}"
    return [
        (people, url.with_changes(provisional=False) if enough else None, not board.provisional),
        (rules, url.with_changes(provisional=True, judge=None), board.provisional),
    ]


def _choices(board: Leaderboard) -> list[tuple[str, str]]:
    """Return the pairs that can be decided for, the leader first; none if the board is filtered."""
    if board.by or board.where or board.exclude or board.judge or not board.judges:
        return []
    return [(str(standing.pair), _short(str(standing.pair))) for standing in board.standings if standing.row.estimate]


def load_board(queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery) -> BoardResult:
    """Return the board, without its baseline if that is not one of its rows, or the reason why there is no board."""
    try:
        return BoardResult(query, queries.board(store, experiment, query))
    except UsageError as exc:
        if query.baseline is None:
            return BoardResult(query, None, str(exc))
        without = load_board(queries, store, experiment, replace(query, baseline=None))
        return without if without.board is None else replace(without, problem=f"The baseline is left out. {exc}")
    except (NotEnoughData, MixedRubrics) as exc:
        return BoardResult(query, None, str(exc))


def _cached_parts(queries: Queries, experiment: Experiment, result: BoardResult, url: BoardUrl) -> dict[str, Any]:
    """Return the parts of the page that do not depend on the user, cached per revision."""
    board, version, sort = result.board, revision(experiment), url.extra.get("sort")
    if board is None:
        return {}
    drawn = charts_installed()

    def make() -> dict[str, Any]:
        context = board_context(board, environment(), links=url, sort=sort)
        return {
            **context,
            "choices": _choices(board),
            "figures": figures(board, url, version) if drawn else {},
            "install": None if drawn or not context["scored"] else INSTALL,
            "downloads": [
                *([("HTML report", url.api("report.html"))] if drawn else []),
                ("CSV", url.api("standings.csv")),
                ("Markdown", url.api("board.md")),
                ("JSON", url.api()),
            ],
        }

    return queries.tables.get((experiment.experiment_id, experiment.name, result.query, sort, drawn), version, make)


def figures(board: Leaderboard, url: BoardUrl, revision: str | None) -> dict[ChartKind, Figure]:
    """Return the board's charts by kind."""
    found = {}
    for kind in kinds_of(board):
        pictures = {}
        for width, narrow in (("wide", False), ("narrow", True)):
            size = chart_size(kind, board, narrow=narrow)
            for theme in ("light", "dark"):
                address = url.chart(kind, theme=theme, narrow=narrow, revision=revision)
                pictures[f"{width}_{theme}"] = Picture(address, *size)
        chart = CHARTS[kind]
        found[kind] = Figure(kind, chart.title, chart.describe(board), chart.caption, pictures)
    return found


def chart_size(kind: ChartKind, board: Leaderboard, *, narrow: bool) -> tuple[int, int]:
    """Return the width and height of a chart in pixels."""
    rows = len(board.standings)
    states = len({state_of(board, standing.pair) for standing in board.standings})
    if kind == "forest":
        return (NARROW, 46 * rows + 58 + 16 * states) if narrow else (WIDE, 26 * rows + 74)
    if kind == "pareto":
        return (NARROW - 12, 358 + 16 * states) if narrow else (WIDTH + 48, HEIGHT + 74)
    models, prompts, _ = heat_rows(board)
    columns = len(prompts) + 1
    step = max(46, (NARROW - 130) // columns) if narrow else max(64, min(110, 620 // columns))
    side = min(18 if narrow else 34, max(len(one_line(model)) for model in models))
    top = min(12 if narrow else 16, max(len(one_line(prompt)) for prompt in prompts))
    head = 20 + _SLANT * _LETTER_PX * top if top * 7 > step else 25
    return round(14 + _LETTER_PX * side + step * columns), round(34 * (len(models) + 1) + head)
