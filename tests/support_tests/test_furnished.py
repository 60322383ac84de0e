"""The furnished experiment holds what it says, in a store in memory and in MLflow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.furnished import Furnished, Words, furnish
from support.hostile import HOSTILE, hostile_names, hostile_words
from tipbench.judge.status import judging_status
from tipbench.record.memory import MemoryStore
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import RunKind
from tipbench.record.store import RunStore

FEW = Words(models=("alpha:1b", "beta:1b", "gamma:1b"))


@pytest.fixture(params=["memory", "mlflow"])
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    with MlflowStore(request.getfixturevalue("mlflow_url")) as opened:
        yield opened


def test_it_has_something_of_everything(store: RunStore) -> None:
    content = furnish(store, f"tip-bench-{uuid.uuid4().hex[:8]}", FEW)
    states = {sort: store.get(run_id)[0] for sort, run_id in content.runs.items()}
    assert {str(kind) for kind in RunKind} - {"cell"} < set(states)
    assert {sort: states[sort].state for sort in ("judged", "pending", "failed", "floored")} == {
        "judged": "judged", "pending": "pending", "failed": "failed", "floored": "judged",
    }  # fmt: skip
    assert states["superseded"].tags["superseded"] == "true"
    status = judging_status(store, content.desk.experiment)
    assert [sheet.status for sheet in status.history if sheet.judge == "ben"] == ["applied", "held"]
    assert (status.history[-1].sheet, status.open_sheets[-1].sheet) == (content.held_sheet, content.open_sheet)


def test_every_hostile_text_is_in_tips_rationales_notes_names_and_messages(tmp_path: Path) -> None:
    content = furnish(MemoryStore(), "tip-bench-<b>", hostile_words(tmp_path / "suite"))
    kept = _everything(content)
    assert [text[:60] for text in HOSTILE.values() if _printable(text[:3900]) not in kept] == []
    assert [name for name in hostile_names(190) if name not in kept] == []


def _everything(content: Furnished) -> str:
    """All that could ever be shown of the experiment."""
    store, experiment = content.desk.store, content.desk.experiment
    found = [store.get(run.run_id) for run in store.search(experiment.experiment_id, where={})]
    texts = [part for run, kept in found for part in (*run.params.values(), *run.tags.values(), *kept.values())]
    given = [each for scores in content.desk.scores().values() for each in scores.judges.values()]
    return _printable("\n".join([*texts, *(tip.note for each in given for tip in each.tips)]))


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isprintable())
