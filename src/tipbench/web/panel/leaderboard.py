"""Leaderboard page: the summary card, filters, standings, charts, attribution, duels, decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tipbench.compare.charts import (
    CHARTS,
    NARROW,
    PARETO_HEIGHT,
    PARETO_WIDTH,
    WIDE,
    ChartKind,
    heat_map_means,
    kinds_of,
)
from tipbench.compare.decision import decide, latest_decision
from tipbench.compare.html import Figure, Picture, board_context, judging_summary
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.matrix import ALL, Pair, parse_pair
from tipbench.compare.report import state_of
from tipbench.compare.standings import MAX_NAME_CHARS
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

_PERSONA, _SUITE, _CONDITIONS = "params.persona", "params.suite", "conditions"  # keys of `BoardQuery.where`
_LETTER_PX = 6.2  # approximate width of a label's character in a chart
_SLANT = 0.64  # height of a slanted label, relative to its length
# Charts contain untrusted names. In the sandbox, a chart that is opened directly has no scripts and no origin.
_CHART_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
_IMMUTABLE = "private, max-age=31536000, immutable"


@dataclass(frozen=True)
class Select:
    """A select field. Its first option has an empty value: nothing is selected."""

    id: str
    name: str
    label: str
    options: tuple[tuple[str, str], ...]  # value, label
    value: str


def options_of(url: BoardUrl, board: Leaderboard | None, available: Facets, judging: JudgingStatus) -> dict[str, Any]:
    """Return the options above the board, in forms. Each form sends the other forms' values as hidden fields."""
    query = url.query
    filters = list(_filters(query, available))
    filter_keys = {each.id for each in filters}
    hidden_where = tuple(("where", f"{key}={value}") for key, value in query.where if key not in filter_keys)
    judge_names = [each.judge for each in judging.judges if not each.provisional and each.cells]
    if query.judge is not None and query.judge not in judge_names:
        judge_names.append(query.judge)
    if len(judge_names) > 1 or query.judge is not None:
        judge_options = select_options("all judges", judge_names)
        filters.append(Select(id="judge", name="judge", label="Judge", options=judge_options, value=query.judge or ""))
    rows = [row_text(standing.pair, board.by) for standing in (*board.standings, *board.references)] if board else []
    row_options = select_options("none", rows)
    baseline = Select(id="baseline", name="baseline", label="Baseline", options=row_options, value=baseline_text(query))
    return {
        "baseline": baseline if len(rows) > 1 else None,
        "baseline_hidden": url.hidden_fields(without=("baseline",)),
        "filters": filters,
        "filters_hidden": (
            *hidden_where,
            *url.hidden_fields(without=("where", "judge", "cluster", "provisional", "exclude")),
        ),
        "cluster": query.cluster is not None,
        "provisional": query.provisional,
        "has_provisional": any(each.provisional and each.cells for each in judging.judges),
        "views": [  # kinds of rows: label, URL, whether it is the current kind
            ("Pairs", url.with_changes(by=None), query.by is None),
            ("Models", url.with_changes(by="model"), query.by == "model"),
            ("Prompts", url.with_changes(by="prompt"), query.by == "prompt"),
        ],
        "included": [  # label of a group, then its checkboxes: value, label, whether it is checked
            (group, [(value, _short(label), value not in query.exclude) for value, label in choices])
            for group, choices in _excludable(available)
        ],
    }


