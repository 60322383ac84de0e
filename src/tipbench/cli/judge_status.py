"""`tipbench judge status`: show the progress of judging, each judge's drift, and agreement between judges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tipbench.cli.console import print_json, print_message, print_table
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, PlotOption, open_experiment
from tipbench.settings import load_settings
from tipbench.text import interval, number, percent

if TYPE_CHECKING:
    from tipbench.judge.drift import Slope
    from tipbench.judge.status import JudgeStatus, JudgingStatus, SheetSummary

_OPEN_SHEET_COLUMNS = ("sheet", "judge", "items", "finished", "exported")
_CHART_CHARS = 25
_CHART_LIMIT = 2.0  # the chart of a bias shows -2 to +2 points


def status(
    experiment: ExperimentOption = None,
    plot: PlotOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the progress of judging, drift and agreement.

    Shows pending, held and judged cells, each judge's drift and agreement, and the rules judge's error. The chart of
    --plot shows each judge's bias by sheet.

    Examples:

      tipbench judge status --experiment tip-bench-demo

      tipbench judge status --plot judges.png
    """
    from tipbench.charts import check_chart_file, save_chart
    from tipbench.judge.charts import history_chart
    from tipbench.judge.rules import rules_error
    from tipbench.judge.status import judging_status
    from tipbench.plan.suite import load_suite

    if plot is not None:
        check_chart_file(plot)
    with open_experiment(load_settings(), mlflow_url, experiment) as (store, stored_experiment):
        judging = judging_status(store, stored_experiment)
    suite = load_suite("tips")  # the rules judge is measured on the built-in suite, whatever the experiment's suite is
    cards = {scenario.id: scenario.to_card() for scenario in suite.scenarios}
    rules_errors = {"anchors": rules_error(suite.rubric.anchors, cards), "controls": rules_error(suite.controls, cards)}
    if json_:
        print_json({**judging.to_json(), "rules_judge": rules_errors})
    else:
        _show_status(judging, rules_errors)
    if plot is not None and not judging.history:
        print_message("nothing to plot yet: no sheet has been applied")
    elif plot is not None:
        save_chart(history_chart(judging.history), plot)
        print_message(f"chart: {plot}")


def _show_status(judging: JudgingStatus, rules_errors: dict[str, dict[str, dict[str, float | None]]]) -> None:
    """Print the status. `rules_errors` has the rules judge's bias and error by scale, on anchors and on controls."""
    print(
        f"{judging.experiment}: {judging.cells} answers, {judging.judged} judged ({judging.floored} unusable), "
        f"{judging.pending} pending ({judging.held} held)"
    )
    if judging.judges:
        print()
        _show_judges(judging)
    else:
        print_message("no scores yet: `tipbench judge export --judge NAME --out FILE`, or `judge run --with rules`")
    for judge in judging.judges:
        if judge.unchecked:
            print(f"{judge.judge}: {judge.unchecked} items are not checked for drift until their sheet is finished")
        if judge.duels and judge.sheets:  # duels show real answers only, so a sheet's other items would be controls
            print(f"{judge.judge}: sheets closed, because duels were opened")
    _show_trends(judging.judges)
    if judging.twice:
        print(f"\nagreement on {judging.twice} answers with two or more judges (Krippendorff's alpha; 1 is full):")
        for name, value in judging.alpha.items():
            print(f"  {name:<16}{'unknown' if value is None else f'{value:.2f}'}")
    if judging.open_sheets:
        print("\nopen sheets (`judge export --sheet ID --filled` writes one again with its scores):")
        rows = [
            [sheet.sheet, sheet.judge or "unsigned", sheet.items, sheet.finished, sheet.exported[:16].replace("T", " ")]
            for sheet in judging.open_sheets
        ]
        print_table(_OPEN_SHEET_COLUMNS, rows, text_columns=("sheet", "judge"))
    if judging.history:
        print("\nbias on the hidden controls, by sheet (the line is the interval; | marks zero)")
        for line in history_lines(judging.history):
            print(line)
    print("\nthe rules judge against the reference scores (bias, mean absolute error):")
    for title, errors in rules_errors.items():
        parts = [
            f"{scale} {_number_text(values['bias'], '+.2f')}, {_number_text(values['error'])}"
            for scale, values in errors.items()
        ]
        print(f"  {title:<10}" + "; ".join(parts))


