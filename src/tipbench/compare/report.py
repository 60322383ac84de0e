"""Formats a board as text: table rows, CSV safe from formula injection, Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from tipbench.compare.attribution import Attribution, Factor, InteractionFlag
from tipbench.compare.duels import DuelTable
from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import Pair
from tipbench.compare.statistics import Difference, Unknown
from tipbench.text import csv_text, interval, join_names, number, one_line, percent, plural, probability

TEXT_COLUMNS = ("model", "prompt", "standing", "flags")
NOTHING = "–"
FACTORS = {
    "model": "model",
    "prompt": "prompt",
    "interaction": "model × prompt",
    "scenario": "scenario",
    "residual": "unexplained",
}

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#!|~&$])")
_MENTION = re.compile(r"(?<!\w)@(?=\w)|@(?=[\w-]+\.\w)")  # a mention or an email address
_LINK = re.compile(r"(?<=\w)(:)(?=//)|(?i:(?<=\bwww)(\.))")


class State(StrEnum):
    """The state of a row relative to the leader."""

    LEADER = "leader"
    TIED = "tied"  # not clearly different from the leader
    SEPARATED = "separated"  # clearly worse than the leader
    INCOMPLETE = "incomplete"  # not ranked


STATE_TEXTS = {
    State.LEADER: "leader",
    State.TIED: "tied",
    State.SEPARATED: "clearly worse",
    State.INCOMPLETE: "not ranked",
}


def state_of(board: Leaderboard, pair: Pair) -> State:
    """Returns the state of a pair on the board."""
    ranking = board.ranking
    if pair == ranking.leader:
        return State.LEADER
    if pair in ranking.tied_set:
        return State.TIED
    return State.SEPARATED if pair in ranking.complete else State.INCOMPLETE


def table_rows(board: Leaderboard) -> tuple[list[str], list[list[str | None]]]:
    """Returns columns (most important first) and rows for display; numbers are rounded, unknown values are None."""
    names = {"model": ["model"], "prompt": ["prompt"]}.get(board.by or "", ["model", "prompt"])
    baseline = ["to baseline", "p (baseline)"] if board.baseline else []
    columns = [
        "rank", *names, "composite", "95 % interval", "P(best)", "to leader", "standing", "p", *baseline, "judged",
        "flags", *board.scales, "format", "overlong", "diversity", "latency s", "tokens/s",
    ]  # fmt: skip
    return columns, [_table_row(board, standing, names) for standing in board.standings]


def _table_row(board: Leaderboard, standing: Standing, names: Sequence[str]) -> list[str | None]:
    row, means = standing.row, standing.means
    estimate = row.estimate
    baseline = [difference_text(row.to_baseline), p_text(row.to_baseline)] if board.baseline else []
    return [
        rank_text(standing),
        *(one_line(getattr(row.pair, name)) for name in names),
        number(estimate.mean if estimate else None),
        interval(estimate.ci_low, estimate.ci_high) if estimate else None,
        best_text(board, standing),
        difference_text(row.to_leader),
        STATE_TEXTS[state_of(board, row.pair)],
        p_text(row.to_leader),
        *baseline,
        f"{standing.judged}/{standing.total}",
        " ".join(standing.flags),
        *(number(means.get(scale)) for scale in board.scales),
        percent(means.get("format_ok")),
        percent(means.get("overlong")),
        number(means.get("diversity")),
        number(means.get("latency_s")),
        number(means.get("tokens_per_s"), ".1f"),
    ]


def to_csv(board: Leaderboard) -> str:
    """Returns one unrounded line per row, with the names of the JSON form; differences take four columns each."""
    records = [_flat(board, standing) for standing in board.standings]
    columns = list(records[0]) if records else []
    return csv_text(columns, [list(record.values()) for record in records])


def _flat(board: Leaderboard, standing: Standing) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in standing.to_json().items():
        if name.startswith("diff_to_"):
            flat |= {f"{name}_{part}": (value or {}).get(part) for part in ("mean", "ci_low", "ci_high", "p")}
        else:
            flat[name] = " ".join(value) if isinstance(value, list) else value
    return {**flat, "standing": str(state_of(board, standing.pair)), "provisional": str(board.provisional).lower()}


def to_markdown(board: Leaderboard) -> str:
    """Returns the verdict, table, attribution and notes as Markdown."""
    columns, rows = table_rows(board)
    judges = ", ".join(board.judges) or "no one yet"
    parts = [
        f"## {plain_markdown(board.experiment)}",
        f"**{plain_markdown(board.verdict)}**",
        markdown_table(columns, rows, text=TEXT_COLUMNS).rstrip(),
        "\n".join(f"- {plain_markdown(line)}" for line in footer_lines(board)),
        "\n".join(f"- Note: {plain_markdown(note)}" for note in board.notes),
        plain_markdown(f"Rubric {board.rubric or 'none'}, suite {board.suite}, judged by {judges}."),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], text: Sequence[str] = ()) -> str:
    """Returns a Markdown table; cells are escaped, columns not in `text` are right-aligned."""
    marks = [":--" if column in text else "--:" for column in columns]
    lines = [[plain_markdown(column) for column in columns], marks]
    for row in rows:
        texts = [f"{value:.2f}" if isinstance(value, float) else value for value in row]
        lines.append([plain_markdown(NOTHING if text is None else str(text)) for text in texts])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain_markdown(text: str) -> str:
    """Returns the text on one line, escaped so that it contains no markup, links or mentions."""
    # Escaping does not disable mentions; a zero-width space does.
    without_mentions = _MENTION.sub("@\u200b", one_line(text))
    return _LINK.sub(lambda found: f"\\{found[0]}", _MARKDOWN.sub(r"\\\1", without_mentions))


def footer_lines(board: Leaderboard) -> list[str]:
    """Returns the lines below the table: detectable difference, attribution and duels."""
    return [*detectable_lines(board), *attribution_lines(board.attribution), *_duel_lines(board.duels)]


def detectable_lines(board: Leaderboard) -> list[str]:
    """Returns a line with the smallest detectable difference; empty if unknown."""
    least = board.ranking.smallest_detectable
    if least is None:
        return []
    over = plural(board.ranking.n_scenarios, board.unit)
    return [f"Differences to the leader of less than {least:.1f} points are unlikely to be detected with {over}."]


def attribution_lines(found: Attribution | Unknown) -> list[str]:
    """Returns the shares in one sentence, then the prompts whose effect depends on the model."""
    if isinstance(found, Unknown):
        return [f"No attribution: {found.reason}"]
    shares = [f"{FACTORS[name]} {share:.0%}" for name, share in found.shares().items() if share is not None]
    rows = f" (over the complete rows, without {join_names(found.without, 3)})" if found.without else ""
    lines = [f"What explains the differences{rows}: {', '.join(shares)}."]
    if found.persona is not None:
        lines.append(f"Differences between personas explain {found.persona.share:.0%} (part of scenario).")
    return [*lines, *(flag_line(flag) for flag in found.flags)]


def flag_line(flag: InteractionFlag) -> str:
    """Returns a sentence on a prompt whose effect depends on the model."""
    effects = (("helps", flag.helps), ("hurts", flag.hurts))
    parts = [f"{verb} {', '.join(models)} more than others" for verb, models in effects if models]
    return f"{flag.prompt} {' and '.join(parts)}."


def _duel_lines(duels: DuelTable | Unknown | None) -> Iterator[str]:
    if isinstance(duels, Unknown):
        yield f"Duels: {duels.reason}"
    elif duels is not None:
        points = [f"{each.pair} {each.points:g} of {each.duels}" for each in duels.standings]
        over = plural(duels.n_scenarios, "scenario")
        yield f"Duels between the tied rows over {over} (points): {', '.join(points)}. {duel_result(duels)}"


def duel_result(duels: DuelTable) -> str:
    """Returns a sentence with the winner of the duels, or why there is none."""
    if duels.absent:
        return f"No winner yet: no duels of {join_names(duels.absent, 3)}."
    return f"{duels.winner} wins." if duels.winner else "No clear winner."


def factors_of(found: Attribution) -> list[tuple[str, Factor]]:
    """Returns the available sources of variance with their display names."""
    pairs = ((label, getattr(found, name)) for name, label in FACTORS.items())
    return [(label, factor) for label, factor in pairs if factor is not None]


def label_of(board: Leaderboard, pair: Pair) -> str:
    """Returns the label of a row: MODEL/PROMPT, or only the ranked side."""
    return one_line({"model": pair.model, "prompt": pair.prompt}.get(board.by or "", str(pair)))


def rank_text(standing: Standing) -> str | None:
    """Formats the rank with its range: 2 (1–4)."""
    row = standing.row
    if row.rank is None:
        return None
    return str(row.rank) if row.rank_low == row.rank_high else f"{row.rank} ({row.rank_low}–{row.rank_high})"


def difference_text(found: Difference | None) -> str | None:
    """Formats a difference with its interval."""
    if found is None:
        return None
    ends = interval(found.ci_low, found.ci_high, "+.2f")
    return f"{number(found.mean, '+.2f')} ({ends})" if ends else number(found.mean, "+.2f")


def probability_text(p: float | None) -> str | None:
    """Formats a resampled probability, never as 0 or 100 %, which resampling cannot establish."""
    if p is None:
        return None
    return "<1 %" if p < 0.005 else ">99 %" if p >= 0.995 else percent(p)


def best_text(board: Leaderboard, standing: Standing) -> str | None:
    """Formats the probability of being best; None if there are too few scenarios to resample."""
    return None if board.ranking.too_few else probability_text(standing.row.p_best)


def p_text(found: Difference | None) -> str | None:
    """Formats the p-value of a difference."""
    return probability(found.p) if found else None
