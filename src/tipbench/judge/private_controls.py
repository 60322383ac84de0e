"""Private controls: judged tips on which several judges agree, as a controls file for a team's own suite."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median_low

from tipbench.judge.material import JudgedCell
from tipbench.plan.rubric import Control, Rubric

MIN_JUDGES = 2
PER_SCENARIO = 10
_MOST_APART = 1  # steps between the judges' scores of a tip on any scale


def agreed_controls(
    cells: Iterable[JudgedCell],
    rubric: Rubric,
    *,
    judges: int = MIN_JUDGES,
    per_scenario: int = PER_SCENARIO,
    known: Iterable[str] = (),
) -> list[Control]:
    """Returns tips with counted scores of at least `judges` judges who are at most one step apart on every scale.

    The reference is the median, the lower one of two. Of more than `per_scenario` tips those are returned that spread
    evenly over the composite. Tips in `known`, such as existing controls and anchors, are left out.
    """
    taken = set(known)
    found: dict[str, list[Control]] = defaultdict(list)
    for cell in sorted(cells, key=lambda each: each.run.run_id):
        counted = [judgement for judgement in cell.scores.counted if judgement.rubric == rubric.tag]
        if len(counted) < judges:
            continue
        for tip, scores in zip(cell.tips, zip(*(judgement.tips for judgement in counted), strict=True), strict=False):
            by_scale = {name: [score.scores[name] for score in scores] for name in rubric.scale_names}
            if tip.tip in taken or any(max(given) - min(given) > _MOST_APART for given in by_scale.values()):
                continue
            taken.add(tip.tip)
            references = {name: median_low(given) for name, given in by_scale.items()}
            why = f"Agreed by {len(counted)} judges."
            found[cell.scenario[0]].append(Control(cell.scenario[0], tip.tip, tip.rationale, references, why))
    return [control for _, group in sorted(found.items()) for control in _spread(group, rubric, per_scenario)]


def _spread(controls: Sequence[Control], rubric: Rubric, count: int) -> list[Control]:
    ranked = sorted(
        controls, key=lambda each: (rubric.composite(each.scores, format_ok=True, overlong=False), each.tip)
    )
    if len(ranked) <= count:
        return ranked
    return [ranked[round(at * (len(ranked) - 1) / max(1, count - 1))] for at in range(count)]


def controls_toml(controls: Sequence[Control], rubric: Rubric) -> str:
    """Returns the content of a controls file."""
    lines = [f"# Private controls, scored under {rubric.tag}. Keep this file from judges.", ""]
    for control in controls:
        scores = ", ".join(f"{name} = {control.scores[name]}" for name in rubric.scale_names)
        texts = {"scenario": control.scenario, "tip": control.tip, "rationale": control.rationale}
        lines.append("[[controls]]")
        lines += [f"{name} = {_toml_string(text)}" for name, text in texts.items()]
        lines += [f"scores = {{ {scores} }}", f"why = {_toml_string(control.why)}", ""]
    return "\n".join(lines)


def _toml_string(text: str) -> str:
    """Returns a TOML string: like JSON, with DEL escaped and lone surrogates, which TOML forbids, replaced by `?`."""
    whole = text.encode("utf-8", "replace").decode()
    return json.dumps(whole, ensure_ascii=False).replace("\x7f", "\\u007f")
