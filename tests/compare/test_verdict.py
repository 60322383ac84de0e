"""The verdict in words: leader, ties and needed scenarios; it never claims that a tied row is worse."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import matrix_of, simulate

import tipbench
from support.judged import cells_of
from tipbench.compare.duels import Duel, duel_table
from tipbench.compare.leaderboard import BoardOptions, JudgingRecord, Leaderboard, make_board, read_judging
from tipbench.compare.matrix import Pair
from tipbench.compare.ranking import RankOptions, rank
from tipbench.compare.report import State, state_of
from tipbench.compare.verdict import NOT_CLEARLY_DIFFERENT
from tipbench.plan.design import make_design
from tipbench.plan.suite import load_suite
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import MemoryStore

A, B, C, D, E, F = (Pair(f"{letter}:1b", "v1") for letter in "abcdef")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
NEAR = [value + (0.6 if at % 2 else -0.4) for at, value in enumerate(LOW)]
HIGH = [value + 4 + (0.25 if at % 2 else -0.25) for at, value in enumerate(LOW)]

Columns = Mapping[Pair, Sequence[float | None]]


def board_of(columns: Columns) -> Leaderboard:
    return make_board("tip-bench-test", cells_of(columns), BoardOptions())


EMPTY = board_of({})


def verdict(columns: Columns) -> str:
    return board_of(columns).verdict


def test_a_decided_board_names_its_leader_and_how_many_scenarios_it_rests_on() -> None:
    text = verdict({A: LOW, B: HIGH})
    assert text.startswith("b:1b/v1 leads over 8 scenarios")
    assert "not clearly different" not in text
    assert "would decide" not in text


def test_a_tie_has_names_and_the_needed_scenarios() -> None:
    found = board_of({A: LOW, B: NEAR})
    assert found.verdict.startswith("b:1b/v1 leads over 8 scenarios, but is not clearly different from a:1b/v1.")
    assert "Too close to call." in found.verdict
    assert found.ranking.units_needed is None
    larger = replace(found, ranking=replace(found.ranking, units_needed=24))
    assert "About 24 scenarios in all would decide, if the lead is as estimated." in larger.verdict


def test_a_long_tie_is_shortened_with_a_count() -> None:
    turns = {pair: [LOW[at] + (at + place) % 5 / 4 for at in range(8)] for place, pair in enumerate((A, B, C, D, E, F))}
    text = verdict(turns)
    assert "and 2 more" in text
    assert text.count(":1b/v1") <= 5


def test_under_six_scenarios_the_verdict_is_too_few_scenarios() -> None:
    text = verdict({A: LOW[:4], B: HIGH[:4]})
    assert "Too few scenarios: 4; at least 6 needed (7 with several looks)." in text


def test_for_identical_rows_the_needed_number_is_unknown() -> None:
    text = verdict({A: LOW, B: LOW})
    assert text.startswith("a:1b/v1 and b:1b/v1 share the lead over 8 scenarios")
    assert "Too close to call." in text


DESIGN = make_design(f"p{at % 4}@s{at}" for at in range(32))


def planned(n: int, near: Sequence[float], *, minutes: float | None = None, **over: object) -> Leaderboard:
    """A board of two pairs with n of 32 planned scenarios judged, the others recorded."""
    low = [LOW[at % 8] for at in range(n)]
    columns: Columns = {
        A: [*low, *[None] * (32 - n)],
        B: [*(low[at] + near[at % len(near)] for at in range(n)), *[None] * (32 - n)],
    }
    options = BoardOptions(design=DESIGN, judging=JudgingRecord(minutes, over.pop("concerns", {})))  # type: ignore[arg-type]
    return make_board("tip-bench-test", cells_of(columns, **over), options)


def test_verdict_names_the_look_and_what_the_next_one_takes() -> None:
    text = planned(8, [1.6, -0.4, 0.2, 0.9], minutes=1.5).verdict
    assert text.startswith("b:1b/v1 leads over 8 scenarios (look 1 of 4), but is not clearly different from a:1b/v1.")
    assert "Next look (2 of 4) at 16 scenarios: judge 8 more scenarios (16 answers), about 24 minutes, " in text
    assert " chance to decide." in text


def test_verdict_between_looks_is_that_of_the_latest_look() -> None:
    text = planned(12, [1.6, -0.4, 0.2, 0.9]).verdict
    assert text.startswith("b:1b/v1 leads over 12 scenarios (look 1 of 4 at 8)")
    assert "Next look (2 of 4) at 16 scenarios: judge 4 more scenarios (8 answers), " in text
    assert "minute" not in text


def test_last_look_without_a_decision_is_too_close_to_call() -> None:
    found = planned(32, [1.0, -1.0, 0.1])
    assert "(look 4 of 4)" in found.verdict
    assert "Too close to call at the last look." in found.verdict
    assert found.to_json()["verdict"]["next_look"] is None


def test_rows_without_an_answer_are_named_in_a_decision() -> None:
    cells = cells_of({A: LOW, B: HIGH, C: [None] * 8, D: [None] * 8})
    failed = [
        replace(each, run=replace(each.run, tags={**each.run.tags, "state": "failed"})) if not each.values else each
        for each in cells.cells
    ]
    found = make_board("tip-bench-test", replace(cells, cells=tuple(failed)), BoardOptions())
    assert found.ranking.decided
    assert "every other pair is clearly worse, not counting 2 pairs that gave no answer." in found.verdict


def test_model_without_an_answer_is_named_in_a_decision_between_models() -> None:
    cells = cells_of({A: LOW, B: HIGH, C: [None] * 8})
    failed = tuple(
        replace(each, run=replace(each.run, tags={"state": "failed"})) if not each.values else each
        for each in cells.cells
    )
    found = make_board("tip-bench-test", replace(cells, cells=failed), BoardOptions(by="model"))
    assert found.ranking.decided
    assert "every other model is clearly worse, not counting 1 model that gave no answer." in found.verdict


def test_stale_rows_are_named_in_a_decision() -> None:
    found = make_board("tip-bench-test", cells_of({A: LOW, B: HIGH}, stale={C: 8}), BoardOptions())
    assert found.ranking.decided
    assert "clearly worse, not counting 1 pair of an older build, prompt or scenario." in found.verdict


def test_row_that_is_clearly_better_at_the_look_is_never_called_worse() -> None:
    """A is better in all 8 scenarios of the first look, B leads by those judged since."""
    late = [30.0 if at >= 8 else -0.5 - at / 50 for at in range(12)]
    found = planned(12, late)
    assert (found.ranking.leader, found.ranking.tied, found.ranking.decided) == (B, (), False)
    assert found.verdict.startswith("b:1b/v1 leads over 12 scenarios (look 1 of 4 at 8).")
    assert (
        "Clearly better than the leader in the 8 scenarios of the look, though not overall: a:1b/v1." in found.verdict
    )
    assert "worse" not in found.verdict
    assert state_of(found, A) is State.TIED


def test_rows_that_are_not_judged_forbid_a_decision_and_are_named() -> None:
    found = board_of({A: LOW, B: HIGH, C: [None] * 8})
    assert not found.ranking.decided
    assert found.ranking.tied == ()
    assert "Not decided: c:1b/v1 (judged in 0 scenarios) may still lead." in found.verdict


def test_row_that_is_judged_in_too_few_scenarios_is_not_separated_and_therefore_tied() -> None:
    found = board_of({A: LOW, B: HIGH, C: [*LOW[:5], *[None] * 3]})
    verdict, rows = found.to_json()["verdict"], {row.pair: row for row in found.standings}
    assert (verdict["leader"], verdict["tied_with_leader"], verdict["decided"]) == (B.to_json(), [C.to_json()], False)
    assert "every other ranked pair is clearly worse." in found.verdict
    assert "Not decided: c:1b/v1 (judged in 5 scenarios) may still lead." in found.verdict
    assert "oo close" not in found.verdict
    row = rows[C].to_json()
    assert (row["rank"], row["rank_low"], row["rank_high"], row["p_best"], row["diff_to_leader"]["p"]) == (None,) * 5
    assert ("incomplete" in row["flags"], state_of(found, C)) == (True, State.INCOMPLETE)


def test_fragile_decision_is_called_fragile() -> None:
    rubric = load_suite("tips").rubric
    lead = [value + 1.5 + (0.1 if at % 2 else -0.1) for at, value in enumerate(LOW)]
    found = make_board("tip-bench-test", cells_of({A: LOW, B: lead}, rubric_content=rubric), BoardOptions())
    assert found.ranking.decided
    assert found.to_json()["verdict"]["fragile"]
    assert "This is fragile" in found.verdict
    firm = make_board("tip-bench-test", cells_of({A: LOW, B: HIGH}, rubric_content=rubric), BoardOptions())
    assert not firm.to_json()["verdict"]["fragile"]
    assert "fragile" not in firm.verdict


def test_leader_is_compared_with_the_reference() -> None:
    reference = Pair("baseline:template", "none")
    assert "clearly better than the reference baseline:template." in verdict({A: LOW, B: HIGH, reference: LOW})
    assert "not clearly different from the reference baseline:template." in verdict({A: LOW, B: NEAR, reference: LOW})
    assert "Nothing to rank: only the reference baseline:template is recorded." in verdict({reference: LOW})


def test_concern_about_the_only_judge_is_stated() -> None:
    concerns = {"anna": "is not checked against reference scores yet"}
    text = planned(8, [1.0, 0.5], concerns=concerns).verdict
    assert "Judged by anna. anna, the only judge, is not checked against reference scores yet." in text
    two = planned(8, [1.0, 0.5], concerns=concerns, judges=("anna", "ben")).verdict
    assert "Judged by anna and ben. anna is not checked against reference scores yet." in two


@pytest.mark.parametrize(
    ("sheets", "concern"),
    [
        ([{}], "is not checked against reference scores yet"),
        ([{"drift": "unknown"}], "is not checked against reference scores yet"),
        ([{"drift": "fine"}], None),
        ([{"drift": "unknown"}, {"drift": "fine"}], None),
        ([{"drift": "fine"}, {}], "has scores that are not checked against reference scores yet"),
        (
            [{"drift": "beyond the limit", "drift_accepted": "yes"}],
            "was accepted although too far off the reference scores",
        ),
    ],
)
def test_concerns_about_a_judge_come_from_all_applied_sheets(
    sheets: Sequence[Mapping[str, str]], concern: str | None
) -> None:
    store = MemoryStore()
    experiment = store.ensure_experiment("tip-bench-test")
    for at, tags in enumerate(sheets):
        run = NewRun(
            kind=RunKind.JUDGING, record_id=f"s{at}", name="sheet", start_ms=at, end_ms=at, params={}, metrics={},
            tags={"judge": "anna", "sheet_status": "applied", **tags},
        )  # fmt: skip
        store.record(experiment.experiment_id, run)
    found = read_judging(store, experiment.experiment_id).concerns.get("anna")
    assert (found is None) if concern is None else (found or "").startswith(concern)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "no looks were planned before the first score"),
        ({"design": make_design(["p0@s0"])}, "scenarios were added after the first score"),
        ({"design": make_design(f"p{at % 4}@s{at}" for at in range(8))}, None),
    ],
)
def test_board_that_is_not_a_planned_look_is_marked(options: dict[str, Any], reason: str | None) -> None:
    found = make_board("tip-bench-test", cells_of({A: LOW, B: NEAR}), BoardOptions(**options))
    assert (f"Not a planned look: {reason}." in found.verdict) == (reason is not None)
    look = found.to_json()["verdict"]["look"]
    assert look == ({"number": 1, "of": 1, "at": 8} if reason is None else None)
    assert found.to_json()["verdict"]["level"] == 0.05


def test_an_empty_board_has_its_own_verdict() -> None:
    assert verdict({}) == "Nothing is recorded yet."


def test_an_unranked_row_with_a_higher_mean_is_mentioned() -> None:
    partly: list[float | None] = [17.0, 17.0, *[None] * 6]
    text = verdict({A: LOW, B: HIGH, C: partly})
    assert text.startswith("b:1b/v1 leads")
    assert "Not ranked, but ahead of the leader in the scenarios that both have: c:1b/v1." in text
    behind: list[float | None] = [3.0, 3.0, *[None] * 6]
    assert "ahead of" not in verdict({A: LOW, B: HIGH, C: behind})


def test_the_winner_of_duels_is_added_and_changes_nothing() -> None:
    plain = board_of({A: LOW, B: NEAR})
    duels = [Duel(A, B, f"s{at}", "first") for at in range(8)] + [Duel(B, A, f"s{at}", "second") for at in range(8)]
    won = replace(plain, duels=duel_table(duels)).verdict
    assert won.startswith(plain.verdict)
    assert "a:1b/v1 wins the duels between the tied rows; duels do not change ranks." in won
    without_c = replace(plain, duels=duel_table(duels, {A, B, C})).verdict
    assert without_c.endswith("The duels between the tied rows have no winner yet: no duels of c:1b/v1.")
    even = [Duel(A, B, f"s{at}", "tie") for at in range(8)]
    assert replace(plain, duels=duel_table(even)).verdict == plain.verdict


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 14), st.integers(1, 6), st.floats(0, 6), st.floats(0, 0.4))
def test_every_verdict_is_whole_sentences_that_keep_to_the_ranking(
    seed: int, n: int, k: int, lead: float, missing: float
) -> None:
    rng = np.random.default_rng(seed)
    values = simulate(rng, [0.0] * (k - 1) + [lead], n)
    values[rng.random(values.shape) < missing] = np.nan
    ranking = rank(matrix_of(values), RankOptions(n_flips=199, n_resamples=50))
    text = replace(EMPTY, ranking=ranking).verdict
    assert text[0].isalnum()
    assert text.endswith(".")
    for word in ("nan", "None,", "best", "winner"):
        assert word not in text
    if ranking.leader is not None:
        assert text.startswith(str(ranking.leader))
    for pair in ranking.tied[:3]:
        assert str(pair) in text
    assert ("not clearly different" in text) == bool(ranking.tied_ranked)
    if ranking.decided:
        assert "would decide" not in text


def test_ties_are_worded_in_one_module() -> None:
    """Changing the wording means changing `compare/verdict.py`, and then the documentation and docstrings by hand."""
    package = Path(tipbench.__file__).parent
    elsewhere = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text("utf-8")
        if not re.search("tied|clearly different", source):
            continue
        tree = ast.parse(source)
        prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in prose]
        texts = [node.value for node in strings if isinstance(node.value, str)]
        elsewhere += [(path.name, text) for text in texts if re.search(r"\btied\b.| tied\b|clearly different", text)]
    for path in sorted(package.rglob("*.html")):
        found = re.findall(r'[^"\n]{0,20}(?<!["-])\btied\b|clearly different', path.read_text("utf-8"))
        elsewhere += [(path.name, text) for text in found]
    assert elsewhere == [("verdict.py", NOT_CLEARLY_DIFFERENT)]
