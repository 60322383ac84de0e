"""Leaderboard page: filters, standings, attribution, duels, judging."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from tipbench.compare.attribution import Attribution, Marginal
from tipbench.compare.charts import MEAN, heat_rows
from tipbench.compare.duels import DuelTable
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.report import NOTHING, attribution_lines, detectable_lines, factors_of, label_of
from tipbench.compare.statistics import Unknown
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetHistory
from tipbench.record.store import Experiment, RunStore
from tipbench.text import interval, join_names, number, one_line, percent, plural, probability, short_name
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import BoardUrl, Facets, PageAsk, Params, baseline_text, facets, row_text, tidy_url
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.charts import charts_there, figures
from tipbench.web.panel.pages import environment, page
from tipbench.web.panel.standings import LONGEST, Table, standings
from tipbench.web.queries import BoardQuery, Queries, experiment_path, get_experiment, revision

_FACETS = (("params.model", "Model"), ("params.prompt_version", "Prompt"), ("params.persona", "Persona"))
_RARE = (("params.suite", "Suite"), ("conditions", "Conditions"))


@dataclass(frozen=True)
class Choice:
    """A select field; its first option is the empty choice."""

    id: str
    name: str
    label: str
    options: tuple[tuple[str, str], ...]  # value, label
    value: str


@dataclass(frozen=True)
class Options:
    """The forms of the page; each includes the other parameters as hidden fields."""

    baseline: Choice | None
    baseline_hidden: Params
    filters: tuple[Choice, ...]
    filters_hidden: Params
    cluster: bool
    provisional: bool
    has_provisional: bool
    views: tuple[tuple[str, str, str], ...]  # key, label, URL: what is ranked
    view: str


def options_of(url: BoardUrl, board: Leaderboard | None, found: Facets, judging: JudgingStatus) -> Options:
    """Returns the available choices with the current selection."""
    ask = url.ask
    filters = (*_filters(ask, found), *_judges(ask, judging))
    offered = {key for key, _ in (*_FACETS, *_RARE)} & {each.id for each in filters}
    others = tuple(("where", f"{key}={value}") for key, value in ask.where if key not in offered)
    views = (
        ("pair", "Pairs", url.asking(by=None)),
        ("model", "Models", url.asking(by="model")),
        ("prompt", "Prompts", url.asking(by="prompt")),
    )
    return Options(
        baseline=_baseline(ask, board) if board else None,
        baseline_hidden=url.hidden("baseline"),
        filters=filters,
        filters_hidden=(*others, *url.hidden("where", "judge", "cluster", "provisional")),
        cluster=ask.cluster is not None,
        provisional=ask.provisional,
        has_provisional=any(each.provisional and each.cells for each in judging.judges),
        views=views,
        view=ask.by or "pair",
    )


def _baseline(ask: BoardQuery, board: Leaderboard) -> Choice | None:
    rows = [row_text(standing.pair, board.by) for standing in board.standings]
    if len(rows) < 2:
        return None
    return Choice("baseline", "baseline", "Baseline", _listed("none", rows), baseline_text(ask))


def _filters(ask: BoardQuery, found: Facets) -> Iterable[Choice]:
    values = {
        "params.model": found.models,
        "params.prompt_version": found.prompts,
        "params.persona": found.personas,
        "params.suite": found.suites,
    }
    chosen = dict(ask.where)
    for key, label in _FACETS:
        if values[key] and (len(values[key]) > 1 or key in chosen):
            yield _where(key, label, [(each, _short(each)) for each in values[key]], chosen.get(key))
    if len(found.suites) > 1:
        yield _where(
            "params.suite", "Suite", [(each, _short(each)) for each in found.suites], chosen.get("params.suite")
        )
    if len(found.conditions) > 1:
        counted = [(each, f"{_short(each)} ({n} cells)") for each, n in found.conditions]
        yield _where("conditions", "Conditions", counted, chosen.get("conditions"), "the newest")


def _where(key: str, label: str, values: Iterable[tuple[str, str]], chosen: str | None, nothing: str = "all") -> Choice:
    options = [("", nothing), *((f"{key}={value}", words) for value, words in values)]
    now = "" if chosen is None else f"{key}={chosen}"
    if now not in dict(options):  # the selected value is listed even if no run has it
        options.append((now, _short(chosen or "")))
    return Choice(key, "where", label, tuple(options), now)


def _judges(ask: BoardQuery, judging: JudgingStatus) -> Iterable[Choice]:
    names = [each.judge for each in judging.judges if not each.provisional and each.cells]
    if ask.judge is not None and ask.judge not in names:
        names.append(ask.judge)
    if len(names) > 1 or ask.judge is not None:
        yield Choice("judge", "judge", "Judge", _listed("all judges", names), ask.judge or "")


def _listed(nothing: str, values: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return (("", nothing), *((value, _short(value)) for value in values))


def _short(text: str) -> str:
    return short_name(text, LONGEST)


Grid = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]  # header, then rows; the first cell is the row's name


@dataclass(frozen=True)
class Source:
    """A source of variance."""

    name: str
    share: float
    percent: str
    p: str


@dataclass(frozen=True)
class AttributionView:
    """What explains the differences; `sources` is empty if it cannot be estimated, and `lines` contains the reason."""

    lines: tuple[str, ...]
    sources: tuple[Source, ...] = ()
    marginals: tuple[tuple[str, Grid], ...] = ()


@dataclass(frozen=True)
class Duels:
    """Blind A/B comparisons among the tied rows."""

    summary: str
    table: Grid | None


@dataclass(frozen=True)
class JudgingSummary:
    """The judging summary of the whole experiment, independent of the board's filters."""

    facts: tuple[tuple[str, str | None], ...]
    table: Grid | None
    filtered: bool