def _excludable(available: Facets) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the models and prompts that the query can exclude, as (value, label) by group.

    A group with only one model or prompt is omitted.
    """
    models = [(model, model) for model in available.models]
    prompts = [(str(Pair(ALL, prompt)), prompt) for prompt in available.prompts if prompt != NO_PROMPT_VERSION]
    return [(label, choices) for label, choices in (("Models", models), ("Prompts", prompts)) if len(choices) > 1]


def _filters(query: BoardQuery, available: Facets) -> Iterable[Select]:
    selected = dict(query.where)
    personas = [(each, _short(each)) for each in available.personas]
    suites = [(each, _short(each)) for each in available.suites]
    conditions = [(each, f"{_short(each)} ({n} cells)") for each, n in available.conditions]
    if len(personas) > 1 or (personas and _PERSONA in selected):
        yield _where_select(_PERSONA, "Persona", personas, selected.get(_PERSONA))
    if len(suites) > 1:
        yield _where_select(_SUITE, "Suite", suites, selected.get(_SUITE))
    if len(conditions) > 1:
        yield _where_select(_CONDITIONS, "Conditions", conditions, selected.get(_CONDITIONS), empty_label="the newest")


def _where_select(
    key: str, label: str, values: Iterable[tuple[str, str]], selected: str | None, empty_label: str = "all"
) -> Select:
    options = [("", empty_label), *((f"{key}={value}", value_label) for value, value_label in values)]
    selected_option = ""
    if selected is not None:
        selected_option = f"{key}={selected}"
        if selected_option not in dict(options):  # no run has it
            options.append((selected_option, _short(selected)))
    return Select(id=key, name="where", label=label, options=tuple(options), value=selected_option)


def select_options(empty_label: str, values: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the value and label of each option; the first option is empty."""
    return (("", empty_label), *((value, _short(value)) for value in values))


def _short(text: str) -> str:
    """Shorten a name. References are shown without a prompt."""
    return short_name(text.removesuffix(f"/{NO_PROMPT_VERSION}"), MAX_NAME_CHARS)


INSTALL = 'pip install "tipbench[charts]"'
Sort = Annotated[str | None, Query(max_length=60)]

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)
# Routes with longer paths come first, because {experiment:path} matches every path.


@dataclass(frozen=True)
class BoardResult:
    """The board of a query. `problem` is the reason if the board is missing, or if its baseline was left out."""

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
    """Return a chart as SVG. Clients may cache it indefinitely if the URL contains the current revision."""
    mlflow_experiment = get_experiment(store, experiment)
    svg = chart(panel.queries, store, mlflow_experiment, query, ChartQuery(kind, theme, narrow))
    if svg is None:
        raise NotFound(f"This board has no {kind} chart: no row has the data for it.", path="path.kind")
    headers = {"Content-Security-Policy": _CHART_POLICY}
    if of_revision is not None and of_revision == revision(mlflow_experiment):
        headers["Cache-Control"] = _IMMUTABLE
    # UTF-8 cannot encode lone surrogates, hence `backslashreplace`.
    return Response(svg.encode("utf-8", "backslashreplace"), media_type="image/svg+xml", headers=headers)


@router.get("/experiments/{experiment:path}")
def leaderboard_page(
    request: Request, experiment: ExperimentPath, query: PageQuery, panel: PanelState, store: Store, sort: Sort = None
) -> Response:
    """Show the leaderboard. Charts are separate requests, so that the page does not wait for them."""
    if (tidy := tidy_url(request, experiment_path(experiment))) is not None:  # without empty form fields
        return RedirectResponse(tidy, 303)
    mlflow_experiment = get_experiment(store, experiment)
    # The form with `choosing` sends the checked models and prompts as `keep`. The URL of the board has the unchecked
    # ones as `exclude`.
    if "choosing" in request.query_params:
        checked = set(request.query_params.getlist("keep"))
        groups = _excludable(facets(panel.queries, store, mlflow_experiment))
        values = [value for _group, choices in groups for value, _label in choices]
        unchecked = tuple(sorted(value for value in values if value not in checked))
        return RedirectResponse(BoardUrl(experiment, replace(query, exclude=unchecked)).page(sort=sort), 303)
    return _board_page(request, panel, store, mlflow_experiment, query, sort)


