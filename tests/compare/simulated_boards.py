"""Simulated leaderboards with known truth: every claim of docs/statistics.md with its rate.

The worlds are drawn here, by numpy alone; none of the product's generators and none of its tests' helpers are used.
`make simulations` runs the long form and writes its table into docs/statistics.md; tests run the short form.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tipbench.compare.attribution import attribute
from tipbench.compare.matrix import Pair, ScoreMatrix
from tipbench.compare.ranking import Ranking, RankOptions, rank
from tipbench.compare.statistics import Estimate, Unknown, is_fragile, mean_estimate
from tipbench.plan.design import make_design

Floats = NDArray[np.float64]
World = Callable[[np.random.Generator, Sequence[float], int], Floats]

FLOOR = 3.0
FLIPS = 999
LOOKS = (8, 16, 24, 32)
PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"
BEGIN, END = "<!-- simulations: begin -->", "<!-- simulations: end -->"


# Worlds: scenarios × pairs, around a composite of 10


def normal(rng: np.random.Generator, effects: Sequence[float], n: int, sd: float = 2.0) -> Floats:
    """Scenarios of different difficulty; `sd` is that of a paired difference."""
    noise = rng.normal(0, sd / np.sqrt(2), (n, len(effects)))
    return np.asarray(10 + rng.normal(0, 2, (n, 1)) + np.asarray(effects) + noise)


def low_noise(rng: np.random.Generator, effects: Sequence[float], n: int) -> Floats:
    """Paired differences with an SD of 0.7."""
    return normal(rng, effects, n, 0.7)


def unequal_noise(rng: np.random.Generator, effects: Sequence[float], n: int) -> Floats:
    """The last row is three times as noisy as the others."""
    scale = np.where(np.arange(len(effects)) == len(effects) - 1, 3.0, 1.0)
    return np.asarray(10 + rng.normal(0, 2, (n, 1)) + np.asarray(effects) + scale * rng.normal(0, 1, (n, len(effects))))


def mostly_ties(rng: np.random.Generator, effects: Sequence[float], n: int) -> Floats:
    """Most differences are exactly zero."""
    steps = rng.choice([-2.0, 0.0, 2.0], p=[0.15, 0.7, 0.15], size=(n, len(effects)))
    return np.asarray(10 + np.round(rng.normal(0, 2, (n, 1))) + np.asarray(effects) + steps)


def near_maximum(rng: np.random.Generator, effects: Sequence[float], n: int) -> Floats:
    """Scores close to the maximum of 17 and cut off there."""
    return np.minimum(normal(rng, effects, n) + 6 - max(effects), 17.0)


def whole_numbers(rng: np.random.Generator, effects: Sequence[float], n: int) -> Floats:
    """Five tips an answer, three scales of whole numbers from 1 to 5, and the two flags."""
    k = len(effects)
    latent = 3 + rng.normal(0, 0.4, (n, 1, 1, 1)) + (np.asarray(effects) / 3)[:, None, None]
    latent = latent + rng.normal(0, 0.35, (n, k, 1, 1)) + rng.normal(0, 0.8, (n, k, 5, 3))
    scales = np.clip(np.round(latent), 1, 5).sum(axis=3)
    flags = 2.0 * (rng.random((n, k, 1)) < 0.9) - (rng.random((n, k, 5)) < 0.1)
    return np.asarray((scales + flags).mean(axis=2))


def heavy_tails(rng: np.random.Generator, effects: Sequence[float], n: int) -> Floats:
    """Noise with the tails of a t distribution with three degrees of freedom."""
    noise = rng.standard_t(3, (n, len(effects))) / np.sqrt(3) * np.sqrt(2)
    return np.asarray(10 + rng.normal(0, 2, (n, 1)) + np.asarray(effects) + noise)


WORLDS: dict[str, World] = {
    "normal": normal,
    "SD 0.7": low_noise,
    "unequal variances": unequal_noise,
    "ties": mostly_ties,
    "ceiling": near_maximum,
    "whole-number tips": whole_numbers,
    "heavy tails": heavy_tails,
}


def with_gaps(rng: np.random.Generator, values: Floats, share: float, *, low: bool = False) -> Floats:
    """Cells missing at random, or (`low`) three times as often below the median as above."""
    chance = np.full(values.shape, share)
    if low:
        chance = np.where(values < np.median(values), 1.5 * share, 0.5 * share)
    return np.where(rng.random(values.shape) < chance, np.nan, values)


def missing_text(share: float, *, low: bool = False) -> str:
    """The part of a world's name for its gaps."""
    return f", {share:.0%} missing{' (low ones more often)' if low else ''}" if share else ""


