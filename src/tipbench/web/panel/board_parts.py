"""The parts of the leaderboard's page below the table: what the spread is due to, the duels, and who judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tipbench.compare.attribution import Attribution, Marginal
from tipbench.compare.duels import DuelTable
from tipbench.compare.heat_map import MEAN, heat_rows
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.report import (
    NOTHING,
    attribution_lines,
    factors_of,
    interval,
    label_of,
    number,
    one_line,
    percent,
    probability,
    shortened,
)
from tipbench.compare.statistics import Unknown
from tipbench.compare.words import listed
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetHistory
from tipbench.web.panel.standings_view import LONGEST

Grid = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]  # heads, then rows; the first of each names the row


@dataclass(frozen=True)
class Source:
    """One source of the spread."""

    name: str
    share: float
    percent: str
    p: str


@dataclass(frozen=True)
class Causes:
    """What the spread is due to; `sources` is empty where it cannot be told, and `lines` say why."""

    lines: tuple[str, ...]
    sources: tuple[Source, ...] = ()
    marginals: tuple[tuple[str, Grid], ...] = ()


@dataclass(frozen=True)
class Duels:
    """Blind A/B comparisons inside the tied rows."""

    said: str
    table: Grid | None


@dataclass(frozen=True)
class Judging:
    """The strip on the judging: of the whole experiment, whatever the board is filtered by."""

    facts: tuple[tuple[str, str | None], ...]
    table: Grid | None
    filtered: bool


def heat_grid(board: Leaderboard) -> Grid:
    """The numbers of the heat map."""
    models, prompts, means = heat_rows(board)
    heads = ("model", *(_short(prompt) for prompt in prompts), "mean")
    rows = [(_short(model), *(_dash(number(means[model, prompt])) for prompt in (*prompts, MEAN))) for model in models]
    return heads, (*rows, ("mean", *(_dash(number(means[MEAN, prompt])) for prompt in prompts), ""))


def causes(found: Attribution | Unknown) -> Causes:
    """Sources with their shares, and each model and prompt over the others."""
    lines = tuple(attribution_lines(found))
    if isinstance(found, Unknown):
        return Causes(lines)
    sources = tuple(
        Source(label, factor.share, percent(factor.share) or NOTHING, _dash(probability(factor.p)))
        for label, factor in factors_of(found)
    )
    sides = (("Models, over all prompts", "model", found.models), ("Prompts, over all models", "prompt", found.prompts))
    # The first line says the shares once more: they stand in the bars.
    return Causes(lines[1:], sources, tuple((title, _grid(side, each)) for title, side, each in sides if len(each) > 1))


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
    """None when there were none."""
    found = board.duels
    if found is None:
        return None
    if isinstance(found, Unknown):
        return Duels(found.reason, None)
    winner = f"{found.winner} wins." if found.winner else "Nobody wins clearly."
    if found.absent:
        winner = f"No winner yet: {listed(found.absent, 3)} not met."
    first = f"The side shown first got {percent(found.first_share)} of the points. Duels change no rank."
    return Duels(one_line(f"{winner} {first}"), _duel_grid(board, found))


def _duel_grid(board: Leaderboard, found: DuelTable) -> Grid:
    rows = [
        (
            shortened(label_of(board, each.pair), LONGEST),
            _dash(number(each.strength.value, "+.2f")),
            _dash(interval(each.strength.ci_low, each.strength.ci_high, "+.2f")),
            f"{each.points:g} of {each.duels}",
            str(each.n_scenarios),
        )
        for each in found.standings
    ]
    return ("row", "strength", "95 % interval", "points", "scenarios"), tuple(rows)


def judging(board: Leaderboard | None, found: JudgingStatus) -> Judging:
    """Who judged, how far they agree, and how far from the agreed scores they are."""
    twice = f"{found.twice} of {found.judged}"
    if found.judged:
        twice += f" ({percent(found.twice / found.judged)})"
    alpha = ", ".join(f"{one_line(name)} {number(value) or 'unknown'}" for name, value in found.alpha.items())
    rubric = (board.rubric_tag if board else "") or ", ".join(found.rubrics)
    answers = f"{found.judged} judged, {found.pending} pending" + (f", {found.held} held" if found.held else "")
    facts = (
        ("rubric", _rubric(rubric)),
        ("answers", f"{answers}; {found.floored} at the floor" if found.floored else answers),
        ("judged twice", twice),
        (
            "agreement (Krippendorff's alpha)",
            alpha if found.twice and alpha else "unknown: no two have judged the same",
        ),
    )
    filtered = board is not None and bool(board.where or board.judge)
    return Judging(facts, _judge_grid(found) if found.judges else None, filtered)


def _rubric(tag: str) -> str | None:
    name, _, sha256 = tag.partition("@")
    return f"{one_line(name)} ({sha256[:12]})" if sha256 else one_line(name) or None


def _judge_grid(found: JudgingStatus) -> Grid:
    newest = {(sheet.judge, sheet.provisional): sheet for sheet in found.history if (sheet.drift or {}).get("scales")}
    scales = list(dict.fromkeys(scale["scale"] for sheet in newest.values() for scale in _scales(sheet)))
    heads = ("judge", "scores", "answers", "drift", "error on controls", "same score again")
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
    beyond = ", beyond" if scale["beyond"] else ""
    return f"{number(scale['bias'], '+.2f')}{beyond}"


def _short(name: str) -> str:
    return shortened(one_line(name), LONGEST)


def _dash(text: str | None) -> str:
    return text or NOTHING
