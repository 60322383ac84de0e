"""Simulations: run policies in one world over several seeds, and compare them with intervals paired by user."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tipbench.compare.statistics import Estimate, estimate_json, mean_estimate
from tipbench.errors import UsageError
from tipbench.plan.collect_config import split_names
from tipbench.serve.policy import DEFAULT_POLICY, POLICIES
from tipbench.serve.prior import Prior
from tipbench.simulate.rollout import CONTROL_ARM, Arm, ArmResult, find_arm, rollout
from tipbench.simulate.world import Ints, World, WorldName, load_personas

EXPERIMENT = "tip-sim"
CURVE_POINTS = 50  # rounds at which a learning curve is stored
ALL_POLICIES = (DEFAULT_POLICY, CONTROL_ARM, *(name for name in POLICIES if name != DEFAULT_POLICY))
_MAX_DECISIONS = 400_000_000  # of all arms together; takes about 20 minutes on one core


class SimulationConfig(BaseModel):
    """Options of `tipbench simulate`, of POST /api/bench/simulations and of the panel's form."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policies: str = Field(",".join(ALL_POLICIES), max_length=500, description="Comma-separated policies to simulate.")
    world: WorldName = Field(WorldName.STANDARD, description="The simulated world.")
    users: int = Field(1000, ge=10, le=20_000, description="Simulated users per seed.")
    rounds: int = Field(200, ge=4, le=5000, description="Decisions per user.")
    seeds: int = Field(5, ge=1, le=1000, description="Number of seeds; each has its own users.")
    seed: int = Field(0, ge=0, le=2**31, description="First seed.")
    baseline: str = Field(DEFAULT_POLICY, description="The policy that others are compared with.")
    ablation: str = Field("", description="A policy to run again without each of its features, one at a time.")

    @field_validator("policies")
    @classmethod
    def _normalise_policies(cls, value: str) -> str:
        return ",".join(split_names(value)) or ",".join(ALL_POLICIES)

    @model_validator(mode="after")
    def _check_names_and_size(self) -> SimulationConfig:
        known = [*POLICIES, CONTROL_ARM]
        names = [*self.policy_names, self.ablation] if self.ablation else self.policy_names
        for name in names:
            if name not in known:
                raise ValueError(f"there is no policy {name[:60]!r}; choose from {', '.join(known)}")
        if self.decisions > _MAX_DECISIONS:
            raise ValueError(
                f"{self.decisions:,} decisions are too many for one simulation; at most {_MAX_DECISIONS:,}. "
                "Use fewer users, rounds, seeds or policies"
            )
        return self

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the simulated policies, the baseline first."""
        return tuple(dict.fromkeys((self.baseline, *split_names(self.policies))))

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Names of all arms, including those of the ablation."""
        if not self.ablation:
            return self.policy_names
        ablation_arms = [f"{self.ablation} without {feature}" for feature in self.ablated_features]
        return tuple(dict.fromkeys((*self.policy_names, self.ablation, *ablation_arms)))

    @property
    def ablated_features(self) -> tuple[str, ...]:
        """Features, or patterns of features, that the ablation leaves out one at a time.

        The pattern `category_*` stands for all features computed from tallies, left out together.
        """
        if not self.ablation:
            return ()
        names = find_arm(self.ablation).policy.features.names
        uses_tallies = any(name.startswith("category_") for name in names)
        return (*names, "category_*") if uses_tallies else names

    @property
    def decisions(self) -> int:
        """Number of decisions of all arms."""
        return self.users * self.rounds * self.seeds * len(self.arm_names)


def make_simulation_config(options: Mapping[str, Any]) -> SimulationConfig:
    """Return the configuration; options that are None get their defaults. Raises UsageError for an invalid option."""
    try:
        return SimulationConfig.model_validate({key: value for key, value in options.items() if value is not None})
    except ValidationError as exc:
        error, *_ = exc.errors(include_url=False)
        problem = error["msg"].removeprefix("Value error, ")
        if error["loc"]:  # empty for an error that concerns several options
            problem = f"--{error['loc'][0]}: {problem} (got {str(error['input'])[:80]!r})"
        raise UsageError(f"{problem}.") from exc


