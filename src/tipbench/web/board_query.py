"""Board queries: parameters, URLs, charts, and the comparison of two rows by scenario."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Query, Request
from pydantic import validate_call

from tipbench.charts import THEMES, to_svg
from tipbench.compare.answers import Answer, ScenarioAnswers, read_answers
from tipbench.compare.cells import BoardCell, is_reference
from tipbench.compare.charts import CHARTS, ChartKind
from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import ALL, OTHER_SIDE, Pair, averaged_pair, shared_by_all
from tipbench.compare.statistics import Difference
from tipbench.record.reader import FILTERS, current_runs, newest_answered_run
from tipbench.record.run import StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import short_name
from tipbench.web.api.models import AnswerShape, DifferenceShape, MeetingShape, PairShape, ReferenceShape, SideShape
from tipbench.web.errors import NotFound, convert_option_errors, convert_validation_errors
from tipbench.web.queries import MAX_WHERE, Queries, experiment_path, quote_path, revision
from tipbench.workflows.board import BoardQuery, board_query

# Maximum characters of a query parameter. For a list, the `max_length` of `Query` limits the number of values, so
# `parse_board_query` cuts each value to this length; no stored name is that long.
_MAX_LENGTH = 500


def parse_board_query(
    baseline: Annotated[
        str | None, Query(max_length=_MAX_LENGTH, description="MODEL/PROMPT: also show differences to this pair.")
    ] = None,
    where: Annotated[
        list[str], Query(max_length=MAX_WHERE, description="KEY=VALUE: any tag, or params.NAME; repeatable.")
    ] = [],  # noqa: B006 - FastAPI copies it
    judge: Annotated[str | None, Query(max_length=200, description="Only this judge's scores.")] = None,
    by: Annotated[
        Literal["model", "prompt"] | None, Query(description="Rank models or prompts instead of pairs.")
    ] = None,
    cluster: Annotated[
        Literal["persona"] | None,
        Query(description="Cluster by persona; generalises to new personas. Needs more scenarios."),
    ] = None,
    provisional: Annotated[
        bool, Query(description="Use the provisional judge's scores, even if people have judged.")
    ] = False,
    exclude: Annotated[
        list[str], Query(max_length=100, description="MODEL, MODEL/PROMPT or */PROMPT: leave these out; repeatable.")
    ] = [],  # noqa: B006 - FastAPI copies it
) -> BoardQuery:
    """Parse the options of `tipbench compare` from the query string."""
    with convert_option_errors("query"):
        return board_query(
            baseline=baseline,
            where=[text[:_MAX_LENGTH] for text in where],
            judge=judge,
            by=by,
            cluster=cluster,
            provisional=provisional,
            exclude=[name[:_MAX_LENGTH] for name in exclude],
        )


BoardQueryParam = Annotated[BoardQuery, Depends(parse_board_query)]
_OPTIONS = frozenset(signature(parse_board_query).parameters)
_parse_with_limits = validate_call(parse_board_query)  # applies the limits of `Query`, as FastAPI does


ThemeName = Literal["light", "dark"]
# Charts are laid out for Arial. An SVG image cannot use the page's style sheet, so it lists fonts of the same width.
_FONTS = (
    '<style>text{font-family:Arial,"Liberation Sans",Arimo,Helvetica,"Nimbus Sans","DejaVu Sans Condensed",sans-serif}'
    "</style>"
)
# A page requests three charts at once. Drawing one at a time leaves a core for other requests.
drawing_lock = threading.Lock()


@dataclass(frozen=True)
class ChartQuery:
    """The kind and style of a chart."""

    kind: ChartKind
    theme: ThemeName = "light"
    narrow: bool = False


@dataclass(frozen=True)
class Facets:
    """Values that an experiment's cells can be filtered by, independent of the current filter."""

    n_cells: int
    models: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    personas: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    conditions: tuple[tuple[str, int], ...] = ()  # (conditions, number of cells), newest first


