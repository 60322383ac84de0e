"""Page of one row: the scenarios where it wins and loses, with both answers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from tipbench.compare.answers import Answer
from tipbench.compare.matrix import Pair
from tipbench.compare.report import label_of, p_text, state_of
from tipbench.text import interval, number, one_line, short_name
from tipbench.web.api.leaderboard import RowModel, RowPrompt
from tipbench.web.api.runs import ExperimentPath
from tipbench.web.auth import ADMINS_ONLY
from tipbench.web.board_query import BoardUrl, PageAsk, baseline_text, row_text, tidy_url
from tipbench.web.deps import PanelState, Store
from tipbench.web.pair_queries import PairView, Role, ScenarioComparison, Side, pair_view
from tipbench.web.panel.leaderboard import load_board
from tipbench.web.panel.pages import here, page
from tipbench.web.panel.standings import LONGEST, STANDING, baseline_words, rank_words
from tipbench.web.queries import experiment_path, get_experiment

PAGE = 20  # scenarios per page
OPEN = 3  # of them expanded
Order = Literal["losses", "wins", "name"]
ORDERS: tuple[tuple[Order, str], ...] = (("losses", "Losses first"), ("wins", "Wins first"), ("name", "By name"))
_ROLES: Mapping[Role, str] = {
    "leader": "the leader",
    "baseline": "the baseline",
    "runner-up": "the runner-up",
    "next row": "the next row",
}

router = APIRouter(dependencies=[ADMINS_ONLY], include_in_schema=False)


@dataclass(frozen=True)
class PairAnswer:
    """An answer on the page."""

    run_url: str
    name: str | None  # the answer's pair, if the row combines several
    about: str
    empty: str | None
    tips: tuple[tuple[str, str, str], ...]  # tip, rationale, scores as text


@dataclass(frozen=True)
class ScenarioView:
    """A scenario on the page."""

    scenario: str
    card: tuple[str, ...]
    difference: float | None
    outcome: str
    tone: str
    own: tuple[PairAnswer, ...]
    other: tuple[PairAnswer, ...]
    composites: tuple[str, str]
    open: bool


@router.get("/experiments/{experiment:path}/pairs")
def pair_page(
    request: Request,
    experiment: ExperimentPath,
    model: RowModel,
    prompt: RowPrompt,
    ask: PageAsk,
    panel: PanelState,
    store: Store,
    order: Order = "losses",
    page_number: Annotated[int, Query(alias="page", ge=1, le=10_000)] = 1,
) -> Response:
    """Shows one row compared with the baseline, the leader or the next row."""
    if (tidy := tidy_url(request, experiment_path(experiment, "pairs"))) is not None:
        return RedirectResponse(tidy, 303)
    found, pair = get_experiment(store, experiment), Pair(model, prompt)
    reading = load_board(panel.queries, store, found, ask)
    view = pair_view(panel.queries, store, found, reading.ask, pair)
    url = BoardUrl(experiment, reading.ask)
    meetings = ordered(view.meetings, order)
    first = (page_number - 1) * PAGE
    shown = meetings[first : first + PAGE]
    more = first + PAGE < len(meetings)
    return page(
        request,
        "pair.html",
        experiment=experiment,
        problem=reading.problem,
        back=url.page(),
        own=_name(view, pair),
        other=_name(view, view.reference.pair) if view.reference else None,
        role=_ROLES[view.role] if view.role else None,
        swapped=url.pair(view.reference.pair) if view.reference else None,
        summary=_summary(view),
        references=_references(view, pair),
        chosen=baseline_text(reading.ask),
        hidden=[*url.hidden("baseline"), ("model", model), ("prompt", prompt), ("order", order)],
        orders=[(key, words, here(request, order=key, page=None)) for key, words in ORDERS],
        order=order,
        compared=[_compared(view, each, url, open_=at < OPEN) for at, each in enumerate(shown)],
        scenarios=len(meetings),
        next_url=here(request, page=page_number + 1) if more else None,
        first_url=here(request, page=None) if page_number > 1 else None,
        json_url=url.api("pairs", model=model, prompt=prompt),
        mlflow_url=found.url,
    )


def ordered(meetings: Sequence[ScenarioComparison], order: Order) -> Sequence[ScenarioComparison]:
    """Sorts scenarios; those without a difference come last, except when sorting by name."""
    if order == "losses":
        return meetings
    if order == "name":
        return sorted(meetings, key=lambda each: each.scenario)
    return sorted(meetings, key=lambda each: (each.difference is None, -(each.difference or 0.0), each.scenario))


def _name(view: PairView, pair: Pair) -> str:
    return short_name(label_of(view.board, pair), LONGEST)


def _references(view: PairView, pair: Pair) -> list[tuple[str, str]]:
    by = view.board.by
    rows = [row_text(standing.pair, by) for standing in view.board.standings if standing.pair != pair]
    return [("", "the leader or the next row"), *((row, short_name(row, LONGEST)) for row in rows)]


def _summary(view: PairView) -> list[tuple[str, str | None]]:
    found, standing = view.difference, view.standing
    estimate = standing.row.estimate
    ends = interval(estimate.ci_low, estimate.ci_high) if estimate else None
    mean = number(estimate.mean) if estimate else None
    gap = interval(found.ci_low, found.ci_high, "+.2f") if found else None
    shown = f"{number(found.mean, '+.2f')}{f' ({gap})' if gap else ''}" if found else None
    p, words = p_text(found), baseline_words(found)
    return [
        ("standing", ", ".join(dict.fromkeys((rank_words(standing), STANDING[state_of(view.board, standing.pair)])))),
        ("composite", f"{mean}{f' ({ends})' if ends else ''}" if mean else "not judged"),
        ("difference", shown),
        ("p, adjusted for all rows", f"{p}: {words}" if p and words else p),
        ("wins, losses, ties", f"{view.count(1)}, {view.count(-1)}, {view.count(0)}" if view.reference else None),
        ("judged", f"{standing.judged} of {standing.total} cells"),
    ]


def _compared(view: PairView, meeting: ScenarioComparison, url: BoardUrl, *, open_: bool) -> ScenarioView:
    other, difference = meeting.other, meeting.difference
    outcome, tone = _outcome(meeting)
    several = view.board.by is not None
    return ScenarioView(
        scenario=meeting.scenario,
        card=card_lines(meeting.card),
        difference=difference,
        outcome=outcome,
        tone=tone,
        own=_answers(meeting.own, url, several=several),
        other=_answers(other, url, several=several) if other else (),
        composites=(_composite(meeting.own), _composite(other) if other else ""),
        open=open_,
    )


def _outcome(meeting: ScenarioComparison) -> tuple[str, str]:
    if meeting.other is None:
        return "no other answer", "quiet"
    if meeting.difference is None:
        return "not both judged", "quiet"
    if abs(meeting.difference) < 0.005:  # displayed as 0.00
        return "tie", "quiet"
    return ("wins", "good") if meeting.difference > 0 else ("loses", "bad")


def _composite(side: Side) -> str:
    return number(side.composite) or "not judged"


def _answers(side: Side, url: BoardUrl, *, several: bool) -> tuple[PairAnswer, ...]:
    repeats = len({answer.repeat for _, answer in side.answers}) > 1
    return tuple(
        PairAnswer(
            run_url=url.run(run_id),
            name=short_name(str(answer.pair), LONGEST) if several else None,
            about=_about(answer, repeats=repeats, alone=len(side.answers) == 1),
            empty=None if answer.tips else "No usable tip." if answer.state != "failed" else "No complete answer.",
            tips=tuple((tip.tip, tip.rationale, _marks(tip.scores, overlong=tip.overlong)) for tip in answer.tips),
        )
        for run_id, answer in side.answers
    )


def _about(answer: Answer, *, repeats: bool, alone: bool) -> str:
    scored = f"composite {number(answer.composite)}" if answer.composite is not None else answer.state
    parts = [
        None if alone and answer.composite is not None else scored,
        f"repeat {answer.repeat}" if repeats and answer.repeat else None,
        "wrong format" if answer.format_ok is False else None,
    ]
    return " · ".join(part for part in parts if part)


def _marks(scores: Mapping[str, float], *, overlong: bool | None) -> str:
    shown = [f"{one_line(name)} {number(value, 'g')}" for name, value in scores.items()]
    return " · ".join([*shown, *(["overlong"] if overlong else [])])


def card_lines(card: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns a scenario's card as sentences; empty if its suite is not available."""
    if card is None:
        return ()
    persona, slot = card["persona"], card["slot"]
    tasks = [f"{task['title']}{' (overdue)' if task.get('overdue') else ''}" for task in persona["tasks"]]
    return (
        f"{persona['name']}, {persona['role']}. {persona['about']}",
        f"{card['weekday']} {card['day']}, {slot['time']}: {slot['label']}.",
        f"Tasks: {'; '.join(tasks)}.",
    )
