"""The grid: all cells of a collect with their prompts, ordered by model so that each model is loaded once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from tipbench.errors import UsageError
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.prompts import WITHOUT_PROMPT, Prompt, RenderedPrompt, render
from tipbench.plan.scenarios import Scenario
from tipbench.plan.suite import Suite, load_suite
from tipbench.text import fingerprint


@dataclass(frozen=True)
class Cell:
    """One model, prompt, scenario and repeat: the unit that is generated, recorded and judged."""

    model: str
    prompt: str
    scenario: str
    repeat: int = 1

    def __str__(self) -> str:
        suffix = f" #{self.repeat}" if self.repeat > 1 else ""
        return f"{self.model}/{self.prompt} {self.scenario}{suffix}"


@dataclass(frozen=True)
class PlannedCell:
    """A cell with the request to send."""

    cell: Cell
    scenario: Scenario
    prompt: Prompt
    rendered: RenderedPrompt
    options: Mapping[str, float | int]  # sampling options
    key: str  # hash of the request; stored with the run


@dataclass(frozen=True)
class ModelIdentity:
    """The properties of a model that determine its cells and their keys."""

    name: str
    digest: str  # of the weights; used in keys, because a name may later refer to other weights
    can_think: bool = False  # can write its reasoning before the answer
    has_prompt: bool = True  # False: answers do not depend on the prompt


def plan_grid(suite: Suite, config: CollectConfig, models: Iterable[ModelIdentity]) -> list[PlannedCell]:
    """Return all cells, ordered by model and prompt. Cells of models with the same digest are planned only once."""
    prompts = choose_prompts(suite, config.prompt_versions)
    scenarios = choose_scenarios(suite, config.n_scenarios)
    repeats = range(1, config.repeats + 1)
    planned: dict[str, PlannedCell] = {}
    for model in models:
        model_prompts = prompts if model.has_prompt else [WITHOUT_PROMPT]
        for prompt, scenario, repeat in product(model_prompts, scenarios, repeats):
            rendered = render(prompt, scenario, n_tips=config.n_tips, ask_for_diversity=config.diversity)
            options: dict[str, float | int] = {
                **suite.sampling,
                "temperature": config.temperature,
                "num_ctx": config.num_ctx,
                "num_predict": config.num_predict,
                "seed": cell_seed(config.seed, scenario.id, prompt.version, repeat),
            }
            key_content: dict[str, object] = {
                "digest": model.digest,
                "scenario": scenario.id,
                "options": options,
                "repeat": repeat,
            }
            if model.has_prompt:
                # The request's field `think`: False switches thinking off. None: the request has no such field.
                think = False if model.can_think else None
                key_content |= {"system": rendered.system, "user": rendered.user, "think": think}
            else:
                key_content |= {"n_tips": config.n_tips, "diversity": config.diversity}
            key = fingerprint(key_content)
            cell = Cell(model.name, prompt.version, scenario.id, repeat)
            planned.setdefault(key, PlannedCell(cell, scenario, prompt, rendered, options, key))
    return list(planned.values())


def cells_by_model(cells: Iterable[PlannedCell]) -> Iterator[tuple[str, list[PlannedCell]]]:
    """Yield each model with its cells, which must be ordered by model."""
    for model, group in groupby(cells, key=lambda planned: planned.cell.model):
        yield model, list(group)


def suite_for(config: CollectConfig) -> Suite:
    """Load the suite of a configuration. Raises UsageError for unknown prompts, before any server is contacted."""
    suite = load_suite(config.suite)
    choose_prompts(suite, config.prompt_versions)  # only for its error
    return suite


def conditions_of(config: CollectConfig, suite: Suite) -> str:
    """Return a hash of the settings that must be equal for scores to be averaged."""
    settings = config.model_dump(include={"n_tips", "temperature", "diversity", "seed", "num_ctx", "num_predict"})
    return fingerprint({**settings, "sampling": dict(suite.sampling)}, length=16)


def choose_prompts(suite: Suite, versions: Sequence[str]) -> list[Prompt]:
    """Return the prompts of these versions. Raises UsageError for unknown versions."""
    unknown = [version for version in versions if version not in suite.prompts]
    if unknown:
        raise UsageError(
            f"suite {suite.name} has no prompt {', '.join(unknown)}; it has {', '.join(sorted(suite.prompts))}."
        )
    return [suite.prompts[version] for version in versions]


def choose_scenarios(suite: Suite, n_scenarios: int) -> tuple[Scenario, ...]:
    """Return the first `n_scenarios` scenarios, or all for 0."""
    return suite.scenarios[:n_scenarios] if n_scenarios else suite.scenarios


def scenarios_warning(suite: Suite, n_scenarios: int) -> str | None:
    """Return a warning if the suite has fewer scenarios than requested."""
    if n_scenarios <= len(suite.scenarios):
        return None
    hint = " Suite tips-32 has more." if suite.name == "tips" else ""
    return (
        f"The suite {suite.name} has {len(suite.scenarios)} scenarios, fewer than n_scenarios {n_scenarios}: "
        f"all of them are used.{hint}"
    )


def cell_seed(seed: int, scenario: str, prompt: str, repeat: int) -> int:
    """Return the sampling seed of a cell. It is the same for all models."""
    digest = hashlib.sha256(f"{seed}|{scenario}|{prompt}|{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**31  # the range of the option `seed`