def facets(queries: Queries, store: RunStore, experiment: Experiment) -> Facets:
    """Return the recorded models, prompts, personas, suites and conditions."""
    cached_store = queries.cached_store(store, experiment)

    def read() -> Facets:
        runs = current_runs(cached_store, experiment.experiment_id, where={})  # newest first
        conditions = Counter(run.tags["conditions"] for run in runs if "conditions" in run.tags)

        def values(param: str) -> tuple[str, ...]:
            return tuple(sorted({run.params[param] for run in runs if run.params.get(param)}))

        return Facets(
            n_cells=len(runs),
            models=values("model"),
            prompts=values("prompt_version"),
            personas=values("persona"),
            suites=values("suite"),
            conditions=tuple(conditions.items()),  # a Counter keeps the order of the runs
        )

    return queries.small_cache.get(("facets", experiment.experiment_id), revision(experiment), read)


def chart(
    queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery, chart_query: ChartQuery
) -> str | None:
    """Return a chart of the board as SVG, or None if the board has no data for it."""
    board = queries.board(store, experiment, query)
    theme = THEMES[chart_query.theme]

    def make() -> str | None:
        with drawing_lock:
            drawing = CHARTS[chart_query.kind].draw(board, theme, narrow=chart_query.narrow)
            if drawing is None:
                return None
            return to_svg(drawing, theme).replace(">", f">{_FONTS}", 1)  # the first ">" ends the <svg> tag

    return queries.charts.get((experiment.experiment_id, query, chart_query), revision(experiment), make)


_API_PATH = "/api/bench/leaderboard"
_MAX_FILTER_CHARS = 60  # of the label of an active filter, and of its value
_FILTER_NAMES = {key: name for name, key in FILTERS.items()}
Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ActiveFilter:
    """A filter of a board, or another option that is not the default."""

    label: str
    value: str
    url_without: str  # of the board without it


@dataclass(frozen=True)
class BoardUrl:
    """URLs of a board's pages, charts and files. The methods add `extra` to the parameters of the board query."""

    experiment: str
    query: BoardQuery = field(default_factory=BoardQuery)
    sort: str | None = None  # of the leaderboard page

    @property
    def params(self) -> Params:
        """The board query as URL parameters."""
        return query_params(self.query)

    def page(self, **changes: str | None) -> str:
        """Return the URL of the leaderboard page; `page(sort=…)` changes its order, `page(sort=None)` resets it."""
        return self._url(experiment_path(self.experiment), {"sort": self.sort, **changes})

    def with_changes(self, **changes: Any) -> str:
        """Return the URL with changes to the board query. A new `by` changes the rows, so it removes the baseline."""
        baseline_change: dict[str, Any] = {"baseline": None} if "by" in changes else {}
        return replace(self, query=replace(self.query, **baseline_change, **changes)).page()

    def pair(self, pair: Pair, **extra: str | None) -> str:
        """Return the URL of a row's page."""
        row = {"model": pair.model, "prompt": pair.prompt}
        return self._url(experiment_path(self.experiment, "pairs"), {**row, **extra})

    def scenario(self, scenario: str | None = None, **extra: str | None) -> str:
        """Return the URL of the scenario matrix, or of the answers of all pairs to one scenario."""
        return self._url(experiment_path(self.experiment, "scenarios"), {"scenario": scenario, **extra})

    def chart(self, kind: str, *, theme: str, narrow: bool, revision: str | None) -> str:
        """Return the URL of a chart; it contains the revision, so that browsers can cache the chart."""
        options = {"theme": theme, "narrow": "true" if narrow else None, "revision": revision}
        return self._url(experiment_path(self.experiment, "charts", f"{kind}.svg"), options)

    def api(self, *rest: str, **extra: str | None) -> str:
        """Return the URL of the board in the API: the JSON, or a download."""
        return self._url("/".join([_API_PATH, quote_path(self.experiment), *rest]), extra)

    def run(self, run_id: str) -> str:
        return experiment_path(self.experiment, "runs", run_id)

    def active_filters(self) -> list[ActiveFilter]:
        """Return the active filters, shortened for display."""
        query = self.query
        filters: list[tuple[str, str, dict[str, Any]]] = []  # label, value, change of the query that removes the filter
        for key, value in query.where:
            label = _FILTER_NAMES.get(key, key.removeprefix("params."))
            others = tuple((name, text) for name, text in query.where if name != key)
            filters.append((label, value, {"where": others}))
        for name in query.exclude:
            other_names = tuple(other for other in query.exclude if other != name)
            filters.append(("without", name.removeprefix(f"{ALL}/"), {"exclude": other_names}))
        if query.judge is not None:
            filters.append(("judge", query.judge, {"judge": None}))
        if query.cluster is not None:
            filters.append(("means per", query.cluster, {"cluster": None}))
        if query.provisional:
            filters.append(("scores", "provisional", {"provisional": False}))
        if query.baseline is not None:
            filters.append(("baseline", baseline_text(query), {"baseline": None}))
        return [
            ActiveFilter(
                short_name(label, _MAX_FILTER_CHARS),
                short_name(value, _MAX_FILTER_CHARS),
                self.with_changes(**change),
            )
            for label, value, change in filters
        ]

    def hidden_fields(self, *, without: Collection[str]) -> Params:
        """Return the parameters for the hidden fields of a form; `without` are the names of its visible fields."""
        sort_param = [("sort", self.sort)] if self.sort is not None else []
        return tuple((name, value) for name, value in (*self.params, *sort_param) if name not in without)

    def _url(self, path: str, extra: Mapping[str, str | None]) -> str:
        extra_params = [(name, value) for name, value in extra.items() if value is not None]
        return _with_query(path, [*self.params, *extra_params])


