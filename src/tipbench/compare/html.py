"""HTML of a board: template variables for the panel and the report, and the report as a single file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

import tipbench
from tipbench import markup
from tipbench.charts import DARK, LIGHT, to_svg
from tipbench.compare.answers import ScenarioAnswers
from tipbench.compare.attribution import Attribution
from tipbench.compare.card import summary_card
from tipbench.compare.charts import CHARTS, MEAN, ChartKind, heat_map_means, kinds_of
from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.report import FACTORS, attribution_lines, detectable_text, duel_result, label_of, state_of
from tipbench.compare.standings import MAX_NAME_CHARS, standings_table
from tipbench.compare.statistics import Unknown
from tipbench.compare.verdict import WORDING, filter_text
from tipbench.judge.drift import verdict_words
from tipbench.judge.status import JudgingStatus
from tipbench.markup import NOTHING
from tipbench.text import interval, number, one_line, p_value, percent, plural, short_name

_NAMESPACE = re.compile(r' xmlns(?::xlink)?="[^"]*"')
_ID = re.compile(r'(\bid="|url\(#|href="#)([^")]*)')  # an id, or a reference to one
_LABELLED_SYMBOL = re.compile(r'<(\w+)( aria-label="([^"]*)" role="graphics-symbol"[^<>]*)/>')


@dataclass(frozen=True)
class Picture:
    """One variant of a chart as an image."""

    url: str
    width: int
    height: int


@dataclass(frozen=True)
class Figure:
    """A chart in four variants: wide and narrow, each in light and dark. Either `pictures` or `inline` is set."""

    kind: ChartKind
    title: str
    alt: str
    caption: str
    pictures: Mapping[str, Picture] | None = None  # by variant, such as wide_light
    inline: Mapping[str, Markup] | None = None  # SVG by CSS classes, such as "wide light"


class Grid(NamedTuple):
    """A table of texts. The first text of a row is its name."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def board_context(
    board: Leaderboard, templates: Environment, *, links: Any = None, sort: str | None = None
) -> dict[str, Any]:
    """Return the variables of `board/body.html`, except charts and judging. Only the panel has `links` (`BoardUrl`)."""
    table = standings_table(board, sort)
    scored = any(standing.result.estimate for standing in board.standings)
    parts: Any = templates.get_template("board/parts.html").module

    def rendered(macro: Any, *arguments: Any) -> Markup:
        """Render a table here, so that the panel, which caches these variables, renders it only once."""
        return Markup(macro(*arguments))  # noqa: S704 - a template's own output, escaped there

    attribution = _attribution_context(board.attribution)
    attribution["marginals"] = [(title, rendered(parts.grid, grid, title)) for title, grid in attribution["marginals"]]
    heat = None
    if scored and not board.by:
        heat = rendered(parts.grid, _heat_grid(board), "Mean composite by model and prompt")
    facts = [
        ("suite", board.suite or None),
        ("judged by", ", ".join(board.judges) or "not judged yet"),
        ("rubric", _rubric_text(board.rubric)),
        ("based on", plural(board.ranking.n_units, board.unit)),
        ("filter", filter_text(board.where, board.judge) or None),
        ("baseline", _short(label_of(board, board.baseline)) if board.baseline else None),
        ("hosts", ", ".join(board.hosts) or None),
    ]
    return {
        "card": summary_card(board),
        "scored": scored,
        "standings": rendered(parts.standings, table, links),
        "sort": table.sort,
        "sort_fault": table.sort_fault,
        "flags": list(dict.fromkeys(flag for row in table.rows for flag in row.flags)),
        "facts": facts,
        "conditions": _conditions(board),
        "detectable": detectable_text(board),
        "heat": heat,
        "attribution": attribution,
        "duels": _duels_context(board),
    }


def _conditions(board: Leaderboard) -> list[tuple[str, str]]:
    """Return the conditions of the board, with the sampling options as separate entries."""
    conditions = {name: str(value) for name, value in board.conditions.items() if value}
    try:
        sampling = json.loads(conditions.pop("sampling", "{}"))
    except (ValueError, RecursionError):
        sampling = None
    shown = list(conditions.items())
    if isinstance(sampling, dict):
        shown += [(name, f"{value:g}" if isinstance(value, float) else str(value)) for name, value in sampling.items()]
    return shown