# Boards


def board(values: Floats, *, design: bool | int = False, n_resamples: int = 1) -> Ranking:
    """The product's ranking of the values; `design`: with looks, planned for this number of scenarios."""
    n, k = values.shape
    names = tuple(f"s{at:03}" for at in range(n))
    pairs = tuple(Pair(f"m{at:03}", "v1") for at in range(k))
    planned = make_design(f"s{at:03}" for at in range(int(design))) if design else None
    return rank(
        ScoreMatrix(names, names, pairs, values), RankOptions(design=planned, n_flips=FLIPS, n_resamples=n_resamples)
    )


def leader_and_tied(found: Ranking) -> set[int]:
    """The leader and its tied rows."""
    return {int(pair.model[1:]) for pair in (found.leader, *found.tied) if pair}


def two_leaders(k: int, one_leader: float = 6.0) -> list[float]:
    return [0.0, 0.0] if k == 2 else [0.0] * (k - 2) + [one_leader, one_leader]


def one_leader(size: float, k: int = 12) -> list[float]:
    return [0.0] * (k - 1) + [size]


# Claims


@dataclass(frozen=True)
class Claim:
    """A rate that must stay within bounds; `rate` simulates a number of benchmarks from a seed."""

    group: str
    world: str
    rate: Callable[[np.random.Generator, int], float]
    at_most: float | None = None
    at_least: float | None = None
    worlds: int = 2000  # in the long form
    short: bool = False  # also in the tests

    def holds(self, rate: float, slack: float = 0.0) -> bool:
        return (self.at_most is None or rate <= self.at_most + slack) and (
            self.at_least is None or rate >= self.at_least - slack
        )


def false_decisions(effects: Sequence[float], n: int, world: World, gaps: float = 0.0, *, low: bool = False) -> Claim:
    def rate(rng: np.random.Generator, worlds: int) -> float:
        return float(
            np.mean([board(with_gaps(rng, world(rng, effects, n), gaps, low=low)).decided for _ in range(worlds)])
        )

    kind = next(name for name, each in WORLDS.items() if each is world)
    pairs = "all equal" if len(set(effects)) == 1 and len(effects) > 2 else "two equal on top"
    label = f"{len(effects)} pairs, {pairs}, n = {n}, {kind}{missing_text(gaps, low=low)}"
    short = kind in ("normal", "ceiling") and n == 8 and gaps in (0.0, 0.1)
    return Claim("`decided` falsely", label, rate, at_most=0.06, short=short)


def false_look_decisions(effects: Sequence[float], world: World, name: str, gaps: float = 0.0) -> Claim:
    def rate(rng: np.random.Generator, worlds: int) -> float:
        ever = 0
        for _ in range(worlds):
            values = with_gaps(rng, world(rng, effects, 32), gaps)
            ever += any(board(values[:at], design=32).decided for at in LOOKS)
        return ever / worlds

    label = f"{len(effects)} pairs, two equal on top, looks at 8, 16, 24, 32, {name}{missing_text(gaps)}"
    return Claim("`decided` falsely at any of four looks", label, rate, at_most=0.06, worlds=4000, short=name == "ties")


