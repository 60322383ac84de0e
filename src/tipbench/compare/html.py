"""HTML report of a board; all values except markup are escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.resources import files
from typing import Any, TypeAlias

import tipbench
from tipbench.charts import DARK, LIGHT, Theme, to_svg
from tipbench.compare.answers import Answer, AnswerTip, ScenarioAnswers
from tipbench.compare.attribution import Attribution, Marginal
from tipbench.compare.charts import MEAN, attribution_bar, forest, heat_map, heat_rows, pareto
from tipbench.compare.leaderboard import Leaderboard, filter_text
from tipbench.compare.report import (
    NOTHING,
    TEXT_COLUMNS,
    State,
    attribution_lines,
    detectable_lines,
    duel_result,
    factors_of,
    label_of,
    state_of,
    table_rows,
)
from tipbench.compare.statistics import Unknown
from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetHistory
from tipbench.text import interval, number, percent, plural, probability, short_name

_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NEWLINES = re.compile("\r\n?")
_VOID = {"meta", "br", "hr"}
_NAMESPACE = re.compile(r' xmlns(?::xlink)?="[^"]*"')
_ID = re.compile(r'(\bid="|url\(#|href="#)([^")]*)')
_DESCRIBED = re.compile(r'<(\w+)( aria-label="([^"]*)" role="graphics-symbol"[^<>]*)/>')


class Html(str):
    """Markup, which is not escaped again."""

    __slots__ = ()


Child: TypeAlias = "str | int | None"


def text(value: str) -> Html:
    """Escapes untrusted text for HTML and replaces characters that HTML does not allow."""
    return Html(escape(_NOT_TEXT.sub("\ufffd", _NEWLINES.sub("\n", value)), quote=True))


def element(tag: str, /, *children: Child, **attributes: str | bool | None) -> Html:
    """Returns an element; non-Html children are escaped, None is skipped, `class_` is `class` and `a_b` is `a-b`."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Html(f"<{tag}{shown}>")
    return Html(f"<{tag}{shown}>{joined(*children)}</{tag}>")


def joined(*children: Child) -> Html:
    """Concatenates children; those that are not Html are escaped."""
    pieces = (child if isinstance(child, Html) else text(str(child)) for child in children if child is not None)
    return Html("".join(pieces))


def inline_svg(svg: str, name: str) -> Html:
    """Prepares a chart's SVG for inlining: no namespaces, ids prefixed with `name`, descriptions as tooltips.

    `svg` must come from vl-convert, which escapes all text; SVG from other sources is not safe.
    """
    plain = _ID.sub(rf"\g<1>{name}-\g<2>", _NAMESPACE.sub("", svg))
    hovering = _DESCRIBED.sub(r"<\1\2><title>\3</title></\1>", plain)
    return Html(hovering.replace("<svg ", '<svg role="img" focusable="false" ', 1))


@dataclass(frozen=True)
class Column:
    """A table column: numbers are right-aligned, text left-aligned; `head` marks the row header."""

    title: str
    text: bool = False
    head: bool = False


def section(anchor: str, title: str, *parts: Html | None) -> Html:
    """Returns a section of the report with its heading."""
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *parts, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str | None]],
    *,
    states: Sequence[str] = (),
    cards: bool = False,
) -> Html:
    """Returns a scrollable table; with `cards`, narrow pages show each row as a card.

    ARIA roles are explicit because the card layout removes the implicit ones.
    """
    heads = [element("th", column.title, scope="col", role="columnheader", class_=_class(column)) for column in columns]
    body = [
        element("tr", *map(_cell, columns, row), role="row", class_=states[at] if at < len(states) else None)
        for at, row in enumerate(rows)
    ]
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *heads, role="row"), role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        role="table",
        class_="cards" if cards else None,
    )
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(column: Column, value: str | None) -> Html:
    shown = element("bdi", value) if value and column.text else (value if value is not None else NOTHING)
    if column.head:
        return element("th", shown, scope="row", role="rowheader", class_=_class(column))
    return element("td", shown, role="cell", class_=_class(column), data_label=column.title)