def _heat_grid(board: Leaderboard) -> Grid:
    """Return the numbers of the heat map, with the means over all prompts (last column) and all models (last row)."""
    models, prompts, means = heat_map_means(board)
    heads = ("model", *(_short(prompt) for prompt in prompts), "mean")
    columns = (*prompts, MEAN)
    rows = [(_short(model), *(_or_dash(number(means[model, column])) for column in columns)) for model in models]
    last_row = ("mean", *(_or_dash(number(means[MEAN, prompt])) for prompt in prompts), "")
    return Grid(heads, (*rows, last_row))


def _attribution_context(attribution: Attribution | Unknown) -> dict[str, Any]:
    """Return the variables of `board/attribution.html`. If the attribution is unknown, `lines` has the reason."""
    lines = attribution_lines(attribution)
    if isinstance(attribution, Unknown):
        return {"lines": lines, "sources": [], "marginals": []}
    sources = [
        {
            "name": FACTORS[name],
            "share": factor.share,
            "percent": percent(factor.share),
            "p": _or_dash(p_value(factor.p)),
        }
        for name, factor in attribution.factors().items()
        if factor is not None
    ]
    marginals = []
    tables = (
        ("Models, over all prompts", "model", attribution.model_means),
        ("Prompts, over all models", "prompt", attribution.prompt_means),
    )
    for title, first_head, means in tables:
        rows = [
            (_short(name), _or_dash(number(each.mean)), _or_dash(interval(each.ci_low, each.ci_high)))
            for name, each in means.items()
        ]
        if len(rows) > 1:
            marginals.append((title, Grid((first_head, "mean", "95 % interval"), rows)))
    # lines[0] lists the shares, which the template draws as bars from "sources".
    return {"lines": lines[1:], "sources": sources, "marginals": marginals}


def _duels_context(board: Leaderboard) -> dict[str, Any] | None:
    """Return the variables of `board/duels.html`, or None if there are no duels."""
    duels = board.duels
    if duels is None:
        return None
    if isinstance(duels, Unknown):
        return {"summary": duels.reason, "table": None}
    order_effect = f"The side shown first got {percent(duels.first_share)} of the points. Duels do not change ranks."
    rows = [
        (
            _short(label_of(board, each.pair)),
            _or_dash(number(each.strength.value, "+.2f")),
            _or_dash(interval(each.strength.ci_low, each.strength.ci_high, "+.2f")),
            f"{each.points:g} of {each.n_duels}",
            str(each.n_scenarios),
        )
        for each in duels.standings
    ]
    table = Grid(("model / prompt", "strength", "95 % interval", "points", "scenarios"), rows)
    return {"summary": one_line(f"{duel_result(duels)} {order_effect}"), "table": table}


def judging_summary(board: Leaderboard | None, status: JudgingStatus) -> dict[str, Any]:
    """Return the variables of `board/judging.html`. Filters of the board do not change its numbers."""
    twice = f"{status.twice} of {status.judged}"
    if status.judged:
        twice += f" ({percent(status.twice / status.judged)})"
    alpha = ", ".join(f"{one_line(name)} {number(value) or 'unknown'}" for name, value in status.alpha.items())
    rubric = (board.rubric if board else "") or ", ".join(status.rubrics)
    answers = f"{status.judged} judged, {status.pending} pending"
    if status.held:
        answers += f", {status.held} held"
    if status.floored:
        answers += f"; {status.floored} with no usable answer"
    facts = (
        ("rubric", _rubric_text(rubric)),
        ("answers", answers),
        ("judged twice", twice),
        ("agreement (Krippendorff's alpha)", alpha if status.twice and alpha else "unknown: no answer has two judges"),
    )
    filtered = board is not None and bool(board.where or board.judge)
    return {"facts": facts, "table": _judge_grid(status) if status.judges else None, "filtered": filtered}


