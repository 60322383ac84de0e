"""Blind without names: neither order nor ids nor structure of a response reveal the model or a control.

Two panels that differ only in the authors of the answers show a judge the same. Many batches are drawn and counted.
A control is treated like any other item.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from support.judging import EXPERIMENT, fill, record_cells
from support.panel_site import fix_random_draws
from tipbench.judge.sheet_store import ItemKind, StoredSheet
from tipbench.plan.grid import PlannedCell
from tipbench.record.store import MemoryStore
from web.judge_client import JudgeClient, scored_tips, stored_sheet
from web.leak_detector import MODELS, PROMPTS, marked_suite
from web.panels import API, ServedPanel, serve_panel


@dataclass(frozen=True)
class JudgeView:
    """What a judge sees of one panel, without times, and the authors of its answers."""

    shown: Any
    files: tuple[bytes, ...]
    outcome: Any
    authors: Mapping[str, str]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        dated = ("opened", "updated", "closed", "seconds", "minutes_per_item")
        return {key: without_times(each) for key, each in value.items() if key not in dated}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def view_as_judge(
    home: Path, monkeypatch: pytest.MonkeyPatch, models: Sequence[str], prompts: Sequence[str]
) -> JudgeView:
    """Judge a batch with fixed random draws, and with these names of models and prompts."""
    rng, number = random.Random(4), count()
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(5))

    def write(_cell: PlannedCell, _rng: random.Random) -> str:
        return json.dumps([{"tip": f"Tip {next(number)}: stop after five minutes.", "rationale": "r"} for _ in "abc"])

    store, suite = MemoryStore(), marked_suite()
    suite = replace(suite, prompts={name: suite.prompts[name] for name in prompts})
    experiment = record_cells(store, suite=suite, models=models, write=write)
    with serve_panel(home, store) as served:
        judge_client = JudgeClient(served, served.judge)
        sheet = judge_client.open()["sheet"]
        files = [served.post(f"{API}/judge/{EXPERIMENT}/sheets", token=served.judge, json={"format": each}).content
                 for each in ("json", "csv")]  # fmt: skip
        shown = without_times(judge_client.get_batch(sheet))
        judge_client.submit(fill(stored_sheet(served, sheet)))
        outcome = without_times(judge_client.close(sheet).json())
    authors = {run.run_id: f"{run.params['model']}/{run.params['prompt_version']}"
               for run in store.search(experiment.experiment_id, where={"kind": "cell"})}  # fmt: skip
    return JudgeView(shown, tuple(files), outcome, authors)


def test_the_model_of_an_answer_changes_nothing_that_a_judge_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same texts and draws but exchanged names, every item, id, position and number is the same."""
    first = view_as_judge(tmp_path / "one", monkeypatch, MODELS, PROMPTS)
    second = view_as_judge(tmp_path / "two", monkeypatch, MODELS[::-1], PROMPTS[::-1])
    assert first.authors.keys() == second.authors.keys()
    assert all(author != second.authors[run_id] for run_id, author in first.authors.items())
    assert first.shown == second.shown
    assert first.files == second.files
    assert first.outcome == second.outcome


@dataclass(frozen=True)
class DrawnBatch:
    """A batch as its judge sees it, and its key."""

    items: Sequence[Mapping[str, Any]]
    judging: StoredSheet
    models: Mapping[str, str]  # by run

    def marks(self, kind: str) -> list[bool]:
        """Return for each item in order whether it is a control, or from this model."""
        if kind in MODELS:
            return [self.models.get(entry.run_id or "") == kind for entry in self.judging.entries]
        return [entry.kind is ItemKind(kind) for entry in self.judging.entries]

    def by_id(self, kind: str) -> list[bool]:
        """Return the same in the order of the ids."""
        marks = dict(zip((item["item"] for item in self.items), self.marks(kind), strict=True))
        return [marks[item] for item in sorted(marks)]