def query_params(query: BoardQuery) -> Params:
    """Return the URL parameters of a board query; `parse_page_query` parses them back."""
    params: list[tuple[str, str]] = [("where", f"{key}={value}") for key, value in query.where]
    params += [("exclude", name) for name in query.exclude]
    baseline = baseline_text(query) or None
    options = {"judge": query.judge, "by": query.by, "cluster": query.cluster, "baseline": baseline}
    params += [(name, value) for name, value in options.items() if value is not None]
    if query.provisional:
        params.append(("provisional", "true"))
    return tuple(params)


def baseline_text(query: BoardQuery) -> str:
    """Return the value of the `baseline` parameter; empty if the query has no baseline."""
    return row_text(query.baseline, query.by) if query.baseline is not None else ""


def row_text(pair: Pair, by: str | None) -> str:
    """Return MODEL/PROMPT, or only the model or the prompt on a board by model or by prompt."""
    if by == "model":
        return pair.model
    if by == "prompt":
        return pair.prompt
    return str(pair)


def parse_page_query(request: Request) -> BoardQuery:
    """Parse a page's query parameters with the rules of the API. Ignores empty form fields."""
    options: dict[str, Any] = {"where": [], "exclude": []}
    for name, value in _nonempty(request.query_params.multi_items()):
        if name in ("where", "exclude"):
            options[name].append(value)
        elif name in _OPTIONS:
            options[name] = value
    with convert_validation_errors("query"):
        return _parse_with_limits(**options)


PageQuery = Annotated[BoardQuery, Depends(parse_page_query)]


def tidy_url(request: Request, path: str) -> str | None:
    """Return the URL without empty form fields, or None if it has no empty fields."""
    params = request.query_params.multi_items()
    nonempty = list(_nonempty(params))
    if len(nonempty) == len(params):
        return None
    return _with_query(path, nonempty)


def _with_query(path: str, params: Sequence[tuple[str, str]]) -> str:
    # backslashreplace, because UTF-8 cannot encode lone surrogates
    return f"{path}?{urlencode(params, errors='backslashreplace')}" if params else path


