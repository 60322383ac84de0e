"""Simulated judges, and how often their sheets are held. Run by hand, it prints the table of docs/judging.md:

python tests/judge/simulated_judges.py
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from tipbench.generate.parsing import Tip
from tipbench.judge.controls import JudgeHistory, compose
from tipbench.judge.drift import ControlScore, Trends, Verdict, measure_drift, measure_trends
from tipbench.judge.material import EligibleCell
from tipbench.plan.rubric import Scale
from tipbench.plan.suite import load_suite

Scores = NDArray[np.int64]  # tips × scales
Judge = Callable[[np.random.Generator, Scores], Scores]

SCALES = load_suite("tips").rubric.scales
SCALE_COUNT = len(SCALES)
TIPS = 5  # per answer


def noisy_judge(
    noise: float, drift: Sequence[float] = (0.0,) * SCALE_COUNT, icc: float = 0.0, *, all_scales: bool = False
) -> Judge:
    """A judge who scores round(reference + drift + noise), clipped.

    `icc` is the share of the noise's variance that the tips of an answer share; with `all_scales`, over all scales.
    """

    def scored(rng: np.random.Generator, references: Scores) -> Scores:
        answer = np.arange(len(references)) // TIPS
        shared = rng.normal(size=(answer[-1] + 1, 1 if all_scales else SCALE_COUNT))[answer]
        errors = noise * (sqrt(icc) * shared + sqrt(1 - icc) * rng.normal(size=references.shape))
        exact: NDArray[np.float64] = references + np.array(drift) + errors
        return np.rint(exact).astype(np.int64).clip(1, 5)

    return scored


def random_judge(rng: np.random.Generator, references: Scores) -> Scores:
    return rng.integers(1, 6, references.shape)


def constant_judge(score: int) -> Judge:
    return lambda _rng, references: np.full_like(references, score)


def biased_judge(scale: int, by: float, icc: float = 0.0, noise: float = 0.7) -> Judge:
    return noisy_judge(noise, [by if column == scale else 0.0 for column in range(SCALE_COUNT)], icc)


def control_tips(
    scores: Scores, references: Scores, scales: Sequence[Scale] = SCALES, sheet: int = 0
) -> list[ControlScore]:
    """The scores as controls, in answers of TIPS tips."""
    names = [scale.name for scale in scales]
    last = max(1, (len(scores) - 1) // TIPS)
    return [
        ControlScore(
            dict(zip(names, given, strict=True)),
            dict(zip(names, agreed, strict=True)),
            f"{sheet}-{number // TIPS}",
            number // TIPS / last,
        )
        for number, (given, agreed) in enumerate(zip(scores.tolist(), references.tolist(), strict=True))
    ]


@cache
def shipped_sheets(cells_per_scenario: int = 5, most_tips: int | None = None, count: int = 40) -> list[Scores]:
    """References of sheets, each the controls that the real export hides among answers of five tips."""
    suite = load_suite("tips")
    cards = {scenario.id: scenario.to_card() for scenario in suite.scenarios}
    answer = (Tip("Open the form.", "It is short."),) * TIPS
    cells = [EligibleCell(f"{s} {n}", s, answer, True, frozenset()) for s in cards for n in range(cells_per_scenario)]

    def exported(seed: int) -> Scores:
        rng = random.Random(seed)
        entries = compose(cells, cards, suite.controls, suite.rubric, JudgeHistory(), sheet_id=f"sheet {seed}", rng=rng)
        agreed = [reference for entry in entries for reference in entry.agreed_scores]
        return np.array([[reference[scale.name] for scale in SCALES] for reference in agreed])[:most_tips]

    return [exported(seed) for seed in range(count)]


def held_rate(judge: Judge, sheets: Sequence[Scores], worlds: int = 400) -> float:
    """The share of worlds in which the judge's sheet would be held."""
    rng = np.random.default_rng(7)
    drifts = (
        measure_drift(SCALES, control_tips(judge(rng, ref), ref))
        for ref in (sheets[k % len(sheets)] for k in range(worlds))
    )
    return sum(drift.verdict is Verdict.BEYOND for drift in drifts) / worlds


def trends_of(judge: Judge, sheets: int, seed: int = 7) -> Trends:
    """The trends of a judge over `sheets` sheets."""
    rng, drawn = np.random.default_rng(seed), shipped_sheets()
    refs = [drawn[(seed + number) % len(drawn)] for number in range(sheets)]
    return measure_trends(SCALES, [control_tips(judge(rng, ref), ref, sheet=number) for number, ref in enumerate(refs)])


def main() -> None:
    """Print the rates as Markdown."""
    worlds = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    full, forty = shipped_sheets(count=400), shipped_sheets(most_tips=40, count=400)
    iccs = (0.0, 0.2, 0.4)
    print("| judge | correlation within an answer 0 / 0.2 / 0.4 |\n|---|---|")
    for noise in (0.4, 0.7, 1.0):
        rates = [f"{100 * held_rate(noisy_judge(noise, icc=icc), full, worlds):.1f}" for icc in iccs]
        print(f"| honest, noise {noise} | {' / '.join(rates)} % |")
        rates = [f"{100 * held_rate(noisy_judge(noise, icc=icc, all_scales=True), full, worlds):.1f}" for icc in iccs]
        print(f"| the same, errors shared by all scales of an answer | {' / '.join(rates)} % |")
    for name, sheets in (("50 control tips in 10 answers", full), ("40 control tips in 8 answers", forty)):
        for noise in (0.5, 0.7, 1.0):
            judges = [[biased_judge(scale, by, icc, noise) for scale, by in BIASES] for icc in iccs]
            rates = [f"{100 * np.mean([held_rate(one, sheets, worlds // 4) for one in each]):.0f}" for each in judges]
            print(f"| half a point off on one scale, noise {noise}, {name} | {' / '.join(rates)} % |")
    for name, judge in (("random", random_judge), *((f"always {score}", constant_judge(score)) for score in (1, 3, 5))):
        print(f"| {name} | {100 * held_rate(judge, forty, worlds // 4):.1f} % |")
    few = worlds // 20
    for name, judge, number in (
        ("honest, 20 sheets", noisy_judge(0.7), 20),
        ("0.2 points off on one scale, 8 sheets", biased_judge(0, 0.2), 8),
    ):
        simulated = [trends_of(judge, number, seed) for seed in range(few)]
        alarms = np.mean([alarms_of(one) for one in simulated], axis=0)
        print(f"| {name}: sums, fatigue, compression beyond | {' / '.join(f'{100 * a:.1f}' for a in alarms)} % |")


BIASES = [(scale, by) for scale in range(SCALE_COUNT) for by in (0.5, -0.5)]


def alarms_of(simulated: Trends) -> tuple[bool, bool, bool]:
    """Whether the sums, the fatigue and the compression exceed chance."""
    fatigue, compression = simulated.fatigue, simulated.compression
    return (
        any(each.beyond for each in simulated.sums),
        bool(fatigue and fatigue.beyond),
        bool(compression and compression.beyond),
    )


if __name__ == "__main__":
    main()
