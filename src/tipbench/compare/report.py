"""The board as text: a table for people, CSV for spreadsheets, Markdown for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from tipbench.compare.attribution import Attribution, Factor, InteractionFlag
from tipbench.compare.duels import DuelTable
from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import Pair
from tipbench.compare.spreadsheet import csv_text
from tipbench.compare.statistics import Difference, Unknown
from tipbench.compare.words import counted, listed

__all__ = ["State", "below", "csv_text", "markdown_table", "state_of", "table_rows", "to_csv", "to_markdown"]

TEXT_COLUMNS = ("model", "prompt", "standing", "flags")
NOTHING = "–"
FACTORS = {
    "model": "model",
    "prompt": "prompt",
    "interaction": "model × prompt",
    "scenario": "scenario",
    "residual": "rest, noise included",
}

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#!|~&$])")
_CALLING = re.compile(r"(?<!\w)@(?=\w)|@(?=[\w-]+\.\w)")  # a mention, or an address of mail
_LINK = re.compile(r"(?<=\w)(:)(?=//)|(?i:(?<=\bwww)(\.))")
_BLANKS = re.compile(r"\s+")
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class State(StrEnum):
    """Where a row stands towards the leader."""

    LEADER = "leader"
    TIED = "tied"  # cannot be told apart from the leader
    SEPARATED = "separated"
    INCOMPLETE = "incomplete"  # not ranked


def state_of(board: Leaderboard, pair: Pair) -> State:
    """Leader, tied with it, separated from it, or not ranked."""
    ranking = board.ranking
    if pair == ranking.leader:
        return State.LEADER
    if pair in ranking.tied_set:
        return State.TIED
    return State.SEPARATED if pair in ranking.complete else State.INCOMPLETE


def table_rows(board: Leaderboard) -> tuple[list[str], list[list[str | None]]]:
    """The table for people: what matters most on the left, numbers rounded, unknown is None."""
    names = {"model": ["model"], "prompt": ["prompt"]}.get(board.by or "", ["model", "prompt"])
    baseline = ["to baseline", "p (baseline)"] if board.baseline else []
    columns = [
        "rank", *names, "composite", "95 % interval", "P(best)", "to leader", "standing", "p", *baseline, "judged",
        "flags", *board.scales, "format", "overlong", "diversity", "latency s", "tokens/s",
    ]  # fmt: skip
    return columns, [_people_row(board, standing, names) for standing in board.standings]


def _people_row(board: Leaderboard, standing: Standing, names: Sequence[str]) -> list[str | None]:
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
        str(state_of(board, row.pair)),
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
    """One line for each row, not rounded, with the names of the JSON form; differences take four columns each."""
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
    """Verdict, table, what the spread is due to, and notes."""
    columns, rows = table_rows(board)
    scored = ", ".join(board.judges) or "nobody"
    parts = [
        f"## {plain_markdown(board.experiment)}",
        f"**{plain_markdown(board.verdict)}**",
        markdown_table(columns, rows, text=TEXT_COLUMNS).rstrip(),
        "\n".join(f"- {plain_markdown(line)}" for line in below(board)),
        "\n".join(f"- Note: {plain_markdown(note)}" for note in board.notes),
        plain_markdown(f"Rubric {board.rubric or 'none'}, suite {board.suite}, judged by {scored}."),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], text: Sequence[str] = ()) -> str:
    """A Markdown table; no cell is read as markup, numbers stand to the right."""
    marks = [":--" if column in text else "--:" for column in columns]
    lines = [[plain_markdown(column) for column in columns], marks]
    lines += [[plain_markdown(_cell(value)) for value in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return NOTHING
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def plain_markdown(text: str) -> str:
    """The text on one line, with nothing that Markdown, HTML or a forge would obey: no markup, link or mention."""
    quiet = _CALLING.sub("@\u200b", one_line(text))  # escaped, a mention would still call; a blank of no width ends it
    return _LINK.sub(lambda found: f"\\{found[0]}", _MARKDOWN.sub(r"\\\1", quiet))


def below(board: Leaderboard) -> list[str]:
    """The lines under the table: what could have been found, what the spread is due to, the duels."""
    return [*detectable_lines(board), *attribution_lines(board.attribution), *_duel_lines(board.duels)]


def detectable_lines(board: Leaderboard) -> list[str]:
    """How small a difference these scenarios would show; nothing where that is unknown."""
    least = board.ranking.smallest_detectable
    if least is None:
        return []
    over = counted(board.ranking.n_scenarios, board.unit)
    return [f"Differences to the leader under {least:.1f} points would probably not be found with {over}."]


def attribution_lines(found: Attribution | Unknown) -> list[str]:
    """The shares in one sentence, then the prompts that do not do the same for all models."""
    if isinstance(found, Unknown):
        return [f"No attribution: {found.reason}"]
    shares = [f"{FACTORS[name]} {share:.0%}" for name, share in found.shares().items() if share is not None]
    rows = f" (over the complete rows, without {listed(found.without, 3)})" if found.without else ""
    lines = [f"The spread of scores{rows} is due to: {', '.join(shares)}."]
    if found.persona is not None:
        lines.append(f"Of the whole, {found.persona.share:.0%} is differences between personas (part of scenario).")
    return [*lines, *(flag_line(flag) for flag in found.flags)]


def flag_line(flag: InteractionFlag) -> str:
    """A prompt whose effect depends on the model."""
    said = [f"{verb} {', '.join(models)}" for verb, models in (("helps", flag.helps), ("hurts", flag.hurts)) if models]
    return f"The prompt {flag.prompt} does not do the same for all models: it {' and '.join(said)}."


def _duel_lines(duels: DuelTable | Unknown | None) -> Iterator[str]:
    if isinstance(duels, Unknown):
        yield f"Duels: {duels.reason}"
    elif duels is not None:
        points = [f"{each.pair} {each.points:g} of {each.duels}" for each in duels.standings]
        winner = f"{duels.winner} wins" if duels.winner else "nobody wins clearly"
        if duels.absent:
            winner = f"not met yet: {listed(duels.absent, 3)}"
        over = counted(duels.n_scenarios, "scenario")
        yield f"Duels inside the tied group over {over} (points): {', '.join(points)}; {winner}."


def factors_of(found: Attribution) -> list[tuple[str, Factor]]:
    """The sources of spread that the layout has, with their names for people."""
    pairs = ((label, getattr(found, name)) for name, label in FACTORS.items())
    return [(label, factor) for label, factor in pairs if factor is not None]


def label_of(board: Leaderboard, pair: Pair) -> str:
    """What a row is called: MODEL/PROMPT, or the side that is ranked alone."""
    return one_line({"model": pair.model, "prompt": pair.prompt}.get(board.by or "", str(pair)))


def one_line(text: str) -> str:
    """Text of unknown origin on one line, without control and direction characters."""
    return _BLANKS.sub(" ", _HIDDEN.sub("\ufffd", text)).strip()


def shortened(text: str, most: int) -> str:
    """The text with its middle left out when too long: names differ at both ends."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def rank_text(standing: Standing) -> str | None:
    """The rank with its range: 2 (1–4)."""
    row = standing.row
    if row.rank is None:
        return None
    return str(row.rank) if row.rank_low == row.rank_high else f"{row.rank} ({row.rank_low}–{row.rank_high})"


