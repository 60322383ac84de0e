"""Decisions: a chosen pair with its reason and evidence, stored as an MLflow run with a Markdown report.

A new decision never replaces an earlier one, even on the same data: each has its own date and run.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tipbench
from tipbench.compare.cells import BoardCells, CellFilter, is_reference
from tipbench.compare.duels import DuelTable
from tipbench.compare.gate import check_on_board
from tipbench.compare.leaderboard import BOARD, Leaderboard, Standing, read_leaderboard
from tipbench.compare.matrix import Pair
from tipbench.compare.report import State, difference_text, markdown_table, plain_markdown, state_of, to_markdown
from tipbench.compare.verdict import NOT_CLEARLY_DIFFERENT, TIED, leader_sentence, unranked_sentence
from tipbench.errors import UsageError
from tipbench.judge.sheet_store import milliseconds
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import Experiment, RunStore
from tipbench.text import interval, number

MARKDOWN = "artifact:decision.md"  # name of the run's text with the report
MAX_REASON_LENGTH = 2000


@dataclass(frozen=True)
class Evidence:
    """Hashes of all data of a decision. Two decisions with equal hashes are based on the same data."""

    model_digest: str | None  # of the chosen model
    prompt_hash: str | None  # of the chosen prompt's text
    rubric: str  # id@sha256
    conditions: str  # id of the board's conditions
    scenarios: Mapping[str, str]  # id → content hash
    models: Mapping[str, str | None]  # model → digest, for all models of the board
    prompts: Mapping[str, str | None]  # version → hash of the text, for all prompts of the board
    leaderboard_sha256: str


@dataclass(frozen=True)
class Decision:
    """The choice of a pair, with its date, reason, board and evidence."""

    id: str
    at: str  # time in ISO format
    chosen: Pair
    reason: str
    board: Leaderboard
    board_text: str  # the board as stored JSON; its hash is `evidence.leaderboard_sha256`
    evidence: Evidence

    @property
    def standing(self) -> Standing:
        return next(standing for standing in self.board.standings if standing.pair == self.chosen)

    @property
    def state(self) -> State:
        return state_of(self.board, self.chosen)

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """Sentences on how well the data support the choice, limitations first."""
        board, chosen, result, state = self.board, self.chosen, self.standing.result, self.state
        leader = board.ranking.leader
        difference = difference_text(result.to_leader)
        numbers = f"difference to the leader: {difference}" if difference else "no shared scenario"
        sentences = []
        if board.provisional:
            judges = ", ".join(board.judges) or "no judge yet"
            sentences.append(f"The scores are provisional: by {judges}, not by people.")
        if result.estimate is None:
            sentences.append(f"{chosen} has no scores: there is no evidence for or against it.")
        elif state is State.INCOMPLETE:
            sentences.append(f"{chosen} is not ranked: it is not scored in enough scenarios.")
        elif state is State.LEADER or result.rank == 1:  # several rows with equal means share the lead
            sentences.append(leader_sentence(board))
        elif state is State.TIED:
            sentences.append(
                f"{chosen} does not lead: {leader} does, but the two are {NOT_CLEARLY_DIFFERENT} ({numbers})."
            )
        else:
            sentences.append(f"{chosen} does not lead: it is clearly worse than {leader} ({numbers}).")
        if leader is not None and board.ranking.unranked and state is not State.INCOMPLETE:
            sentences.append(unranked_sentence(board))
        if isinstance(board.duels, DuelTable) and board.duels.winner is not None:  # duels can be Unknown or None
            sentences.append(f"{board.duels.winner} wins the duels between the {TIED} rows.")
        return tuple(sentences)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serialisable values; unknown ones are None."""
        return {
            "decision": self.id,
            "experiment": self.board.experiment,
            "at": self.at,
            "chosen": self.chosen.to_json(),
            "reason": self.reason,
            "standing": str(self.state),  # "standing" is the stored name of the state
            "provisional": self.board.provisional,
            "findings": list(self.findings),
            "evidence": vars(self.evidence),
            "leaderboard": json.loads(self.board_text),
        }


def make_decision(
    board: Leaderboard, cells: BoardCells, chosen: Pair, reason: str, *, decision_id: str, at: str
) -> Decision:
    """Create a decision. Raises UsageError if the pair is not on the board or the reason is invalid."""
    if is_reference(chosen):
        raise UsageError(
            f"{chosen.model} is a reference that models are compared with; it cannot be chosen. Name a ranked pair."
        )
    check_on_board(cells, chosen)
    reason = validate_reason(reason)
    board_text = json.dumps(board.to_json(), ensure_ascii=False, indent=1)
    chosen_runs = [cell.run for cell in cells.cells if cell.pair == chosen and not cell.failed]
    # Sorted, so that equal data have equal evidence. Failed cells come first: the dicts below keep the last value of a
    # key, which has to be that of an answer.
    ordered_cells = sorted(cells.cells, key=lambda cell: (not cell.failed, cell.scenario, cell.pair, cell.run.run_id))
    evidence = Evidence(
        model_digest=_common_value(run.params.get("model_digest") for run in chosen_runs),
        prompt_hash=_common_value(run.tags.get("prompt_hash") for run in chosen_runs),
        rubric=board.rubric,
        conditions=cells.conditions,
        scenarios={cell.scenario: cell.run.tags.get("scenario_hash", "") for cell in ordered_cells},
        models={cell.pair.model: cell.run.params.get("model_digest") for cell in ordered_cells},
        prompts={cell.pair.prompt: cell.run.tags.get("prompt_hash") for cell in ordered_cells},
        leaderboard_sha256=hashlib.sha256(board_text.encode("utf-8", "surrogatepass")).hexdigest(),
    )
    return Decision(decision_id, at, chosen, reason, board, board_text, evidence)


