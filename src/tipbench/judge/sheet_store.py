"""Sheets stored in MLflow as runs of kind `judging`: content, unblinding key, scores and status."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import tipbench
from tipbench.errors import CorruptText, SheetRefused, SheetsClosed
from tipbench.judge.check import Problem, refusal, shown
from tipbench.judge.scores import RUBRIC
from tipbench.judge.sheet import ItemScore, ItemT, Sheet, SheetTip, TipItem, TipSheet, instructions
from tipbench.plan.collect_config import EXPERIMENT_PREFIX, check_experiment_name
from tipbench.plan.rubric import Control, Rubric, parse_rubric
from tipbench.record.run import NewRun, RunKind, StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import fingerprint

# Names of texts in a sheet's run.
SHEET = "artifact:sheet.json"
KEY = "artifact:key.json"  # the source of each item, which the judge must not see
FILLED = "artifact:answers.json"  # what the judge has filled in: scores, or the winners of duels
DRIFT = "artifact:drift.json"
# Names of tags.
SHEET_KIND = "sheet_kind"  # absent on a sheet of tips
FINAL, REVISIONS = "sheet_final", "sheet_revisions"
TIPS, DUEL = "sheet", "duel"  # kinds of sheets
# Prefix of the metrics, tags and texts that an apply adds to the sheet's run for a control or repeat. Nothing reads
# them. Writing them takes as long as writing a cell's scores, so that the time of an apply does not reveal such items.
HIDDEN = "hidden_"
StoredT = TypeVar("StoredT")


class ItemKind(StrEnum):
    """The kind of an item. Judges do not see it."""

    CELL = "cell"  # an answer to score
    CONTROL = "control"  # calibrated tips presented as an answer; measures drift
    REPEAT = "repeat"  # an answer this judge has already scored; measures self-agreement


@dataclass(frozen=True)
class SheetEntry:
    """One item of a stored sheet, with its kind and source."""

    item: TipItem
    kind: ItemKind
    run_id: str | None = None  # for cells and repeats
    controls: tuple[str, ...] = ()  # ids of the control tips, in the item's order
    agreed_scores: tuple[Mapping[str, int], ...] = ()  # of each control tip, by scale


def control_id(control: Control) -> str:
    """Return the id of a control: a hash of its content, independent of the machine and the file."""
    return fingerprint([control.scenario, control.tip], length=12)


@dataclass(frozen=True)
class ReplacedScore:
    """An item's score that was replaced by a later one."""

    score: ItemScore
    at: str  # ISO time of the replacement


def item_scores_text(scores: Mapping[str, ItemScore], history: Sequence[ReplacedScore]) -> str:
    """Serialize the scores and their history for storage with the sheet."""
    value = {
        "items": {item: score.to_json() for item, score in sorted(scores.items())},
        "history": [{"item": old.score.item, "at": old.at, **old.score.to_json()} for old in history],
    }
    return compact_json(value)


def read_item_scores(text: str | None) -> tuple[dict[str, ItemScore], tuple[ReplacedScore, ...]]:
    """Parse the output of `item_scores_text`; return empty values for None."""
    if text is None:
        return {}, ()
    raw = json.loads(text)
    history = tuple(ReplacedScore(ItemScore.from_json(entry["item"], entry), entry["at"]) for entry in raw["history"])
    scores = {item: ItemScore.from_json(item, raw_score) for item, raw_score in raw["items"].items()}
    return scores, history


def scores_fingerprint(scores: Mapping[str, ItemScore]) -> str:
    """Return a fingerprint of the scores and flags. Notes are ignored, because they do not affect drift."""
    return fingerprint(
        {
            item: [score.format_ok, [[dict(tip.scores), tip.overlong] for tip in score.tips]]
            for item, score in scores.items()
        },
        length=32,
    )


class SheetStatus(StrEnum):
    """The status of a sheet (tag `sheet_status`)."""

    EXPORTED = "exported"  # not applied yet
    APPLIED = "applied"  # its scores count
    HELD = "held"  # its scores are stored but do not count, because the drift limit was exceeded