def number(value: float | None, form: str = ".2f") -> str | None:
    """Rounded, with a minus that is as wide as a plus; None stays None."""
    return None if value is None else format(value, form).replace("-", "−")


def interval(low: float | None, high: float | None, form: str = ".2f") -> str | None:
    """Both ends; None when there is no interval."""
    return None if low is None or high is None else f"{number(low, form)} to {number(high, form)}"


def difference_text(found: Difference | None) -> str | None:
    """A difference with its interval."""
    if found is None:
        return None
    ends = interval(found.ci_low, found.ci_high, "+.2f")
    return f"{number(found.mean, '+.2f')} ({ends})" if ends else number(found.mean, "+.2f")


def percent(share: float | None) -> str | None:
    """A share as people say it; never 0 % or 100 % unless it is."""
    if share is None:
        return None
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{share:.0%}".replace("%", " %")


def chance(p: float | None) -> str | None:
    """A probability found by resampling: none of 10 000 is not never, and all is not always."""
    if p is None:
        return None
    return "<1 %" if p < 0.005 else ">99 %" if p >= 0.995 else percent(p)


def best_text(board: Leaderboard, standing: Standing) -> str | None:
    """The chance of being best; with too few scenarios resampling them says too little to be shown."""
    return None if board.ranking.too_few else chance(standing.row.p_best)


def p_text(found: Difference | None) -> str | None:
    """The p of a difference."""
    return probability(found.p) if found else None


def probability(p: float | None) -> str | None:
    """A p value."""
    return None if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"