def decide(store: RunStore, experiment: Experiment, chosen: Pair, reason: str, *, at: str) -> tuple[Decision, str]:
    """Choose a pair on the current board and store the decision. Returns the decision and its run id."""
    board, cells = read_leaderboard(store, experiment, CellFilter())
    decision = make_decision(board, cells, chosen, reason, decision_id=uuid.uuid4().hex, at=at)
    run_id = store.record(experiment.experiment_id, decision_run(decision, milliseconds(at)))
    store.mark_changed(experiment.experiment_id)
    return decision, run_id


@dataclass(frozen=True)
class PastDecision:
    """A stored decision."""

    run_id: str
    chosen: Pair
    at: str
    reason: str
    provisional: bool


def latest_decision(store: RunStore, experiment_id: str) -> PastDecision | None:
    """Return the newest decision; None if there is none."""
    newest = max(
        store.search(experiment_id, where={"kind": str(RunKind.DECISION)}),
        key=lambda run: (run.start_ms, run.run_id),
        default=None,
    )
    if newest is None:
        return None
    tags = newest.tags
    pair = Pair(newest.params.get("model", ""), newest.params.get("prompt_version", ""))
    provisional = tags.get("provisional") == "true"
    return PastDecision(newest.run_id, pair, tags.get("decided_at", ""), tags.get("reason", ""), provisional)


def validate_reason(text: str) -> str:
    """Return the reason stripped of whitespace; raises UsageError if it is empty or too long."""
    reason = text.strip()
    if not 1 <= len(reason) <= MAX_REASON_LENGTH:
        raise UsageError(f"--because must have 1 to {MAX_REASON_LENGTH} characters (got {len(reason)}).")
    return reason


def decision_markdown(decision: Decision) -> str:
    """Return the decision as Markdown: choice, reason, findings, leaderboard and hashes."""
    evidence = decision.evidence
    reason = "\n".join(f"> {plain_markdown(line)}".rstrip() for line in decision.reason.splitlines())
    estimate = decision.standing.result.estimate
    composite = number(estimate.mean) if estimate else None
    bounds = interval(estimate.ci_low, estimate.ci_high) if estimate else None
    if composite and bounds:
        composite = f"{composite} ({bounds})"
    facts = {
        "experiment": decision.board.experiment,
        "decided at": decision.at,
        "decision": decision.id,
        "standing": str(decision.state) + (" (provisional)" if decision.board.provisional else ""),
        "composite": composite,
        "model digest": evidence.model_digest,
        "prompt hash": evidence.prompt_hash,
        "rubric": evidence.rubric or None,
        "conditions": evidence.conditions,
        "leaderboard.json, SHA-256": evidence.leaderboard_sha256,
        "tipbench": tipbench.__version__,
    }
    parts = [
        f"# Decision: {plain_markdown(str(decision.chosen))}",
        reason,
        "\n".join(f"- {plain_markdown(sentence)}" for sentence in decision.findings),
        _table(("field", "value"), facts.items()),
        to_markdown(decision.board).rstrip(),
        "## Hashes",
        _table(("scenario", "content"), sorted(evidence.scenarios.items())),
        _table(("model", "digest"), sorted(evidence.models.items())),
        _table(("prompt", "text"), sorted(evidence.prompts.items())),
    ]
    return "\n\n".join(parts) + "\n"


def decision_run(decision: Decision, at_ms: int) -> NewRun:
    """Return the MLflow run that stores the decision."""
    evidence, result = decision.evidence, decision.standing.result
    estimate, to_leader = result.estimate, result.to_leader
    metrics = {
        "composite": estimate.mean if estimate else None,
        "ci_low": estimate.ci_low if estimate else None,
        "ci_high": estimate.ci_high if estimate else None,
        "rank": result.rank,
        "p_best": result.p_best,
        "diff_to_leader": to_leader.mean if to_leader else None,
        "n_scenarios": estimate.n if estimate else 0,
        "decided": float(decision.board.ranking.decided),  # whether the board has a clear winner
    }
    params = {
        "model": decision.chosen.model,
        "prompt_version": decision.chosen.prompt,
        "model_digest": evidence.model_digest,
        "prompt_hash": evidence.prompt_hash,
        "rubric": evidence.rubric,
        "suite": decision.board.suite,
    }
    return NewRun(
        kind=RunKind.DECISION,
        record_id=decision.id,
        name=f"decision for {decision.chosen}",
        start_ms=at_ms,
        end_ms=at_ms,
        params={name: value or "unknown" for name, value in params.items()},
        metrics={name: float(value) for name, value in metrics.items() if value is not None},
        tags={
            "standing": str(decision.state),
            "leader": str(decision.board.ranking.leader or "none"),
            "provisional": str(decision.board.provisional).lower(),
            "conditions": evidence.conditions,
            "decided_at": decision.at,
            "reason": decision.reason,
            "leaderboard_sha256": evidence.leaderboard_sha256,
            "judges": json.dumps(list(decision.board.judges), ensure_ascii=False),
            "tipbench.version": tipbench.__version__,
        },
        texts={MARKDOWN: decision_markdown(decision), BOARD: decision.board_text},
    )


def _common_value(values: Iterable[str | None]) -> str | None:
    """Return the only known value; None if there are several or none."""
    known = {value for value in values if value}
    return known.pop() if len(known) == 1 else None


def _table(columns: tuple[str, str], rows: Iterable[tuple[str, str | None]]) -> str:
    return markdown_table(columns, rows, left_aligned=columns).rstrip()
