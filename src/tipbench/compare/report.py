"""Formats a board as text: table rows, CSV and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum

from tipbench.compare.attribution import Attribution
from tipbench.compare.cells import is_reference
from tipbench.compare.duels import DuelTable
from tipbench.compare.leaderboard import Leaderboard, Standing
from tipbench.compare.matrix import Pair
from tipbench.compare.statistics import Difference, Unknown
from tipbench.compare.verdict import TIED
from tipbench.markup import NOTHING
from tipbench.text import csv_text, interval, join_names, number, one_line, p_value, percent, plural

TEXT_COLUMNS = ("model", "prompt", "standing", "flags")
FACTORS = {
    "model": "model",
    "prompt": "prompt",
    "interaction": "model × prompt",
    "scenario": "scenario",
    "residual": "unexplained",
}

_MARKUP = re.compile(r"[\\`*_{}\[\]<>()#!|~&$]")
_MENTION = re.compile(r"(?<!\w)@(?=\w)|@(?=[\w-]+\.\w)")  # the @ of a mention or an email address
_LINK = re.compile(r"(?<=\w):(?=//)|(?<=\bwww)\.", re.IGNORECASE)  # the colon of `https://` or the dot after `www`


class State(StrEnum):
    """The state of a row relative to the leader."""

    LEADER = "leader"
    TIED = "tied"  # ranked, and not significantly worse than the leader
    SEPARATED = "separated"  # significantly worse than the leader
    INCOMPLETE = "incomplete"  # not ranked
    REFERENCE = "reference"  # compared with the leader, but not ranked


STATE_TEXTS = {
    State.LEADER: "leader",
    State.TIED: TIED,
    State.SEPARATED: "clearly worse",
    State.INCOMPLETE: "not ranked",
    State.REFERENCE: "reference",
}


def state_of(board: Leaderboard, pair: Pair) -> State:
    """Return the state of a pair on the board."""
    ranking = board.ranking
    if pair == ranking.leader:
        return State.LEADER
    if any(reference.pair == pair for reference in board.references):
        return State.REFERENCE
    if pair not in ranking.ranked:
        return State.INCOMPLETE
    # `ahead`: clearly better than the leader in the tested scenarios, although its mean over all scenarios is lower.
    if pair in ranking.tied or pair in ranking.ahead:
        return State.TIED
    return State.SEPARATED


def table_rows(board: Leaderboard) -> tuple[list[str], list[list[str | None]]]:
    """Return the columns, most important first, and the rows. Numbers are rounded; unknown values are None."""
    name_columns = [board.by] if board.by else ["model", "prompt"]
    has_adjusted = any(standing.result.is_adjusted for standing in board.standings)
    rows: list[list[tuple[str, str | None]]] = []
    for standing in (*board.standings, *board.references):
        result, means, estimate = standing.result, standing.means, standing.result.estimate
        differences = [("to leader", difference_text(result.to_leader)), ("p", p_text(result.to_leader))]
        if board.baseline:
            differences.append(("to baseline", difference_text(result.to_baseline)))
            differences.append(("p (baseline)", p_text(result.to_baseline)))
        adjusted = [("adjusted", number(result.adjusted_mean))] if has_adjusted else []
        rows.append(
            [
                ("rank", rank_text(standing)),
                *((name, one_line(getattr(result.pair, name))) for name in name_columns),
                ("composite", number(estimate.mean if estimate else None)),
                ("standing", STATE_TEXTS[state_of(board, result.pair)]),
                *adjusted,
                ("95 % interval", interval(estimate.ci_low, estimate.ci_high) if estimate else None),
                ("P(best)", best_text(board, standing)),
                *differences,
                ("usable", usable_text(standing)),
                ("if usable", number(standing.usable.composite) if standing.usable else None),
                ("judged", f"{standing.n_judged}/{standing.n_cells}"),
                ("flags", " ".join(standing.flags)),
                *((scale, number(means.get(scale))) for scale in board.scales),
                ("format", percent(means.get("format_ok"))),
                ("overlong", percent(means.get("overlong"))),
                ("diversity", number(means.get("diversity"))),
                ("latency s", number(means.get("latency_s"))),
                ("tokens/s", number(means.get("tokens_per_s"), ".1f")),
            ]
        )
    columns = [column for column, _ in rows[0]] if rows else []
    return columns, [[value for _, value in row] for row in rows]


def to_csv(board: Leaderboard) -> str:
    """Return the rows as CSV, references last. Columns are named as in JSON, and numbers are not rounded."""
    records: list[dict[str, object]] = []
    for standing in (*board.standings, *board.references):
        record: dict[str, object] = {}
        for name, value in standing.to_json().items():
            if name.startswith("diff_to_"):
                record |= {f"{name}_{part}": (value or {}).get(part) for part in ("mean", "ci_low", "ci_high", "p")}
            else:
                record[name] = " ".join(value) if isinstance(value, list) else value
        record["standing"] = str(state_of(board, standing.pair))
        record["provisional"] = str(board.provisional).lower()
        records.append(record)
    return csv_text(list(records[0]) if records else [], [list(record.values()) for record in records])


def to_markdown(board: Leaderboard) -> str:
    """Return the verdict, table, attribution and notes as Markdown."""
    columns, rows = table_rows(board)
    judges = ", ".join(board.judges) or "no one yet"
    rubric_id, _, _ = board.rubric.partition("@")
    parts = [
        f"## {plain_markdown(board.experiment)}",
        f"**{plain_markdown(board.verdict)}**",
        markdown_table(columns, rows, left_aligned=TEXT_COLUMNS).rstrip(),
        "\n".join(f"- {plain_markdown(line)}" for line in footer_lines(board)),
        "\n".join(f"- Note: {plain_markdown(note)}" for note in board.notes),
        plain_markdown(f"Rubric {rubric_id or 'none'}, suite {board.suite}, judged by {judges}."),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], left_aligned: Sequence[str] = ()) -> str:
    """Return a Markdown table with escaped values. Columns that are not in `left_aligned` are right-aligned."""
    alignments = [":--" if column in left_aligned else "--:" for column in columns]
    lines = [[plain_markdown(column) for column in columns], alignments]
    for row in rows:
        values = [f"{value:.2f}" if isinstance(value, float) else value for value in row]
        lines.append([plain_markdown(NOTHING if value is None else str(value)) for value in values])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain_markdown(text: str) -> str:
    """Return the text on one line, escaped so that it contains no markup, links or mentions."""
    # Escaping does not disable mentions; a zero-width space does.
    without_mentions = _MENTION.sub("@\u200b", one_line(text))
    without_markup = _MARKUP.sub(r"\\\g<0>", without_mentions)
    return _LINK.sub(r"\\\g<0>", without_markup)


def footer_lines(board: Leaderboard) -> list[str]:
    """Return the lines below the table: detectable difference, attribution and duels."""
    detectable, duels = detectable_text(board), board.duels
    lines = [detectable] if detectable else []
    lines += attribution_lines(board.attribution)
    if isinstance(duels, Unknown):
        lines.append(f"Duels: {duels.reason}")
    elif duels is not None:
        points = [f"{row.pair} {row.points:g} of {row.n_duels}" for row in duels.standings]
        scenarios = plural(duels.n_scenarios, "scenario")
        lines.append(
            f"Duels between the {TIED} rows over {scenarios} (points): {', '.join(points)}. {duel_result(duels)}"
        )
    return lines


def detectable_text(board: Leaderboard) -> str | None:
    """Return the sentence on the smallest detectable difference; None if it is unknown."""
    smallest = board.ranking.smallest_detectable
    if smallest is None:
        return None
    n_units = board.ranking.n_tested or board.ranking.n_units  # n_tested is 0 before the first look
    units = plural(n_units, board.unit)
    return f"Differences to the leader of less than {smallest:.1f} points are unlikely to be detected with {units}."


def attribution_lines(attribution: Attribution | Unknown) -> list[str]:
    """Return a line with the share of each factor, and a line for each prompt whose effect depends on the model."""
    if isinstance(attribution, Unknown):
        return [f"No attribution: {attribution.reason}"]
    shares = []
    for name, factor in attribution.factors().items():
        if factor is not None:
            show_p = factor.p is not None and name != "scenario"  # that scenarios differ is expected
            p = f" (p {p_value(factor.p)})" if show_p else ""
            shares.append(f"{FACTORS[name]} {percent(factor.share)}{p}")
    scope = ""
    if attribution.excluded:
        scope = f" (over the complete rows, without {join_names(attribution.excluded, 3)})"
    lines = [f"What explains the differences{scope}: {', '.join(shares)}."]
    if attribution.persona is not None:
        lines.append(f"Differences between personas explain {percent(attribution.persona.share)} (part of scenario).")
    for each in attribution.model_dependent_prompts:
        effects = (("helps", each.helps), ("hurts", each.hurts))
        parts = [f"{verb} {', '.join(models)} more than others" for verb, models in effects if models]
        lines.append(f"{each.prompt} {' and '.join(parts)}.")
    return lines


def duel_result(duels: DuelTable) -> str:
    """Return a sentence with the winner of the duels, or why there is none."""
    if duels.absent:
        return f"No winner yet: no duels of {join_names(duels.absent, 3)}."
    return f"{duels.winner} wins." if duels.winner else "No clear winner."


def label_of(board: Leaderboard, pair: Pair) -> str:
    """Return the label of a row: its model, its prompt or MODEL/PROMPT."""
    if board.by == "model" or is_reference(pair):
        return one_line(pair.model)
    if board.by == "prompt":
        return one_line(pair.prompt)
    return one_line(str(pair))


def rank_text(standing: Standing) -> str | None:
    """Format the rank with its range: 2 (1–4)."""
    result = standing.result
    if result.rank is None:
        return None
    if result.rank_low == result.rank_high:
        return str(result.rank)
    return f"{result.rank} ({result.rank_low}–{result.rank_high})"


def usable_text(standing: Standing) -> str | None:
    """Format the number of scenarios with a usable tip, with the interval of the rate unless it is 100 %."""
    usable = standing.usable
    if usable is None:
        return None
    count = f"{usable.n_usable:g}/{usable.n_scenarios}"
    return count if usable.rate == 1 else f"{count} ({percent(usable.low)} to {percent(usable.high)})"


def difference_text(difference: Difference | None) -> str | None:
    """Format a difference with its interval."""
    if difference is None:
        return None
    bounds = interval(difference.ci_low, difference.ci_high, "+.2f")
    return f"{number(difference.mean, '+.2f')} ({bounds})" if bounds else number(difference.mean, "+.2f")


def chance_text(p: float | None) -> str | None:
    """Format a probability from resampling: never 0 % or 100 %, because resampling cannot establish either."""
    if p is None:
        return None
    if p < 0.005:
        return "<1 %"
    return ">99 %" if p >= 0.995 else percent(p)


def best_text(board: Leaderboard, standing: Standing) -> str | None:
    """Format the probability of being best; None if there are too few scenarios to resample."""
    return None if board.ranking.too_few_units else chance_text(standing.result.p_best)


def p_text(difference: Difference | None) -> str | None:
    """Format the p-value of a difference."""
    return p_value(difference.p) if difference else None
