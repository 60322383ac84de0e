"""The report: one HTML file that needs nothing else. No script, no request; what models wrote shows as text.

Every chart is there four times, light and dark, wide and narrow, and the style sheet shows the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

import tipbench
from tipbench.charts import DARK, LIGHT, Theme, to_svg
from tipbench.compare.answers import ScenarioAnswers
from tipbench.compare.drawing import attribution_bar, forest, heat_map, pareto
from tipbench.compare.html_answers import answers_part
from tipbench.compare.html_judging import judging_part
from tipbench.compare.html_parts import facts, section
from tipbench.compare.html_tables import (
    attribution_tables,
    duel_part,
    heat_table,
    measures_table,
    standings_table,
)
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.markup import Html, element, inline_svg, joined
from tipbench.compare.notes import question_text
from tipbench.compare.report import attribution_lines, detectable_lines
from tipbench.compare.statistics import Unknown
from tipbench.compare.words import counted
from tipbench.judge.status import JudgingStatus

CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
Draw = Callable[..., Any]


def html_report(
    board: Leaderboard, answers: Sequence[ScenarioAnswers] = (), judging: JudgingStatus | None = None
) -> str:
    """The whole report as one page, to be written as UTF-8. Needs the extra `charts`."""
    parts = [
        ("standings", "Standings", _standings(board)),
        ("grid", "Model × prompt", _grid(board)),
        ("speed", "Quality against latency", _speed(board)),
        ("causes", "What the spread is due to", _causes(board)),
        ("duels", "Duels", duel_part(board)),
        ("judging", "The judging", judging_part(board, judging)),
        ("answers", "The answers, side by side", answers_part(board, answers)),
    ]
    shown = [(anchor, title, part) for anchor, title, part in parts if part]
    contents = element(
        "nav",
        element("ul", *(element("li", element("a", title, href=f"#{anchor}")) for anchor, title, _ in shown)),
        aria_label="Contents",
    )
    body = joined(_head(board), contents, *(section(anchor, title, part) for anchor, title, part in shown), _foot())
    title = f"Leaderboard of {board.experiment}"
    return f'<!doctype html>\n<html lang="en">\n{_html_head(title)}\n{element("body", body)}\n</html>\n'


def _html_head(title: str) -> Html:
    style = files("tipbench.compare").joinpath("report.css").read_text("utf-8")
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}"
    colours = f":root {{ {_variables(LIGHT)} }}\n{dark}\n"
    return element(
        "head",
        element("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{CSP}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(colours + style)),
    )


def _variables(theme: Theme) -> str:
    names = ("background", "ink", "muted", "grid", "accent", "warning")
    shade = f"--shade: color-mix(in srgb, {theme.accent} 13%, {theme.background})"
    return "; ".join([*(f"--{name}: {getattr(theme, name)}" for name in names), shade])


def _head(board: Leaderboard) -> Html:
    conditions = ", ".join(f"{name} {value}" for name, value in board.conditions.items() if value and name != "id")
    rubric = f"{board.rubric} ({board.rubric_tag.partition('@')[2][:12]})" if board.rubric else "none yet"
    pairs = [
        ("suite", board.suite),
        ("rubric", rubric),
        ("judged by", ", ".join(board.judges) or "nobody yet"),
        ("over", counted(board.ranking.n_scenarios, board.unit)),
        ("filter", question_text(board.where, board.judge) or None),
        ("baseline", str(board.baseline) if board.baseline else None),
        ("conditions", conditions),
        ("hosts", ", ".join(board.hosts) or None),
    ]
    badge = element("span", "provisional", class_="badge warning") if board.provisional else None
    notes = element("ul", *(element("li", note) for note in board.notes)) if board.notes else None
    heading = element("h1", f"Leaderboard of {board.experiment} ", badge)
    return element("header", heading, element("p", board.verdict, class_="verdict"), notes, facts(pairs))


def _foot() -> Html:
    said = (
        "Every comparison is paired by scenario. Intervals are Student-t over scenarios; rows are separated from the "
        "leader by step-down max-t over sign-flips of whole scenarios, at 5 % for all rows together. The leader was "
        "chosen for being high, so its own interval flatters it. Unknown is shown as a dash."
    )
    made = f"Made by tipbench {tipbench.__version__}. This page loads nothing and runs no script."
    return element("footer", element("p", said, class_="muted"), element("p", made, class_="muted"))


def _figure(name: str, draw: Draw, board: Leaderboard, caption: str) -> Html | None:
    drawn = partial(draw, board, titled=False)
    if drawn() is None:
        return None
    variants = [(theme, narrow) for narrow in (False, True) for theme in (LIGHT, DARK)]
    boxes = []
    for theme, narrow in variants:
        width = "narrow" if narrow else "wide"
        svg = inline_svg(to_svg(drawn(theme, narrow=narrow), theme), f"{name}-{width}-{theme.name}")
        labelled = Html(svg.replace("<svg ", f'<svg aria-labelledby="{name}-caption" ', 1))
        boxes.append(element("div", labelled, class_=f"chart {width} {theme.name}"))
    return element("figure", *boxes, element("figcaption", caption, id=f"{name}-caption"))


def _standings(board: Leaderboard) -> Html:
    caption = (
        "Mean composite of each row with its 95 % interval. Diamond: the leader. Circle, shaded: cannot be told apart "
        "from the leader. Square: separated from it. Hollow triangle: incomplete, not ranked. Rows are compared by "
        "paired differences: intervals may overlap and the rows still be told apart."
    )
    least = [element("p", line, class_="muted") for line in detectable_lines(board)]
    return joined(_figure("forest", forest, board, caption), standings_table(board), *least)


def _grid(board: Leaderboard) -> Html | None:
    caption = (
        "Mean composite of each pair: the stronger the blue, the higher. Thick frame: the leader; thin frame: "
        "cannot be told apart from it; in brackets: incomplete."
    )
    figure = _figure("grid-chart", heat_map, board, caption)
    return joined(figure, heat_table(board)) if figure else None


def _speed(board: Leaderboard) -> Html:
    caption = (
        "Up is better, left is faster. The dashed line joins the complete pairs that no other pair beats in both. "
        "Latency is without the loading of the model."
    )
    hosts = None
    if len(board.hosts) > 1:
        hosts = element(
            "p", f"Measured on {len(board.hosts)} hosts: speeds do not compare across them.", class_="warning"
        )
    return joined(_figure("speed-chart", pareto, board, caption), hosts, measures_table(board))


def _causes(board: Leaderboard) -> Html:
    lines = [element("p", line) for line in attribution_lines(board.attribution)]
    if isinstance(board.attribution, Unknown):
        return joined(*lines)
    caption = (
        "Shares of the sum of squares. Chance alone gives every source some share; p says whether there is more "
        "(F test against the rest)."
    )
    return joined(
        *lines, _figure("causes-chart", attribution_bar, board, caption), attribution_tables(board.attribution)
    )
