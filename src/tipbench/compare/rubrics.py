"""The rubric a board's scores were given under, from what is kept with the scores; and the floor it sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tipbench.errors import SuiteError
from tipbench.judge.scores import RUBRIC
from tipbench.plan.rubric import Rubric
from tipbench.plan.rubric_files import parse_rubric
from tipbench.record.run import RunKind, StoredRun
from tipbench.record.store import RunStore


def find_rubric(store: RunStore, experiment_id: str, tag: str, runs: Iterable[StoredRun]) -> Rubric | None:
    """The rubric of this tag: kept with a cell that was scored under it, or with a sheet; None when it is nowhere."""
    for text in _texts(store, experiment_id, tag, runs):
        rubric = read_rubric(text)
        if rubric is not None and rubric.tag == tag:
            return rubric
    return None


def read_rubric(text: str | None) -> Rubric | None:
    """A kept rubric; None for none, or for one that this version cannot read."""
    try:
        return parse_rubric(text, Path("rubric.md")) if text is not None else None
    except SuiteError:
        return None


def floor_values(rubric: Rubric) -> Mapping[str, float]:
    """What an answer without a usable tip gets under a rubric."""
    return {**rubric.floor, "composite": rubric.floor_composite}


def _texts(store: RunStore, experiment_id: str, tag: str, runs: Iterable[StoredRun]) -> Iterator[str | None]:
    kept = next((run for run in runs if run.tags.get("scores_rubric", run.params.get("rubric")) == tag), None)
    if kept is not None:
        yield store.get(kept.run_id)[1].get(RUBRIC)
    where = {"kind": str(RunKind.JUDGING), "params.rubric": tag}
    for _, texts in store.read(experiment_id, where=where, texts=(RUBRIC,), limit=1):
        yield texts.get(RUBRIC)
