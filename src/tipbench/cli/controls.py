"""`tipbench controls make`: private controls from judged tips on which several judges agree."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from tipbench.cli.console import print_json, print_message
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, SuiteOption, command_group, open_experiment
from tipbench.errors import NotEnoughData
from tipbench.files import check_output, write_output
from tipbench.settings import load_settings
from tipbench.text import plural

app = command_group("Make private controls that measure judges.")

_ENOUGH_CONTROLS = 5  # scenarios with fewer are listed


@app.command("make")
def make(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The controls.toml of your own suite.")],
    experiment: ExperimentOption = None,
    judges: Annotated[int, typer.Option(min=2, metavar="NUMBER", help="Judges that must agree.")] = 2,
    per_scenario: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Maximum controls per scenario.")] = 10,
    suite: SuiteOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Make private controls from tips that judges agree on.

    A tip qualifies if several judges scored it at most one step apart on every scale. The built-in controls are public,
    so a judge may have read them. For decisions that matter use private controls: put the file into your own suite
    (`extends = "tips"`), keep it from judges, and use it for later experiments only, because the judges of this
    experiment have seen its tips. Exit 3 if no tip qualifies.

    Examples:

      tipbench controls make --experiment tip-bench-pilot --judges 3 --out our-suite/controls.toml
    """
    from tipbench.judge.controls import agreed_controls, controls_toml
    from tipbench.judge.material import load_material, read_cells

    check_output(out, "--out")
    with open_experiment(load_settings(), mlflow_url, experiment) as (store, stored_experiment):
        cells = read_cells(store, stored_experiment.experiment_id)
    if not cells:
        raise NotEnoughData(f"{stored_experiment.name} has no answered cells yet. Run `tipbench collect` first.")
    material = load_material(cells, suite)
    known_tips = [example.tip for example in (*material.controls, *material.rubric.anchors)]
    # A control needs a card. Cells of another suite or of an earlier scenario version have none.
    cells_of_suite = [cell for cell in cells if cell.scenario_key in material.cards]
    controls = agreed_controls(
        cells_of_suite, material.rubric, min_judges=judges, per_scenario=per_scenario, exclude=known_tips
    )
    if not controls:
        raise NotEnoughData(
            f"{stored_experiment.name} has no tip that {judges} judges scored at most one step apart. "
            "Let more judges score the same answers: `tipbench judge export --judge NAME --all`."
        )
    write_output(out, controls_toml(controls, material.rubric), "--out")
    by_scenario = Counter(control.scenario for control in controls)
    if json_:
        print_json({"file": str(out), "controls": len(controls), "scenarios": dict(by_scenario)})
        return
    print(f"{plural(len(controls), 'control')} for {plural(len(by_scenario), 'scenario')} written to {out}")
    if few := sorted(scenario for scenario, n_controls in by_scenario.items() if n_controls < _ENOUGH_CONTROLS):
        print_message(f"fewer than {_ENOUGH_CONTROLS} controls: {', '.join(few)}")
    print_message("keep the file from judges, and use it for later experiments only")