BATCHES_DRAWN = 20


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[DrawnBatch]:
    """Batches of many judges, over HTTP."""
    store = MemoryStore()
    experiment = record_cells(store, suite=marked_suite(), models=MODELS)
    runs = store.search(experiment.experiment_id, where={"kind": "cell"})
    models = {run.run_id: run.params["model"] for run in runs}
    found = []
    with pytest.MonkeyPatch.context() as patch, serve_panel(tmp_path_factory.mktemp("blind") / "home", store) as served:
        fix_random_draws(patch)
        for number in range(BATCHES_DRAWN):
            judge_client = JudgeClient.create(served, f"judge-{number}")
            sheet = judge_client.open()["sheet"]
            found.append(DrawnBatch(judge_client.get_batch(sheet)["items"], stored_sheet(served, sheet), models))
    return found


def rank_deviation(rows: Sequence[Sequence[bool]]) -> float:
    """Return how far the marked items are from the middle, in standard deviations of random orders (rank sums)."""
    off, spread = 0.0, 0.0
    for row in rows:
        n, k = len(row), sum(row)
        off += sum(at for at, marked in enumerate(row, start=1) if marked) - k * (n + 1) / 2
        spread += k * (n - k) * (n + 1) / 12
    return off / sqrt(spread)


def clustering(rows: Sequence[Sequence[bool]]) -> float:
    """Return how much more often marked items are neighbours than in shuffled rows, in standard deviations."""

    def neighbours(each: Sequence[Sequence[bool]]) -> int:
        return sum(one and other for row in each for one, other in pairwise(row))

    rng = random.Random(1)
    chance = [neighbours([rng.sample(row, len(row)) for row in rows]) for _ in range(60)]
    return (neighbours(rows) - fmean(chance)) / pstdev(chance)


@pytest.mark.parametrize("kind", [MODELS[0], "control"])
def test_neither_position_nor_id_reveals_the_model_or_a_control(batches: list[DrawnBatch], kind: str) -> None:
    for rows in ([each.marks(kind) for each in batches], [each.by_id(kind) for each in batches]):
        assert sum(map(sum, rows)) > BATCHES_DRAWN
        assert abs(rank_deviation(rows)) < 5.5
        assert abs(clustering(rows)) < 6
    assert abs(rank_deviation([sorted(row) for row in rows])) > 5.5  # the measure detects a sorted order
    assert abs(clustering([sorted(row) for row in rows])) > 6


def test_item_ids_are_unique_and_not_derived_from_run_ids(batches: list[DrawnBatch]) -> None:
    ids = [item["item"] for each in batches for item in each.items]
    assert len(set(ids)) == len(ids)
    assert {len(item) for item in ids} == {12}
    assert {re.sub("[0-9a-f]", "", item) for item in ids} == {""}
    for each in batches:
        runs = {entry.item.id: entry.run_id or "" for entry in each.judging.entries}
        assert not any(item in run or run[:10] in item for item, run in runs.items() if run)


# fields of a control


def field_types(value: Any) -> Any:
    """Return the fields and their types, without values."""
    if isinstance(value, Mapping):
        return tuple((key, field_types(each)) for key, each in value.items())
    return tuple(field_types(each) for each in value) if isinstance(value, list) else type(value).__name__


def split_controls(each: DrawnBatch) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the items that are controls, and the others."""
    marks = each.marks("control")
    items = list(zip(each.items, marks, strict=True))
    return [item for item, marked in items if marked], [item for item, marked in items if not marked]


def test_a_control_has_the_fields_and_scenario_of_an_ordinary_item(batches: list[DrawnBatch]) -> None:
    for each in batches:
        controls, others = split_controls(each)
        assert controls
        assert {field_types(item) for item in controls} <= {field_types(item) for item in others}
        cards = {json.dumps(item["scenario"], sort_keys=True) for item in others}
        assert {json.dumps(item["scenario"], sort_keys=True) for item in controls} <= cards
        assert {json.dumps(item["answer"] | {"tips": []}) for item in each.items} == {
            json.dumps(others[0]["answer"] | {"tips": [], "format_ok": flag})
            for flag in {item["format_ok"] for item in each.items}
        }


def test_a_control_has_the_flags_and_rationales_of_an_ordinary_item(batches: list[DrawnBatch]) -> None:
    for each in batches:
        controls, others = split_controls(each)
        assert {visible_flags(item) for item in controls} <= {visible_flags(item) for item in others}


def visible_flags(item: Mapping[str, Any]) -> tuple[Any, ...]:
    return item["format_ok"], *(bool(tip["rationale"]) for tip in item["tips"])


# responses about a control


def find_alike_items(judge_client: JudgeClient) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Open a batch; return its sheet, and a control and an answer in it with the same flags."""
    sheet = judge_client.open()["sheet"]
    items = judge_client.get_batch(sheet)["items"]
    kinds_by_item = {entry.item.id: entry.kind for entry in stored_sheet(judge_client.served, sheet).entries}
    for one in items:
        for other in items:
            kinds = (kinds_by_item[one["item"]], kinds_by_item[other["item"]])
            if kinds == (ItemKind.CONTROL, ItemKind.CELL) and flags(one) == flags(other):
                return sheet, one, other
    raise AssertionError("no two items are alike")