def unusable_decisions(n: int, world: World, name: str) -> Iterator[Claim]:
    """One of two pairs with equal means gives an unusable answer in one of ten scenarios."""

    def rates(rng: np.random.Generator, worlds: int) -> tuple[float, float]:
        decided = firm = 0
        for _ in range(worlds):
            values = world(rng, [0.0, 0.0], n)
            bad = rng.random(n) < 0.1
            quality = 10 + (10 - FLOOR) * 0.1 / 0.9  # of the usable answers, so that both means are equal
            values[:, 1] = np.where(bad, FLOOR, values[:, 1] + quality - 10)
            found = board(values)
            decided += found.decided
            if found.decided and found.leader:
                own = int(found.leader.model[1:])
                count = int(bad.sum()) if own == 1 else 0
                usable = values[~bad, 1] if own == 1 else values[:, 0]
                smallest = -(found.rows[1].to_leader.mean if found.rows[1].to_leader else 0.0)
                mean = float(usable.mean()) if len(usable) else None
                firm += not is_fragile(smallest, mean, FLOOR, count, n)
        return decided / worlds, firm / worlds

    label = f"2 pairs, equal means, one unusable in 10 %, n = {n}, {name}"
    yield Claim("`decided`, measured", label, lambda rng, worlds: rates(rng, worlds)[0])
    yield Claim(
        "`decided` falsely and not `fragile`",
        label,
        lambda rng, worlds: rates(rng, worlds)[1],
        at_most=0.06,
        short=n == 8,
    )


def best_in_tied_set(
    effects: Sequence[float], n: int, gaps: float, *, low: bool = False, looks: bool = False, ranked: bool = False
) -> Claim:
    """With `ranked`, a best row that is tied because too little of it is judged counts as lost."""
    best = len(effects) - 1

    def rate(rng: np.random.Generator, worlds: int) -> float:
        inside = 0
        for _ in range(worlds):
            values = with_gaps(rng, normal(rng, effects, n), gaps, low=low)
            found = board(values, design=n if looks else False)
            counted = {int(pair.model[1:]) for pair in found.ranked} if ranked else {best}
            inside += best in leader_and_tied(found) & counted
        return inside / worlds

    label = f"12 pairs, lead {max(effects):g}, n = {n}{missing_text(gaps, low=low)}{', planned looks' if looks else ''}"
    if ranked:
        return Claim("true best is ranked, and leads or is tied", label, rate, worlds=1000)
    return Claim(
        "true best leads or is tied",
        label,
        rate,
        at_least=0.95,
        worlds=1000,
        short=gaps == 0.1 and n == 8,
    )


def right_decisions(size: float, n: int, *, looks: bool, required: bool = True) -> Claim:
    def rate(rng: np.random.Generator, worlds: int) -> float:
        done = 0
        for _ in range(worlds):
            values = normal(rng, one_leader(size), n)
            at = [each for each in LOOKS if each <= n] if looks else [n]
            done += any(board(values[:each], design=n if looks else False).decided for each in at)
        return done / worlds

    label = f"12 pairs, lead {size:g}, n = {n}, {'four looks' if looks else 'one look'}"
    return Claim("`decided` rightly", label, rate, at_least=0.9 if required else None, worlds=1000, short=required)


def covers(estimate: Estimate | None, truth: float) -> bool:
    if estimate is None or estimate.ci_low is None or estimate.ci_high is None:
        return False
    return estimate.ci_low <= truth <= estimate.ci_high


def coverage(n: int, world: World, name: str, gaps: float, *, low: bool = False, required: bool = True) -> Claim:
    def rate(rng: np.random.Generator, worlds: int) -> float:
        inside = 0
        for _ in range(worlds):
            values = with_gaps(rng, world(rng, [0.0] * 12, n), gaps, low=low)
            inside += covers(mean_estimate(values[:, 0]), 10)
        return inside / worlds

    return Claim(
        "interval of a row covers its mean",
        f"n = {n}, {name}{missing_text(gaps, low=low)}",
        rate,
        at_most=0.97 if required else None,
        at_least=0.93 if required else None,
        worlds=4000,
        short=required and n == 8,
    )


