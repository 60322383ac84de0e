"""Converts runs and filters to requests of MLflow's REST API, within its limits; parses its responses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tipbench.errors import MlflowError
from tipbench.record.run import NewRun, RunChange, StoredRun, check_transition
from tipbench.record.texts import (
    MAX_TAG_CHARS,
    escape,
    is_text_tag,
    multi_request_tags,
    single_request_tags,
    to_tags,
    unescape,
)

# Limits of MLflow
MAX_KEY_CHARS = 250
MAX_PARAM_CHARS = 6000
MAX_BATCH_PARAMS = 100
MAX_BATCH_TAGS = 100
MAX_BATCH_METRICS = 800  # so that metrics, params and tags are not more than 1000 in total
MAX_BATCH_BYTES = 900_000  # older servers reject more than 1 MB; params and tags may use half each
MAX_CHANGE_BYTES = 800_000  # for the tags of a change, which has no params; the rest of MAX_BATCH_BYTES is for metrics

RECORD_TAG = "tipbench.record"
CELL_TAG = "cell_key"
SUPERSEDED_TAG = "superseded"
REVISION_TAG = "tipbench.revision"
STATE_TAG = "state"
IDENTITY_TAGS = frozenset({"kind", RECORD_TAG, CELL_TAG, "mlflow.runName"})
WRITTEN_STATUSES = frozenset({"FINISHED", "FAILED"})  # a RUNNING run is only half written

Json = dict[str, Any]


@dataclass
class Batch:
    """The content of one request that writes to a run."""

    tags: list[Json] = field(default_factory=list)
    params: list[Json] = field(default_factory=list)
    metrics: list[Json] = field(default_factory=list)

    def body(self, run_id: str) -> Json:
        return {"run_id": run_id, "params": self.params, "metrics": self.metrics, "tags": self.tags}


def checked_tags(run: NewRun) -> dict[str, str]:
    """Check the whole run, also its params and metrics, and return all its tags, including those of its texts.

    Raises MlflowError if a key or value exceeds a limit or a metric is not finite, ValueError if a text is in `tags`.
    """
    for key, value in run.params.items():
        _check_value("param", key, escape(value), MAX_PARAM_CHARS)
    _check_no_texts(run.tags)
    identity = {"kind": str(run.kind), RECORD_TAG: run.record_id, "mlflow.runName": run.name}
    if run.cell_key is not None:
        identity[CELL_TAG] = run.cell_key
    other_tags = {key: value for key, value in run.tags.items() if key not in identity}
    # The identity comes first, because it must be set when the run is created.
    tags = {key: escape(value) for key, value in (identity | other_tags).items()}
    for key, text in run.texts.items():
        tags |= to_tags(key, text)
    for key, value in tags.items():
        _check_value("tag", key, value, MAX_TAG_CHARS)
    _check_metrics(run.metrics, f"run {run.name!r}")
    return tags


def _check_no_texts(tags: Mapping[str, str]) -> None:
    for key in tags:
        if is_text_tag(key):
            raise ValueError(f"{key} is a text: it belongs among the texts, not the tags")


def _check_metrics(metrics: Mapping[str, float], run_label: str) -> None:
    for key, number in metrics.items():
        _check_key("metric", key)
        if not math.isfinite(number):
            raise MlflowError(
                f"A metric is a finite number; {key} of {run_label} is {number}. Leave out what is unknown.",
                code="NOT_A_NUMBER",
            )


def run_batches(run: NewRun, tags: Mapping[str, str]) -> list[Batch]:
    """Split the run into as few requests as the limits allow. The first one creates the run and has only tags."""
    tag_chunks = _chunks(tags.items(), MAX_BATCH_TAGS)
    param_chunks = _chunks(((key, escape(value)) for key, value in run.params.items()), MAX_BATCH_PARAMS)
    metric_chunks = _chunks(((key, float(number)) for key, number in run.metrics.items()), MAX_BATCH_METRICS)
    n_requests = max(len(tag_chunks), 1 + len(param_chunks), 1 + len(metric_chunks))
    batches = [Batch() for _ in range(n_requests)]
    for index, chunk in enumerate(tag_chunks):
        batches[index].tags = chunk
    for index, chunk in enumerate(param_chunks, start=1):
        batches[index].params = chunk
    for index, chunk in enumerate(metric_chunks, start=1):
        batches[index].metrics = [{**item, "timestamp": run.end_ms, "step": 0} for item in chunk]
    return batches


@dataclass(frozen=True)
class CurrentRun:
    """A run before a change, with the tags that hold its texts."""

    run: StoredRun
    text_tags: Mapping[str, str]
    metric_times: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # latest timestamp (ms) and its step


def change_batches(change: RunChange, current: CurrentRun) -> list[Batch]:
    """Return the requests of a change, in the order to send them: the last one sets the new state, if any.

    Raises ValueError or MlflowError if the change is invalid.
    """
    _check_no_texts(change.tags)
    if fixed := IDENTITY_TAGS & change.tags.keys():
        raise ValueError(f"{min(fixed)} identifies the run: it cannot be changed")
    _check_metrics(change.metrics, f"run {current.run.run_id}")
    if STATE_TAG in change.tags:
        check_transition(current.run.state, change.tags[STATE_TAG])
    batches = [Batch(tags=chunk) for chunk in _changed_tags(change, current.text_tags)]
    for batch in batches:
        for tag in batch.tags:
            _check_value("tag", tag["key"], tag["value"], MAX_TAG_CHARS)
    # MLflow shows the value with the greatest (step, timestamp, value), not the one written last. So a new timestamp
    # must be later than the stored one, also within the same millisecond or if this machine's clock is behind.
    # Unchanged values are written too: a faster response would tell a judge that an earlier judge gave the same scores.
    metrics: list[Json] = []
    for key, number in change.metrics.items():
        latest_timestamp, step = current.metric_times.get(key, (-1, 0))
        timestamp = max(change.at_ms, latest_timestamp + 1)
        metrics.append({"key": key, "value": float(number), "timestamp": timestamp, "step": step})
    if not metrics:
        return batches
    metric_chunks = [metrics[start : start + MAX_BATCH_METRICS] for start in range(0, len(metrics), MAX_BATCH_METRICS)]
    if not batches:
        batches.append(Batch())
    batches[-1].metrics = metric_chunks.pop()
    return [Batch(metrics=chunk) for chunk in metric_chunks] + batches


def _changed_tags(change: RunChange, text_tags: Mapping[str, str]) -> list[list[Json]]:
    """Return the tags of a change, one list per request: first the texts, then the plain tags, with the state last.

    A single request overwrites the current texts. Several requests keep them until the new texts are complete.
    """

    def chunks_of(tags: list[tuple[str, str]]) -> list[list[Json]]:
        return _chunks(tags, MAX_BATCH_TAGS, MAX_CHANGE_BYTES)

    plain_tags = [(key, escape(value)) for key, value in change.tags.items()]
    plain_tags.sort(key=lambda tag: tag[0] == STATE_TAG)
    new_text_tags: list[tuple[str, str]] = []
    for key, text in change.texts.items():
        new_text_tags += single_request_tags(key, text, text_tags).items()
    chunks = chunks_of(new_text_tags + plain_tags)
    if len(chunks) <= 1:
        return chunks
    new_parts: list[tuple[str, str]] = []
    switch_tags: list[tuple[str, str]] = []  # until these are written, readers ignore the new parts
    for key, text in change.texts.items():
        first, last = multi_request_tags(key, text, text_tags)
        new_parts += first.items()
        switch_tags += last.items()
    last_chunks = chunks_of(switch_tags + plain_tags)
    if len(last_chunks) > 1:  # start a new request for the plain tags, so that they are not split if they fit into one
        last_chunks = chunks_of(switch_tags) + chunks_of(plain_tags)
    return chunks_of(new_parts) + last_chunks


def text_tags_after(text_tags: Mapping[str, str], sent: Iterable[Batch]) -> dict[str, str]:
    """Return the tags that hold the texts, as they are after these requests."""
    sent_tags = _key_values(tag for batch in sent for tag in batch.tags)
    return {**text_tags, **{key: value for key, value in sent_tags if is_text_tag(key)}}


def _chunks(
    items: Iterable[tuple[str, str]] | Iterable[tuple[str, float]],
    max_items: int,
    max_bytes: int = MAX_BATCH_BYTES // 2,
) -> list[list[Json]]:
    """Split keys and values into lists of at most `max_items` items and about `max_bytes` of strings."""
    chunks: list[dict[str, str | float]] = []
    free_bytes = 0
    for key, value in items:
        if not isinstance(value, str):
            size = 0
        elif len(value) < 500:
            size = 6 * len(value)  # an upper bound; faster than encoding
        else:
            size = len(json.dumps(value, ensure_ascii=False).encode())
        if not chunks or len(chunks[-1]) >= max_items or size > free_bytes:
            chunks.append({})
            free_bytes = max_bytes
        chunks[-1][key] = value  # the last value of a key replaces earlier ones of the same request
        free_bytes -= size
    return [[{"key": key, "value": value} for key, value in chunk.items()] for chunk in chunks]


def _check_key(kind: str, key: str) -> None:
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise MlflowError(
            f"MLflow takes keys of 1 to {MAX_KEY_CHARS} characters; the {kind} {key[:60]!r} has {len(key)}. "
            "Shorten it.",
            code="KEY_LENGTH",
        )
    if escape(key) != key:
        raise MlflowError(
            f"The key of the {kind} {key!r} contains a NUL or an unpaired surrogate. Rename it.", code="KEY"
        )


def _check_value(kind: str, key: str, value: str, limit: int) -> None:
    _check_key(kind, key)
    if len(value) > limit:
        raise MlflowError(
            f"MLflow cuts a {kind} after {limit} characters; {key} has {len(value)}. "
            "Nothing was sent: shorten it, or store it as a text.",
            code="VALUE_LENGTH",
        )


def mlflow_filter(where: Mapping[str, str], *, include_half_written: bool = False) -> str:
    """Return the filter of MLflow's search for these tags and params.

    Values that a filter cannot express are left out, so callers check the results with `matches`.
    """
    clauses = [] if include_half_written else ["attributes.status != 'RUNNING'"]
    for key, value in where.items():
        entity, name = _entity_and_name(key)
        stored = escape(value)
        # A filter has two kinds of quotes, and no escapes.
        has_both_quotes = "'" in stored and '"' in stored
        needs_escape = has_both_quotes or "\\" in stored or any(char in name for char in "`'\"\\")
        if not needs_escape:
            quote = '"' if "'" in stored else "'"
            clauses.append(f"{entity}.`{name}` = {quote}{stored}{quote}")
    return " AND ".join(clauses)


def matches(run: StoredRun, where: Mapping[str, str]) -> bool:
    """Return whether the run has these tags (plain keys) and params (`params.NAME`)."""
    for key, value in where.items():
        entity, name = _entity_and_name(key)
        values = run.params if entity == "params" else run.tags
        if values.get(name) != value:
            return False
    return True


def _entity_and_name(key: str) -> tuple[str, str]:
    if key.startswith("params."):
        return "params", key.removeprefix("params.")
    return "tags", key


def where_same_run(run: NewRun) -> dict[str, str]:
    """Return the filter that finds stored runs of the same cell, or of the same record id if `run` is not a cell."""
    return {RECORD_TAG: run.record_id} if run.cell_key is None else {CELL_TAG: run.cell_key}


@dataclass(frozen=True)
class ExistingRuns:
    """Ids of the stored runs with the same cell key or record id as a run that is to be recorded."""

    written_id: str | None = None  # a complete run to keep
    half_written_id: str | None = None  # a half-written run to complete
    abandoned_ids: tuple[str, ...] = ()  # half-written runs to delete


def classify_existing(run: NewRun, existing: Iterable[StoredRun]) -> ExistingRuns:
    """Classify the stored runs with the cell_key or record_id of `run`.

    A half-written run with another record_id, not older than `run`, is ignored: its writer may still be running.
    """
    same_record, same_cell, half_written, abandoned = [], [], [], []
    for stored in existing:
        has_same_record_id = stored.tags.get(RECORD_TAG) == run.record_id
        if stored.status in WRITTEN_STATUSES and has_same_record_id:
            same_record.append(stored.run_id)
        # Another attempt counts only if it is finished: a failed cell is tried again.
        elif stored.status == "FINISHED" and stored.tags.get(SUPERSEDED_TAG) != "true":
            same_cell.append(stored.run_id)
        elif stored.status == "RUNNING" and has_same_record_id:
            half_written.append(stored.run_id)
        elif stored.status == "RUNNING" and stored.start_ms < run.start_ms:
            abandoned.append(stored.run_id)
    if written := same_record + same_cell:
        return ExistingRuns(written_id=written[0], abandoned_ids=(*half_written, *abandoned))
    if half_written:
        to_complete, *surplus = half_written
        return ExistingRuns(half_written_id=to_complete, abandoned_ids=(*surplus, *abandoned))
    return ExistingRuns(abandoned_ids=tuple(abandoned))


def parse_current_run(raw: Json) -> CurrentRun:
    """Parse a run of a response, with the timestamps of its metrics."""
    run, text_tags = parse_run(raw)
    metrics = _without_empty(raw.get("data", {}).get("metrics", ()))
    metric_times = {item["key"]: (int(item.get("timestamp", 0)), int(item.get("step", 0))) for item in metrics}
    return CurrentRun(run, text_tags, metric_times)


def parse_run(raw: Json) -> tuple[StoredRun, dict[str, str]]:
    """Return a run of a response and the tags that hold its texts; raises KeyError or TypeError if it is invalid."""
    info, data = raw["info"], raw.get("data", {})
    end = info.get("end_time")
    tags: dict[str, str] = {}
    text_tags: dict[str, str] = {}
    for key, value in _key_values(data.get("tags", ())):
        if is_text_tag(key):
            text_tags[key] = value
        else:
            tags[key] = unescape(value)
    run = StoredRun(
        run_id=str(info["run_id"]),
        status=str(info["status"]),
        start_ms=int(info.get("start_time", 0)),
        end_ms=None if end is None else int(end),
        params={key: unescape(value) for key, value in _key_values(data.get("params", ()))},
        metrics={item["key"]: float(item["value"]) for item in _without_empty(data.get("metrics", ()))},
        tags=tags,
    )
    return run, text_tags


def parse_experiment(raw: Json) -> tuple[str, str, dict[str, str]]:
    """Return the id, name and tags of an experiment in a response."""
    return str(raw["experiment_id"]), str(raw["name"]), dict(_key_values(raw.get("tags", ())))


def _without_empty(metrics: Iterable[Json | None]) -> Iterator[Json]:
    return (item for item in metrics if item)


def _key_values(items: Iterable[Json | None]) -> Iterator[tuple[str, str]]:
    # MLflow omits the `value` of an item if it is empty.
    return ((str(item["key"]), str(item.get("value", ""))) for item in items if item is not None)
