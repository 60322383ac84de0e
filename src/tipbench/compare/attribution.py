"""Analysis of variance of a board: score ~ scenario + model + prompt + model:prompt, with scenarios as blocks.

Requires a complete layout: among the complete rows, every model with every prompt, over the scenarios they all share.
The sums of squares are then additive and independent of order. The share of a factor is ω²: its sum of squares, minus
what is expected by chance, divided by the total. A negative share is set to 0, and the residual is what remains.

`p` is from an F test. The effect of a model varies between scenarios, so models are tested against model × scenario,
and prompts against prompt × scenario. Their interaction is tested against what then remains, and scenarios against all
variation within them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tipbench.compare.matrix import Floats, Pair, ScoreMatrix
from tipbench.compare.resampling import ALPHA, FLIPS, SEED, TOLERANCE, step_down
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
class Marginal:
    """The mean of a model over all prompts, or of a prompt over all models."""

    name: str
    estimate: Estimate


@dataclass(frozen=True)
class InteractionFlag:
    """A prompt whose effect, relative to the mean of the other prompts, depends on the model."""

    prompt: str
    helps: tuple[str, ...]  # models
    hurts: tuple[str, ...]


@dataclass(frozen=True)
class Attribution:
    """Attribution over the complete rows. Shares that are not None sum to 1; a side with one member is None."""

    model: Factor | None
    prompt: Factor | None
    interaction: Factor | None
    scenario: Factor
    residual: Factor
    persona: Factor | None  # part of scenario; None with one persona, or one scenario per persona
    models: tuple[Marginal, ...]
    prompts: tuple[Marginal, ...]
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
        """Return coverage, p, marginal means, interactions and persona share, as in the leaderboard JSON."""
        sides = {"models": self.models, "prompts": self.prompts}
        return {
            "p": {name: factor.p if factor else None for name, factor in self.factors().items()},
            "n_scenarios": self.n_scenarios,
            "without": list(self.without),
            **{
                side: [
                    {"name": each.name, **{key: getattr(each.estimate, key) for key in ("mean", "ci_low", "ci_high")}}
                    for each in marginals
                ]
                for side, marginals in sides.items()
            },
            "interactions": [
                {"prompt_version": flag.prompt, "helps": list(flag.helps), "hurts": list(flag.hurts)}
                for flag in self.flags
            ],
            "persona": self.persona.share if self.persona else None,
        }


def attribute(matrix: ScoreMatrix, *, seed: int = SEED, flips: int = FLIPS) -> Attribution | Unknown:
    """Attribute the spread to model, prompt, their interaction, scenario and residual."""
    board = matrix.only(matrix.complete)
    models = sorted({pair.model for pair in board.pairs})
    prompts = sorted({pair.prompt for pair in board.pairs})
    used = set(board.pairs)
    missing = [str(Pair(m, p)) for m in models for p in prompts if Pair(m, p) not in used]
    rows = np.flatnonzero(board.judged.all(axis=1))
    values = board.values[rows]
    if len(used) < 2:
        return Unknown(f"Attribution needs two complete rows; there are {len(used)}.")
    if missing:
        return Unknown(f"Attribution needs every model with every prompt; not complete: {join_names(missing, 3)}.")
    if len(rows) < 2:
        return Unknown(f"Attribution needs two scenarios that all complete rows share; there are {len(rows)}.")
    if np.ptp(values) < TOLERANCE:
        return Unknown("All scores are equal: there is no spread to attribute.")
    scores = values.reshape(len(rows), len(models), len(prompts))  # pairs are sorted by model, then prompt
    found = _analyse(scores, models, prompts, [board.personas[row] for row in rows], seed=seed, flips=flips)
    return replace(found, without=_excluded_names(matrix.pairs, used))


def _excluded_names(pairs: Sequence[Pair], used: set[Pair]) -> tuple[str, ...]:
    """Return what the layout excludes in its shortest form: whole models, whole prompts, then single pairs."""
    excluded = [pair for pair in pairs if pair not in used]
    models = {pair.model for pair in excluded} - {pair.model for pair in used}
    prompts = {pair.prompt for pair in excluded} - {pair.prompt for pair in used}
    others = [pair for pair in excluded if pair.model not in models]
    single_pairs = [str(pair) for pair in others if pair.prompt not in prompts]
    return (*sorted(models), *sorted({pair.prompt for pair in others if pair.prompt in prompts}), *single_pairs)


def _analyse(
    scores: Floats, models: Sequence[str], prompts: Sequence[str], personas: Sequence[str], *, seed: int, flips: int
) -> Attribution:
    n, k_models, k_prompts = scores.shape
    centred = scores - scores.mean()
    by_model = centred.mean(axis=(0, 2))
    by_prompt = centred.mean(axis=(0, 1))
    by_scenario = centred.mean(axis=(1, 2))
    interaction_means = centred.mean(axis=0) - by_model[:, None] - by_prompt
    within_scenarios = centred - centred.mean(axis=0) - by_scenario[:, None, None]
    models_by_scenario = within_scenarios.mean(axis=2)  # scenarios × models
    prompts_by_scenario = within_scenarios.mean(axis=1)  # scenarios × prompts
    remaining = within_scenarios - models_by_scenario[:, :, None] - prompts_by_scenario[:, None, :]
    total = _sum_of_squares(centred)
    # What each factor is tested against: a sum of squares with its degrees of freedom.
    df_model, df_prompt = k_models - 1, k_prompts - 1
    model_error = (k_prompts * _sum_of_squares(models_by_scenario), (n - 1) * df_model)
    prompt_error = (k_models * _sum_of_squares(prompts_by_scenario), (n - 1) * df_prompt)
    pair_error = (_sum_of_squares(remaining), (n - 1) * df_model * df_prompt)
    noise = (_sum_of_squares(within_scenarios), (n - 1) * (k_models * k_prompts - 1))
    model = _factor((n * k_prompts * _sum_of_squares(by_model), df_model), model_error, total)
    prompt = _factor((n * k_models * _sum_of_squares(by_prompt), df_prompt), prompt_error, total)
    interaction = _factor((n * _sum_of_squares(interaction_means), df_model * df_prompt), pair_error, total)
    scenario = _factor((k_models * k_prompts * _sum_of_squares(by_scenario), n - 1), noise, total)
    explained = sum(factor.share for factor in (model, prompt, interaction, scenario) if factor)
    if scenario is None:
        raise ValueError("Attribution needs two scenarios.")
    return Attribution(
        model=model,
        prompt=prompt,
        interaction=interaction,
        scenario=scenario,
        residual=Factor(max(1 - explained, 0.0), *noise, None),
        persona=_persona_factor(by_scenario, personas, k_models * k_prompts, total, scenario.share),
        models=_marginals(models, scores.mean(axis=2)),
        prompts=_marginals(prompts, scores.mean(axis=1)),
        flags=_interaction_flags(scores, models, prompts, seed=seed, flips=flips),
        n_scenarios=n,
    )


def _sum_of_squares(numbers: Floats) -> float:
    return float(np.square(numbers).sum())


_Squares = tuple[float, int]  # sum of squares, degrees of freedom


def _factor(effect: _Squares, against: _Squares, total: float) -> Factor | None:
    """Return the factor with its ω² and F test; None without degrees of freedom."""
    from scipy.special import fdtrc

    (squares, freedom), (other, other_freedom) = effect, against
    if not freedom:
        return None
    by_chance = freedom * other / other_freedom if other_freedom else 0.0
    p = None
    if other_freedom and other > 1e-12 * total:
        p = float(fdtrc(freedom, other_freedom, (squares / freedom) / (other / other_freedom)))
    return Factor(max(squares - by_chance, 0.0) / total, squares, freedom, p)


def _persona_factor(
    by_scenario: Floats, personas: Sequence[str], pairs: int, total: float, scenario_share: float
) -> Factor | None:
    """Return the part of the scenario factor that is due to personas, tested against scenarios of one persona."""
    names = sorted(set(personas))
    inside = len(personas) - len(names)
    if len(names) < 2 or not inside:
        return None
    members = [np.array(personas) == name for name in names]
    between = sum(float(rows.sum()) * float(by_scenario[rows].mean()) ** 2 for rows in members) * pairs
    slots = (pairs * _sum_of_squares(by_scenario) - between, inside)
    found = _factor((between, len(names) - 1), slots, total)
    return replace(found, share=min(found.share, scenario_share)) if found else None


def _marginals(names: Sequence[str], means: Floats) -> tuple[Marginal, ...]:
    estimates = [shown_estimate(column) for column in means.T]
    return tuple(Marginal(name, found) for name, found in zip(names, estimates, strict=True) if found)


def _interaction_flags(
    scores: Floats, models: Sequence[str], prompts: Sequence[str], *, seed: int, flips: int
) -> tuple[InteractionFlag, ...]:
    """Return the prompts whose effect depends on the model, with the models they help or hurt.

    A significant effect on one model but not on another does not prove that the effects differ. The test is therefore
    on the contrast, a prompt's effect on one model − its mean effect on the others, step-down over all cells.
    """
    n, k_models, k_prompts = scores.shape
    if k_models < 2 or k_prompts < 2:
        return ()
    effect = _against_others(scores, axis=2)
    contrast = _against_others(effect, axis=1)
    shape = (k_models, k_prompts)
    depends = _significant(contrast.reshape(n, -1), seed=seed, flips=flips).reshape(shape)
    real = _significant(effect.reshape(n, -1), seed=seed, flips=flips).reshape(shape)
    up = effect.mean(axis=0) > 0
    flags = []
    for at, prompt in enumerate(prompts):
        helps = tuple(model for i, model in enumerate(models) if real[i, at] and up[i, at])
        hurts = tuple(model for i, model in enumerate(models) if real[i, at] and not up[i, at])
        if depends[:, at].any() and (helps or hurts):
            flags.append(InteractionFlag(prompt, helps, hurts))
    return tuple(flags)


def _against_others(scores: Floats, axis: int) -> Floats:
    """Return each score minus the mean of the others along the axis."""
    k = scores.shape[axis]
    return np.asarray((scores - scores.mean(axis=axis, keepdims=True)) * (k / (k - 1)))


def _significant(differences: Floats, *, seed: int, flips: int) -> Floats:
    """Return for each column whether its mean differs from 0, adjusted for all columns."""
    adjusted = step_down(differences, seed=seed, flips=flips)
    return np.array([p is not None and p <= ALPHA for p in adjusted])