@dataclass(frozen=True)
class StoredSheet:
    """A sheet stored in MLflow: its content, the kind and source of each item, and the scores."""

    sheet: TipSheet
    entries: tuple[SheetEntry, ...]  # in the sheet's order
    exported: str  # ISO time
    provisional: bool = False
    outdated_floors: tuple[str, ...] = ()  # runs whose floor scores are updated to the sheet's rubric on apply
    run_id: str = ""  # empty until recorded
    # The fields below change when scores are applied.
    status: SheetStatus = SheetStatus.EXPORTED
    scores: Mapping[str, ItemScore] = field(default_factory=dict)  # by item id
    replaced: tuple[ReplacedScore, ...] = ()
    acceptance: str | None = None  # the reason with which an admin accepted the drift
    accepted_for: str | None = None  # `scores_fingerprint` of the scores whose drift was accepted
    drift: Mapping[str, Any] | None = None  # None until it is first measured
    final: bool = False  # whether the judge has finished the sheet, even if items are unscored
    revisions: int = 0  # changes of scores after the drift was first measured
    applied_at: str | None = None
    owner: str | None = None  # the judge named at export, or the first who applied scores
    self_exact: float | None = None  # share of equal scores on repeated tips

    @property
    def unscored(self) -> tuple[SheetEntry, ...]:
        """The entries without scores."""
        return tuple(entry for entry in self.entries if entry.item.id not in self.scores)

    @property
    def is_open(self) -> bool:
        """Whether items are unscored and the judge has not finished the sheet."""
        return not self.final and bool(self.unscored)

    @property
    def accepted(self) -> str | None:
        """The reason for accepting the drift of the current scores, or None."""
        return self.acceptance_of(self.scores)

    def acceptance_of(self, scores: Mapping[str, ItemScore]) -> str | None:
        """Return the reason for accepting the drift of exactly these scores and flags, or None."""
        if self.acceptance and self.accepted_for == scores_fingerprint(scores):
            return self.acceptance
        return None


def now_iso() -> str:
    """Return the current UTC time in ISO format with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def milliseconds(iso: str) -> int:
    """Convert an ISO time to milliseconds since the epoch, as used by MLflow."""
    return int(datetime.fromisoformat(iso).timestamp() * 1000)


def record_sheet(store: RunStore, experiment_id: str, stored: StoredSheet, *, seed: int) -> str:
    """Store a new sheet and return its run id. Call it before the file is sent to a judge."""
    sheet, entries = stored.sheet, stored.entries
    content = {
        "instructions": sheet.instructions,
        "cards": {item.card["id"]: item.card for item in sheet.items},
        "items": [[item.id, item.card["id"], item.format_ok, list(map(astuple, item.tips))] for item in sheet.items],
    }
    sources = {
        entry.item.id: {
            "behind": str(entry.kind),
            "run": entry.run_id,
            "controls": list(entry.controls),
            "references": [dict(scores) for scores in entry.agreed_scores],
        }
        for entry in entries
    }
    kinds = [entry.kind for entry in entries]
    counts = {f"n_{kind}s": float(kinds.count(kind)) for kind in ItemKind}
    run = judging_run(
        sheet,
        stored.exported,
        seed,
        name=f"sheet {sheet.id}",
        metrics={**counts, "n_control_tips": float(sum(len(entry.controls) for entry in entries))},
        tags={"provisional": str(stored.provisional).lower()},
        content=content,
        key={"judge": sheet.judge, "items": sources, "refloor": list(stored.outdated_floors)},
    )
    return store.record(experiment_id, run)


def judging_run(
    sheet: Sheet[ItemT],
    exported: str,
    seed: int,
    *,
    name: str,
    metrics: Mapping[str, float],
    tags: Mapping[str, str],
    content: object,
    key: object,
) -> NewRun:
    """Return the run of a new sheet of tips or duels. `content` is shown to the judge; `key` has the items' sources."""
    exported_ms = milliseconds(exported)
    judge_tag = {"judge": sheet.judge} if sheet.judge else {}
    return NewRun(
        kind=RunKind.JUDGING,
        record_id=sheet.id,
        name=name,
        start_ms=exported_ms,
        end_ms=exported_ms,
        params={"rubric": sheet.rubric.tag, "seed": str(seed)},
        metrics={"n_items": float(len(sheet.items)), **metrics},
        tags={
            "sheet": sheet.id,
            "sheet_status": str(SheetStatus.EXPORTED),
            "exported_at": exported,
            "tipbench.version": tipbench.__version__,
            **tags,
            **judge_tag,
        },
        texts={SHEET: compact_json(content), KEY: compact_json(key), RUBRIC: sheet.rubric.text},
    )


