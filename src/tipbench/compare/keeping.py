"""A board as a run of kind `leaderboard`: what was shown on a day can be looked up later."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import tipbench
from tipbench.compare.leaderboard import Leaderboard
from tipbench.plan.fingerprint import fingerprint
from tipbench.record.mlflow_wire import RECORD_TAG
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import RunStore

BOARD = "artifact:leaderboard.json"


def keep_board(store: RunStore, experiment_id: str, board: Leaderboard) -> str:
    """Record the board; the same board again is kept once. Returns the run's id."""
    content = board.to_json()
    record_id = fingerprint(content, 32)
    there = next(store.search(experiment_id, where={RECORD_TAG: record_id}, limit=1), None)
    if there is not None:
        return there.run_id
    run_id = store.record(experiment_id, _run(board, content, record_id), maybe_there=True)
    store.touch(experiment_id)
    return run_id


def _run(board: Leaderboard, content: Mapping[str, Any], record_id: str) -> NewRun:
    now = int(time.time() * 1000)
    top = board.standings[0].row.estimate if board.ranking.leader and board.standings else None
    return NewRun(
        kind=RunKind.LEADERBOARD,
        record_id=record_id,
        name=f"leaderboard of {board.experiment}",
        start_ms=now,
        end_ms=now,
        params={"rubric": board.rubric_tag or "none", "conditions": str(board.conditions.get("id", ""))},
        metrics={
            "pairs": float(len(board.standings)),
            "scenarios": float(board.n_scenarios),
            "decided": float(board.ranking.decided),
            "tied": float(len(board.ranking.tied)),
            **({"leader_composite": top.mean} if top else {}),
        },
        tags={
            "leader": str(board.ranking.leader or "none"),
            "provisional": str(board.provisional).lower(),
            "judges": json.dumps(list(board.judges), ensure_ascii=False),
            "mlflow.note.content": board.verdict,
            "tipbench.version": tipbench.__version__,
        },
        texts={BOARD: json.dumps(content, ensure_ascii=False, separators=(",", ":"))},
    )
