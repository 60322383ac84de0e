"""Analysis of variance of a board: score ~ scenario + model + prompt + model:prompt, with scenarios as blocks.

Requires a complete layout: among the complete rows, every model with every prompt, over the scenarios they all share.
The sums of squares are then additive and independent of order. By chance alone every factor gets a share of about its
degrees of freedom / the total; `p` (F test against the residual) tests for more. The residual is the variation of a
pair between scenarios, including noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tipbench.compare.matrix import Floats, Pair, ScoreMatrix
from tipbench.compare.resampling import ALPHA, FLIPS, NOTHING, SEED, step_down
from tipbench.compare.statistics import Estimate, Unknown, mean_estimate
from tipbench.text import join_names


@dataclass(frozen=True)
class Factor:
    """One source of variation."""

    share: float  # of the total sum of squares
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

    def shares(self) -> dict[str, float | None]:
        """Returns the five shares by name, as in the leaderboard JSON."""
        names = ("model", "prompt", "interaction", "scenario", "residual")
        factors: list[Factor | None] = [self.model, self.prompt, self.interaction, self.scenario, self.residual]
        return {name: factor.share if factor else None for name, factor in zip(names, factors, strict=True)}


def attribute(matrix: ScoreMatrix, *, seed: int = SEED, flips: int = FLIPS) -> Attribution | Unknown:
    """Attributes the spread to model, prompt, their interaction, scenario and residual."""
    board = matrix.only(matrix.complete)
    models = sorted({pair.model for pair in board.pairs})
    prompts = sorted({pair.prompt for pair in board.pairs})
    missing = [str(Pair(m, p)) for m in models for p in prompts if Pair(m, p) not in board.pairs]
    rows = np.flatnonzero(board.judged.all(axis=1))
    values = board.values[rows]
    reason = _why_not(board, missing, values)
    if reason:
        return Unknown(reason)
    scores = values.reshape(len(rows), len(models), len(prompts))  # pairs are sorted by model, then prompt
    found = _attribution(scores, models, prompts, [board.personas[row] for row in rows], seed=seed, flips=flips)
    return replace(found, without=_without(matrix.pairs, board.pairs))


def _without(pairs: Sequence[Pair], used: Sequence[Pair]) -> tuple[str, ...]:
    """Returns what the layout excludes in its shortest form: whole models, whole prompts, then single pairs."""
    left = [pair for pair in pairs if pair not in used]
    models = {pair.model for pair in left} - {pair.model for pair in used}
    prompts = {pair.prompt for pair in left} - {pair.prompt for pair in used}
    rest = [pair for pair in left if pair.model not in models]
    alone = [str(pair) for pair in rest if pair.prompt not in prompts]
    return (*sorted(models), *sorted({pair.prompt for pair in rest if pair.prompt in prompts}), *alone)


def _why_not(board: ScoreMatrix, missing: Sequence[str], values: Floats) -> str | None:
    if len(board.pairs) < 2:
        return f"Attribution needs two complete rows; there are {len(board.pairs)}."
    if missing:
        return f"Attribution needs every model with every prompt; not complete: {join_names(missing, 3)}."
    if len(values) < 2:
        return f"Attribution needs two scenarios that all complete rows share; there are {len(values)}."
    if np.ptp(values) < NOTHING:
        return "All scores are equal: there is no spread to attribute."
    return None


def _attribution(
    scores: Floats, models: Sequence[str], prompts: Sequence[str], personas: Sequence[str], *, seed: int, flips: int
) -> Attribution:
    n, k_models, k_prompts = scores.shape
    centred = scores - scores.mean()
    by_model = centred.mean(axis=(0, 2))
    by_prompt = centred.mean(axis=(0, 1))
    by_scenario = centred.mean(axis=(1, 2))
    crossed = centred.mean(axis=0) - by_model[:, None] - by_prompt
    rest = centred - centred.mean(axis=0) - by_scenario[:, None, None]
    noise = _Squares(_sum(rest), (n - 1) * (k_models * k_prompts - 1))
    total = _sum(centred)

    def factor(effects: Floats, weight: int, freedom: int) -> Factor | None:
        return _factor(_Squares(weight * _sum(effects), freedom), noise, total) if freedom else None

    scenario = _Squares(k_models * k_prompts * _sum(by_scenario), n - 1)
    return Attribution(
        model=factor(by_model, n * k_prompts, k_models - 1),
        prompt=factor(by_prompt, n * k_models, k_prompts - 1),
        interaction=factor(crossed, n, (k_models - 1) * (k_prompts - 1)),
        scenario=_factor(scenario, noise, total),
        residual=Factor(noise.squares / total, noise.squares, noise.freedom, None),
        persona=_persona(by_scenario, personas, k_models * k_prompts, total),
        models=_marginals(models, scores.mean(axis=2)),
        prompts=_marginals(prompts, scores.mean(axis=1)),
        flags=_flags(scores, models, prompts, seed=seed, flips=flips),
        n_scenarios=n,
    )


@dataclass(frozen=True)
class _Squares:
    squares: float
    freedom: int


def _sum(numbers: Floats) -> float:
    return float(np.square(numbers).sum())


def _factor(effect: _Squares, against: _Squares, total: float) -> Factor:
    return Factor(effect.squares / total, effect.squares, effect.freedom, _f_test(effect, against, total))


def _f_test(effect: _Squares, against: _Squares, total: float) -> float | None:
    if not against.freedom or against.squares <= 1e-12 * total:
        return None
    from scipy.special import fdtrc

    ratio = (effect.squares / effect.freedom) / (against.squares / against.freedom)
    return float(fdtrc(effect.freedom, against.freedom, ratio))


def _persona(by_scenario: Floats, personas: Sequence[str], pairs: int, total: float) -> Factor | None:
    names = sorted(set(personas))
    inside = len(personas) - len(names)
    if len(names) < 2 or not inside:
        return None
    members = [np.array(personas) == name for name in names]
    between = sum(float(rows.sum()) * float(by_scenario[rows].mean()) ** 2 for rows in members) * pairs
    slots = _Squares(pairs * _sum(by_scenario) - between, inside)
    return _factor(_Squares(between, len(names) - 1), slots, total)


def _marginals(names: Sequence[str], means: Floats) -> tuple[Marginal, ...]:
    estimates = [mean_estimate(column) for column in means.T]
    return tuple(Marginal(name, found) for name, found in zip(names, estimates, strict=True) if found)


def _flags(
    scores: Floats, models: Sequence[str], prompts: Sequence[str], *, seed: int, flips: int
) -> tuple[InteractionFlag, ...]:
    """Returns the prompts whose effect depends on the model, with the models they help or hurt.

    A significant effect on one model but not on another does not prove that the effects differ. The test is therefore
    on the contrast, a prompt's effect on one model − its mean effect on the others, step-down over all cells.
    """
    n, k_models, k_prompts = scores.shape
    if k_models < 2 or k_prompts < 2:
        return ()
    effect = _against_others(scores, axis=2)
    contrast = _against_others(effect, axis=1)
    shape = (k_models, k_prompts)
    depends = _separated(contrast.reshape(n, -1), seed=seed, flips=flips).reshape(shape)
    real = _separated(effect.reshape(n, -1), seed=seed, flips=flips).reshape(shape)
    up = effect.mean(axis=0) > 0
    flags = []
    for at, prompt in enumerate(prompts):
        helps = tuple(model for i, model in enumerate(models) if real[i, at] and up[i, at])
        hurts = tuple(model for i, model in enumerate(models) if real[i, at] and not up[i, at])
        if depends[:, at].any() and (helps or hurts):
            flags.append(InteractionFlag(prompt, helps, hurts))
    return tuple(flags)


def _against_others(scores: Floats, axis: int) -> Floats:
    k = scores.shape[axis]
    return np.asarray((scores - scores.mean(axis=axis, keepdims=True)) * (k / (k - 1)))


def _separated(differences: Floats, *, seed: int, flips: int) -> Floats:
    adjusted = step_down(differences, seed=seed, flips=flips)
    return np.array([p is not None and p <= ALPHA for p in adjusted])
