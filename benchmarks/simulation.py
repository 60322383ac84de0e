"""Simulated decisions per CPU-second of each policy, and the CPU time of a promotion check, with their worlds."""

from __future__ import annotations

import statistics
import time

from report import Claim, Result, Size, count_rounds
from tipbench.simulate.promotion_gate import FULL, WORLDS, simulation_clauses
from tipbench.simulate.promotion_gate import Size as GateSize
from tipbench.simulate.rollout import find_arm, rollout
from tipbench.simulate.simulation import ALL_POLICIES
from tipbench.simulate.world import World

_USERS = 1000


def measure(size: Size) -> Result:
    """Measure each policy alone on one core."""
    decisions = 20_000 if size.quick else 200_000
    per_s: dict[str, list[float]] = {name: [] for name in ALL_POLICIES}
    gate: list[float] = []
    for number in count_rounds("simulation", size.rounds):
        for name in ALL_POLICIES:
            started = time.process_time()
            rollout(World("standard", number, _USERS, decisions // _USERS), [find_arm(name)])
            per_s[name].append(decisions / (time.process_time() - started))
        started = time.process_time()
        small = GateSize(1, _USERS, decisions // _USERS)
        simulation_clauses("egreedy/v3", "egreedy/v1", small, workers=1, seed=number)
        share = FULL.seeds * FULL.users * FULL.rounds / (small.users * small.rounds)
        gate.append((time.process_time() - started) * share)
    v3 = tuple(1e6 / speed for speed in per_s["egreedy/v3"])
    speeds = ", ".join(f"{name} {statistics.median(speed) / 1000:.0f}k/s" for name, speed in per_s.items())
    claims = (
        Claim("simulate: CPU time of 1M decisions of egreedy/v3", 4.0, "s", v3, speeds),
        Claim(
            f"promote check: CPU time of clauses a to c ({FULL}, {len(WORLDS)} worlds, two policies)",
            360.0,  # three minutes on two cores
            "s",
            tuple(gate),
            "extrapolated from one seed",
        ),
    )
    rows = [
        {"per_cpu_s": {name: speed[at] for name, speed in per_s.items()}, "gate_cpu_s": gate[at]}
        for at in range(size.rounds)
    ]
    return Result("simulation", claims, rows)