@dataclass(frozen=True)
class Simulation:
    """Results of all arms on the same users, pooled over seeds. Mappings are by name of the arm."""

    config: SimulationConfig
    arms: Mapping[str, Arm]
    results: Mapping[str, ArmResult]
    persona: Ints  # of each user, as an index into the names of `load_personas()`
    seeds_done: int
    seconds: float

    def gain(self, name: str, baseline: str | None = None, persona: int | None = None) -> Estimate | None:
        """Return the gain in reward per decision of an arm over the baseline, paired by user.

        The default baseline is the configured one. `persona` selects the users of one persona.
        """
        difference = self.results[name].reward - self.results[baseline or self.config.baseline].reward
        if persona is not None:
            difference = difference[self.persona == persona]
        return mean_estimate(difference)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `--json`, MLflow, the API and the charts."""
        config, personas = self.config, load_personas()
        ablation_losses = {
            feature: self.gain(config.ablation, baseline=f"{config.ablation} without {feature}")
            for feature in config.ablated_features
        }
        return {
            "format": "tipbench-simulation/1",
            "config": config.model_dump(mode="json"),
            "personas": personas.version,
            "seeds_done": self.seeds_done,
            "decisions": self.seeds_done * config.decisions // config.seeds,
            "seconds": self.seconds,
            "policies": [self._arm_json(name) for name in config.policy_names],
            "ablation": [
                {"feature": feature, "loss": estimate_json(loss)} for feature, loss in ablation_losses.items()
            ],
        }

    def _arm_json(self, name: str) -> dict[str, Any]:
        arm, result = self.arms[name], self.results[name]

        def estimates(persona: int | None = None) -> dict[str, Any]:
            selected = slice(None) if persona is None else self.persona == persona
            gain = None if name == self.config.baseline else self.gain(name, persona=persona)
            return {
                "reward": estimate_json(mean_estimate(result.reward[selected])),
                "regret": estimate_json(mean_estimate(result.regret[selected])),
                "gain": estimate_json(gain),
            }

        rounds = np.arange(1, len(result.reward_by_round) + 1)
        shown_rounds = np.unique(np.linspace(1, len(rounds), CURVE_POINTS).round().astype(int))
        return {
            "name": name,
            "version": arm.policy.version,
            "dim": arm.policy.features.dim,
            "prior": arm.prior.hash if arm.prior else None,
            **estimates(),
            "personas": [{"persona": each, **estimates(persona=i)} for i, each in enumerate(load_personas().names)],
            "curve": {  # up to each shown round: the mean reward, but the total regret
                "round": shown_rounds.tolist(),
                "reward": (np.cumsum(result.reward_by_round) / rounds)[shown_rounds - 1].tolist(),
                "regret": np.cumsum(result.regret_by_round)[shown_rounds - 1].tolist(),
            },
        }


def simulate(
    config: SimulationConfig,
    *,
    priors: Sequence[Prior] = (),
    workers: int | None = None,
    on_progress: Callable[[Simulation, float], None] | None = None,
) -> Simulation:
    """Run the simulation. After each seed, `on_progress` gets the results so far and the share of seeds done."""
    started = time.monotonic()
    prior_of = {prior.policy: prior for prior in priors}
    for prior in priors:
        find_arm(prior.policy).policy.check_prior(prior)  # raises UsageError
    arms = {name: find_arm(name, prior_of) for name in config.arm_names}
    done: dict[int, list[ArmResult]] = {}  # by seed; one for each arm
    # The same for every seed: seeds differ in random numbers, not in the users' personas.
    persona = World(config.world, config.seed, config.users, config.rounds).persona

    def simulate_seed(seed: int) -> list[ArmResult]:
        return rollout(World(config.world, seed, config.users, config.rounds), list(arms.values()))

    def results_so_far() -> Simulation:
        by_arm = zip(*(done[seed] for seed in sorted(done)), strict=True)  # for each arm, its results of all seeds
        return Simulation(
            config,
            arms,
            results={name: _pool_seeds(by_seed) for name, by_seed in zip(arms, by_arm, strict=True)},
            persona=np.tile(persona, len(done)),
            seeds_done=len(done),
            seconds=time.monotonic() - started,
        )

    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1)  # threads, because numpy releases the GIL
    try:
        seeds = range(config.seed, config.seed + config.seeds)
        seed_of = {pool.submit(simulate_seed, seed): seed for seed in seeds}
        for future in as_completed(seed_of):
            done[seed_of[future]] = future.result()
            if on_progress is not None:
                on_progress(results_so_far(), len(done) / config.seeds)
    finally:
        pool.shutdown(cancel_futures=True)
    return results_so_far()


def _pool_seeds(by_seed: Sequence[ArmResult]) -> ArmResult:
    return ArmResult(
        reward=np.concatenate([result.reward for result in by_seed]),
        regret=np.concatenate([result.regret for result in by_seed]),
        reward_by_round=np.mean([result.reward_by_round for result in by_seed], axis=0),
        regret_by_round=np.mean([result.regret_by_round for result in by_seed], axis=0),
    )
