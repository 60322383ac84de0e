"""Which cells a judge gets: whole scenarios, nothing twice, a fair share of what others have scored."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tipbench.generate.parsing import Tip
from tipbench.judge.export import ExportRequest, choose_cells
from tipbench.judge.material import EligibleCell

SCENARIOS = [f"persona{number}@slot" for number in range(8)]


def cell(run_id: str, scenario: str, *judges: str) -> EligibleCell:
    return EligibleCell(run_id, scenario, (Tip("Write one line."),), True, frozenset(judges))


def grid(*judges: str, scenarios: list[str] = SCENARIOS, pairs: int = 12, name: str = "run") -> list[EligibleCell]:
    return [cell(f"{name}-{scenario}-{pair}", scenario, *judges) for scenario in scenarios for pair in range(pairs)]


def choose(
    candidates: list[EligibleCell], seed: int = 0, controls: tuple[str, ...] = (), **options: object
) -> list[EligibleCell]:
    values = {"judge": None, "limit": None, **options}
    first = values.pop("first", ())
    return choose_cells(candidates, ExportRequest(**values), controls, random.Random(seed), first)  # type: ignore[arg-type]


def scenarios_of(cells: list[EligibleCell]) -> list[str]:
    """The scenarios of the cells in the order of their first cells."""
    return list(dict.fromkeys(cell.scenario for cell in cells))


judges = st.frozensets(st.sampled_from(["ann", "ben", "cleo"]))
cell_lists = st.lists(st.tuples(st.sampled_from(SCENARIOS), judges), max_size=60).map(
    lambda cells: [cell(f"run{at:03}", scenario, *by) for at, (scenario, by) in enumerate(cells)]
)
requests = st.builds(
    ExportRequest,
    judge=st.sampled_from([None, "ann"]),
    limit=st.none() | st.integers(1, 70),
    overlap=st.sampled_from([0.0, 0.07, 0.2, 0.5, 1.0]),
    everything=st.booleans(),
)
ordered = st.lists(st.sampled_from(SCENARIOS), unique=True, max_size=4)


@settings(max_examples=30)
@given(cell_lists, requests, ordered, ordered, st.integers(0, 99), st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_changes_nothing(
    cells: list[EligibleCell],
    request: ExportRequest,
    controls: list[str],
    first: list[str],
    seed: int,
    shuffle: random.Random,
) -> None:
    chosen = choose_cells(cells, request, controls, random.Random(seed), first)
    mixed = shuffle.sample(cells, len(cells))
    assert choose_cells(mixed, request, set(controls), random.Random(seed), first) == chosen


@settings(max_examples=30)
@given(cell_lists, requests, ordered, st.integers(0, 99))
def test_no_judge_gets_a_cell_twice_or_an_unsuitable_one(
    cells: list[EligibleCell], request: ExportRequest, controls: list[str], seed: int
) -> None:
    chosen = choose_cells(cells, request, controls, random.Random(seed))
    assert len({cell.run_id for cell in chosen}) == len(chosen)
    assert all(request.judge not in cell.scored_by if request.judge else not cell.scored_by for cell in chosen)


@settings(max_examples=30)
@given(cell_lists, requests, ordered, st.integers(0, 99))
def test_a_limit_is_used_up_and_never_exceeded(
    cells: list[EligibleCell], request: ExportRequest, controls: list[str], seed: int
) -> None:
    unlimited = replace(request, limit=None)
    available = len(choose_cells(cells, unlimited, controls, random.Random(seed)))
    limit = available if request.limit is None else min(available, request.limit)
    assert len(choose_cells(cells, request, controls, random.Random(seed))) == limit


@settings(max_examples=30)
@given(cell_lists, requests, ordered, st.integers(0, 99))
def test_at_most_one_scenario_is_cut_in_each_part(
    cells: list[EligibleCell], request: ExportRequest, controls: list[str], seed: int
) -> None:
    chosen = choose_cells(cells, request, controls, random.Random(seed))
    for part in (True, False):
        possible = Counter(
            cell.scenario for cell in cells if bool(cell.scored_by) is part and request.judge not in cell.scored_by
        )
        counts = Counter(cell.scenario for cell in chosen if bool(cell.scored_by) is part)
        assert sum(counts[scenario] < possible[scenario] for scenario in counts) <= 1


@settings(max_examples=30)
@given(cell_lists, st.sampled_from([0.0, 0.07, 0.2, 1.0]), st.integers(0, 99))
def test_without_a_limit_a_judge_gets_all_fresh_cells_and_the_overlap_in_whole_scenarios(
    cells: list[EligibleCell], overlap: float, seed: int
) -> None:
    chosen = choose_cells(cells, ExportRequest("ann", overlap=overlap), (), random.Random(seed))
    others = Counter(cell.scenario for cell in cells if cell.scored_by and "ann" not in cell.scored_by)
    shared = Counter(cell.scenario for cell in chosen if cell.scored_by)
    by_others = sum(bool(cell.scored_by - {"ann"}) for cell in cells)
    expected = max(0, ceil(round(overlap * by_others, 6)) - (by_others - others.total()))
    assert [cell for cell in chosen if not cell.scored_by] == sorted(
        (cell for cell in cells if not cell.scored_by), key=chosen.index
    )
    assert all(shared[scenario] == others[scenario] for scenario in shared)
    assert shared.total() >= expected
    assert not shared or shared.total() - min(shared.values()) < expected


def test_a_judge_who_has_the_overlap_gets_no_more_of_it() -> None:
    cells = grid("ann")
    both = [replace(cell, scored_by=cell.scored_by | {"ben"}) for cell in choose(cells, judge="ben")]
    done = {cell.run_id for cell in both}
    assert choose([*both, *(cell for cell in cells if cell.run_id not in done)], judge="ben") == []


def test_a_second_judge_gets_two_of_eight_scenarios_that_the_first_has_scored() -> None:
    chosen = choose(grid("ann"), judge="ben")
    assert (len(chosen), len(scenarios_of(chosen))) == (24, 2)  # 20 % of 96 are 20 cells


def test_a_judge_without_a_name_gets_only_unscored_cells() -> None:
    fresh = grid(scenarios=SCENARIOS[:2])
    assert set(choose([*fresh, *grid("ann", name="old")])) == set(fresh)


@pytest.mark.parametrize(("judge", "count"), [("ben", 60), (None, 24)])
def test_everything_is_all_that_this_judge_has_not_scored(judge: str | None, count: int) -> None:
    cells = [
        *grid(scenarios=SCENARIOS[:2]),
        *grid("ann", scenarios=SCENARIOS[2:5], name="old"),
        *grid("ann", "ben", scenarios=SCENARIOS[5:], name="both"),
    ]
    assert len(choose(cells, judge=judge, everything=True)) == count


def test_requested_scenarios_come_first_then_those_with_controls() -> None:
    chosen = choose(
        grid(), seed=3, controls=("persona6@slot", "persona2@slot"), first=["persona5@slot", "persona2@slot"]
    )
    assert scenarios_of(chosen)[:3] == ["persona5@slot", "persona2@slot", "persona6@slot"]


def test_not_every_judge_begins_with_the_same_scenario() -> None:
    begun = {choose(grid(), seed=seed, controls=tuple(SCENARIOS), limit=12)[0].scenario for seed in range(40)}
    assert len(begun) == len(SCENARIOS)


def test_a_limit_takes_whole_scenarios_then_part_of_one_more() -> None:
    chosen = choose(grid(), limit=30)
    assert sorted(Counter(cell.scenario for cell in chosen).values()) == [6, 12, 12]


def test_a_judge_finishes_the_scenario_they_began_before_another_gets_it() -> None:
    cells = [cell(f"new-{scenario}", scenario) for scenario in SCENARIOS] + grid("ann", scenarios=SCENARIOS[3:4])
    assert choose(cells, judge="ann", limit=1, overlap=0.0)[0].scenario == "persona3@slot"
    assert choose(cells, judge="ben", overlap=0.0)[-1].scenario == "persona3@slot"


@pytest.mark.parametrize(
    ("fresh", "scored", "expected"),
    [
        (96, 96, (40, 8)),  # 48 / 1.2 fresh ones, the rest for agreement
        (12, 96, (12, 24)),  # the overlap uses the rest
        (96, 0, (48, 0)),
        (36, 12, (36, 12)),
    ],
)
def test_a_limit_of_48_keeps_a_share_for_the_overlap(fresh: int, scored: int, expected: tuple[int, int]) -> None:
    cells = [*grid(scenarios=SCENARIOS[: fresh // 12]), *grid("ann", scenarios=SCENARIOS[: scored // 12], name="old")]
    chosen = choose(cells, judge="ben", limit=48)
    shared = sum(bool(cell.scored_by) for cell in chosen)
    assert (len(chosen) - shared, shared) == expected


def test_nothing_to_judge_is_an_empty_choice() -> None:
    assert choose(grid("ann"), judge="ann", limit=5) == []
    assert choose([]) == []