def flags(item: Mapping[str, Any]) -> tuple[Any, ...]:
    return item["format_ok"], *(tip["overlong"] for tip in item["tips"])


def judge_in_steps(judge_client: JudgeClient, sheet: str, item: Mapping[str, Any]) -> list[Any]:
    """Judge an item step by step; return all responses, without the item's id."""
    own = item["item"]
    tips = scored_tips(item, note="n")
    responses = [
        judge_client.put(sheet, own, 0, "draft", tips=tips[:-1]),
        judge_client.put(sheet, own, 0, "draft", tips=[*tips[:-1], {"scores": {"tone": 2}}]),
        judge_client.put(sheet, own, 1, "submitted", tips=[*tips[:-1], {"scores": {"tone": 2}}]),
        judge_client.put(sheet, own, 0, "submitted", tips=tips),
        judge_client.put(sheet, own, 1, "submitted", tips=tips, format_ok=not item["format_ok"]),
        judge_client.put(sheet, own, 2, "skipped", tips=tips, reason="why"),
        judge_client.undo(sheet, own, 3),
        judge_client.request("GET", f"/{sheet}/items/{own}/history"),
        judge_client.put(sheet, own, 4, "empty"),
    ]
    return [
        (response.status_code, without_times(json.loads(response.text.replace(own, "the item"))))
        for response in responses
    ]


def test_requests_about_a_control_are_answered_like_those_about_an_answer(served: ServedPanel) -> None:
    judge_client = JudgeClient(served, served.judge)
    sheet, control, other = find_alike_items(judge_client)
    first, second = judge_in_steps(judge_client, sheet, control), judge_in_steps(judge_client, sheet, other)
    assert [status for status, _ in first] == [422, 200, 422, 409, 200, 200, 200, 200, 200]
    assert first == second


def test_closing_with_one_item_does_not_reveal_whether_it_is_a_control(served: ServedPanel) -> None:
    results = []
    for name, hidden in (("anna", True), ("ben", False)):
        judge_client = JudgeClient.create(served, name)
        sheet, control, other = find_alike_items(judge_client)
        item = control if hidden else other
        judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item))
        outcome = judge_client.close(sheet).json()["outcome"]
        results.append({**outcome, "unfinished": 0, "sheet": "", "judge": ""})
    assert results[0] == results[1]
    assert results[0]["applied"] == 1


def test_a_preview_of_one_item_does_not_reveal_whether_it_is_a_control(served: ServedPanel) -> None:
    results = []
    for name, hidden in (("anna", True), ("ben", False)):
        judge_client = JudgeClient.create(served, name)
        sheet, control, other = find_alike_items(judge_client)
        item = control if hidden else other
        url = f"{API}/judge/{EXPERIMENT}"
        raw = served.post(f"{url}/sheets", token=judge_client.token, json={"sheet": sheet}).json()
        (own,) = [each for each in raw["items"] if each["item"] == item["item"]]
        for tip in own["tips"]:
            tip["scores"] = dict.fromkeys(tip["scores"], 4)
        response = served.post(f"{url}/apply?dry_run=true", token=judge_client.token, json=raw)
        assert response.status_code == 200, response.text
        body = json.loads(response.text.replace(item["item"], "the item"))
        results.append({**body, "unfinished": 0, "sheet": "", "judge": ""})
    assert results[0] == results[1]
    assert len(results[0]["changes"]) == 1