def find_sheet(store: RunStore, experiment: Experiment, sheet_id: str) -> StoredSheet | None:
    """Return the sheet with this id, or None."""
    return next(_read_sheets(store, experiment, {"sheet": sheet_id}), None)


def stored_sheets(store: RunStore, experiment: Experiment, judge: str | None = None) -> Iterator[StoredSheet]:
    """Yield the sheets of an experiment, or only those of one judge, newest first."""
    return _read_sheets(store, experiment, {"judge": judge} if judge else {})


def check_no_duels(store: RunStore, experiment: Experiment, judge: str) -> None:
    """Raise SheetsClosed if the judge has opened a duel in the experiment."""
    if has_duels(store, experiment, judge):
        raise SheetsClosed(
            f"{judge} has opened duels in {experiment.name}, which closes their sheets there: duels show real answers "
            "only and would reveal the hidden controls. Scores given before are kept; continue under another name."
        )


def check_no_open_sheet(store: RunStore, experiment: Experiment, judge: str) -> None:
    """Raise SheetsClosed if the judge has an open sheet in the experiment, unless an earlier duel has closed it."""
    if has_duels(store, experiment, judge):
        return
    for stored in stored_sheets(store, experiment, judge):
        if stored.is_open and not stored.provisional:
            raise SheetsClosed(
                f"{judge} has the open sheet {stored.sheet.id} in {experiment.name} ({len(stored.unscored)} items "
                "left). Sheets come before duels: fill it in, or finish it with `tipbench judge apply FILE --final` "
                "or *Finish batch*."
            )


def has_duels(store: RunStore, experiment: Experiment, judge: str) -> bool:
    """Return whether the judge has opened a duel in the experiment, judged or not."""
    where = {"kind": str(RunKind.JUDGING), SHEET_KIND: DUEL, "judge": judge}
    return next(store.search(experiment.experiment_id, where=where, limit=1), None) is not None


def controls_shown_to(store: RunStore, judge: str) -> list[str]:
    """Return the ids of the controls shown to this judge in all experiments, one for each time shown."""
    control_ids: list[str] = []
    where = {"kind": str(RunKind.JUDGING), "judge": judge}
    for experiment in store.experiments():
        if not experiment.name.startswith(EXPERIMENT_PREFIX):
            continue
        for run, texts in store.read(experiment.experiment_id, where=where, texts=(KEY,)):
            if run.tags.get(SHEET_KIND, TIPS) == TIPS:
                for item in json.loads(texts[KEY])["items"].values():
                    control_ids += item["controls"]
    return control_ids