def _class(column: Column) -> str:
    return "text" if column.text else "number"


def facts(pairs: Iterable[tuple[str, str | None]]) -> Html:
    """Returns a description list of names and values; empty values are omitted."""
    return element(
        "dl",
        *(element("div", element("dt", name), element("dd", element("bdi", value))) for name, value in pairs if value),
        class_="facts",
    )


LONGEST = 80  # characters of a name; JSON and CSV have the full name
_STANDINGS = (
    "composite", "95 % interval", "rank", "P(best)", "to leader", "standing", "p", "to baseline", "p (baseline)",
    "judged", "flags",
)  # fmt: skip


def standings_table(board: Leaderboard) -> Html:
    """Returns the table of composites, ranks, differences and flags."""
    other = f", or − {short_name(str(board.baseline), LONGEST)} (baseline)" if board.baseline else ""
    differences = f"Differences are row − leader{other}, with 95 % interval; p is adjusted for all rows. "
    caption = f"{differences}Brackets after a rank contain its range."
    return _board_table(board, caption, _STANDINGS)


def measures_table(board: Leaderboard) -> Html:
    """Returns the table of scales, format and speed."""
    names = ("composite", *board.scales, "format", "overlong", "diversity", "latency s", "tokens/s")
    return _board_table(board, "Scales, format and speed: means over scenarios.", names)


def _board_table(board: Leaderboard, caption: str, wanted: Sequence[str]) -> Html:
    columns, rows = table_rows(board)
    flagged = any(standing.flags for standing in board.standings)
    kept = [name for name in wanted if name in columns and (flagged or name != "flags")]
    at = [columns.index(name) for name in kept]
    named = [
        Column("Model / prompt", text=True, head=True),
        *(Column(name, text=name in TEXT_COLUMNS) for name in kept),
    ]
    pairs = [standing.pair for standing in board.standings]
    body = [
        [short_name(label_of(board, pair), LONGEST), *(row[i] for i in at)]
        for pair, row in zip(pairs, rows, strict=True)
    ]
    return table(caption, named, body, states=[str(state_of(board, pair)) for pair in pairs], cards=True)


def heat_table(board: Leaderboard) -> Html:
    """Returns the numbers of the heat map as a collapsed table."""
    models, prompts, means = heat_rows(board)
    columns = [
        Column("model", text=True, head=True),
        *(Column(short_name(prompt, LONGEST)) for prompt in prompts),
        Column("mean"),
    ]
    rows: list[list[str | None]] = [
        [short_name(model, LONGEST), *(number(means[model, prompt]) for prompt in [*prompts, MEAN])] for model in models
    ]
    rows.append(["mean", *(number(means[MEAN, prompt]) for prompt in prompts), ""])
    caption = "Mean composite by model and prompt; margins where every pair is ranked."
    inside = table(caption, columns, rows)
    return element("details", element("summary", "Show as table"), inside)


def attribution_tables(found: Attribution) -> Html:
    """Returns the sources of variance with their tests, then the marginal means of models and prompts."""
    sources = [
        [label, percent(factor.share), str(factor.freedom), probability(factor.p)]
        for label, factor in factors_of(found)
    ]
    columns = [Column("source", text=True, head=True), Column("share"), Column("degrees of freedom"), Column("p")]
    rows = "complete rows" if found.without else "rows"
    caption = f"Sources of variance among the {rows} over {plural(found.n_scenarios, 'scenario')}."
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
            short_name(each.name, LONGEST),
            number(each.estimate.mean),
            interval(each.estimate.ci_low, each.estimate.ci_high),
        ]
        for each in marginals
    ]
    return table(caption, columns, rows)