def _nonempty(params: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Return the parameters that have a value. `where=KEY=` has the value `KEY=`: it matches runs with an empty KEY."""
    return ((name, value) for name, value in params if value.strip())


OtherRole = Literal["leader", "baseline", "runner-up", "next row"]
Outcome = Literal["win", "loss", "tie"]


@dataclass(frozen=True)
class RowResult:
    """A row's result in one scenario: its mean composite, and its answers."""

    composite: float | None
    answers: tuple[Answer, ...]

    def response(self) -> SideShape:
        """Return this result as part of the API's response."""
        answers = [
            AnswerShape.model_validate(
                {
                    "run_id": answer.run_id,
                    "model": answer.pair.model,
                    "prompt_version": answer.pair.prompt,
                    "state": answer.state,
                    "composite": answer.composite,
                    "format_ok": answer.format_ok,
                    "repeat": answer.repeat or None,
                    "tips": [vars(tip) for tip in answer.tips],
                }
            )
            for answer in self.answers
        ]
        return SideShape(composite=self.composite, answers=answers)


@dataclass(frozen=True)
class ScenarioComparison:
    """The results of two rows in one scenario."""

    scenario: str
    card: Mapping[str, Any] | None
    own: RowResult
    other: RowResult | None
    difference: float | None  # own − other; None if a row is not judged in this scenario

    @property
    def outcome(self) -> Outcome | None:
        """The own row's outcome, by the difference as rounded on pages; None without a difference."""
        if self.difference is None:
            return None
        shown_difference = round(self.difference, 2)
        if shown_difference == 0:
            return "tie"
        return "win" if shown_difference > 0 else "loss"


@dataclass(frozen=True)
class OtherRow:
    """The row that a row is compared with."""

    standing: Standing
    role: OtherRole
    difference: Difference | None  # own − other, from the board


@dataclass(frozen=True)
class PairView:
    """A board row compared with another row by scenario, largest loss first."""

    board: Leaderboard
    standing: Standing
    other: OtherRow | None
    comparisons: tuple[ScenarioComparison, ...]

    def count(self, outcome: Outcome) -> int:
        return sum(comparison.outcome == outcome for comparison in self.comparisons)

    def response(self) -> PairShape:
        """Return the API's response; numbers are not rounded."""
        other = difference = None
        if self.other is not None:
            pair, estimate = self.other.standing.pair, self.other.difference
            other = ReferenceShape(model=pair.model, prompt_version=pair.prompt, role=self.other.role)
            if estimate is not None:
                difference = DifferenceShape(
                    mean=estimate.mean, ci_low=estimate.ci_low, ci_high=estimate.ci_high, p=estimate.p
                )
        return PairShape(
            experiment=self.board.experiment,
            model=self.standing.pair.model,
            prompt_version=self.standing.pair.prompt,
            reference=other,  # the API calls the other row the reference
            difference=difference,
            wins=self.count("win"),
            losses=self.count("loss"),
            even=self.count("tie"),
            scenarios=[
                MeetingShape(
                    scenario=each.scenario,
                    difference=each.difference,
                    own=each.own.response(),
                    reference=each.other.response() if each.other else None,
                )
                for each in self.comparisons
            ],
        )


def pair_view(queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery, pair: Pair) -> PairView:
    """Return a board row compared with another row. Raises NotFound if the board has no such row."""
    board = queries.board(store, experiment, query)
    standing = next((each for each in (*board.standings, *board.references) if each.pair == pair), None)
    if standing is None:
        raise NotFound(
            f"This board has no row {str(pair)[:300]}. See the leaderboard of {board.experiment[:200]}.",
            path="query.model",
        )

    def largest_loss_first(comparison: ScenarioComparison) -> tuple[float, str]:
        difference = comparison.difference
        return math.inf if difference is None else difference, comparison.scenario

    def make() -> PairView:
        other = _other_row(board, standing)
        other_pair = other.standing.pair if other is not None else None
        comparisons = _comparisons(queries, store, experiment, query, pair, other_pair)
        return PairView(board, standing, other, tuple(sorted(comparisons, key=largest_loss_first)))

    return queries.pairs.get((experiment.experiment_id, query, pair), revision(experiment), make)


def _other_row(board: Leaderboard, standing: Standing) -> OtherRow | None:
    """Return the baseline, else the leader, else the first row with a score; never the row itself."""
    rows = {each.pair: each for each in (*board.standings, *board.references)}
    named_rows: tuple[tuple[Pair | None, OtherRole, Difference | None], ...] = (
        (board.baseline, "baseline", standing.result.to_baseline),
        (board.ranking.leader, "leader", standing.result.to_leader),
    )
    for pair, role, difference in named_rows:
        if pair is not None and pair != standing.pair and pair in rows:
            return OtherRow(rows[pair], role, difference)
    # The row is the leader itself, or there is no leader.
    first_scored = next((each for each in board.standings if each.pair != standing.pair and each.result.estimate), None)
    if first_scored is None:
        return None
    if board.ranking.leader is None or not first_scored.result.is_ranked:
        return OtherRow(first_scored, "next row", difference=None)
    return OtherRow(first_scored, "runner-up", _negated(first_scored.result.to_leader))


def _negated(difference: Difference | None) -> Difference | None:
    """Return leader − runner-up for the difference runner-up − leader."""
    if difference is None:
        return None
    low = None if difference.ci_high is None else -difference.ci_high
    high = None if difference.ci_low is None else -difference.ci_low
    return replace(difference, mean=-difference.mean, ci_low=low, ci_high=high)


def _comparisons(
    queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery, own: Pair, other: Pair | None
) -> Iterator[ScenarioComparison]:
    """Yield the comparison in every scenario that the own row has answers to."""
    # Rows are compared by scenario, even if the board is clustered by persona. The baseline, which changes no score, is
    # left out so that more queries share a cached board.
    board = queries.board(store, experiment, replace(query, cluster=None, baseline=None))
    all_cells = queries.cells(store, experiment, query)
    all_pairs = {cell.pair for cell in all_cells.cells}
    own_pairs = _pairs_of(own, all_pairs, query.by)
    other_pairs = _pairs_of(other, all_pairs, query.by) if other is not None else []
    compared_pairs = {*own_pairs, *other_pairs}
    compared_cells = tuple(cell for cell in all_cells.cells if cell.pair in compared_pairs)
    cached_store = queries.cached_store(store, experiment)
    scenario_answers = read_answers(cached_store, experiment, board, replace(all_cells, cells=compared_cells))
    own_results = _row_results(board, own, own_pairs, scenario_answers)
    other_results = _row_results(board, other, other_pairs, scenario_answers) if other is not None else {}
    cards = _cards(scenario_answers, compared_cells)
    for scenario, own_result in own_results.items():
        other_result = other_results.get(scenario)
        difference = None
        if other_result is not None and own_result.composite is not None and other_result.composite is not None:
            difference = own_result.composite - other_result.composite
        yield ScenarioComparison(scenario, cards[scenario], own_result, other_result, difference)


def _cards(scenario_answers: Iterable[ScenarioAnswers], cells: Iterable[BoardCell]) -> dict[str, Any]:
    """Return one card per scenario. If a scenario was changed, `scenario_answers` has a card for each of its versions.

    The returned card is that of the newest answer, or of the newest failed cell if there is no answer.
    """
    runs: dict[str, list[StoredRun]] = defaultdict(list)  # by scenario
    for cell in cells:
        runs[cell.scenario].append(cell.run)
    newest_ids = {newest_answered_run(scenario_runs).run_id for scenario_runs in runs.values()}
    return {
        each.scenario: each.card
        for each in scenario_answers
        if any(answer.run_id in newest_ids for answer in each.answers)
    }


def _row_results(
    board: Leaderboard, row: Pair, pairs: Collection[Pair], scenario_answers: Iterable[ScenarioAnswers]
) -> dict[str, RowResult]:
    """Return a row's results by scenario; `pairs` are those that the row averages."""
    answers: dict[str, list[Answer]] = defaultdict(list)
    for each in scenario_answers:
        for answer in each.answers:
            if answer.pair in pairs:
                answers[each.scenario].append(answer)
    matrix = board.reference_matrix if row in board.reference_matrix.pairs else board.matrix
    column = matrix.column(row)
    composites: dict[str, float] = {}  # by judged scenario
    if column is not None:
        for index, scenario in enumerate(matrix.scenarios):
            if matrix.judged[index, column]:
                composites[scenario] = float(matrix.values[index, column])
    return {
        scenario: RowResult(composites.get(scenario), tuple(row_answers)) for scenario, row_answers in answers.items()
    }


def _pairs_of(row: Pair, pairs: Collection[Pair], by: Literal["model", "prompt"] | None) -> Sequence[Pair]:
    """Return the pairs that a row averages; without `by`, only its own pair.

    By model: its model with each prompt that all models have. By prompt: its prompt with each model that all prompts
    have. `ScoreMatrix.averaged_by` uses the same pairs.
    """
    if by is None or is_reference(row):
        return [row] if row in pairs else []
    candidates = {pair for pair in pairs if not is_reference(pair)}
    shared_names = shared_by_all(candidates, by)
    averaged_side = OTHER_SIDE[by]
    same_row = [pair for pair in candidates if averaged_pair(pair, by) == row]
    return sorted(pair for pair in same_row if getattr(pair, averaged_side) in shared_names)