def heat_grid(board: Leaderboard) -> Grid:
    """Returns the numbers of the heat map."""
    models, prompts, means = heat_rows(board)
    heads = ("model", *(_short(prompt) for prompt in prompts), "mean")
    rows = [(_short(model), *(_dash(number(means[model, prompt])) for prompt in (*prompts, MEAN))) for model in models]
    return heads, (*rows, ("mean", *(_dash(number(means[MEAN, prompt])) for prompt in prompts), ""))


def attribution_view(found: Attribution | Unknown) -> AttributionView:
    """Returns the sources of variance with their shares, and the means of each model and prompt."""
    lines = tuple(attribution_lines(found))
    if isinstance(found, Unknown):
        return AttributionView(lines)
    sources = tuple(
        Source(label, factor.share, percent(factor.share) or NOTHING, _dash(probability(factor.p)))
        for label, factor in factors_of(found)
    )
    sides = (("Models, over all prompts", "model", found.models), ("Prompts, over all models", "prompt", found.prompts))
    # The first line repeats the shares, which the bars already show.
    return AttributionView(
        lines[1:], sources, tuple((title, _grid(side, each)) for title, side, each in sides if len(each) > 1)
    )


def _grid(side: str, marginals: Sequence[Marginal]) -> Grid:
    rows = [
        (
            _short(each.name),
            _dash(number(each.estimate.mean)),
            _dash(interval(each.estimate.ci_low, each.estimate.ci_high)),
        )
        for each in marginals
    ]
    return (side, "mean", "95 % interval"), tuple(rows)


def duels(board: Leaderboard) -> Duels | None:
    """Returns the duels, or None if there are none."""
    found = board.duels
    if found is None:
        return None
    if isinstance(found, Unknown):
        return Duels(found.reason, None)
    winner = f"{found.winner} wins." if found.winner else "No clear winner."
    if found.absent:
        winner = f"No winner yet: {join_names(found.absent, 3)} not compared yet."
    first = f"The side shown first got {percent(found.first_share)} of the points. Duels change no rank."
    return Duels(one_line(f"{winner} {first}"), _duel_grid(board, found))


def _duel_grid(board: Leaderboard, found: DuelTable) -> Grid:
    rows = [
        (
            short_name(label_of(board, each.pair), LONGEST),
            _dash(number(each.strength.value, "+.2f")),
            _dash(interval(each.strength.ci_low, each.strength.ci_high, "+.2f")),
            f"{each.points:g} of {each.duels}",
            str(each.n_scenarios),
        )
        for each in found.standings
    ]
    return ("model / prompt", "strength", "95 % interval", "points", "scenarios"), tuple(rows)