def duel_section(board: Leaderboard) -> Html | None:
    """Returns the blind A/B duels within the tied set; None if there are none."""
    duels = board.duels
    if duels is None:
        return None
    if isinstance(duels, Unknown):
        return element("p", duels.reason)
    first = f"The side shown first got {percent(duels.first_share)} of the points. Duels do not change ranks."
    columns = [
        Column("Model / prompt", text=True, head=True), Column("strength"), Column("95 % interval"), Column("points"),
        Column("duels"), Column("scenarios"),
    ]  # fmt: skip
    rows = [
        [
            short_name(label_of(board, each.pair), LONGEST),
            number(each.strength.value, "+.2f"),
            interval(each.strength.ci_low, each.strength.ci_high, "+.2f"),
            f"{each.points:g}",
            str(each.duels),
            str(each.n_scenarios),
        ]
        for each in duels.standings
    ]
    caption = "Bradley–Terry strength in log-odds, relative to the average of the rows."
    return joined(element("p", f"{duel_result(duels)} {first}"), table(caption, columns, rows))


def answers_section(board: Leaderboard, scenarios: Sequence[ScenarioAnswers]) -> Html | None:
    """Returns one collapsed block per scenario; None if there are no answers."""
    if not scenarios:
        return None
    hint = "In board order. Answers are shown as plain text, unedited. Open a scenario to print it."
    return joined(element("p", hint, class_="muted"), *(_scenario(board, each) for each in scenarios))


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
        return element("p", "The suite of this scenario is not available, so its card is not shown.", class_="muted")
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
    name = short_name(str(answer.pair), 120)
    badge = element("span", str(state), class_="badge") if leader or state is State.TIED else None
    facts = [
        f"composite {number(answer.composite)}" if answer.composite is not None else answer.state,
        None if answer.format_ok is not False else "not the requested format",
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


def judging_section(board: Leaderboard, judging: JudgingStatus | None) -> Html | None:
    """Returns the judging status: agreement, judges and bias; None without a status."""
    if judging is None:
        return None
    twice = f"{judging.twice} of {judging.judged}"
    if judging.judged:
        twice += f" ({percent(judging.twice / judging.judged)})"
    alpha = "; ".join(f"{name} {number(value) or 'unknown'}" for name, value in judging.alpha.items())
    filtered = "whole experiment, not only the filtered cells" if board.where or board.judge else None
    strip = facts(
        [
            ("scope", filtered),
            ("rubric", board.rubric_tag or None),
            ("answers", f"{judging.judged} judged ({judging.floored} without a usable tip), {judging.pending} pending"),
            ("judged twice", twice),
            (
                "agreement",
                f"Krippendorff's alpha: {alpha}" if judging.twice and alpha else "unknown: no overlap",
            ),
        ]
    )
    method = "Judges score blind. Hidden control tips with reference scores measure how far each judge is off."
    return joined(element("p", method), strip, _judges(judging), _biases(judging))


def _judges(judging: JudgingStatus) -> Html:
    columns = [
        Column("judge", text=True, head=True), Column("scores", text=True), Column("answers"),
        Column("drift", text=True), Column("error on controls"), Column("repeat consistency"),
    ]  # fmt: skip
    rows = [_judge(judge) for judge in judging.judges]
    return table("Judges. The error is the mean distance from the reference scores, in points.", columns, rows)


def _judge(judge: JudgeStatus) -> list[str | None]:
    return [
        judge.judge,
        "provisional" if judge.provisional else "count",
        f"{judge.cells}" + (f" ({judge.held} held)" if judge.held else ""),
        judge.drift or "unknown",
        number(judge.error),
        percent(judge.self_exact),
    ]


def _biases(judging: JudgingStatus) -> Html | None:
    newest: dict[str, SheetHistory] = {}
    for sheet in judging.history:
        if (sheet.drift or {}).get("scales"):
            newest[sheet.judge] = sheet
    if not newest:
        return None
    names = list(dict.fromkeys(scale["scale"] for sheet in newest.values() for scale in _scales(sheet)))
    columns = [Column("judge", text=True, head=True), *(Column(name) for name in names)]
    rows = [
        [judge, *(_bias({scale["scale"]: scale for scale in _scales(sheet)}.get(name)) for name in names)]
        for judge, sheet in newest.items()
    ]
    return table("Bias on hidden controls, by scale: points too high (+) or too low (−), with interval.", columns, rows)


def _scales(sheet: SheetHistory) -> list[Mapping[str, Any]]:
    return list((sheet.drift or {}).get("scales", []))


def _bias(scale: Mapping[str, Any] | None) -> str | None:
    if scale is None or scale["bias"] is None:
        return None
    low, high = scale["interval"] or (None, None)
    ends = interval(low, high, "+.2f")
    limit = ", too far off" if scale["beyond"] else ""
    return f"{number(scale['bias'], '+.2f')}{f' ({ends})' if ends else ''}{limit}"


CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
Draw = Callable[..., Any]


def html_report(
    board: Leaderboard, answers: Sequence[ScenarioAnswers] = (), judging: JudgingStatus | None = None
) -> str:
    """Returns the report as a single page, to be saved as UTF-8. Requires the `charts` extra."""
    parts = [
        ("standings", "Standings", _standings(board)),
        ("grid", "Model × prompt", _grid(board)),
        ("speed", "Quality against latency", _speed(board)),
        ("causes", "What explains the differences", _explanations(board)),
        ("duels", "Duels", duel_section(board)),
        ("judging", "Judging", judging_section(board, judging)),
        ("answers", "Answers, side by side", answers_section(board, answers)),
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
        ("judged by", ", ".join(board.judges) or "no one yet"),
        ("over", plural(board.ranking.n_scenarios, board.unit)),
        ("filter", filter_text(board.where, board.judge) or None),
        ("baseline", str(board.baseline) if board.baseline else None),
        ("conditions", conditions),
        ("hosts", ", ".join(board.hosts) or None),
    ]
    badge = element("span", "provisional", class_="badge warning") if board.provisional else None
    notes = element("ul", *(element("li", note) for note in board.notes)) if board.notes else None
    heading = element("h1", f"Leaderboard of {board.experiment} ", badge)
    return element("header", heading, element("p", board.verdict, class_="verdict"), notes, facts(pairs))


def _foot() -> Html:
    method = (
        "Comparisons are paired by scenario. Intervals are Student-t over scenarios. A row is clearly worse than the "
        "leader if step-down max-t over sign flips of whole scenarios finds a difference, at 5 % for all rows "
        "together. The leader is selected for its high mean, so its own interval is optimistic. Unknown values are "
        "shown as a dash."
    )
    made = f"Made by tipbench {tipbench.__version__}. This page loads nothing and runs no script."
    return element("footer", element("p", method, class_="muted"), element("p", made, class_="muted"))


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
        "Mean composite of each row with its 95 % interval. Diamond: the leader. Circle, shaded: not clearly "
        "different from the leader. Square: clearly worse. Hollow triangle: not ranked. Rows are compared by paired "
        "differences, so rows can be clearly different although their intervals overlap."
    )
    least = [element("p", line, class_="muted") for line in detectable_lines(board)]
    return joined(_figure("forest", forest, board, caption), standings_table(board), *least)


