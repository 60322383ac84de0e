"""A decision records its evidence, and where the numbers do not support it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from support.judged import RUBRIC, cells_of
from tipbench.compare.decision import MARKDOWN, Decision, decision_markdown, decision_run, make_decision
from tipbench.compare.duels import Duel, duel_table
from tipbench.compare.leaderboard import BOARD, BoardOptions, make_board
from tipbench.compare.matrix import Pair
from tipbench.errors import UsageError
from tipbench.record.store import MemoryStore

A, B, C = Pair("a:1b", "v1"), Pair("a:1b", "v2"), Pair("c:1b", "v1")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]
WAVE = [0.5, -0.5, 0.3, -0.3, 0.4, -0.4, 0.2, -0.1]
SAME = [one + wave for one, wave in zip(LOW, WAVE, strict=True)]
HIGH = [one + 3 + wave for one, wave in zip(LOW, WAVE, strict=True)]


def decide(
    columns: Mapping[Pair, Sequence[float | None]], chosen: Pair, reason: str = "It is good.", **over: Any
) -> Decision:
    cells = cells_of(columns, **over)
    board = make_board("tip-bench-x", cells, BoardOptions())
    return make_decision(board, cells, chosen, reason, decision_id="d" * 32, at="2026-11-15T12:00:00.000+00:00")


def test_a_clearly_better_leader_is_described_as_such() -> None:
    decision = decide({A: HIGH, B: LOW}, A)
    assert decision.findings == ("a:1b/v1 leads over 8 scenarios; every other pair is clearly worse.",)
    assert decision.to_json()["standing"] == "leader"


def test_a_tied_leader_is_described_as_such() -> None:
    finding = "a:1b/v1 leads over 8 scenarios, but is not clearly different from a:1b/v2."
    assert decide({A: SAME, B: LOW}, A).findings == (finding,)


def test_a_finding_agrees_with_the_verdict() -> None:
    for columns, chosen in (({A: HIGH, B: LOW}, A), ({A: SAME, B: LOW}, A), ({A: LOW, B: LOW}, B), ({A: LOW}, A)):
        decision = decide(columns, chosen)
        assert decision.board.verdict.startswith(decision.findings[0])


def test_a_pair_that_shares_the_lead_is_not_described_as_behind() -> None:
    (finding,) = decide({A: LOW, B: LOW}, B).findings
    assert finding.startswith("a:1b/v1 and a:1b/v2 share the lead")


def test_a_tied_pair_that_does_not_lead_is_described_as_such() -> None:
    decision = decide({A: SAME, B: LOW}, B)
    (finding,) = decision.findings
    assert finding.startswith("a:1b/v2 does not lead: a:1b/v1 does, but the two are not clearly different (")
    assert decision.to_json()["standing"] == "tied"


def test_a_clearly_worse_pair_is_described_as_such() -> None:
    decision = decide({A: HIGH, B: LOW}, B)
    (finding,) = decision.findings
    assert "does not lead" in finding
    assert "it is clearly worse than a:1b/v1" in finding
    assert "−3.0" in finding


def test_an_unranked_pair_is_described_as_such() -> None:
    decision = decide({A: HIGH, B: LOW, C: [9.0, *[None] * 7]}, C)
    assert decision.findings == ("c:1b/v1 is not ranked: it is not scored in enough scenarios.",)


def test_a_pair_without_scores_may_be_chosen_and_it_shows() -> None:
    decision = decide({A: HIGH, B: [None] * 8}, B)
    assert decision.findings == ("a:1b/v2 has no scores: there is no evidence for or against it.",)


def test_provisional_scores_are_the_first_finding() -> None:
    decision = decide({A: HIGH, B: LOW}, A, provisional=True, judges=("rules",))
    assert decision.findings[0] == "The scores are provisional: by rules, not by people."
    assert decision_run(decision, 1).tags["provisional"] == "true"


def test_the_winner_of_duels_is_added() -> None:
    cells = cells_of({A: SAME, B: LOW})
    duels = [Duel(A, B, f"s{at}", "second") for at in range(12)]
    board = replace(make_board("tip-bench-x", cells, BoardOptions()), duels=duel_table(duels))
    decision = make_decision(board, cells, A, "x", decision_id="d", at="2026-11-15T12:00:00+00:00")
    assert decision.findings[-1] == "a:1b/v2 wins the duels between the tied rows."


def test_an_unknown_pair_cannot_be_chosen() -> None:
    with pytest.raises(UsageError, match=r"The pair c:1b/v1 is not on this board. Available: a:1b/v1 and a:1b/v2"):
        decide({A: HIGH, B: LOW}, C)


@pytest.mark.parametrize("reason", ["", " \n ", "x" * 2001])
def test_a_reason_has_1_to_2000_characters(reason: str) -> None:
    with pytest.raises(UsageError, match="1 to 2000"):
        decide({A: HIGH}, A, reason)


def test_the_hashes_identify_the_data_of_the_board() -> None:
    evidence = decide({A: HIGH, B: LOW, C: LOW}, B).evidence
    assert (evidence.model_digest, evidence.prompt_hash, evidence.rubric) == ("sha256:a:1b", "p-v2", RUBRIC)
    assert evidence.models == {"a:1b": "sha256:a:1b", "c:1b": "sha256:c:1b"}
    assert evidence.prompts == {"v1": "p-v1", "v2": "p-v2"}
    assert evidence.scenarios == {f"p{at % 4}@s{at}": f"h-p{at % 4}@s{at}" for at in range(8)}


def test_the_run_has_the_whole_board_and_its_hash() -> None:
    decision = decide({A: HIGH, B: LOW}, A)
    store = MemoryStore()
    run_id = store.record(store.ensure_experiment("tip-bench-x").experiment_id, decision_run(decision, 5))
    run, texts = store.get(run_id)
    assert json.loads(texts[BOARD]) == decision.board.to_json()
    assert hashlib.sha256(texts[BOARD].encode()).hexdigest() == run.tags["leaderboard_sha256"]
    assert texts[MARKDOWN] == decision_markdown(decision)
    assert (run.tags["kind"], run.tags["standing"], run.tags["reason"]) == ("decision", "leader", "It is good.")
    assert run.metrics["composite"] == pytest.approx(sum(HIGH) / 8)
    assert {"model": "a:1b", "prompt_version": "v1", "rubric": RUBRIC}.items() <= run.params.items()


def test_the_run_of_a_pair_without_scores_has_no_numbers() -> None:
    run = decision_run(decide({A: HIGH, B: [None] * 8}, B), 5)
    assert "composite" not in run.metrics
    assert run.metrics["n_scenarios"] == 0


def test_the_longest_reason_can_be_stored() -> None:
    decision = decide({A: HIGH}, A, "é" * 2000)
    store = MemoryStore()
    run_id = store.record(store.ensure_experiment("tip-bench-x").experiment_id, decision_run(decision, 5))
    assert store.get(run_id)[0].tags["reason"] == "é" * 2000


def test_the_page_has_reason_findings_numbers_and_hashes() -> None:
    decision = decide({A: HIGH, B: LOW}, A, "First line.\n\nSecond.")
    page = decision_markdown(decision)
    assert page.startswith("# Decision: a:1b/v1\n\n> First line.\n>\n> Second.\n")
    for part in (*decision.findings, decision.evidence.leaderboard_sha256, "sha256:a:1b", "h-p0@s0", RUBRIC):
        assert part in page.replace("\\", "")


def test_names_and_reasons_do_not_become_markup() -> None:
    nasty = Pair("<script>|`m`", "v1")
    page = decision_markdown(decide({nasty: HIGH, B: LOW}, nasty, "# Not a heading\n<b>|</b>\n```"))
    assert "<script>" not in page
    assert "<b>" not in page
    assert not any(line.startswith(("# Not", "```")) for line in page.splitlines())