@router.post("/experiments/{experiment:path}/decisions")
def record_decision(
    request: Request, experiment: ExperimentPath, form: SentForm, panel: PanelState, store: Store
) -> Response:
    """Record a decision on the unfiltered board, like `tipbench decide`, and redirect to the board."""
    mlflow_experiment = get_experiment(store, experiment)
    fields = form.fields
    try:
        chosen = parse_pair(fields.get("choose", "")) or Pair("", "")  # on no board, so `decide` raises
        decide(store, mlflow_experiment, chosen, fields.get("because", ""), at=now_iso())
    except (UsageError, NotEnoughData, MixedRubrics) as exc:
        error = str(exc).replace("--because", "The reason")  # the option of `tipbench decide`
        return _board_page(
            request, panel, store, mlflow_experiment, BoardQuery(), sort=None, error=error, fields=fields
        )
    return RedirectResponse(experiment_path(experiment), 303)


def _board_page(
    request: Request,
    panel: Panel,
    store: RunStore,
    mlflow_experiment: Experiment,
    query: BoardQuery,
    sort: str | None,
    *,
    error: str | None = None,  # of the decision form, with its fields
    fields: Mapping[str, str] | None = None,
) -> HTMLResponse:
    experiment = mlflow_experiment.name
    fields = fields or {}
    cached_store = panel.queries.cached_store(store, mlflow_experiment)
    # The decision and the judging status (with the sheets) are read while `load_board` waits for MLflow's cells.
    with ThreadPoolExecutor(max_workers=1) as background:
        decision_future = background.submit(latest_decision, cached_store, mlflow_experiment.experiment_id)
        judging_future = background.submit(panel.queries.judging, store, mlflow_experiment)
        result = load_board(panel.queries, store, mlflow_experiment, query)
    url = BoardUrl(experiment, result.query, sort)
    judging = judging_future.result()
    available = facets(panel.queries, store, mlflow_experiment)
    leader = result.board.ranking.leader if result.board else None
    weakest_url = None
    if leader and not result.query.by:
        lowest_first = urlencode({"model": leader.model, "prompt": leader.prompt, "sort": "composite"})
        weakest_url = f"{experiment_path(experiment, 'runs')}?{lowest_first}"
    context: dict[str, Any] = {
        "experiment": experiment,
        "board": result.board,
        "problem": result.problem,
        "url": url,
        "chips": [(f"{each.label}: {_short(each.value)}", each.url_without) for each in url.active_filters()],
        "options": options_of(url, result.board, available, judging),
        "recorded": available.n_cells,
        "pending": judging.pending,
        "held": judging.held,
        "judging": judging_summary(result.board, judging),
        "revision": revision(mlflow_experiment),
        "revision_url": BoardUrl(experiment).api("revision"),
        "json_url": url.api(),
        "mlflow_url": mlflow_experiment.url,
        "links": url,  # None in the report, which has the same templates
        "sources": _score_sources(url, result.board) if result.board else [],
        "weakest_url": weakest_url,
        "decision": decision_future.result(),
        "leader": leader,
        "chosen": fields.get("choose", ""),
        "because": fields.get("because", ""),
        "decision_error": error,
        **_cached_parts(panel.queries, mlflow_experiment, result, url),
    }
    return page(request, "leaderboard.html", status=422 if error else 200, **context)


def _score_sources(url: BoardUrl, board: Leaderboard) -> list[tuple[str, str | None, bool]]:
    """Return the label and URL of each source of scores, and whether it is the current one.

    The URL is None if the source cannot be chosen. The list is empty without automatic scores.
    """
    coverage = board.coverage
    if coverage is None or not coverage.n_automatic:
        return []
    has_enough_people = coverage.n_by_people >= min(MIN_SCENARIOS, coverage.n_scenarios)
    people = f"People: {coverage.n_by_people} of {plural(coverage.n_scenarios, 'scenario')}"
    rules = f"Rules: {coverage.n_automatic} of {coverage.n_scenarios}"
    return [
        (people, url.with_changes(provisional=False) if has_enough_people else None, not board.provisional),
        (rules, url.with_changes(provisional=True, judge=None), board.provisional),
    ]


def _decidable_pairs(board: Leaderboard) -> list[tuple[str, str]]:
    """Return the value and label of each pair that a decision can choose, the leader first.

    Empty if nothing is judged, or if the board is filtered: decisions are on the whole board.
    """
    is_filtered = board.by or board.where or board.exclude or board.judge
    if is_filtered or not board.judges:
        return []
    return [
        (str(standing.pair), _short(str(standing.pair))) for standing in board.standings if standing.result.estimate
    ]


