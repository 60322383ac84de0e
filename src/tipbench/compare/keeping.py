"""A board as a run of kind `leaderboard`: what was shown on a day can be looked up later."""

from __future__ import annotations

import json
import time

import tipbench
from tipbench.compare.leaderboard import Leaderboard
from tipbench.plan.fingerprint import fingerprint
from tipbench.record.run import NewRun, RunKind
from tipbench.record.store import RunStore

BOARD = "artifact:leaderboard.json"


def keep_board(store: RunStore, experiment_id: str, board: Leaderboard) -> str:
    """Record the board; the same board again is kept once. Returns the run's id."""
    content = board.to_json()
    now = int(time.time() * 1000)
    verdict = content["verdict"]
    top = board.standings[0].row.estimate if board.ranking.leader and board.standings else None
    run = NewRun(
        kind=RunKind.LEADERBOARD,
        record_id=fingerprint(content, 32),
        name=f"leaderboard of {board.experiment}",
        start_ms=now,
        end_ms=now,
        params={"rubric": board.rubric_tag or "none", "conditions": str(board.conditions.get("id", ""))},
        metrics={
            "pairs": float(len(board.standings)),
            "scenarios": float(board.ranking.n_scenarios),
            "decided": float(board.ranking.decided),
            "tied": float(len(board.ranking.tied)),
            **({"leader_composite": top.mean} if top else {}),
        },
        tags={
            "leader": str(board.ranking.leader or "none"),
            "provisional": str(board.provisional).lower(),
            "judges": json.dumps(list(board.judges), ensure_ascii=False),
            "mlflow.note.content": verdict["text"],
            "tipbench.version": tipbench.__version__,
        },
        texts={BOARD: json.dumps(content, ensure_ascii=False, separators=(",", ":"))},
    )
    return store.record(experiment_id, run, maybe_there=True)
