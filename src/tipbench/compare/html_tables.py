"""The report's tables of numbers: standings, scales and speed, model × prompt, sources of spread, duels."""

from __future__ import annotations

from collections.abc import Sequence

from tipbench.compare.attribution import Attribution, Marginal
from tipbench.compare.duels import DuelTable
from tipbench.compare.heat_map import MEAN, heat_rows
from tipbench.compare.html_parts import Column, table
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.markup import Html, element, joined
from tipbench.compare.report import (
    TEXT_COLUMNS,
    factors_of,
    interval,
    label_of,
    number,
    one_line,
    percent,
    probability,
    shortened,
    state_of,
    table_rows,
)
from tipbench.compare.statistics import Unknown
from tipbench.compare.words import counted, listed

LONGEST = 80  # letters of a name; JSON and CSV have it whole
_STANDINGS = (
    "composite", "95 % interval", "rank", "P(best)", "to leader", "standing", "p", "to baseline", "p (baseline)",
    "judged", "flags",
)  # fmt: skip


def standings_table(board: Leaderboard) -> Html:
    """What decides: composite, ranks, differences, flags."""
    other = f", or − {shortened(one_line(str(board.baseline)), LONGEST)} (baseline)" if board.baseline else ""
    versus = f"Differences are row − leader{other}, with 95 % interval; p is adjusted for all rows. "
    caption = f"{versus}A rank has its range in brackets."
    return _board_table(board, caption, _STANDINGS)


def measures_table(board: Leaderboard) -> Html:
    """What a composite is made of, and what it costs."""
    names = ("composite", *board.scales, "format", "overlong", "diversity", "latency s", "tokens/s")
    return _board_table(board, "Scales, form and speed: means over scenarios.", names)


def _board_table(board: Leaderboard, caption: str, wanted: Sequence[str]) -> Html:
    columns, rows = table_rows(board)
    flagged = any(standing.flags for standing in board.standings)
    kept = [name for name in wanted if name in columns and (flagged or name != "flags")]
    at = [columns.index(name) for name in kept]
    named = [Column("row", text=True, head=True), *(Column(name, text=name in TEXT_COLUMNS) for name in kept)]
    pairs = [standing.pair for standing in board.standings]
    body = [
        [shortened(label_of(board, pair), LONGEST), *(row[i] for i in at)]
        for pair, row in zip(pairs, rows, strict=True)
    ]
    return table(caption, named, body, states=[str(state_of(board, pair)) for pair in pairs], cards=True)


def heat_table(board: Leaderboard) -> Html:
    """The numbers of the heat map."""
    models, prompts, means = heat_rows(board)
    columns = [
        Column("model", text=True, head=True),
        *(Column(shortened(one_line(prompt), LONGEST)) for prompt in prompts),
        Column("mean"),
    ]
    rows: list[list[str | None]] = [
        [shortened(one_line(model), LONGEST), *(number(means[model, prompt]) for prompt in [*prompts, MEAN])]
        for model in models
    ]
    rows.append(["mean", *(number(means[MEAN, prompt]) for prompt in prompts), ""])
    caption = "Mean composite by model and prompt; margins where every pair is complete."
    inside = table(caption, columns, rows)
    return element("details", element("summary", "The numbers as a table"), inside)


def attribution_tables(found: Attribution) -> Html:
    """Sources with their tests, then every model and prompt over the others."""
    sources = [
        [label, percent(factor.share), str(factor.freedom), probability(factor.p)]
        for label, factor in factors_of(found)
    ]
    columns = [Column("source", text=True, head=True), Column("share"), Column("degrees of freedom"), Column("p")]
    rows = "complete rows" if found.without else "rows"
    caption = f"Sources of the spread, of the {rows} over {counted(found.n_scenarios, 'scenario')}."
    return joined(
        table(caption, columns, sources),
        _marginals("Models, over all prompts.", "model", found.models),
        _marginals("Prompts, over all models.", "prompt", found.prompts),
    )


def _marginals(caption: str, side: str, marginals: Sequence[Marginal]) -> Html | None:
    if len(marginals) < 2:
        return None
    columns = [Column(side, text=True, head=True), Column("mean"), Column("95 % interval")]
    rows = [
        [
            shortened(one_line(each.name), LONGEST),
            number(each.estimate.mean),
            interval(each.estimate.ci_low, each.estimate.ci_high),
        ]
        for each in marginals
    ]
    return table(caption, columns, rows)


def duel_part(board: Leaderboard) -> Html | None:
    """Blind A/B comparisons inside the tied set; None when there were none."""
    duels = board.duels
    if duels is None:
        return None
    if isinstance(duels, Unknown):
        return element("p", duels.reason)
    winner = f"{duels.winner} wins." if duels.winner else "Nobody wins clearly."
    if duels.absent:
        winner = f"No winner yet: {listed(duels.absent, 3)} not met."
    shown = f"The side shown first got {percent(duels.first_share)} of the points. Duels change no rank."
    return joined(element("p", f"{winner} {shown}"), _duel_table(board, duels))


def _duel_table(board: Leaderboard, duels: DuelTable) -> Html:
    columns = [
        Column("row", text=True, head=True), Column("strength"), Column("95 % interval"), Column("points"),
        Column("duels"), Column("scenarios"),
    ]  # fmt: skip
    rows = [
        [
            shortened(label_of(board, each.pair), LONGEST),
            number(each.strength.value, "+.2f"),
            interval(each.strength.ci_low, each.strength.ci_high, "+.2f"),
            f"{each.points:g}",
            str(each.duels),
            str(each.n_scenarios),
        ]
        for each in duels.standings
    ]
    return table("Bradley–Terry strength in log-odds, against the average of the rows.", columns, rows)