def unusable_coverage(n: int, share: float) -> Claim:
    def rate(rng: np.random.Generator, worlds: int) -> float:
        truth, inside = share * FLOOR + (1 - share) * 10, 0
        for _ in range(worlds):
            values = np.where(rng.random(n) < share, FLOOR, rng.normal(10, 2, n))
            inside += covers(mean_estimate(values), truth)
        return inside / worlds

    return Claim(
        "interval of a row covers its mean", f"n = {n}, {share:.0%} of the answers unusable", rate, worlds=4000
    )


def best_probability_error(sd: float, n: int) -> Claim:
    """How often a row with a P(best) of about 0.8 is the best one, less its P(best)."""

    def rate(rng: np.random.Generator, worlds: int) -> float:
        given, right = [], []
        for _ in range(worlds):
            effects = rng.normal(0, sd, 12)
            found = board(normal(rng, list(effects), n), n_resamples=500)
            best = int(np.argmax(effects))
            for row in found.rows:
                if row.p_best is not None and 0.7 <= row.p_best <= 0.9:
                    given.append(row.p_best)
                    right.append(int(row.pair.model[1:]) == best)
        return float(np.mean(right) - np.mean(given)) if given else 0.0

    return Claim(
        "P(best) of 0.7 to 0.9: frequency − P",
        f"12 pairs, SD between pairs {sd:g}, n = {n}",
        rate,
        at_most=0.07 if sd >= 1 else None,
        at_least=-0.07 if sd >= 1 else -0.15,
        worlds=4000,
        short=sd == 1 and n == 8,
    )


def false_attribution(n: int, sd: float) -> Claim:
    def rate(rng: np.random.Generator, worlds: int) -> float:
        wrong = 0
        for _ in range(worlds):
            suits = rng.normal(0, sd, (n, 4, 1)) + rng.normal(0, 1, (n, 4, 3)) + rng.normal(0, 2, (n, 1, 1))
            names = tuple(f"s{at:03}" for at in range(n))
            pairs = tuple(Pair(f"m{model}", f"v{prompt}") for model in range(4) for prompt in range(3))
            found = attribute(ScoreMatrix(names, names, pairs, suits.reshape(n, 12)), n_flips=19)
            wrong += not isinstance(found, Unknown) and found.model is not None and (found.model.p or 1.0) < 0.05
        return wrong / worlds

    return Claim(
        "attribution: model p < 0.05 without a model effect",
        f"4 models × 3 prompts, n = {n}, model × scenario SD {sd:g}",
        rate,
        at_most=0.06,
        short=n == 8,
    )


def next_look_power(k: int, size: float) -> Claim:
    """The mean chance to decide at the next look, less the share of boards that decide there."""

    def rate(rng: np.random.Generator, worlds: int) -> float:
        said, done = [], []
        for _ in range(worlds):
            values = normal(rng, list(rng.normal(0, size, k)), 16)
            first = board(values[:8], design=32, n_resamples=99)
            if first.next_look is not None and first.next_look.power is not None:
                said.append(first.next_look.power)
                done.append(board(values, design=32).decided)
        return float(np.mean(said) - np.mean(done)) if said else 0.0

    return Claim(
        "chance to decide at the next look: given − frequency",
        f"{k} pairs, SD between pairs {size:g}, from 8 to 16",
        rate,
        0.1,
        -0.1,
        worlds=1000,
    )


