"""The summary card: which pair to use, how certain that is, and the next step."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import Pair
from tipbench.compare.report import best_text, label_of
from tipbench.compare.statistics import POWER
from tipbench.compare.verdict import (
    TIED,
    judging_task,
    leader_sentence,
    next_look_task,
    unranked_sentence,
    unusable_text,
)
from tipbench.markup import duration
from tipbench.plan.design import MIN_SCENARIOS
from tipbench.text import file_size, interval, join_names, number, parameter_count, plural, short_name

_MAX_NAME_CHARS = 60


class CardState(StrEnum):
    """How much is known about which pair to use."""

    UNJUDGED = "unjudged"  # answers wait for a judge
    UNUSABLE = "unusable"  # every cell failed, or no answer has a usable tip: there is nothing to judge
    UNRANKED = "unranked"  # there are too few scores to rank a pair
    PROVISIONAL = "provisional"  # scored by rules or a model, not by people
    EARLY = "early"  # people have judged, but the first look is not reached
    BEHIND = "behind"  # the leader is clearly worse than the reference
    DECIDED = "decided"  # the leader is better than every other pair
    TIED = "tied"  # other pairs are tied with the leader or not ranked yet; more scores may decide
    CLOSE = "close"  # tied; more scores would hardly decide


@dataclass(frozen=True)
class SummaryCard:
    """The title and the sentences of a card."""

    state: CardState
    title: str
    lines: tuple[str, ...]
    next: str  # the next step with its effort

    @property
    def sentences(self) -> tuple[str, ...]:
        return (*self.lines, self.next)


def summary_card(board: Leaderboard) -> SummaryCard:
    """Return the card of a board."""
    state = _state(board)
    return SummaryCard(state, _title(board, state), tuple(_sentences(board, state)), _next_step(board, state))


def _state(board: Leaderboard) -> CardState:
    ranking = board.ranking
    if not _has_cells(board):
        return CardState.UNRANKED
    if not board.judges:
        any_usable = any(standing.usable is not None and standing.usable.rate > 0 for standing in board.standings)
        return CardState.UNJUDGED if any_usable else CardState.UNUSABLE
    if ranking.leader is None:
        return CardState.UNRANKED
    if board.provisional:
        return CardState.PROVISIONAL
    if board.unplanned_reason is None and ranking.look is None:
        return CardState.EARLY
    if ranking.to_reference is not None and ranking.to_reference.worse:
        return CardState.BEHIND
    if ranking.decided:
        return CardState.DECIDED
    if ranking.unranked or ranking.next_look is not None:
        return CardState.TIED
    # After the last of several looks, further scenarios are not tested.
    if ranking.look is not None and ranking.look.of > 1:
        return CardState.CLOSE
    # Nothing is tied if only one row is ranked, or if a row is better than the leader in the tested scenarios although
    # its mean over all scenarios is lower.
    may_decide_later = ranking.too_few_units or not ranking.tied or ranking.units_needed is not None
    return CardState.TIED if may_decide_later else CardState.CLOSE


def _title(board: Leaderboard, state: CardState) -> str:
    leader = board.ranking.leader
    name = _name(board, leader) if leader else ""
    n_first = sum(row.rank == 1 for row in board.ranking.rows)
    lead_text = f"{plural(n_first, board.row_noun)} share the lead" if n_first > 1 else f"{name} leads"
    reference = board.ranking.references[0].pair.model if board.ranking.references else "the reference"
    unranked_title = "No ranking yet"
    if _has_cells(board):
        unranked_title += ": too little is judged"
    elif not board.ranking.unranked:  # if there are unranked rows, the first sentence of the card has the reason
        unranked_title += ": too little is collected"
    return {
        CardState.UNJUDGED: "Not judged yet",
        CardState.UNUSABLE: "No usable answers",
        CardState.UNRANKED: unranked_title,
        CardState.PROVISIONAL: f"For now: {name}",
        CardState.EARLY: f"For now: {name}",
        CardState.BEHIND: f"Use none of them: {reference} is better",
        CardState.DECIDED: f"Use {name}",
        CardState.TIED: f"Not decided: {lead_text}",
        CardState.CLOSE: f"Too close to call: {lead_text}",
    }[state]


def _sentences(board: Leaderboard, state: CardState) -> Iterator[str]:
    if state is CardState.UNUSABLE:
        if n_answers := _count_answers(board):
            yield unusable_text(n_answers)
        else:
            n_cells = sum(standing.n_cells for standing in board.standings)
            yield f"None of {plural(n_cells, 'cell')} has an answer: all failed."
        return
    if state is CardState.UNJUDGED:
        n_pending = _count_pending(board)
        rows = plural(len(board.standings), board.row_noun)
        yield f"{plural(n_pending, 'answer')} of {rows} {'waits' if n_pending == 1 else 'wait'} for a judge."
        if board.judging.held:
            yield f"Scores of {join_names(sorted(board.judging.held), 3)} are held and not counted: too far off."
        return
    leader = board.ranking.leader
    if leader is None:
        yield leader_sentence(board)  # why there is no leader
        return
    standing = _standing(board, leader)
    size = board.sizes.get(leader.model)
    mean = standing.result.estimate.mean if standing.result.estimate else None
    parts = [
        _composite_text(board, mean),
        _latency_text(standing.means.get("latency_s")),
        f"{parameter_count(size.params_b)} parameters" if size and size.params_b else None,
        f"about {file_size(size.memory_bytes)} in memory" if size and size.memory_bytes else None,
    ]
    yield f"{_name(board, leader)}: {', '.join(part for part in parts if part)}."
    yield leader_sentence(board)
    if board.ranking.unranked:
        yield unranked_sentence(board)
    yield from _alternatives(board)
    yield _against_reference(board)
    yield _certainty(board, state)


def _composite_text(board: Leaderboard, mean: float | None) -> str | None:
    """Return "13.1 of 17", or "composite 13.1" if the maximum is unknown."""
    if mean is None:
        return None
    if board.composite_range is None:
        return f"composite {number(mean, '.1f')}"
    _, highest = board.composite_range
    return f"{number(mean, '.1f')} of {highest:g}"


def _latency_text(latency: float | None) -> str | None:
    return None if latency is None else f"{duration(latency)} per answer"


def _alternatives(board: Leaderboard) -> Iterator[str]:
    """Yield a sentence on the fastest and the smallest among the leader and the ranked rows tied with it."""
    ranking = board.ranking
    if ranking.leader is None or not ranking.tied_ranked or board.by == "prompt":  # a prompt has no speed or size
        return
    leader = _standing(board, ranking.leader)
    rows = [leader, *(_standing(board, pair) for pair in ranking.tied_ranked)]
    parts = []
    fastest = None
    latencies = {row.pair: latency for row in rows if (latency := row.means.get("latency_s")) is not None}
    if latencies and len(board.hosts) < 2:  # latencies of several hosts are not comparable
        fastest = min(latencies, key=lambda pair: latencies[pair])
        name = "it" if fastest == leader.pair else _name(board, fastest)
        parts.append(f"{name} is the fastest ({_latency_text(latencies[fastest])})")
    sizes = {row.pair.model: board.sizes.get(row.pair.model) for row in rows}
    params_b = {model: size.params_b for model, size in sizes.items() if size and size.params_b is not None}
    smallest = min(params_b, key=lambda model: (params_b[model], model), default="")
    if smallest and params_b[smallest] < max(params_b.values()):
        smallest_text = f"the smallest ({parameter_count(params_b[smallest])})"
        if smallest == leader.pair.model and fastest == leader.pair:
            parts.append(smallest_text)  # "it is the fastest and the smallest"
        elif smallest == leader.pair.model and fastest is None:
            parts.append(f"it is {smallest_text}")
        else:  # by name also if it is the leader: after another model's name, "it" would be ambiguous
            parts.append(f"{short_name(smallest, _MAX_NAME_CHARS)} is {smallest_text}")
    if parts:
        yield f"Among the {TIED}, {' and '.join(parts)}."


def _against_reference(board: Leaderboard) -> str:
    ranking = board.ranking
    if not ranking.references:
        return "There is no reference: add the model baseline:template to see whether a model is needed at all."
    name = ranking.references[0].pair.model
    difference = ranking.to_reference
    if difference is None:
        return f"Not compared with {name} yet."
    bounds = interval(difference.ci_low, difference.ci_high, "+.1f")
    mean = number(difference.mean, "+.1f")
    numbers = f"{mean}, {bounds}" if bounds else mean
    if ranking.beats_reference is None:
        return f"Against {name}: {numbers}; too little is judged to compare them."
    return f"{'Beats' if ranking.beats_reference else 'Does not beat'} {name}: {numbers}."


def _certainty(board: Leaderboard, state: CardState) -> str:
    ranking = board.ranking
    p_best = best_text(board, _standing(board, ranking.leader)) if ranking.leader else None
    if len(ranking.ranked) == 1:
        chance = "there is nothing to compare it with"
    elif p_best is None:
        chance = "too few scenarios to estimate a chance"
    elif ranking.unranked:
        chance = f"the chance that it is the best of the {len(ranking.ranked)} ranked is {p_best}"
    else:
        chance = f"the chance that it is the best is {p_best}"
    scenarios = plural(ranking.n_units, board.unit)
    if state is CardState.PROVISIONAL:
        return f"How sure: scored by {join_names(board.judges, 3)} over {scenarios}, not by people; {chance}."
    concerns = [f"{judge} {board.judging.concerns[judge]}" for judge in board.judges if judge in board.judging.concerns]
    if board.fragile:
        concerns.insert(0, "a few more unusable answers could change it")
    if board.unplanned_reason and not ranking.too_few_units:  # with too few scenarios, nothing is decided
        concerns.append(f"this is not a planned look: {board.unplanned_reason}")
    if board.judging.held:
        concerns.append(f"scores of {join_names(sorted(board.judging.held), 3)} are held and not counted")
    but_concerns = f", but {'; '.join(concerns)}" if concerns else ""
    if state is CardState.EARLY and ranking.next_look is not None:  # the next look is the first
        first_look = plural(ranking.next_look.look.at, board.unit)
        return f"How sure: nothing is tested before the first look, at {first_look}; {chance}{but_concerns}."
    result = "clearly ahead" if ranking.decided else "not enough to decide"
    return f"How sure: {result} over {scenarios}; {chance}{but_concerns}."


def _next_step(board: Leaderboard, state: CardState) -> str:
    ranking = board.ranking
    experiment = shlex.quote(board.experiment)
    if state is CardState.UNUSABLE:
        if not _count_answers(board):
            runs = f"`tipbench runs list --state failed --json --experiment {experiment}`"
            return f"Next: read why in the failed runs ({runs}), then collect again."
        return "Next: read the raw answers, then try another prompt or a larger model."
    if state is CardState.UNJUDGED:
        if board.judging.held:
            return f"Next: accept or return the held scores of {join_names(sorted(board.judging.held), 3)}."
        return (
            f"Next: judge them, or score by rules first: `tipbench judge run --with rules --experiment {experiment}`."
        )
    if state is CardState.PROVISIONAL:
        n_scenarios = board.coverage.n_scenarios if board.coverage else MIN_SCENARIOS
        n_by_people = board.coverage.n_by_people if board.coverage else 0
        n_missing = min(MIN_SCENARIOS, n_scenarios) - n_by_people
        if n_missing <= 0:
            return f"Next: compare by people's scores: they cover {n_by_people} of {plural(n_scenarios, 'scenario')}."
        return (
            f"Next: judge {plural(n_missing, 'scenario')} by hand, so that people's scores count: "
            f"`tipbench judge export --experiment {experiment}`."
        )
    if not _has_cells(board) and not ranking.unranked:
        return "Next: collect a model with a prompt, which can be ranked."
    if state is CardState.BEHIND:
        return "Next: use the reference, or try other prompts and models."
    if state is CardState.DECIDED and board.by:
        return "Next: choose one of its pairs on the board without `--by`."
    if state is CardState.DECIDED and ranking.leader is not None:
        return f"Next: record it: `tipbench decide --choose {shlex.quote(str(ranking.leader))} --because …`."
    if ranking.next_look is not None and ranking.next_look.n_answers:
        return f"Next: {next_look_task(ranking.next_look)}."
    n_pending = _count_pending(board)
    if n_pending and not ranking.decided:
        return f"Next: {judging_task(n_pending, minutes=_judging_minutes(board, n_pending))}."
    if ranking.unranked:
        rows = join_names((row.pair for row in ranking.unranked), 3)
        return f"Next: collect and judge the missing answers of {rows}, or compare with `--exclude`."
    if ranking.units_needed is not None:
        n_more = max(ranking.units_needed - ranking.n_units, 1)
        if board.by or board.cluster:  # each mean is of several answers, so their number is unknown
            return f"Next: collect and {judging_task(n_answers=0, n_scenarios=n_more, power=POWER, unit=board.unit)}."
        n_answers = n_more * len(ranking.ranked)
        minutes = _judging_minutes(board, n_answers)
        return f"Next: collect and {judging_task(n_answers, n_scenarios=n_more, minutes=minutes, power=POWER)}."
    if len(ranking.ranked) < 2:
        return "Next: collect another model or prompt to compare it with."
    if ranking.too_few_units:
        return f"Next: collect more scenarios; at least {MIN_SCENARIOS} {board.unit}s are needed to decide."
    return f"Next: choose among the {TIED} by speed, size or duels; more scenarios would hardly decide."


def _judging_minutes(board: Leaderboard, n_answers: int) -> float | None:
    minutes_per_answer = board.judging.minutes_per_answer
    return None if minutes_per_answer is None else minutes_per_answer * n_answers


def _has_cells(board: Leaderboard) -> bool:
    """Return whether any row has cells.

    Stale rows have none. On a board by model, rows have none if no prompt is shared by all models, and on a board by
    prompt, if no model is shared by all prompts.
    """
    return any(standing.n_cells for standing in board.standings)


def _count_answers(board: Leaderboard) -> int:
    return sum(standing.n_cells - standing.n_failed for standing in board.standings)


def _count_pending(board: Leaderboard) -> int:
    return sum(standing.n_cells - standing.n_failed - standing.n_judged for standing in board.standings)


def _standing(board: Leaderboard, pair: Pair) -> Standing:
    return next(standing for standing in board.standings if standing.pair == pair)


def _name(board: Leaderboard, pair: Pair) -> str:
    return short_name(label_of(board, pair), _MAX_NAME_CHARS)