def _show_judges(judging: JudgingStatus) -> None:
    from tipbench.judge.drift import verdict_words

    rows = [
        {
            "judge": judge.judge,
            "scores": judging.use_of_scores(judge),
            "cells": judge.cells,
            "held": judge.held,
            "sheets": judge.sheets,
            "open items": judge.open_items,
            "drift": None if judge.verdict is None else verdict_words(judge.verdict),
            "error": judge.error,
            "repeat consistency": percent(judge.self_exact),
            "min/item": judge.minutes_per_item,
        }
        for judge in judging.judges
    ]
    columns = list(rows[0])
    print_table(
        columns,
        [list(row.values()) for row in rows],
        text_columns=("judge", "scores", "drift"),
        n_always_shown=columns.index("drift") + 1,
    )


def _show_trends(judges: Sequence[JudgeStatus]) -> None:
    from tipbench.judge.drift import CUSUM_LIMIT

    rows = []
    for judge in judges:
        if judge.trends is None:
            continue
        name = judge.judge
        slopes = [_slope_text(judge.trends.fatigue), _slope_text(judge.trends.compression)]
        for scale in judge.trends.sums:
            bias = _number_text(scale.bias, "+.2f")
            sums = f"+{scale.high:.1f} / −{scale.low:.1f}"
            beyond = "beyond" if scale.beyond else ""
            rows.append([name, scale.scale, scale.sheets, bias, sums, beyond, *slopes])
            name, slopes = "", ["", ""]  # only the judge's first row shows them
    if rows:
        print(f"\nover all sheets: cumulative sums of the bias, up / down, in standard errors (limit {CUSUM_LIMIT});")
        print("fatigue and compression in points, with a 99 % interval (* if not due to chance)")
        columns = ("judge", "scale", "sheets", "mean bias", "sums", "", "fatigue", "compression")
        print_table(columns, rows, text_columns=("judge", "scale", "sums", "", "fatigue", "compression"))
    for judge in judges:
        if judge.trends is not None:
            for sentence in judge.trends.sentences():
                print(f"{judge.judge}: {sentence}")


def _slope_text(slope: Slope | None) -> str:
    if slope is None:
        return "unknown"
    bounds = interval(slope.ci_low, slope.ci_high, "+.2f")
    return f"{number(slope.value, '+.2f')} ({bounds}){'*' if slope.beyond else ''}"


def _number_text(value: float | None, format_spec: str = ".2f") -> str:
    return number(value, format_spec) or "unknown"


def history_lines(history: tuple[SheetSummary, ...]) -> list[str]:
    """Return one line for each sheet, each followed by one line for each of its scales."""
    from tipbench.judge.drift import verdict_words

    lines = []
    for sheet in history:
        drift = sheet.drift or {}
        scales: list[dict[str, Any]] = drift.get("scales", [])
        verdict = verdict_words(drift.get("verdict"))
        lines.append(f"  {sheet.exported[:10]}  {sheet.judge}  {sheet.sheet}  {verdict}, {sheet.status}")
        lines += [f"    {scale['scale']:<16}{_bias_chart(scale)}" for scale in scales]
    return lines


def _bias_chart(scale: dict[str, Any]) -> str:
    """Draw the bias and its interval as characters, followed by the number."""
    if scale["bias"] is None:
        return "unknown"
    chart = ["·"] * _CHART_CHARS
    chart[_CHART_CHARS // 2] = "|"
    if scale["interval"] is not None:
        low, high = (_chart_position(bound) for bound in scale["interval"])
        chart[low : high + 1] = ["─"] * (high + 1 - low)
    chart[_chart_position(scale["bias"])] = "●"
    return f"{''.join(chart)}  {number(scale['bias'], '+.2f')}" + ("  too far off" if scale["beyond"] else "")


def _chart_position(bias: float) -> int:
    """Return the column of a bias in the chart. A bias outside the chart is shown at its end."""
    clipped = min(max(bias, -_CHART_LIMIT), _CHART_LIMIT)
    return round((clipped + _CHART_LIMIT) / (2 * _CHART_LIMIT) * (_CHART_CHARS - 1))