def claims() -> list[Claim]:
    two, twelve = two_leaders(2), two_leaders(12)
    found = [false_decisions([0.0] * 12, n, normal) for n in (8, 32)]
    for world in WORLDS.values():
        found += [false_decisions(two, n, world) for n in (8, 32)]
    found += [false_decisions(twelve, n, normal) for n in (8, 32)]
    for gaps, low in ((0.01, False), (0.05, False), (0.1, False), (0.2, False), (0.1, True), (0.2, True)):
        found += [false_decisions(effects, n, normal, gaps, low=low) for effects in (two, twelve) for n in (8, 32)]
    found += [
        false_look_decisions(two, world, name)
        for name, world in WORLDS.items()
        if name in ("normal", "ties", "whole-number tips", "unequal variances")
    ]
    found += [false_look_decisions(twelve, normal, "normal"), false_look_decisions(two, normal, "normal", 0.1)]
    for world, name in ((normal, "SD 2"), (low_noise, "SD 0.7")):
        for n in (8, 12, 32):
            found += unusable_decisions(n, world, name)
    for n in (8, 32):
        found += [best_in_tied_set(one_leader(1.0), n, gaps) for gaps in (0.0, 0.01, 0.05, 0.1, 0.2)]
        found += [best_in_tied_set(one_leader(1.0), n, gaps, low=True) for gaps in (0.1, 0.2)]
    found += [best_in_tied_set(one_leader(1.0), 32, 0.1, looks=True)]
    found += [best_in_tied_set(one_leader(1.0), n, gaps, ranked=True) for n in (8, 32) for gaps in (0.05, 0.1, 0.2)]
    found += [right_decisions(5.0, 8, looks=False), right_decisions(2.0, 32, looks=True)]
    found += [
        right_decisions(2.0, 8, looks=False, required=False),
        right_decisions(3.0, 8, looks=False, required=False),
    ]
    for n in (8, 32):
        found += [coverage(n, normal, "normal", gaps) for gaps in (0.0, 0.05, 0.2)]
        found += [coverage(n, normal, "normal", 0.1, low=True, required=False), unusable_coverage(n, 0.1)]
    found += [best_probability_error(sd, n) for sd in (0.5, 1.0, 2.0) for n in (8, 32)]
    found += [false_attribution(n, sd) for n in (8, 32) for sd in (0.0, 1.0)]
    found += [next_look_power(k, size) for k, size in ((2, 1.0), (12, 1.0))]
    return found


def measure(claim: Claim, worlds: int) -> float:
    """The rate, from a seed that does not depend on the other claims."""
    seed = [len(claim.group), *claim.world.encode()]
    return claim.rate(np.random.default_rng(seed), worlds)


def table(share: float) -> Iterator[str]:
    yield "| claim | world | limit | measured | worlds |"
    yield "|---|---|---|---|---|"
    broken = []
    for claim in claims():
        worlds = max(50, round(share * claim.worlds))
        began = time.process_time()
        rate = measure(claim, worlds)
        signed = claim.group.startswith(("P(best)", "chance"))
        shown = f"{rate:+.3f}" if signed else f"{rate:.1%}".replace("%", " %")
        parts = [
            f"{sign} {bound:g}" if signed else f"{sign} {bound:.0%}".replace("%", " %")
            for sign, bound in (("≥", claim.at_least), ("≤", claim.at_most))
            if bound is not None
        ]
        holds = claim.holds(rate)
        if not holds:
            broken.append(claim)
        limits, marked = ", ".join(parts) or "none", shown if holds else f"**{shown}**"
        yield f"| {claim.group} | {claim.world} | {limits} | {marked} | {worlds} |"
        state = "" if holds else "NOT KEPT"
        print(
            f"{time.process_time() - began:6.1f} s {shown:>8} {state} {claim.group}: {claim.world}",
            file=sys.stderr,
            flush=True,
        )
    print(f"{len(broken)} claims not kept", file=sys.stderr)


def main(share: float = 1.0) -> None:
    """Simulates every claim and writes the table into the docs; `share` of the worlds of the long form."""
    lines = "\n".join(table(share))
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
