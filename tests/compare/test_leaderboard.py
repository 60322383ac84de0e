"""The leaderboard as JSON: every key, null where unknown, the same for the same data."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.boards import MODELS, PAIRS, PROMPTS, SCALES, board, cell, scenario_names
from support.judged import cells_of
from tipbench.compare.card import summary_card
from tipbench.compare.cells import BoardCells, CellFilter, select_cells
from tipbench.compare.leaderboard import BoardOptions, Leaderboard, make_board
from tipbench.compare.matrix import Pair
from tipbench.errors import UsageError
from tipbench.judge.scores import NO_SCORES
from tipbench.record.run import StoredRun

A, B, C = Pair("a:1b", "v1"), Pair("b:1b", "v1"), Pair("c:1b", "v1")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
HIGH = [value + 4 + (0.25 if at % 2 else -0.25) for at, value in enumerate(LOW)]
BOARD_KEYS = {
    *("experiment", "suite", "rubric", "conditions", "judges", "provisional", "baseline", "verdict", "standings"),
    *("references", "attribution", "attribution_details", "duels", "exclude"),
}
VERDICT_KEYS = {
    *("text", "leader", "tied_with_leader", "decided", "scenarios_needed", "fragile", "level", "look", "next_look"),
    *("beats_reference", "diff_to_reference"),
}
STANDING_KEYS = {
    *("rank", "rank_low", "rank_high", "model", "prompt_version", "composite", "ci_low", "ci_high", "p_best"),
    *("diff_to_leader", "diff_to_baseline", "relevance", "actionability", "tone", "format_ok", "overlong"),
    *("diversity", "latency_s", "tokens_per_s", "n_scenarios", "judged", "total", "failed", "flags"),
    *("composite_adjusted", "composite_usable", "usable", "usable_low", "usable_high"),
}
DIFFERENCE_KEYS = {"mean", "ci_low", "ci_high", "p"}
SHARES = {"model", "prompt", "interaction", "scenario", "residual"}


def board_of(cells: BoardCells, **options: Any) -> Leaderboard:
    return make_board("tip-bench-test", cells, BoardOptions(**{"scales": SCALES, **options}))


def board_of_runs(runs: Sequence[StoredRun], **options: Any) -> Leaderboard:
    return board_of(select_cells([(run, NO_SCORES) for run in runs], CellFilter()), **options)


def rows(found: Leaderboard) -> dict[str, dict[str, Any]]:
    return {f"{row['model']}/{row['prompt_version']}": row for row in found.to_json()["standings"]}


def known_sum(shares: Mapping[str, float | None]) -> float:
    """The sum of the shares that are known; a factor with one level has none."""
    return sum(share for share in shares.values() if share is not None)


def check_shape(found: Mapping[str, Any]) -> None:
    """Assert what PRODUCT.md promises of every board."""
    assert set(found) >= BOARD_KEYS
    assert set(found["verdict"]) >= VERDICT_KEYS
    assert found["verdict"]["text"].endswith(".")
    assert all(set(row) >= STANDING_KEYS for row in found["standings"])
    for row in found["standings"]:
        for name in ("diff_to_leader", "diff_to_baseline"):
            assert row[name] is None or set(row[name]) == DIFFERENCE_KEYS
    ranked = [row for row in found["standings"] if row["rank"] is not None]
    unranked = found["standings"][len(ranked) :]
    assert all("incomplete" in row["flags"] for row in unranked)
    assert not any("incomplete" in row["flags"] for row in ranked)
    for row in unranked:
        assert [row[name] for name in ("rank", "rank_low", "rank_high", "p_best")] == [None] * 4
    for row in ranked:
        assert 1 <= row["rank_low"] <= row["rank"] <= row["rank_high"] <= len(ranked)
    chances = [row["p_best"] for row in ranked]
    assert None in chances or not chances or sum(chances) == pytest.approx(1)
    shares = found["attribution"]
    assert shares is None or (set(shares) == SHARES and known_sum(shares) == pytest.approx(1))
    assert (found["verdict"]["leader"] is None) == (not ranked)
    assert not (found["verdict"]["decided"] and found["verdict"]["tied_with_leader"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_full_board_has_every_key_with_a_number() -> None:
    found = board(baseline=PAIRS[0]).to_json()
    check_shape(found)
    assert (found["rubric"], found["suite"], found["provisional"]) == ("tip-v1", "tips", False)
    assert found["baseline"] == {"model": MODELS[0], "prompt_version": PROMPTS[0]}
    assert found["conditions"]["temperature"] == "0.7"
    assert len(found["standings"]) == 12
    empty = {
        name for row in found["standings"] for name, value in row.items()
        if name in STANDING_KEYS and value is None and not name.startswith("diff_to_")
    }  # fmt: skip
    assert empty == set()
    assert [row["diff_to_leader"] is None for row in found["standings"]] == [True] + [False] * 11
    assert [row for row in found["standings"] if row["diff_to_baseline"] is None] == [rows(board())[str(PAIRS[0])]]


def test_numbers_are_those_of_the_scores_not_rounded() -> None:
    found = rows(board_of(cells_of({A: LOW, B: HIGH})))
    assert found[str(A)]["composite"] == pytest.approx(sum(LOW) / 8, abs=1e-12)
    assert found[str(A)]["diff_to_leader"]["mean"] == pytest.approx(-4.0, abs=1e-12)
    assert found[str(B)]["ci_low"] < found[str(B)]["composite"] < found[str(B)]["ci_high"]
    assert (found[str(B)]["n_scenarios"], found[str(B)]["judged"], found[str(B)]["total"]) == (8, 8, 8)


def test_a_planted_leader_is_found_and_decided() -> None:
    found = board_of(cells_of({A: LOW, B: HIGH, C: [value - 1 for value in LOW]})).to_json()
    check_shape(found)
    verdict = found["verdict"]
    assert verdict["leader"] == {"model": "b:1b", "prompt_version": "v1"}
    assert (verdict["decided"], verdict["tied_with_leader"], verdict["scenarios_needed"]) == (True, [], None)
    assert [row["rank"] for row in found["standings"]] == [1, 2, 3]
    assert found["standings"][0]["p_best"] == pytest.approx(1)


def test_planted_effects_are_attributed() -> None:
    """Model +3, prompt +1, alternating scenarios, and a little noise."""
    scores = {
        Pair(model, prompt): [
            8 + 3 * (model == "b") + (prompt == "v2") + value / 4 + 0.01 * ((at * 7 + ord(model) + len(prompt)) % 5)
            for at, value in enumerate(LOW)
        ]
        for model in "ab" for prompt in ("v1", "v2")
    }  # fmt: skip
    found = board_of(cells_of(scores)).to_json()
    shares = found["attribution"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["model"] > shares["prompt"] > shares["interaction"]
    assert shares["model"] / shares["prompt"] == pytest.approx(9, rel=0.1)
    assert shares["residual"] < 0.01
    assert {each["name"]: round(each["mean"]) for each in found["attribution_details"]["models"]} == {"a": 11, "b": 14}


def test_an_incomplete_row_is_last_without_a_rank_and_changes_no_other() -> None:
    full = board_of(cells_of({A: LOW, B: HIGH}))
    partly: list[float | None] = [17.0, 17.0, 17.0, *[None] * 5]
    found = board_of(cells_of({A: LOW, B: HIGH, C: partly}))
    check_shape(found.to_json())
    *first, last = found.to_json()["standings"]
    assert first == full.to_json()["standings"]
    assert (last["model"], last["rank"], last["composite"], last["n_scenarios"]) == ("c:1b", None, 17.0, 3)
    assert (last["judged"], last["total"], last["flags"]) == (3, 8, ["incomplete", "adjusted"])
    assert last["diff_to_leader"]["p"] is None, "it is in no test"
    assert "c:1b/v1" in found.verdict, "one that looks better must not be overlooked"


def test_without_a_row_in_six_scenarios_the_verdict_names_what_is_missing() -> None:
    holes: dict[Pair, Sequence[float | None]] = {
        pair: [value if at % 3 != hole else None for at, value in enumerate(LOW)] for hole, pair in enumerate((A, B, C))
    }
    holes[C] = [*holes[C][:7], None]
    found = board_of(cells_of(holes)).to_json()
    check_shape(found)
    assert (found["verdict"]["leader"], found["verdict"]["decided"]) == (None, False)
    assert {row["rank"] for row in found["standings"]} == {None}
    assert "No pair is judged in 6 of the 7 core scenarios" in found["verdict"]["text"]
    assert found["attribution"] is None


def test_no_scores_at_all_is_a_board_of_nulls() -> None:
    board_ = board_of_runs([cell(pair, "nurse@morning", None) for pair in (A, B)])
    found = board_.to_json()
    check_shape(found)
    assert (found["rubric"], found["judges"], found["provisional"]) == (None, [], False)
    assert found["verdict"]["text"].startswith("Not judged yet: 2 pairs without scores.")
    for row in found["standings"]:
        assert {row[name] for name in ("composite", "ci_low", "ci_high", "diff_to_leader", *SCALES)} == {None}
        assert (row["judged"], row["total"], row["n_scenarios"], row["latency_s"]) == (0, 1, 0, 2.0)
    assert any(note.startswith("Not judged yet") for note in board_.notes)


def test_all_failed_is_a_board_of_nulls_with_flags() -> None:
    failed = [
        replace(cell(pair, scenario, None, tags={"state": "failed"}), status="FAILED", metrics={})
        for pair in (A, B) for scenario in scenario_names(4)
    ]  # fmt: skip
    found = board_of_runs(failed).to_json()
    check_shape(found)
    for row in found["standings"]:
        assert (row["failed"], row["total"], row["judged"]) == (4, 4, 0)
        assert row["flags"] == ["incomplete", "failed"]
        assert {row[name] for name in ("composite", "latency_s", "format_ok", "tokens_per_s", *SCALES)} == {None}


def test_one_model_leads_alone_and_nothing_is_decided() -> None:
    found = board_of(cells_of({A: LOW})).to_json()
    check_shape(found)
    assert (found["verdict"]["leader"]["model"], found["verdict"]["decided"]) == ("a:1b", False)
    (row,) = found["standings"]
    assert (row["rank"], row["p_best"], row["diff_to_leader"]) == (1, 1.0, None)
    assert "nothing to compare it with" in found["verdict"]["text"]


def test_one_scenario_gives_means_only() -> None:
    found = board_of(cells_of({A: LOW[:1], B: HIGH[:1]})).to_json()
    check_shape(found)
    assert (found["verdict"]["leader"]["model"], found["verdict"]["decided"]) == ("b:1b", False)
    assert found["verdict"]["scenarios_needed"] is None
    for row in found["standings"]:
        assert {row[name] for name in ("ci_low", "ci_high", "p_best")} == {None}
        assert (row["rank_low"], row["rank_high"]) == (1, 2)
    assert found["standings"][1]["diff_to_leader"] == {"mean": -3.75, "ci_low": None, "ci_high": None, "p": None}


def test_the_same_score_everywhere_has_no_interval_and_no_attribution() -> None:
    found = board_of(cells_of({A: [11.0] * 8, B: [11.0] * 8})).to_json()
    check_shape(found)
    assert [(row["composite"], row["ci_low"]) for row in found["standings"]] == [(11.0, None)] * 2
    assert found["attribution"] is None
    assert found["attribution_details"] == {"reason": "All scores are equal: there is no spread to attribute."}


def test_repeats_are_averaged_within_their_scenario() -> None:
    """Three repeats in one scenario weigh no more than one in another."""
    single = [cell(A, name, 10.0) for name in scenario_names(4)]
    extra = [replace(cell(A, scenario_names(1)[0], value), run_id=f"again {value}") for value in (16.0, 16.0)]
    (row,) = board_of_runs([*single, *extra]).to_json()["standings"]
    assert row["composite"] == pytest.approx((14 + 10 + 10 + 10) / 4)
    assert (row["n_scenarios"], row["judged"], row["total"]) == (4, 6, 6)


def test_problems_of_cells_become_flags_and_not_scores() -> None:
    names = scenario_names(6)
    tags = [{}, {"truncated": "true"}, {"floored": "true"}, {"foreign_resident": "true"}, {"state": "failed"}, {}]
    runs = [cell(A, name, 10.0, tags=each) for name, each in zip(names, tags, strict=True)]
    old = replace(runs[0], run_id="old", start_ms=0, params={**runs[0].params, "model_digest": "sha256:old"})
    (row,) = board_of_runs([*runs, old]).to_json()["standings"]
    assert row["flags"] == ["failed", "stale", "truncated", "floored", "foreign_resident"]
    assert (row["judged"], row["failed"], row["total"], row["composite"]) == (5, 1, 6, 10.0)


def test_an_unknown_baseline_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"The pair c:1b/v1 is not on this board. Available: a:1b/v1 and b:1b/v1\."):
        board_of(cells_of({A: LOW, B: HIGH}), baseline=C)


def test_by_model_scores_are_averaged_over_prompts() -> None:
    found = board(by="model").to_json()
    check_shape(found)
    assert {(row["model"], row["prompt_version"]) for row in found["standings"]} == {(model, "*") for model in MODELS}
    assert {row["total"] for row in found["standings"]} == {24}
    each = rows(board())
    for row in found["standings"]:
        alone = [each[f"{row['model']}/{prompt}"]["composite"] for prompt in PROMPTS]
        assert row["composite"] == pytest.approx(sum(alone) / 3)
    assert found["attribution"] == board().to_json()["attribution"]


def test_by_model_only_prompts_that_every_model_has_count_for_any_number() -> None:
    names = scenario_names(3)
    both = [cell(Pair("a", prompt), name, 10.0 + (prompt == "v2")) for prompt in ("v1", "v2") for name in names]
    slow = [
        replace(run, metrics={**run.metrics, "latency_s": 9.0}) for run in both if run.params["prompt_version"] == "v2"
    ]
    found = board_of_runs([*both[:3], *slow, *(cell(Pair("b", "v1"), name, 9.0) for name in names)], by="model")
    row = rows(found)["a/*"]
    assert (row["composite"], row["relevance"]) == (10.0, pytest.approx(10 / 17 * 5))
    assert (row["latency_s"], row["judged"], row["total"]) == (2.0, 3, 3)
    assert "Excluded from the means by model, because not all models have it: v2." in found.notes


def test_by_model_without_a_shared_prompt_nothing_is_ranked_with_the_reason() -> None:
    found = board_of(cells_of({Pair("a", "v1"): LOW, Pair("b", "v2"): HIGH}), by="model")
    check_shape(found.to_json())
    assert found.ranking.leader is None
    assert "No prompt is shared by all models, so the models cannot be ranked." in found.notes


def test_by_model_older_builds_are_flagged_too() -> None:
    runs = [cell(A, "nurse@morning", 10.0), cell(B, "nurse@morning", 10.0)]
    old = replace(runs[0], run_id="old", start_ms=0, params={**runs[0].params, "model_digest": "sha256:old"})
    found = rows(board_of_runs([*runs, old], by="model"))
    assert ("stale" in found["a:1b/*"]["flags"], "stale" in found["b:1b/*"]["flags"]) == (True, False)


def test_per_persona_there_are_fewer_units_and_the_same_means() -> None:
    wide, narrow = board_of(cells_of({A: LOW, B: HIGH})), board_of(cells_of({A: LOW, B: HIGH}), cluster="persona")
    check_shape(narrow.to_json())
    assert (narrow.to_json()["cluster"], narrow.ranking.n_units) == ("persona", 4)
    assert "leads over 4 personas" in narrow.verdict
    assert not narrow.to_json()["verdict"]["decided"], "four personas cannot decide anything"
    assert rows(narrow)[str(A)]["composite"] == pytest.approx(rows(wide)[str(A)]["composite"])


def test_excluded_cells_are_noted_with_the_option_to_show_them() -> None:
    runs = [
        *(cell(A, "nurse@morning", 10.0, tags={"conditions": "older"}) for _ in range(2)),
        replace(cell(A, "nurse@morning", 10.0), run_id="new", start_ms=9),
    ]
    notes = board_of_runs(runs).notes
    assert "2 runs under other conditions are excluded; --where conditions=older to show them." in notes


def test_hosts_are_named_where_speed_does_not_compare() -> None:
    runs = [cell(A, "nurse@morning", 10.0), cell(B, "nurse@morning", 10.0)]
    elsewhere = replace(runs[1], params={**runs[1].params, "host": "other"})
    found = board_of_runs([runs[0], elsewhere])
    assert found.to_json()["hosts"] == ["box", "other"]
    assert any("not comparable across hosts" in note for note in found.notes)
    assert not any("hosts" in note for note in board_of_runs(runs).notes)


scores = st.lists(st.one_of(st.none(), st.integers(8, 68).map(lambda step: step / 4)), min_size=7, max_size=7)


@settings(max_examples=20)
@given(st.lists(scores, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, "model", "prompt"]))
def test_every_board_has_the_documented_format(
    columns: list[list[float | None]], cluster: bool, by: str | None
) -> None:
    pairs = [Pair("a", "v1"), Pair("a", "v2"), Pair("b", "v1"), Pair("b", "v2")]
    cells = cells_of(dict(zip(pairs, columns, strict=False)))
    check_shape(board_of(cells, cluster="persona" if cluster else None, by=by).to_json())


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_order_and_repetition_change_no_byte(seed: int) -> None:
    plain = cells_of({A: LOW, B: HIGH, C: [*LOW[:5], None, None, None]})
    shuffled = list(plain.cells)
    random.Random(seed).shuffle(shuffled)
    text = json.dumps(board_of(plain).to_json())
    assert json.dumps(board_of(replace(plain, cells=tuple(shuffled))).to_json()) == text
    twice = board_of(replace(plain, cells=plain.cells * 2)).to_json()
    for row, alone in zip(twice["standings"], board_of(plain).to_json()["standings"], strict=True):
        assert (row["judged"], row["total"]) == (2 * alone["judged"], 2 * alone["total"])
        assert {**row, "judged": 0, "total": 0} == {**alone, "judged": 0, "total": 0}


@settings(max_examples=20)
@given(st.lists(st.floats(2, 17), min_size=8, max_size=8), st.integers(0, 8))
def test_an_irrelevant_model_changes_no_difference_of_others(values: list[float], judged: int) -> None:
    """P and interval may change, because they are adjusted over more rows; the difference of two others may not."""
    third: list[float | None] = [value if at < judged else None for at, value in enumerate(values)]
    alone = rows(board_of(cells_of({A: LOW, B: HIGH}), baseline=A))[str(B)]["diff_to_baseline"]
    together = rows(board_of(cells_of({A: LOW, B: HIGH, C: third}), baseline=A))[str(B)]["diff_to_baseline"]
    assert together["mean"] == alone["mean"]


REFERENCE = Pair("baseline:template", "none")


def test_reference_is_shown_next_to_the_ranking() -> None:
    found = board_of(cells_of({A: LOW, B: HIGH, REFERENCE: [value - 1 for value in LOW]})).to_json()
    check_shape(found)
    alone = board_of(cells_of({A: LOW, B: HIGH})).to_json()
    assert found["standings"] == alone["standings"]
    assert found["attribution"] == alone["attribution"]
    (reference,) = found["references"]
    assert (reference["model"], reference["prompt_version"]) == ("baseline:template", "none")
    assert (reference["rank"], reference["p_best"], reference["flags"]) == (None, None, [])
    assert found["verdict"]["beats_reference"] is True
    assert found["verdict"]["diff_to_reference"]["mean"] == pytest.approx(5.0)
    assert reference["diff_to_leader"]["mean"] == pytest.approx(-5.0)
    assert (alone["verdict"]["beats_reference"], alone["references"]) == (None, [])


def reference_runs(prompt: str, value: float | None, names: Sequence[str]) -> list[StoredRun]:
    return [cell(Pair("baseline:template", prompt), name, value) for name in names]


def test_older_runs_of_a_reference_with_prompts_are_one_row_until_one_without_is_scored() -> None:
    names = scenario_names(8)
    candidate = [cell(A, name, 10.0 + at) for at, name in enumerate(names)]
    old = [*reference_runs("v1", 4.0, names), *reference_runs("v2-mentor", 8.0, names)]
    (row,) = board_of_runs([*candidate, *old]).to_json()["references"]
    assert (row["composite"], row["total"]) == (6.0, 16)
    (row,) = board_of_runs([*candidate, *old, *reference_runs("none", None, names)]).to_json()["references"]
    assert row["composite"] == 6.0
    (row,) = board_of_runs([*candidate, *old, *reference_runs("none", 12.0, names[:4])]).to_json()["references"]
    assert row["composite"] == 9.0


def test_reference_can_be_the_baseline_of_a_board() -> None:
    found = rows(board_of(cells_of({A: LOW, B: HIGH, REFERENCE: LOW}), baseline=REFERENCE))
    assert found[str(B)]["diff_to_baseline"]["mean"] == pytest.approx(4.0)


def test_unusable_answers_are_a_part_of_their_own() -> None:
    names = scenario_names(8)
    runs = [
        cell(A, name, 3.0 if at < 2 else 12.0, tags={"floored": "true"} if at < 2 else {})
        for at, name in enumerate(names)
    ]
    (row,) = board_of_runs(runs).to_json()["standings"]
    assert (row["composite"], row["composite_usable"], row["usable"]) == (9.75, 12.0, 0.75)
    assert (row["usable_low"], row["usable_high"]) == pytest.approx((0.349, 0.968), abs=0.001)


def test_nothing_is_ranked_while_only_floors_are_there() -> None:
    floors = [cell(pair, name, 3.0, tags={"floored": "true"}) for pair in (A, B) for name in scenario_names(8)]
    found = board_of_runs(
        [
            *floors[:8],
            *(replace(run, tags={**run.tags, "state": "pending", "floored": ""}, metrics={}) for run in floors[8:]),
        ]
    )
    check_shape(found.to_json())
    assert found.ranking.leader is None
    assert found.verdict.startswith("Not judged yet")
    assert any(note.startswith("Not judged yet. Create a sheet") for note in found.notes)


def test_without_a_usable_answer_no_sheet_is_suggested() -> None:
    floors = [cell(pair, name, 3.0, tags={"floored": "true"}) for pair in (A, B) for name in scenario_names(8)]
    found = board_of_runs(floors)
    assert found.verdict == "Nothing can be ranked: no answer has a usable tip."
    assert found.notes[0] == "None of 16 answers has a usable tip, so there is nothing to judge."
    assert found.notes[0] in summary_card(found).lines
    assert not any("Not judged yet" in note for note in found.notes)


def test_excluded_rows_are_left_out_and_recorded() -> None:
    runs = [cell(pair, name, 10.0 + at) for pair in (A, B, C) for at, name in enumerate(scenario_names(8))]
    cell_filter = CellFilter(exclude=("a:1b", str(B)))
    found = board_of(select_cells([(run, NO_SCORES) for run in runs], cell_filter))
    assert [str(row.pair) for row in found.standings] == [str(C)]
    assert found.to_json()["exclude"] == ["a:1b", "b:1b/v1"]
    assert "Left out with --exclude: a:1b/v1 and b:1b/v1." in found.notes


def test_row_with_gaps_is_ranked_by_its_adjusted_mean() -> None:
    """C lacks the two hardest scenarios: its plain mean is above B's, although it is worse wherever both are judged."""
    low, high = ([value - 6 if at < 2 else value for at, value in enumerate(values)] for values in (LOW, HIGH))
    gaps: list[float | None] = [None if at < 2 else value - 0.5 for at, value in enumerate(high)]
    found = board_of(cells_of({A: low, B: high, C: gaps}))
    by_name = rows(found)
    assert by_name[str(C)]["composite"] > by_name[str(B)]["composite"]
    assert by_name[str(C)]["rank"] > by_name[str(B)]["rank"]
    assert by_name[str(C)]["composite_adjusted"] < by_name[str(B)]["composite_adjusted"]
    assert ("adjusted" in by_name[str(C)]["flags"], "adjusted" in by_name[str(B)]["flags"]) == (True, False)
    assert by_name[str(B)]["composite_adjusted"] == pytest.approx(by_name[str(B)]["composite"])