def _grid(board: Leaderboard) -> Html | None:
    caption = (
        "Mean composite of each pair: a darker blue is a higher mean. Thick frame: the leader; thin frame: "
        "not clearly different from it; in brackets: not ranked."
    )
    figure = _figure("grid-chart", heat_map, board, caption)
    return joined(figure, heat_table(board)) if figure else None


def _speed(board: Leaderboard) -> Html:
    caption = (
        "Up is better, left is faster. The dashed line joins the ranked pairs that no other pair beats in both. "
        "Latency excludes loading the model."
    )
    hosts = None
    if len(board.hosts) > 1:
        hosts = element(
            "p", f"Measured on {len(board.hosts)} hosts: speeds are not comparable across hosts.", class_="warning"
        )
    return joined(_figure("speed-chart", pareto, board, caption), hosts, measures_table(board))


def _explanations(board: Leaderboard) -> Html:
    lines = [element("p", line) for line in attribution_lines(board.attribution)]
    if isinstance(board.attribution, Unknown):
        return joined(*lines)
    caption = (
        "Shares of the sum of squares. Chance alone gives every source a share; a small p means that a source "
        "explains more than chance (F test)."
    )
    return joined(
        *lines, _figure("causes-chart", attribution_bar, board, caption), attribution_tables(board.attribution)
    )
