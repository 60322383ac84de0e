"""Batches as JSON: the counts for whoever may see them, the whole for its judge. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any
from urllib.parse import quote

from tipbench.times import iso
from tipbench.web.batch import Batch, Kept, State
from tipbench.web.batch_papers import Paper, RawItem, answer_json, rubric_json, rubric_of


def batch_json(batch: Batch, given: Mapping[str, Kept]) -> dict[str, Any]:
    """Where a batch stands."""
    count = Counter(kept.said.state for kept in given.values())
    touched = count[State.SUBMITTED] + count[State.DRAFT] + count[State.SKIPPED]
    times = [kept.seconds for kept in given.values() if kept.said.state is State.SUBMITTED and kept.seconds > 0]
    return {
        "sheet": batch.sheet,
        "experiment": batch.experiment,
        "judge": batch.judge,
        "kind": str(batch.kind),
        "status": str(batch.status),
        "items": batch.size,
        "done": count[State.SUBMITTED],
        "draft": count[State.DRAFT],
        "skipped": count[State.SKIPPED],
        "empty": batch.size - touched,
        "opened": iso(batch.opened),
        "updated": iso(batch.updated),
        "closed": iso(batch.closed),
        "seconds": round(sum(kept.seconds for kept in given.values()), 1),
        "minutes_per_item": median(times) / 60 if times else None,
        "note": batch.note,
        "accepted": batch.accepted,
        "outcome": batch.outcome,
        "links": _links(batch),
    }


def whole_json(paper: Paper, given: Mapping[str, Kept]) -> dict[str, Any]:
    """Rubric and items, with what their judge has said of them."""
    items = [
        {
            "item": item["item"],
            "number": number,
            **paper.shown(item),
            "answer": item_answer(paper, item, given.get(item["item"])),
        }
        for number, item in enumerate(paper.raw["items"], start=1)
    ]
    return {"instructions": paper.raw["instructions"], "rubric": rubric_json(rubric_of(paper.raw)), "items": items}


def item_answer(paper: Paper, item: RawItem, kept: Kept | None) -> dict[str, Any]:
    """What the judge has said of an item."""
    return answer_json(paper, item, kept, {"updated": iso(kept.updated if kept else None)})


def skips_json(paper: Paper, given: Mapping[str, Kept]) -> list[dict[str, Any]]:
    """The skipped items in the sheet's order, with the reasons."""
    numbers = {item["item"]: number for number, item in enumerate(paper.raw["items"], start=1)}
    return [
        {"item": item, "number": number, "reason": given[item].said.reason, "updated": iso(given[item].updated)}
        for item, number in numbers.items()
        if item in given and given[item].said.state is State.SKIPPED
    ]


def medians(spent: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """By judge: the median minutes of an item, of (judge, sheet, seconds)."""
    times: dict[str, list[float]] = defaultdict(list)
    for judge, _sheet, seconds in spent:
        times[judge].append(seconds)
    return {judge: median(found) / 60 for judge, found in sorted(times.items())}


def _links(batch: Batch) -> dict[str, str]:
    own = f"/api/bench/judge/{quote(batch.experiment, safe='')}/batches/{batch.sheet}"
    return {
        "self": own,
        "items": f"{own}/items",
        "close": f"{own}/close",
        "reopen": f"{own}/reopen",
        "page": f"/judge/batches/{batch.sheet}",
    }
