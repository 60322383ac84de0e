"""How far off the rules judge is on a suite's anchors and controls, as docs/rules-judge.md shows it."""

from __future__ import annotations

from tipbench.errors import UsageError
from tipbench.judge.rules import check_rubric, rules_error
from tipbench.plan.suite import load_suite

MEASURED = ("<!-- measured -->", "<!-- /measured -->")


def measured_table(suite: str = "tips") -> str:
    """The rules' error on a suite's anchors and controls, as a Markdown table."""
    loaded = load_suite(suite)
    check_rubric(loaded.rubric)
    cards = {scenario.id: scenario.to_card() for scenario in loaded.scenarios}
    anchors, controls = loaded.rubric.anchors, loaded.controls
    lines = [
        "| measured on | scale | tips | bias | error | within one step | always 3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, examples in (("anchors", anchors), ("controls", controls), ("both", (*anchors, *controls))):
        for scale, found in rules_error(examples, cards).items():
            if found["bias"] is None or found["error"] is None or found["within_one"] is None:
                continue
            naive = sum(abs(3 - example.scores[scale]) for example in examples) / len(examples)
            lines.append(
                f"| {name} | {scale} | {found['n']} | {found['bias']:+.2f} | {found['error']:.2f} "
                f"| {found['within_one']:.0%} | {naive:.2f} |"
            )
    return "\n".join(lines)


def with_measured(page: str) -> str:
    """A page with the table between its two markers made anew."""
    before, start, rest = page.partition(MEASURED[0])
    _, end, after = rest.partition(MEASURED[1])
    if not start or not end:
        raise UsageError(
            f"The page needs the markers {MEASURED[0]} and {MEASURED[1]}. Put them where the table belongs."
        )
    return f"{before}{start}\n{measured_table()}\n{end}{after}"
