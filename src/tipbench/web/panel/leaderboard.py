"""/experiments/NAME: the leaderboard. The verdict first, then what it rests on."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.report import detectable_lines
from tipbench.compare.words import counted
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError
from tipbench.record.store import Experiment, RunStore
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_queries import facets
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel import board_parts
from tipbench.web.panel.board_charts import charts_there, figures
from tipbench.web.panel.board_links import BoardUrl, PageAsk, tidy_url
from tipbench.web.panel.board_options import options_of
from tipbench.web.panel.pages import environment, page
from tipbench.web.panel.showing import experiment_path
from tipbench.web.panel.standings_view import Table, standings
from tipbench.web.queries import BoardAsk, Queries, existing
from tipbench.web.snapshots import revision

INSTALL = 'pip install "tipbench[charts]"'
Sort = Annotated[str | None, Query(max_length=60)]

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@dataclass(frozen=True)
class Reading:
    """The board that can be shown for what was asked, and what stands in the way of the rest."""

    ask: BoardAsk
    board: Leaderboard | None
    problem: str | None = None


@router.get("/experiments/{experiment:path}")
def leaderboard_page(
    request: Request, experiment: ExperimentPath, ask: PageAsk, panel: PanelState, store: Store, sort: Sort = None
) -> Response:
    """The page. Its charts come by themselves, so it does not wait for them."""
    if (tidy := tidy_url(request, experiment_path(experiment))) is not None:
        return RedirectResponse(tidy, 303)
    found = existing(store, experiment)
    reading = read_board_for(panel.queries, store, found, ask)
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
        "judging": board_parts.judging(reading.board, judging),
        "revision": revision(found),
        "revision_url": BoardUrl(experiment).api("revision"),
        "json_url": url.api(),
        "mlflow_url": found.url,
        **_prepared(panel.queries, found, reading, url),
    }
    return page(request, "leaderboard.html", **context)


def read_board_for(queries: Queries, store: RunStore, experiment: Experiment, ask: BoardAsk) -> Reading:
    """The board; without its baseline when that is not a row of it; none, and why, when there can be none."""
    try:
        return Reading(ask, queries.board(store, experiment, ask))
    except UsageError as exc:
        if ask.baseline is None:
            return Reading(ask, None, str(exc))
        without = read_board_for(queries, store, experiment, replace(ask, baseline=None))
        return without if without.board is None else replace(without, problem=f"The baseline is left out. {exc}")
    except (NotEnoughData, MixedRubrics) as exc:
        return Reading(ask, None, str(exc))


def _prepared(queries: Queries, experiment: Experiment, reading: Reading, url: BoardUrl) -> dict[str, Any]:
    """What a board's page shows to whoever asks, made once for a revision: nothing of the reader is in it."""
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
        "heat": board_parts.heat_grid(board) if scored and board.by is None else None,
        "causes": board_parts.causes(board.attribution),
        "duels": board_parts.duels(board),
        "downloads": _downloads(url, drawn=drawn),
    }


def _rendered(table: Table, url: BoardUrl) -> Markup:
    """Of a long board the most of the page's work. The macro knows no request."""
    parts: Any = environment().get_template("board/parts.html").module
    return Markup(parts.standings(table, url))  # noqa: S704 - a template's own output, escaped there


def _facts(board: Leaderboard) -> list[tuple[str, str | None]]:
    return [
        ("suite", board.suite or None),
        ("judged by", ", ".join(board.judges) or "nobody yet"),
        ("over", counted(board.ranking.n_scenarios, board.unit)),
        ("hosts", ", ".join(board.hosts) or None),
    ]


def _conditions(board: Leaderboard) -> list[tuple[str, str]]:
    """Under which all cells of the board were generated; the sampling's own names stand beside the others."""
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