def judging_summary(board: Leaderboard | None, found: JudgingStatus) -> JudgingSummary:
    """Returns the judges with their agreement and their drift from the reference scores."""
    twice = f"{found.twice} of {found.judged}"
    if found.judged:
        twice += f" ({percent(found.twice / found.judged)})"
    alpha = ", ".join(f"{one_line(name)} {number(value) or 'unknown'}" for name, value in found.alpha.items())
    rubric = (board.rubric_tag if board else "") or ", ".join(found.rubrics)
    answers = f"{found.judged} judged, {found.pending} pending" + (f", {found.held} held" if found.held else "")
    facts = (
        ("rubric", _rubric(rubric)),
        ("answers", f"{answers}; {found.floored} with no usable answer" if found.floored else answers),
        ("judged twice", twice),
        (
            "agreement (Krippendorff's alpha)",
            alpha if found.twice and alpha else "unknown: no answer has two judges",
        ),
    )
    filtered = board is not None and bool(board.where or board.judge)
    return JudgingSummary(facts, _judge_grid(found) if found.judges else None, filtered)


def _rubric(tag: str) -> str | None:
    name, _, sha256 = tag.partition("@")
    return f"{one_line(name)} ({sha256[:12]})" if sha256 else one_line(name) or None


def _judge_grid(found: JudgingStatus) -> Grid:
    newest = {(sheet.judge, sheet.provisional): sheet for sheet in found.history if (sheet.drift or {}).get("scales")}
    scales = list(dict.fromkeys(scale["scale"] for sheet in newest.values() for scale in _scales(sheet)))
    heads = ("judge", "scores", "answers", "drift", "error on controls", "repeat consistency")
    rows = [_judge(each, newest.get((each.judge, each.provisional)), scales) for each in found.judges]
    return (*heads, *(f"bias: {one_line(name)}" for name in scales)), tuple(rows)


def _judge(judge: JudgeStatus, sheet: SheetHistory | None, scales: Sequence[str]) -> tuple[str, ...]:
    biases = {scale["scale"]: scale for scale in _scales(sheet)} if sheet else {}
    return (
        _short(judge.judge),
        "provisional" if judge.provisional else "count",
        f"{judge.cells}" + (f" ({judge.held} held)" if judge.held else ""),
        judge.drift or "unknown",
        _dash(number(judge.error)),
        _dash(percent(judge.self_exact)),
        *(_bias(biases.get(name)) for name in scales),
    )


def _scales(sheet: SheetHistory) -> list[Mapping[str, Any]]:
    return list((sheet.drift or {}).get("scales", []))


def _bias(scale: Mapping[str, Any] | None) -> str:
    if scale is None or scale["bias"] is None:
        return NOTHING
    beyond = ", too far off" if scale["beyond"] else ""
    return f"{number(scale['bias'], '+.2f')}{beyond}"


def _dash(text: str | None) -> str:
    return text or NOTHING


INSTALL = 'pip install "tipbench[charts]"'
Sort = Annotated[str | None, Query(max_length=60)]

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@dataclass(frozen=True)
class BoardResult:
    """The board that can be shown for a query, and the problem if it is not exactly the requested one."""

    ask: BoardQuery
    board: Leaderboard | None
    problem: str | None = None


@router.get("/experiments/{experiment:path}")
def leaderboard_page(
    request: Request, experiment: ExperimentPath, ask: PageAsk, panel: PanelState, store: Store, sort: Sort = None
) -> Response:
    """Shows the leaderboard; charts are separate requests, so the page does not wait for them."""
    if (tidy := tidy_url(request, experiment_path(experiment))) is not None:
        return RedirectResponse(tidy, 303)
    found = get_experiment(store, experiment)
    reading = load_board(panel.queries, store, found, ask)
    extra = {"sort": sort} if sort else {}
    url = BoardUrl(experiment, reading.ask, extra)
    judging = panel.queries.judging_of(store, found)
    there = facets(panel.queries, store, found)
    context: dict[str, Any] = {
        "experiment": experiment,
        "shell_name": shlex.quote(experiment),
        "board": reading.board,
        "problem": reading.problem,
        "url": url,
        "chips": [(f"{chip.label}: {chip.value}", chip.remove) for chip in url.chips()],
        "options": options_of(url, reading.board, there, judging),
        "recorded": there.cells,
        "pending": judging.pending,
        "judging": judging_summary(reading.board, judging),
        "revision": revision(found),
        "revision_url": BoardUrl(experiment).api("revision"),
        "json_url": url.api(),
        "mlflow_url": found.url,
        **_prepared(panel.queries, found, reading, url),
    }
    return page(request, "leaderboard.html", **context)


