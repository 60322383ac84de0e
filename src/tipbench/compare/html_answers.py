"""The report's last part: what every pair wrote, side by side, scenario by scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tipbench.compare.answers import Answer, AnswerTip, ScenarioAnswers
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.markup import Html, element, joined
from tipbench.compare.report import State, number, one_line, shortened, state_of


def answers_part(board: Leaderboard, scenarios: Sequence[ScenarioAnswers]) -> Html | None:
    """A fold for each scenario, closed; None when there are no answers."""
    if not scenarios:
        return None
    said = "In the order of the board. What models wrote is shown as it is, as text. Open what you want to print."
    return joined(element("p", said, class_="muted"), *(_scenario(board, each) for each in scenarios))


def _scenario(board: Leaderboard, found: ScenarioAnswers) -> Html:
    known = [answer.composite for answer in found.answers if answer.composite is not None]
    span = f" · composite {number(min(known))} to {number(max(known))}" if known else " · not judged"
    several = len({answer.repeat for answer in found.answers}) > 1
    return element(
        "details",
        element("summary", found.scenario, element("span", span, class_="muted")),
        _card(found.card),
        element("div", *(_answer(board, answer, several=several) for answer in found.answers), class_="answers"),
    )


def _card(card: Mapping[str, Any] | None) -> Html:
    if card is None:
        return element("p", "The suite of this scenario is not at hand, so its card is not shown.", class_="muted")
    persona, slot = card["persona"], card["slot"]
    lines = [
        f"{persona['name']}, {persona['role']}. {persona['about']}",
        f"{card['weekday']} {card['day']}, {slot['time']}: {slot['label']}.",
        f"Prefers: {'; '.join(persona['preferences'])}.",
        f"Habits: {'; '.join(persona['habits'])}.",
        f"Tasks: {'; '.join(map(_task, persona['tasks']))}.",
    ]
    return joined(*(element("p", line) for line in lines))


def _task(task: Mapping[str, Any]) -> str:
    due = f", due {task['due']}" if task["due"] else ""
    return f"{task['title']} (priority {task['priority']}{due}{', overdue' if task.get('overdue') else ''})"


def _answer(board: Leaderboard, answer: Answer, *, several: bool) -> Html:
    state = state_of(board, answer.pair)
    leader = state is State.LEADER
    name = shortened(one_line(str(answer.pair)), 120)
    badge = element("span", str(state), class_="badge") if leader or state is State.TIED else None
    facts = [
        f"composite {number(answer.composite)}" if answer.composite is not None else answer.state,
        None if answer.format_ok is not False else "not the asked format",
        f"repeat {answer.repeat}" if several and answer.repeat else None,
    ]
    tips = [_tip(tip) for tip in answer.tips]
    return element(
        "article",
        element("h3", element("bdi", name), " ", badge),
        element("div", " · ".join(fact for fact in facts if fact), class_="muted"),
        element("ol", *tips) if tips else element("p", "No usable tip." if answer.state != "failed" else "No answer."),
        class_="answer leader" if leader else "answer",
    )


def _tip(tip: AnswerTip) -> Html:
    scores = [f"{name} {number(value, 'g')}" for name, value in tip.scores.items()]
    marks = " · ".join([*scores, *(["overlong"] if tip.overlong else [])])
    return element(
        "li",
        element("p", tip.tip, class_="tip", dir="auto"),
        element("p", tip.rationale, class_="tip muted", dir="auto") if tip.rationale else None,
        element("div", marks, class_="muted") if marks else None,
    )