def _read_sheets(store: RunStore, experiment: Experiment, where: Mapping[str, str]) -> Iterator[StoredSheet]:
    def parse(run: StoredRun, texts: Mapping[str, str], rubric: Rubric) -> StoredSheet:
        content, key = json.loads(texts[SHEET]), json.loads(texts[KEY])
        scores, replaced = read_item_scores(texts.get(FILLED))
        entries = []
        for id_, card_id, format_ok, tips in content["items"]:
            source = key["items"][id_]
            entries.append(
                SheetEntry(
                    TipItem(id_, content["cards"][card_id], bool(format_ok), tuple(SheetTip(*tip) for tip in tips)),
                    kind=ItemKind(source["behind"]),
                    run_id=source["run"],
                    controls=tuple(source["controls"]),
                    agreed_scores=tuple(source["references"]),
                )
            )
        items = tuple(entry.item for entry in entries)
        text = content.get("instructions", instructions(rubric))  # earlier versions of tipbench did not store it
        return StoredSheet(
            sheet=Sheet(run.tags["sheet"], experiment.name, key["judge"], rubric, items, text),
            entries=tuple(entries),
            exported=run.tags["exported_at"],
            provisional=run.tags.get("provisional") == "true",
            outdated_floors=tuple(key["refloor"]),
            run_id=run.run_id,
            status=SheetStatus(run.tags["sheet_status"]),
            scores=scores,
            replaced=replaced,
            acceptance=run.tags.get("drift_accepted"),
            accepted_for=run.tags.get("drift_accepted_for"),
            drift=json.loads(texts[DRIFT]) if DRIFT in texts else None,
            final=run.tags.get(FINAL) == "true",
            revisions=int(run.tags.get(REVISIONS, "0")),
            applied_at=run.tags.get("applied_at"),
            owner=run.tags.get("judge"),
            self_exact=run.metrics.get("self_exact"),
        )

    return read_judgings(store, experiment, TIPS, where, parse)


def read_judgings(
    store: RunStore,
    experiment: Experiment,
    kind: str,
    where: Mapping[str, str],
    parse: Callable[[StoredRun, Mapping[str, str], Rubric], StoredT],
) -> Iterator[StoredT]:
    """Yield the parsed sheets of a kind, newest first. Raises CorruptText if a run has an unexpected format."""
    filters = {"kind": str(RunKind.JUDGING)}
    if kind == DUEL:
        filters[SHEET_KIND] = DUEL
    filters.update(where)
    text_names = (SHEET, KEY, RUBRIC, FILLED, DRIFT)
    rubrics: dict[str, Rubric] = {}  # by text, because most sheets have the same rubric
    for run, texts in store.read(experiment.experiment_id, where=filters, texts=text_names):
        if run.tags.get(SHEET_KIND, TIPS) != kind:  # sheets of tips lack the tag, so the search cannot select them
            continue
        try:
            rubric_text = texts[RUBRIC]
            if rubric_text not in rubrics:
                rubrics[rubric_text] = parse_rubric(rubric_text, Path("rubric.md"))
            yield parse(run, texts, rubrics[rubric_text])
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise CorruptText(
                f"The judging run {run.run_id} in MLflow has an unexpected format ({type(exc).__name__}: {exc})."
            ) from exc


def compact_json(value: object) -> str:
    """Return JSON without spaces, as stored in MLflow."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def find_original(
    store: RunStore,
    raw: Mapping[str, Any],
    format_: str,
    find: Callable[[RunStore, Experiment, str], StoredT | None],
) -> tuple[Experiment, StoredT]:
    """Return the experiment and the stored sheet named in a filled file. Raises SheetRefused if either is missing."""

    def wrong_field(field: str, expected: str) -> SheetRefused:
        return refusal([Problem(item=None, tip=None, field=field, seen=shown(raw.get(field)), expected=expected)])

    if raw.get("format") != format_:
        raise wrong_field("format", repr(format_))
    name, sheet_id = raw.get("experiment"), raw.get("sheet")
    try:
        check_experiment_name(name if isinstance(name, str) else "")
    except ValueError as exc:
        raise wrong_field("experiment", "the name in the exported file, tip-bench-…") from exc
    if not isinstance(sheet_id, str) or not 0 < len(sheet_id) <= 64:
        raise wrong_field("sheet", "the id in the exported file")
    experiment = store.experiment(str(name))
    if experiment is None:
        raise wrong_field("experiment", "an experiment of this MLflow; see --mlflow-url")
    stored = find(store, experiment, sheet_id)
    if stored is None:
        raise wrong_field(
            "sheet", f"a sheet exported from {experiment.name} and recorded in this MLflow; see --mlflow-url"
        )
    return experiment, stored
