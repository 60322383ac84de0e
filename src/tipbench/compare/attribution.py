"""Analysis of variance of a board: score ~ scenario + model + prompt + model:prompt, with scenarios as blocks.

It uses the complete rows of the board (pairs judged in every core scenario) and the scenarios in which all these rows
are judged: the core scenarios, and perhaps others. Every model must have every prompt: the sums of squares then add up,
and the order of the factors does not matter. The share of a factor is ω² (Hays 1963): (sum of squares − sum expected by
chance) / (total + mean square of the error term), but at least 0. The residual is the rest.

`p` is from an F test with scenarios as a random factor. The error terms are model × scenario for models, prompt ×
scenario for prompts, model × prompt × scenario for their interaction, and the residual for scenarios.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tipbench.compare.matrix import Floats, Mask, Pair, ScoreMatrix
from tipbench.compare.resampling import ALPHA, N_FLIPS, TOLERANCE, step_down
from tipbench.compare.statistics import Estimate, Unknown, shown_estimate
from tipbench.text import join_names


@dataclass(frozen=True)
class Factor:
    """One source of variation."""

    share: float  # ω², of the total
    squares: float  # sum of squares
    df: int  # degrees of freedom
    p: float | None  # None for the residual, and if there is no variation to test against


@dataclass(frozen=True)
class SumOfSquares:
    """A sum of squares with its degrees of freedom."""

    squares: float
    df: int

    @classmethod
    def of(cls, deviations: Floats, df: int, *, weight: int = 1) -> SumOfSquares:
        """Return the sum of squares of deviations; `weight` is the number of scores that share a deviation."""
        return cls(weight * float(np.square(deviations).sum()), df)

    @property
    def mean_square(self) -> float:
        return self.squares / self.df


@dataclass(frozen=True)
class ModelDependentPrompt:
    """A prompt whose effect, relative to the mean of the other prompts, depends on the model."""

    prompt: str
    helps: tuple[str, ...]  # models
    hurts: tuple[str, ...]


@dataclass(frozen=True)
class Attribution:
    """Attribution over the complete rows. Shares sum to 1; a factor without degrees of freedom is None."""

    model: Factor | None
    prompt: Factor | None
    interaction: Factor | None
    scenario: Factor
    residual: Factor
    persona: Factor | None  # part of scenario; None with one persona, or one scenario per persona
    model_means: Mapping[str, Estimate]  # marginal means over all prompts
    prompt_means: Mapping[str, Estimate]  # marginal means over all models
    model_dependent_prompts: tuple[ModelDependentPrompt, ...]
    n_scenarios: int
    excluded: tuple[str, ...] = ()  # incomplete models, prompts or pairs

    def factors(self) -> dict[str, Factor | None]:
        """Return the five factors by name."""
        names = ("model", "prompt", "interaction", "scenario", "residual")
        return {name: getattr(self, name) for name in names}

    def shares(self) -> dict[str, float | None]:
        """Return `attribution` of the leaderboard JSON."""
        return {name: factor.share if factor else None for name, factor in self.factors().items()}

    def details(self) -> dict[str, Any]:
        """Return `attribution_details` of the leaderboard JSON."""
        return {
            "p": {name: factor.p if factor else None for name, factor in self.factors().items()},
            "n_scenarios": self.n_scenarios,
            "without": list(self.excluded),
            "models": [{"name": name, **estimate.to_json()} for name, estimate in self.model_means.items()],
            "prompts": [{"name": name, **estimate.to_json()} for name, estimate in self.prompt_means.items()],
            "interactions": [
                {"prompt_version": each.prompt, "helps": list(each.helps), "hurts": list(each.hurts)}
                for each in self.model_dependent_prompts
            ],
            "persona": self.persona.share if self.persona else None,
        }


def attribute(matrix: ScoreMatrix, *, n_flips: int = N_FLIPS) -> Attribution | Unknown:
    """Attribute the spread of the scores to model, prompt, their interaction, scenario and residual."""
    complete = matrix.select(matrix.complete)
    used = set(complete.pairs)
    models = sorted({pair.model for pair in used})
    prompts = sorted({pair.prompt for pair in used})
    missing = [str(Pair(model, prompt)) for model in models for prompt in prompts if Pair(model, prompt) not in used]
    shared = np.flatnonzero(complete.judged.all(axis=1))
    values = complete.values[shared]
    if len(used) < 2:
        return Unknown(f"Attribution needs two complete rows; there are {len(used)}.")
    if missing:
        return Unknown(f"Attribution needs every model with every prompt; not complete: {join_names(missing, 3)}.")
    if len(shared) < 2:
        return Unknown(f"Attribution needs two scenarios that all complete rows share; there are {len(shared)}.")
    if np.ptp(values) < TOLERANCE:
        return Unknown("All scores are equal: there is no spread to attribute.")
    n, n_models, n_prompts = len(shared), len(models), len(prompts)
    n_pairs = n_models * n_prompts
    scores = values.reshape(n, n_models, n_prompts)  # pairs are sorted by model, then prompt
    centred = scores - scores.mean()
    model_effects = centred.mean(axis=(0, 2))
    prompt_effects = centred.mean(axis=(0, 1))
    scenario_effects = centred.mean(axis=(1, 2))
    pair_effects = centred.mean(axis=0)
    residuals = centred - pair_effects - scenario_effects[:, None, None]
    # The residuals are the sum of the interactions model × scenario, prompt × scenario and model × prompt × scenario.
    model_by_scenario = residuals.mean(axis=2)
    prompt_by_scenario = residuals.mean(axis=1)
    df_model, df_prompt = n_models - 1, n_prompts - 1
    residual = SumOfSquares.of(residuals, (n - 1) * (n_pairs - 1))
    total = float(np.square(centred).sum())
    model = prompt = interaction = None
    if df_model:
        effect = SumOfSquares.of(model_effects, df_model, weight=n * n_prompts)
        error = SumOfSquares.of(model_by_scenario, (n - 1) * df_model, weight=n_prompts)
        model = _factor(effect, error, total)
    if df_prompt:
        effect = SumOfSquares.of(prompt_effects, df_prompt, weight=n * n_models)
        error = SumOfSquares.of(prompt_by_scenario, (n - 1) * df_prompt, weight=n_models)
        prompt = _factor(effect, error, total)
    if df_model and df_prompt:
        interaction_effects = pair_effects - model_effects[:, None] - prompt_effects
        effect = SumOfSquares.of(interaction_effects, df_model * df_prompt, weight=n)
        pair_by_scenario = residuals - model_by_scenario[:, :, None] - prompt_by_scenario[:, None, :]
        error = SumOfSquares.of(pair_by_scenario, (n - 1) * df_model * df_prompt)
        interaction = _factor(effect, error, total)
    scenario = _factor(SumOfSquares.of(scenario_effects, n - 1, weight=n_pairs), residual, total)
    explained = sum(factor.share for factor in (model, prompt, interaction, scenario) if factor)
    personas = [complete.personas[index] for index in shared]
    return Attribution(
        model=model,
        prompt=prompt,
        interaction=interaction,
        scenario=scenario,
        residual=Factor(max(1 - explained, 0.0), residual.squares, residual.df, p=None),
        persona=_persona_factor(scenario_effects, personas, n_pairs, total, scenario.share),
        model_means=_marginal_means(models, scores.mean(axis=2)),
        prompt_means=_marginal_means(prompts, scores.mean(axis=1)),
        model_dependent_prompts=_model_dependent_prompts(scores, models, prompts, n_flips),
        n_scenarios=n,
        excluded=_excluded_names(matrix.pairs, used),
    )


def _excluded_names(pairs: Sequence[Pair], used: set[Pair]) -> tuple[str, ...]:
    """Return the models and prompts of which every pair is excluded, then the other excluded pairs."""
    used_models = {pair.model for pair in used}
    used_prompts = {pair.prompt for pair in used}
    models, prompts, other_pairs = set(), set(), []
    for pair in pairs:
        if pair.model not in used_models:
            models.add(pair.model)
        elif pair.prompt not in used_prompts:
            prompts.add(pair.prompt)
        elif pair not in used:
            other_pairs.append(str(pair))
    return (*sorted(models), *sorted(prompts), *other_pairs)


def _factor(effect: SumOfSquares, error: SumOfSquares, total: float) -> Factor:
    """Return the factor with its ω² and its F test against `error`. Both must have degrees of freedom."""
    from scipy.special import fdtrc

    expected_by_chance = effect.df * error.squares / error.df
    p = None
    if error.squares > 1e-12 * total:  # otherwise the error term has only rounding errors
        p = float(fdtrc(effect.df, error.df, effect.mean_square / error.mean_square))
    omega_squared = max(effect.squares - expected_by_chance, 0.0) / (total + error.mean_square)
    return Factor(omega_squared, effect.squares, effect.df, p)


def _persona_factor(
    scenario_effects: Floats, personas: Sequence[str], n_pairs: int, total: float, scenario_share: float
) -> Factor | None:
    """Return the part of the scenario factor due to personas, tested against the variation within personas."""
    names = sorted(set(personas))
    df_within = len(personas) - len(names)
    if len(names) < 2 or not df_within:
        return None
    effects_by_persona = [scenario_effects[np.array(personas) == name] for name in names]
    squares_between = sum(float(len(effects)) * float(effects.mean()) ** 2 for effects in effects_by_persona) * n_pairs
    within = SumOfSquares(n_pairs * float(np.square(scenario_effects).sum()) - squares_between, df_within)
    factor = _factor(SumOfSquares(squares_between, len(names) - 1), within, total)
    # The two shares have different error terms, so the part could exceed the whole.
    return replace(factor, share=min(factor.share, scenario_share))


def _marginal_means(names: Sequence[str], means: Floats) -> dict[str, Estimate]:
    """Return an estimate for each name, from its column of `means`. Below MIN_SCENARIOS, it has no interval."""
    estimates = {name: shown_estimate(column) for name, column in zip(names, means.T, strict=True)}
    # `shown_estimate` returns None only without scores, which does not happen here.
    return {name: estimate for name, estimate in estimates.items() if estimate is not None}


def _model_dependent_prompts(
    scores: Floats, models: Sequence[str], prompts: Sequence[str], n_flips: int
) -> tuple[ModelDependentPrompt, ...]:
    """Return the prompts whose effect depends on the model, with the models they help or hurt.

    A significant effect on one model but not on another does not prove that the effects differ. The test is therefore
    on the contrast: a prompt's effect on one model − its mean effect on the others.
    """
    n, n_models, n_prompts = scores.shape
    if n_models < 2 or n_prompts < 2:
        return ()
    prompt_effects = _minus_mean_of_others(scores, axis=2)  # in each scenario, on each model

    def significant(differences: Floats) -> Mask:
        """Return a mask, models × prompts: whether the mean over scenarios differs from 0.

        p is adjusted, because all entries of the mask are tested together.
        """
        adjusted_p = step_down(differences.reshape(n, -1), n_flips=n_flips)
        return np.array([p is not None and p <= ALPHA for p in adjusted_p]).reshape(n_models, n_prompts)

    depends_on_model = significant(_minus_mean_of_others(prompt_effects, axis=1))
    has_effect = significant(prompt_effects)
    is_positive = prompt_effects.mean(axis=0) > 0
    found = []
    for column, prompt in enumerate(prompts):
        affected = [row for row in range(n_models) if has_effect[row, column]]
        helps = tuple(models[row] for row in affected if is_positive[row, column])
        hurts = tuple(models[row] for row in affected if not is_positive[row, column])
        if depends_on_model[:, column].any() and (helps or hurts):
            found.append(ModelDependentPrompt(prompt, helps, hurts))
    return tuple(found)


def _minus_mean_of_others(scores: Floats, axis: int) -> Floats:
    """Return score − mean of the others along the axis, which is k / (k − 1) × (score − mean of all k)."""
    k = scores.shape[axis]
    return np.asarray((scores - scores.mean(axis=axis, keepdims=True)) * (k / (k - 1)))
