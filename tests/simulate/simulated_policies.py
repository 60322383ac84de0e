"""The long policy simulations of `make simulations`: take minutes, and exit with 1 if a promise does not hold.

python tests/simulate/simulated_policies.py [--quick]

The tests run the same simulations with fewer users and seeds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from tipbench.serve.policy import POLICIES
from tipbench.simulate.promotion_gate import FULL, QUICK, WORLDS, Size, simulation_clauses
from tipbench.simulate.rollout import CONTROL_ARM, Arm, rollout
from tipbench.simulate.simulation import SimulationConfig, simulate
from tipbench.simulate.world import World, WorldName

NULL = Size(1, 200, 100)
MOST_NULL_PASSES = 0.05


def gates(size: Size) -> Iterator[tuple[str, bool]]:
    """Check clauses a to c of every policy against v1: v3 must pass, v1 must fail against v3, others are reported."""
    for candidate, baseline in (
        *((name, "egreedy/v1") for name in POLICIES if name != "egreedy/v1"),
        ("egreedy/v1", "egreedy/v3"),
    ):
        clauses = simulation_clauses(candidate, baseline, size)
        passed = all(clause.passed for clause in clauses)
        required = {"egreedy/v3": True, "egreedy/v1": False}.get(candidate)
        lines = [f"{candidate} against {baseline}: {'passes' if passed else 'fails'} ({size})"]
        lines += [f"    {'passed' if clause.passed else 'FAILED'} {clause.name}: {clause.why}" for clause in clauses]
        yield "\n".join(lines), required is None or passed is required


def attribution(size: Size) -> Iterator[tuple[str, bool]]:
    """Check that the gain of v3 comes from its features, and not from an intercept."""
    config = SimulationConfig(policies=f"{CONTROL_ARM},egreedy/v2,egreedy/v3", ablation="egreedy/v3", **vars(size))
    found = simulate(config).to_json()
    gains = {policy["name"]: policy["gain"] for policy in found["policies"] if policy["gain"]}
    lines = [f"{name} − egreedy/v1: {_interval(gain)}" for name, gain in gains.items()]
    lines += [f"    egreedy/v3 without {row['feature']} loses {_interval(row['loss'])}" for row in found["ablation"]]
    yield "\n".join(lines), gains["egreedy/v3"]["ci_low"] > gains[CONTROL_ARM]["ci_high"]


def null_world(seeds: int) -> Iterator[tuple[str, bool]]:
    """How often chance alone passes clauses a to c."""
    worlds = [WorldName.NULL] * len(WORLDS)
    passes = sum(
        all(clause.passed for clause in simulation_clauses("egreedy/v3", "egreedy/v1", NULL, worlds=worlds, seed=seed))
        for seed in range(seeds)
    )
    yield f"null world: {passes} of {seeds} seeds pass clauses a to c", passes <= MOST_NULL_PASSES * seeds


def linear_world(users: int) -> Iterator[tuple[str, bool]]:
    """LinUCB without exploration, where its model is true."""
    arm = Arm(replace(POLICIES["linucb"], epsilon=0.0))
    regret = rollout(World(WorldName.LINEAR, 1, users, 400), [arm])[0].regret_by_round
    first, last = regret[:100].mean(), regret[-100:].mean()
    yield f"linear world: regret per round {first:.4f} in the first quarter, {last:.4f} in the last", last <= first / 2


def _interval(gain: dict[str, float]) -> str:
    return f"{gain['mean']:+.4f} [{gain['ci_low']:+.4f}, {gain['ci_high']:+.4f}]"


def main(quick: bool) -> int:
    """Run all and return the exit code."""
    size, seeds = (QUICK, 20) if quick else (FULL, 100)
    failed = 0
    began = time.monotonic()
    for results in (gates(size), attribution(size), null_world(seeds), linear_world(200 if quick else 2000)):
        for text, holds in results:
            failed += not holds
            print(text if holds else f"DOES NOT HOLD: {text}", flush=True)
    print(f"{failed} promises do not hold; {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main("--quick" in sys.argv))