def load_board(queries: Queries, store: RunStore, experiment: Experiment, ask: BoardQuery) -> BoardResult:
    """Returns the board, without its baseline if that is not one of its rows, or the reason why there is no board."""
    try:
        return BoardResult(ask, queries.board(store, experiment, ask))
    except UsageError as exc:
        if ask.baseline is None:
            return BoardResult(ask, None, str(exc))
        without = load_board(queries, store, experiment, replace(ask, baseline=None))
        return without if without.board is None else replace(without, problem=f"The baseline is left out. {exc}")
    except (NotEnoughData, MixedRubrics) as exc:
        return BoardResult(ask, None, str(exc))


def _prepared(queries: Queries, experiment: Experiment, reading: BoardResult, url: BoardUrl) -> dict[str, Any]:
    """Returns the part of the page that does not depend on the user, cached per revision."""
    board, version = reading.board, revision(experiment)
    if board is None:
        return {}
    drawn = charts_there()
    key = (experiment.experiment_id, experiment.name, reading.ask, url.extra.get("sort"), drawn)
    return queries.tables.get(key, version, lambda: _board_context(board, url, version, drawn=drawn))


def _board_context(board: Leaderboard, url: BoardUrl, version: str | None, *, drawn: bool) -> dict[str, Any]:
    scored = any(standing.row.estimate for standing in board.standings)
    table = standings(board, url.extra.get("sort"))
    return {
        "scored": scored,
        "standings": _rendered(table, url),
        "sort": table.sort,
        "sort_fault": table.fault,
        "flags": list(dict.fromkeys(flag for row in table.rows for flag in row.flags)),
        "figures": figures(board, url, version) if drawn else {},
        "install": None if drawn or not scored else INSTALL,
        "facts": _facts(board),
        "conditions": _conditions(board),
        "least": detectable_lines(board),
        "heat": heat_grid(board) if scored and board.by is None else None,
        "causes": attribution_view(board.attribution),
        "duels": duels(board),
        "downloads": _downloads(url, drawn=drawn),
    }


def _rendered(table: Table, url: BoardUrl) -> Markup:
    """Renders the standings, the slowest part of a long page; independent of the request, so it can be cached."""
    parts: Any = environment().get_template("board/parts.html").module
    return Markup(parts.standings(table, url))  # noqa: S704 - a template's own output, escaped there


def _facts(board: Leaderboard) -> list[tuple[str, str | None]]:
    return [
        ("suite", board.suite or None),
        ("judged by", ", ".join(board.judges) or "not judged yet"),
        ("based on", plural(board.ranking.n_scenarios, board.unit)),
        ("hosts", ", ".join(board.hosts) or None),
    ]


def _conditions(board: Leaderboard) -> list[tuple[str, str]]:
    """Returns the conditions shared by all cells of the board, with the sampling options as separate entries."""
    given = {name: str(value) for name, value in board.conditions.items() if value}
    try:
        sampling = json.loads(given.pop("sampling", "{}"))
    except ValueError:
        sampling = None
    more = sampling if isinstance(sampling, dict) else {}
    return [
        *given.items(),
        *((str(name), f"{value:g}" if isinstance(value, float) else str(value)) for name, value in more.items()),
    ]


def _downloads(url: BoardUrl, *, drawn: bool) -> list[tuple[str, str]]:
    report = [("HTML report", url.api("report.html"))] if drawn else []
    return [
        *report,
        ("CSV", url.api("standings.csv")),
        ("Markdown", url.api("board.md")),
        ("JSON", url.api()),
    ]