def _judge_grid(status: JudgingStatus) -> Grid:
    latest: dict[tuple[str | None, bool], dict[str, Any]] = {}  # (judge, provisional) → drift of each scale
    for sheet in status.history:  # oldest first, so later sheets replace earlier ones
        if scales := (sheet.drift or {}).get("scales"):
            latest[sheet.judge, sheet.provisional] = {each["scale"]: each for each in scales}
    scale_names = list(dict.fromkeys(name for scales in latest.values() for name in scales))

    def bias_text(scale: Mapping[str, Any] | None) -> str:
        if scale is None or scale["bias"] is None:
            return NOTHING
        far_off = ", too far off" if scale["beyond"] else ""
        return f"{number(scale['bias'], '+.2f')}{far_off}"

    rows = [
        (
            _short(each.judge),
            status.use_of_scores(each),
            f"{each.cells}" + (f" ({each.held} held)" if each.held else ""),
            verdict_words(each.verdict),
            _or_dash(number(each.error)),
            _or_dash(percent(each.self_exact)),
            *(bias_text(latest.get((each.judge, each.provisional), {}).get(name)) for name in scale_names),
        )
        for each in status.judges
    ]
    heads = ("judge", "scores", "answers", "drift", "error on controls", "repeat consistency")
    return Grid((*heads, *(f"bias: {one_line(name)}" for name in scale_names)), rows)


def _rubric_text(tag: str) -> str | None:
    name, _, sha256 = tag.partition("@")
    if sha256:
        return f"{one_line(name)} ({sha256[:12]})"
    return one_line(name) or None


def _or_dash(text: str | None) -> str:
    return text or NOTHING


def _short(text: str) -> str:
    return short_name(text, MAX_NAME_CHARS)


CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def html_report(
    board: Leaderboard, answers: Sequence[ScenarioAnswers] = (), judging: JudgingStatus | None = None
) -> str:
    """Return the report as a single page, to be saved as UTF-8. Requires the `charts` extra."""
    templates = _environment()
    page = templates.get_template("report.html").render(
        board=board,
        **board_context(board, templates),
        figures={kind: _inline_figure(kind, board) for kind in kinds_of(board)},
        judging=judging_summary(board, judging) if judging else None,
        answers=answers,
        links=None,
        states={standing.pair: str(state_of(board, standing.pair)) for standing in board.standings},
        made_by=f"tipbench {tipbench.__version__}",
        csp=CSP,
    )
    return page.encode("utf-8", "backslashreplace").decode("utf-8")  # escape surrogates, which cannot be saved


@cache
def _environment() -> Environment:
    board_style = markup.style_sheets("tipbench.compare", "board.css", "report.css")
    style = Markup(markup.style_sheets() + board_style)  # noqa: S704 - our own files
    return markup.environment("tipbench.compare", template_globals={"style": style, **WORDING})


def _inline_figure(kind: ChartKind, board: Leaderboard) -> Figure:
    """Return a chart with all its variants; the style sheet shows one of them."""
    chart = CHARTS[kind]
    variants = {}
    for width in ("wide", "narrow"):
        for theme in (LIGHT, DARK):
            svg = to_svg(chart.draw(board, theme, narrow=width == "narrow"), theme)
            name = f"{kind}-{width}-{theme.name}"
            variants[f"{width} {theme.name}"] = inline_svg(svg, name, f"{kind}-caption")
    return Figure(kind, chart.title, chart.describe(board), chart.caption, inline=variants)


def inline_svg(svg: str, name: str, labelled_by: str) -> Markup:
    """Prepare a chart's SVG for inlining: without namespaces, ids prefixed with `name`, labels as tooltips.

    `svg` must come from vl-convert, which escapes all text.
    """
    plain = _ID.sub(rf"\g<1>{name}-\g<2>", _NAMESPACE.sub("", svg))
    with_tooltips = _LABELLED_SYMBOL.sub(r"<\1\2><title>\3</title></\1>", plain)
    start = f'<svg role="img" focusable="false" aria-labelledby="{labelled_by}" '
    return Markup(with_tooltips.replace("<svg ", start, 1))  # noqa: S704 - escaped by vl-convert