def load_board(queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery) -> BoardResult:
    """Return the board, or the reason why there is none. A baseline that is not on the board is left out."""
    try:
        return BoardResult(query, queries.board(store, experiment, query))
    except UsageError as exc:
        if query.baseline is None:
            return BoardResult(query, None, str(exc))
        # If the baseline is the only problem, there is a board without it.
        result = load_board(queries, store, experiment, replace(query, baseline=None))
        if result.board is None:
            return result
        return replace(result, problem=f"The baseline is left out. {exc}")
    except (NotEnoughData, MixedRubrics) as exc:
        return BoardResult(query, None, str(exc))


def _cached_parts(queries: Queries, experiment: Experiment, result: BoardResult, url: BoardUrl) -> dict[str, Any]:
    """Return the parts of the page that do not depend on the user, cached per revision."""
    board = result.board
    if board is None:
        return {"choices": []}
    version = revision(experiment)
    sort = url.sort
    has_charts = charts_installed()

    def make() -> dict[str, Any]:
        context = board_context(board, environment(), links=url, sort=sort)
        downloads = [("CSV", url.api("standings.csv")), ("Markdown", url.api("board.md")), ("JSON", url.api())]
        if has_charts:
            downloads.insert(0, ("HTML report", url.api("report.html")))
        return {
            **context,
            "choices": _decidable_pairs(board),
            "figures": figures(board, url, version) if has_charts else {},
            "install": INSTALL if context["scored"] and not has_charts else None,
            "downloads": downloads,
        }

    key = (experiment.experiment_id, experiment.name, result.query, sort, has_charts)
    return queries.tables.get(key, version, make)


def figures(board: Leaderboard, url: BoardUrl, version: str | None) -> dict[ChartKind, Figure]:
    """Return the board's charts by kind."""
    figures_by_kind = {}
    for kind in kinds_of(board):
        pictures = {}
        for width, narrow in (("wide", False), ("narrow", True)):
            size = chart_size(kind, board, narrow=narrow)
            for theme in ("light", "dark"):
                chart_url = url.chart(kind, theme=theme, narrow=narrow, revision=version)
                pictures[f"{width}_{theme}"] = Picture(chart_url, *size)
        board_chart = CHARTS[kind]
        figures_by_kind[kind] = Figure(
            kind, board_chart.title, board_chart.describe(board), board_chart.caption, pictures
        )
    return figures_by_kind


def chart_size(kind: ChartKind, board: Leaderboard, *, narrow: bool) -> tuple[int, int]:
    """Return the width and height in pixels, so that the page reserves the space before the chart is loaded.

    The numbers were fitted to the sizes of drawn charts; a test compares both.
    """
    n_rows = len(board.standings)
    n_states = len({state_of(board, standing.pair) for standing in board.standings})
    if kind == "forest":
        return (NARROW, 46 * n_rows + 58 + 16 * n_states) if narrow else (WIDE, 26 * n_rows + 74)
    if kind == "pareto":
        return (NARROW - 12, 358 + 16 * n_states) if narrow else (PARETO_WIDTH + 48, PARETO_HEIGHT + 74)
    models, prompts, _ = heat_map_means(board)
    n_columns = len(prompts) + 1  # the last one has the means
    column_px = max(46, (NARROW - 130) // n_columns) if narrow else max(64, min(110, 620 // n_columns))
    model_chars = min(18 if narrow else 34, max(len(one_line(model)) for model in models))
    prompt_chars = min(12 if narrow else 16, max(len(one_line(prompt)) for prompt in prompts))
    is_slanted = prompt_chars * 7 > column_px  # the prompts' names do not fit above their columns
    header_px = 20 + _SLANT * _LETTER_PX * prompt_chars if is_slanted else 25
    width = 14 + _LETTER_PX * model_chars + column_px * n_columns
    height = 34 * (len(models) + 1) + header_px
    return round(width), round(height)
