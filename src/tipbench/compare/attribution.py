"""Analysis of variance of a board: score ~ scenario + model + prompt + model:prompt, with scenarios as blocks.

Only complete rows count, over the scenarios they all share; they must have every model with every prompt.
The sums of squares are then additive and independent of order. The share of a factor is ω² (Hays 1963): its sum of
squares minus the sum expected by chance, divided by the total plus the mean square of its error term (below). A negative
share is set to 0. The residual is the rest.

`p` is from an F test with scenarios as a random factor: models are tested against model × scenario, prompts against
prompt × scenario, their interaction against model × prompt × scenario, and scenarios against the residual.
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
    squares: float
    freedom: int
    p: float | None  # None for the residual, and if there is no variation to test against


@dataclass(frozen=True)
class InteractionFlag:
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
    models: Mapping[str, Estimate]  # marginal means over all prompts
    prompts: Mapping[str, Estimate]  # marginal means over all models
    flags: tuple[InteractionFlag, ...]
    n_scenarios: int
    without: tuple[str, ...] = ()  # excluded as incomplete: models, prompts or pairs of the board

    def factors(self) -> dict[str, Factor | None]:
        """Return the five factors by name, as in the leaderboard JSON."""
        names = ("model", "prompt", "interaction", "scenario", "residual")
        return {name: getattr(self, name) for name in names}

    def shares(self) -> dict[str, float | None]:
        """Return the five shares by name, as in the leaderboard JSON."""
        return {name: factor.share if factor else None for name, factor in self.factors().items()}

    def details(self) -> dict[str, Any]:
        """Return p, scenarios, excluded names, marginal means, interactions and persona share, as in the JSON."""
        return {
            "p": {name: factor.p if factor else None for name, factor in self.factors().items()},
            "n_scenarios": self.n_scenarios,
            "without": list(self.without),
            "models": [{"name": name, **estimate.to_json()} for name, estimate in self.models.items()],
            "prompts": [{"name": name, **estimate.to_json()} for name, estimate in self.prompts.items()],
            "interactions": [
                {"prompt_version": flag.prompt, "helps": list(flag.helps), "hurts": list(flag.hurts)}
                for flag in self.flags
            ],
            "persona": self.persona.share if self.persona else None,
        }


def attribute(matrix: ScoreMatrix, *, n_flips: int = N_FLIPS) -> Attribution | Unknown:
    """Attribute the spread of the scores to model, prompt, their interaction, scenario and residual."""
    board = matrix.only(matrix.complete)
    models = sorted({pair.model for pair in board.pairs})
    prompts = sorted({pair.prompt for pair in board.pairs})
    used = set(board.pairs)
    missing = [str(Pair(model, prompt)) for model in models for prompt in prompts if Pair(model, prompt) not in used]
    shared = np.flatnonzero(board.judged.all(axis=1))
    values = board.values[shared]
    if len(used) < 2:
        return Unknown(f"Attribution needs two complete rows; there are {len(used)}.")
    if missing:
        return Unknown(f"Attribution needs every model with every prompt; not complete: {join_names(missing, 3)}.")
    if len(shared) < 2:
        return Unknown(f"Attribution needs two scenarios that all complete rows share; there are {len(shared)}.")
    if np.ptp(values) < TOLERANCE:
        return Unknown("All scores are equal: there is no spread to attribute.")
    scores = values.reshape(len(shared), len(models), len(prompts))  # pairs are sorted by model, then prompt
    n, k_models, k_prompts = scores.shape
    n_pairs = k_models * k_prompts
    centred = scores - scores.mean()
    by_model = centred.mean(axis=(0, 2))
    by_prompt = centred.mean(axis=(0, 1))
    by_scenario = centred.mean(axis=(1, 2))
    residuals = centred - centred.mean(axis=0) - by_scenario[:, None, None]
    models_by_scenario = residuals.mean(axis=2)  # scenarios × models
    prompts_by_scenario = residuals.mean(axis=1)  # scenarios × prompts
    df_model, df_prompt = k_models - 1, k_prompts - 1
    residual = SumOfSquares.of(residuals, (n - 1) * (n_pairs - 1))
    total = float(np.square(centred).sum())
    model = prompt = interaction = None
    if df_model:
        effect = SumOfSquares.of(by_model, df_model, times=n * k_prompts)
        error = SumOfSquares.of(models_by_scenario, (n - 1) * df_model, times=k_prompts)
        model = _factor(effect, error, total)
    if df_prompt:
        effect = SumOfSquares.of(by_prompt, df_prompt, times=n * k_models)
        error = SumOfSquares.of(prompts_by_scenario, (n - 1) * df_prompt, times=k_models)
        prompt = _factor(effect, error, total)
    if df_model and df_prompt:
        interactions = centred.mean(axis=0) - by_model[:, None] - by_prompt
        effect = SumOfSquares.of(interactions, df_model * df_prompt, times=n)
        noise = residuals - models_by_scenario[:, :, None] - prompts_by_scenario[:, None, :]
        error = SumOfSquares.of(noise, (n - 1) * df_model * df_prompt)
        interaction = _factor(effect, error, total)
    scenario = _factor(SumOfSquares.of(by_scenario, n - 1, times=n_pairs), residual, total)
    explained = sum(factor.share for factor in (model, prompt, interaction, scenario) if factor)
    personas = [board.personas[row] for row in shared]
    return Attribution(
        model=model,
        prompt=prompt,
        interaction=interaction,
        scenario=scenario,
        residual=Factor(max(1 - explained, 0.0), residual.squares, residual.freedom, None),
        persona=_persona_factor(by_scenario, personas, n_pairs, total, scenario.share),
        models=_marginals(models, scores.mean(axis=2)),
        prompts=_marginals(prompts, scores.mean(axis=1)),
        flags=_interaction_flags(scores, models, prompts, n_flips),
        n_scenarios=n,
        without=_excluded_names(matrix.pairs, used),
    )


def _excluded_names(pairs: Sequence[Pair], used: set[Pair]) -> tuple[str, ...]:
    """Return the excluded pairs, abbreviated: models and prompts that are excluded as a whole, then other pairs."""
    excluded = [pair for pair in pairs if pair not in used]
    models = {pair.model for pair in excluded} - {pair.model for pair in used}
    prompts = {pair.prompt for pair in excluded} - {pair.prompt for pair in used}
    others = [pair for pair in excluded if pair.model not in models]
    single_pairs = [str(pair) for pair in others if pair.prompt not in prompts]
    return (*sorted(models), *sorted({pair.prompt for pair in others if pair.prompt in prompts}), *single_pairs)


@dataclass(frozen=True)
class SumOfSquares:
    """A sum of squares with its degrees of freedom."""

    squares: float
    freedom: int

    @classmethod
    def of(cls, deviations: Floats, freedom: int, *, times: int = 1) -> SumOfSquares:
        """Return the sum of squares of deviations, each of which is shared by `times` scores."""
        return cls(times * float(np.square(deviations).sum()), freedom)

    @property
    def mean(self) -> float:
        """The mean square."""
        return self.squares / self.freedom


def _factor(effect: SumOfSquares, error: SumOfSquares, total: float) -> Factor:
    """Return the factor with its ω² and its F test against `error`. Both have degrees of freedom."""
    from scipy.special import fdtrc

    by_chance = effect.freedom * error.squares / error.freedom
    p = None
    if error.squares > 1e-12 * total:
        p = float(fdtrc(effect.freedom, error.freedom, effect.mean / error.mean))
    omega_squared = max(effect.squares - by_chance, 0.0) / (total + error.mean)
    return Factor(omega_squared, effect.squares, effect.freedom, p)


def _persona_factor(
    by_scenario: Floats, personas: Sequence[str], n_pairs: int, total: float, scenario_share: float
) -> Factor | None:
    """Return the part of the scenario factor due to personas, tested against the variation within personas."""
    names = sorted(set(personas))
    freedom_within = len(personas) - len(names)
    if len(names) < 2 or not freedom_within:
        return None
    members = [np.array(personas) == name for name in names]
    between = sum(float(rows.sum()) * float(by_scenario[rows].mean()) ** 2 for rows in members) * n_pairs
    within = SumOfSquares(n_pairs * float(np.square(by_scenario).sum()) - between, freedom_within)
    factor = _factor(SumOfSquares(between, len(names) - 1), within, total)
    return replace(factor, share=min(factor.share, scenario_share))


def _marginals(names: Sequence[str], means: Floats) -> dict[str, Estimate]:
    estimates = {name: shown_estimate(column) for name, column in zip(names, means.T, strict=True)}
    return {name: estimate for name, estimate in estimates.items() if estimate}


def _interaction_flags(
    scores: Floats, models: Sequence[str], prompts: Sequence[str], n_flips: int
) -> tuple[InteractionFlag, ...]:
    """Return the prompts whose effect depends on the model, with the models they help or hurt.

    A significant effect on one model but not on another does not prove that the effects differ. The test is therefore
    on the contrast: a prompt's effect on one model − its mean effect on the others.
    """
    n, k_models, k_prompts = scores.shape
    if k_models < 2 or k_prompts < 2:
        return ()
    effect = _against_others(scores, axis=2)

    def significant(differences: Floats) -> Mask:
        """Return whether the mean over scenarios differs from 0, adjusted for all models × prompts."""
        adjusted = step_down(differences.reshape(n, -1), n_flips=n_flips)
        return np.array([p is not None and p <= ALPHA for p in adjusted]).reshape(k_models, k_prompts)

    depends_on_model = significant(_against_others(effect, axis=1))
    has_effect, positive = significant(effect), effect.mean(axis=0) > 0
    flags = []
    for column, prompt in enumerate(prompts):
        affected = [row for row in range(k_models) if has_effect[row, column]]
        helps = tuple(models[row] for row in affected if positive[row, column])
        hurts = tuple(models[row] for row in affected if not positive[row, column])
        if depends_on_model[:, column].any() and (helps or hurts):
            flags.append(InteractionFlag(prompt, helps, hurts))
    return tuple(flags)


def _against_others(scores: Floats, axis: int) -> Floats:
    """Return each score minus the mean of the others along the axis."""
    k = scores.shape[axis]
    return np.asarray((scores - scores.mean(axis=axis, keepdims=True)) * (k / (k - 1)))
