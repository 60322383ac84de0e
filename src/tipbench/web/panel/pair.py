"""Page of one row of the leaderboard: the scenarios that it wins and loses, with both answers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from tipbench.compare.matrix import Pair
from tipbench.compare.report import STATE_TEXTS, label_of, p_text, state_of
from tipbench.compare.standings import MAX_NAME_CHARS, baseline_words, rank_words
from tipbench.compare.statistics import Estimate
from tipbench.text import interval, number, short_name
from tipbench.web.api.leaderboard import ModelParam, PromptParam
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import (
    BoardUrl,
    OtherRole,
    PageQuery,
    PairView,
    ScenarioComparison,
    baseline_text,
    pair_view,
    row_text,
    tidy_url,
)
from tipbench.web.deps import PanelState, Store
from tipbench.web.panel.leaderboard import Select, load_board, select_options
from tipbench.web.panel.pages import here, page
from tipbench.web.queries import experiment_path, get_experiment

PAGE_SIZE = 20  # scenarios
EXPANDED_SCENARIOS = 3  # at the top of each page
Order = Literal["losses", "wins", "name"]
ORDERS: tuple[tuple[Order, str], ...] = (("losses", "Losses first"), ("wins", "Wins first"), ("name", "By name"))
_ROLES: Mapping[OtherRole, str] = {
    "leader": "the leader",
    "baseline": "the baseline",
    "runner-up": "the runner-up",
    "next row": "the next row",
}

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@router.get("/experiments/{experiment:path}/pairs")
def pair_page(
    request: Request,
    experiment: ExperimentPath,
    query: PageQuery,
    panel: PanelState,
    store: Store,
    model: ModelParam | None = None,
    prompt: PromptParam | None = None,
    order: Order = "losses",
    page_number: Annotated[int, Query(alias="page", ge=1, le=10_000)] = 1,
) -> Response:
    """Show one row compared with the baseline, the leader or the next row. Without a row, redirect to the leader's."""
    if (tidy := tidy_url(request, experiment_path(experiment, "pairs"))) is not None:
        return RedirectResponse(tidy, 303)
    mlflow_experiment = get_experiment(store, experiment)
    result = load_board(panel.queries, store, mlflow_experiment, query)
    url = BoardUrl(experiment, result.query)  # a baseline that is not on the board is left out of result.query
    if model is None or prompt is None:
        leader = result.board.ranking.leader if result.board else None
        return RedirectResponse(url.pair(leader) if leader else url.page(), 303)
    pair = Pair(model, prompt)
    view = pair_view(panel.queries, store, mlflow_experiment, result.query, pair)
    comparisons = ordered(view.comparisons, order)
    first = (page_number - 1) * PAGE_SIZE
    on_page = comparisons[first : first + PAGE_SIZE]
    has_more = first + PAGE_SIZE < len(comparisons)
    return page(
        request,
        "pair.html",
        experiment=experiment,
        problem=result.problem,
        board_url=url.page(),
        own=_name(view, pair),
        other=_name(view, view.other.standing.pair) if view.other else None,
        role=_ROLES[view.other.role] if view.other else None,
        swapped_url=url.pair(view.other.standing.pair) if view.other else None,
        summary=_summary(view),
        against=Select(
            id="against",
            name="baseline",  # the URL parameter
            label="Against",
            options=_other_rows(view, pair),
            value=baseline_text(result.query),
        ),
        hidden=[*url.hidden_fields(without=("baseline",)), ("model", model), ("prompt", prompt), ("order", order)],
        orders=[(label, here(request, order=key, page=None), key == order) for key, label in ORDERS],
        compared=[
            {"comparison": each, **outcome_text(each), "open": position < EXPANDED_SCENARIOS}
            for position, each in enumerate(on_page)
        ],
        rows_are_groups=view.board.by is not None,  # rows are models or prompts, so each answer shows its pair
        links=url,
        scenarios=len(comparisons),
        next_url=here(request, page=page_number + 1) if has_more else None,
        first_url=here(request, page=None) if page_number > 1 else None,
        json_url=url.api("pairs", model=model, prompt=prompt),
        mlflow_url=mlflow_experiment.url,
    )


def ordered(comparisons: Sequence[ScenarioComparison], order: Order) -> Sequence[ScenarioComparison]:
    """Sort comparisons, which are given in the order "losses". Those without a difference come last."""
    if order == "losses":
        return comparisons
    if order == "name":
        return sorted(comparisons, key=lambda each: each.scenario)
    return sorted(comparisons, key=lambda each: (each.difference is None, -(each.difference or 0.0), each.scenario))


def _name(view: PairView, pair: Pair) -> str:
    return short_name(label_of(view.board, pair), MAX_NAME_CHARS)


def _other_rows(view: PairView, pair: Pair) -> tuple[tuple[str, str], ...]:
    """Return the rows that the pair can be compared with, as options of a select field."""
    standings = (*view.board.standings, *view.board.references)
    rows = [row_text(standing.pair, view.board.by) for standing in standings if standing.pair != pair]
    return select_options(empty_label="the leader or the next row", values=rows)


def _summary(view: PairView) -> list[tuple[str, str | None]]:
    """Return the label and value of each line of the summary; a line without a value is not shown."""
    standing = view.standing
    rank, state = rank_words(standing), STATE_TEXTS[state_of(view.board, standing.pair)]
    estimate = standing.result.estimate
    difference = view.other.difference if view.other else None
    p, verdict = p_text(difference), baseline_words(difference)
    wins, losses, ties = view.count("win"), view.count("loss"), view.count("tie")
    return [
        ("standing", rank if rank == state else f"{rank}, {state}"),  # both can be "not ranked"
        ("composite", _estimate_text(estimate) if estimate else "not judged"),
        ("difference", _estimate_text(difference, "+.2f") if difference else None),
        ("p, adjusted for all rows", f"{p}: {verdict}" if p and verdict else p),
        ("wins, losses, ties", f"{wins}, {losses}, {ties}" if view.other else None),
        ("judged", f"{standing.n_judged} of {standing.n_cells} cells"),
    ]


def _estimate_text(estimate: Estimate, spec: str = ".2f") -> str:
    mean = number(estimate.mean, spec)
    bounds = interval(estimate.ci_low, estimate.ci_high, spec)
    return f"{mean} ({bounds})" if bounds else mean


def outcome_text(comparison: ScenarioComparison) -> dict[str, str]:
    """Return the text of a comparison's badge, and the tone that selects its colour."""
    if comparison.other is None:
        return {"outcome": "no other answer", "tone": "quiet"}
    match comparison.outcome:
        case "win":
            return {"outcome": "wins", "tone": "good"}
        case "loss":
            return {"outcome": "loses", "tone": "bad"}
        case "tie":
            return {"outcome": "tie", "tone": "quiet"}
        case None:
            return {"outcome": "not both judged", "tone": "quiet"}
