"""Decisions with their evidence: the leaderboard, hashes and reason, stored as a run and as Markdown.

Decisions are dated: deciding again, even on the same data, creates another decision and another run.
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
from tipbench.compare.matrix import Pair, pair_json
from tipbench.compare.report import State, difference_text, markdown_table, plain_markdown, state_of, to_markdown
from tipbench.compare.verdict import standing_sentence, unranked_sentence
from tipbench.errors import UsageError
from tipbench.judge.sheet_store import milliseconds
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import Experiment, RunStore
from tipbench.text import TIED, UNCLEAR, interval, number

MARKDOWN = "artifact:decision.md"
MAX_REASON_LENGTH = 2000


@dataclass(frozen=True)
class Evidence:
    """Hashes of everything the numbers depend on; equal hashes mean the same benchmark."""

    model_digest: str | None  # of the chosen model
    prompt_hash: str | None  # of the chosen prompt's text
    rubric: str  # id@sha256
    conditions: str
    scenarios: Mapping[str, str]  # id → content hash
    models: Mapping[str, str | None]  # every model of the board → digest
    prompts: Mapping[str, str | None]  # every prompt version → hash of its text
    leaderboard_sha256: str


@dataclass(frozen=True)
class Decision:
    """The choice of a pair, with its date, reason, board and evidence."""

    id: str
    at: str  # ISO time
    chosen: Pair
    reason: str
    board: Leaderboard
    board_text: str  # the stored JSON, hashed in `evidence.leaderboard_sha256`
    evidence: Evidence

    @property
    def standing(self) -> Standing:
        """The standing of the chosen pair."""
        return next(each for each in self.board.standings if each.pair == self.chosen)

    @property
    def state(self) -> State:
        return state_of(self.board, self.chosen)

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """Sentences on how the data support the choice, limitations first."""
        board, chosen, row, state = self.board, self.chosen, self.standing.row, self.state
        leader, found = board.ranking.leader, []
        difference = difference_text(row.to_leader)
        gap = f"difference to the leader: {difference}" if difference else "no shared scenario"
        if board.provisional:
            found.append(f"The scores are provisional: by {', '.join(board.judges) or 'no judge yet'}, not by people.")
        if row.estimate is None:
            found.append(f"{chosen} has no scores: there is no evidence for or against it.")
        elif state is State.INCOMPLETE:
            found.append(f"{chosen} is not ranked: it is not scored in enough scenarios.")
        elif state is State.LEADER or row.rank == 1:
            found.append(standing_sentence(board.ranking, board.verdict_facts))
        elif state is State.TIED:
            found.append(f"{chosen} does not lead: {leader} does, but the two are {UNCLEAR} ({gap}).")
        else:
            found.append(f"{chosen} does not lead: it is clearly worse than {leader} ({gap}).")
        if leader is not None and board.ranking.unranked and state is not State.INCOMPLETE:
            found.append(unranked_sentence(board.ranking, board.verdict_facts))
        if isinstance(board.duels, DuelTable) and board.duels.winner is not None:
            found.append(f"{board.duels.winner} wins the duels between the {TIED} rows.")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-serialisable values; None if unknown."""
        return {
            "decision": self.id,
            "experiment": self.board.experiment,
            "at": self.at,
            "chosen": pair_json(self.chosen),
            "reason": self.reason,
            "standing": str(self.state),
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
    text = json.dumps(board.to_json(), ensure_ascii=False, indent=1)
    own = [cell.run for cell in cells.cells if cell.pair == chosen and not cell.failed]
    # In a fixed order, failed cells first, so that hashes of answered ones take precedence.
    ordered = sorted(cells.cells, key=lambda cell: (not cell.failed, cell.scenario, cell.pair, cell.run.run_id))
    evidence = Evidence(
        model_digest=_only(run.params.get("model_digest") for run in own),
        prompt_hash=_only(run.tags.get("prompt_hash") for run in own),
        rubric=board.rubric_tag,
        conditions=cells.conditions,
        scenarios={cell.scenario: cell.run.tags.get("scenario_hash", "") for cell in ordered},
        models={cell.pair.model: cell.run.params.get("model_digest") for cell in ordered},
        prompts={cell.pair.prompt: cell.run.tags.get("prompt_hash") for cell in ordered},
        leaderboard_sha256=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
    )
    return Decision(decision_id, at, chosen, reason, board, text, evidence)


def decide(store: RunStore, experiment: Experiment, chosen: Pair, reason: str, *, at: str) -> tuple[Decision, str]:
    """Decide for a pair on the present board and store the decision; return it with its run id."""
    board, cells = read_leaderboard(store, experiment, CellFilter())
    decision = make_decision(board, cells, chosen, reason, decision_id=uuid.uuid4().hex, at=at)
    run_id = store.record(experiment.experiment_id, decision_run(decision, milliseconds(at)))
    store.touch(experiment.experiment_id)
    return decision, run_id


@dataclass(frozen=True)
class PastDecision:
    """A stored decision, as shown on the board."""

    run_id: str
    chosen: Pair
    at: str
    reason: str
    provisional: bool


def latest_decision(store: RunStore, experiment_id: str) -> PastDecision | None:
    """Return the newest decision; None if there is none."""
    found = max(
        store.search(experiment_id, where={"kind": str(RunKind.DECISION)}),
        key=lambda run: (run.start_ms, run.run_id),
        default=None,
    )
    if found is None:
        return None
    tags = found.tags
    pair = Pair(found.params.get("model", ""), found.params.get("prompt_version", ""))
    provisional = tags.get("provisional") == "true"
    return PastDecision(found.run_id, pair, tags.get("decided_at", ""), tags.get("reason", ""), provisional)


def validate_reason(text: str) -> str:
    """Return the reason stripped of whitespace; raises UsageError if it is empty or too long."""
    reason = text.strip()
    if not 1 <= len(reason) <= MAX_REASON_LENGTH:
        raise UsageError(f"--because must have 1 to {MAX_REASON_LENGTH} characters (got {len(reason)}).")
    return reason


def decision_markdown(decision: Decision) -> str:
    """Return the decision as Markdown: choice, reason, findings, leaderboard and hashes."""
    evidence, chosen = decision.evidence, decision.standing
    reason = "\n".join(f"> {plain_markdown(line)}".rstrip() for line in decision.reason.splitlines())
    estimate = chosen.row.estimate
    composite = number(estimate.mean) if estimate else None
    ends = interval(estimate.ci_low, estimate.ci_high) if estimate else None
    facts = {
        "experiment": decision.board.experiment,
        "decided at": decision.at,
        "decision": decision.id,
        "standing": str(decision.state) + (" (provisional)" if decision.board.provisional else ""),
        "composite": f"{composite} ({ends})" if composite and ends else composite,
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
    evidence, row = decision.evidence, decision.standing.row
    numbers = {
        "composite": row.estimate.mean if row.estimate else None,
        "ci_low": row.estimate.ci_low if row.estimate else None,
        "ci_high": row.estimate.ci_high if row.estimate else None,
        "rank": row.rank,
        "p_best": row.p_best,
        "diff_to_leader": row.to_leader.mean if row.to_leader else None,
        "n_scenarios": row.estimate.n if row.estimate else 0,
        "decided": float(decision.board.ranking.decided),
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
        metrics={name: float(value) for name, value in numbers.items() if value is not None},
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


def _only(values: Iterable[str | None]) -> str | None:
    """Return the only known value; None if there is none or more than one."""
    known = {value for value in values if value}
    return known.pop() if len(known) == 1 else None


def _table(columns: tuple[str, str], rows: Iterable[tuple[str, str | None]]) -> str:
    return markdown_table(columns, rows, text=columns).rstrip()
