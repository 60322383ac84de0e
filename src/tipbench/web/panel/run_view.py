"""One run as its page shows it: what was asked and how, the answer tip by tip, who said what of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tipbench.errors import CorruptText
from tipbench.judge.judging import KEY
from tipbench.judge.material import CANDIDATES, RAW
from tipbench.judge.scores import NOBODY, RUBRIC, SCORES, CellScores, Judgement, read_scores
from tipbench.record.run import RunKind

PROMPT = "artifact:prompt.txt"
COUNTS, HELD, PROVISIONAL, EARLIER, OTHER_RUBRIC, REPLACED = (
    "counts", "held", "provisional", "provisional, earlier", "other rubric", "replaced",
)  # fmt: skip
_SHOWN_APART = (PROMPT, RAW, CANDIDATES, SCORES)  # texts that have their own place on a cell's page
_NOTE_TAG = "mlflow.note.content"
_NAME_TAG = "mlflow.runName"


@dataclass(frozen=True)
class Given:
    """What one judge said of one answer."""

    judge: str
    standing: str  # counts, held, provisional, …
    at: str
    sheet: str
    rubric: str
    format_ok: bool
    means: Mapping[str, float]


@dataclass(frozen=True)
class TipMark:
    """What one judge said of one tip."""

    judge: str
    standing: str
    scores: Mapping[str, int]
    overlong: bool
    note: str


@dataclass(frozen=True)
class TipView:
    """One tip of the answer."""

    number: int
    tip: str
    rationale: str
    judged: bool  # False: beyond the number that was asked for, kept and not judged
    marks: tuple[TipMark, ...]


@dataclass(frozen=True)
class AnswerView:
    """A cell's answer and everything said of it."""

    tips: tuple[TipView, ...]
    given: tuple[Given, ...]
    history: tuple[Given, ...]  # oldest first
    scales: tuple[str, ...]
    faults: tuple[str, ...] = ()  # texts that are not what tipbench writes


@dataclass(frozen=True)
class Remark:
    """Something to know before reading on."""

    kind: str  # info, warn or bad
    title: str
    text: str = ""


def run_title(run: Mapping[str, Any]) -> str:
    """What a run is called."""
    params, tags = run["params"], run["tags"]
    if tags.get("kind") == RunKind.CELL:
        return f"{params.get('model', '?')}/{params.get('prompt_version', '?')} · {params.get('scenario', '?')}"
    return str(tags.get(_NAME_TAG) or f"{tags.get('kind', 'run')} {run['run_id'][:8]}")


def run_note(run: Mapping[str, Any]) -> str:
    """One line on a run that is no cell: why, or how it ended."""
    tags = run["tags"]
    if tags.get("kind") == RunKind.JUDGING:
        held = {"exported": "handed out, nothing has come back", "held": "scores are held"}
        return held.get(tags.get("sheet_status", ""), str(tags.get("sheet_status", "")))
    return str(tags.get(_NOTE_TAG) or tags.get("reason") or tags.get("evidence") or tags.get("ended") or "")


def answer_view(run: Mapping[str, Any]) -> AnswerView:
    """The answer of a cell with its scores. What cannot be read is named and left out."""
    faults: list[str] = []
    scores = NOBODY
    try:
        scores = read_scores(run["texts"].get(SCORES))
    except CorruptText as exc:
        faults.append(str(exc))
    tips: list[tuple[str, str]] = []
    try:
        tips = _tips(run["texts"].get(CANDIDATES))
    except (ValueError, KeyError, TypeError, AttributeError):
        faults.append(f"The text {CANDIDATES} is not what tipbench writes; it is shown below as it is.")
    standing = list(_standing(scores))
    n_judged = _whole(run["params"].get("n_tips")) or len(tips)
    views = tuple(
        TipView(at + 1, tip, why, at < n_judged, tuple(_marks(standing, at)))
        for at, (tip, why) in enumerate(tips)
    )  # fmt: skip
    everything = [given for _, given in standing] + list(scores.history)
    scales = dict.fromkeys(name for given in everything for tip in given.tips for name in tip.scores)
    return AnswerView(
        tips=views,
        given=tuple(_given(name, given) for name, given in standing),
        history=tuple(_given(REPLACED, given) for given in scores.history),
        scales=tuple(scales),
        faults=tuple(faults),
    )


def _standing(scores: CellScores) -> Iterator[tuple[str, Judgement]]:
    counted = {given.judge for given in scores.counted}
    for name, given in sorted(scores.judges.items()):
        yield (COUNTS if name in counted else OTHER_RUBRIC), given
    for _, given in sorted(scores.held.items()):
        yield HELD, given
    latest = scores.latest_provisional
    for _, given in sorted(scores.provisional.items()):
        yield (PROVISIONAL if given is latest else EARLIER), given


def _given(standing: str, given: Judgement) -> Given:
    rubric = given.rubric.partition("@")[0]
    return Given(given.judge, standing, given.at, given.sheet, rubric, given.format_ok, given.means)


def _marks(standing: list[tuple[str, Judgement]], at: int) -> Iterator[TipMark]:
    for name, given in standing:
        if at < len(given.tips):
            tip = given.tips[at]
            yield TipMark(given.judge, name, tip.scores, tip.overlong, tip.note)


def _tips(text: str | None) -> list[tuple[str, str]]:
    return [(str(tip["tip"]), str(tip["rationale"])) for tip in json.loads(text or "[]")]


def remarks(run: Mapping[str, Any], *, stale: bool = False) -> list[Remark]:
    """What sets this run apart, most important first."""
    return [*_failure(run), *_age(run, stale=stale), *_scored(run), *_odd(run)]


def _failure(run: Mapping[str, Any]) -> Iterator[Remark]:
    tags = run["tags"]
    if run["state"] == "failed":
        said = f"{tags.get('failure', 'unknown')}: {tags.get('failure_reason', 'no reason was kept')}"
        yield Remark("bad", "No complete answer came, so nothing is scored. The next collect tries it again.", said)
    elif run["status"] == "FAILED":
        yield Remark("bad", "It did not end well.", tags.get("ended", ""))


def _age(run: Mapping[str, Any], *, stale: bool) -> Iterator[Remark]:
    if run["tags"].get("superseded") == "true":
        yield Remark("info", "Superseded: a later try of the same cell has replaced this run.")
    if stale:
        yield Remark(
            "warn",
            "Stale: the model's digest, the prompt's text or the scenario has changed since. The leaderboard goes by "
            "the newer answer.",
        )


def _scored(run: Mapping[str, Any]) -> Iterator[Remark]:
    tags = run["tags"]
    if tags.get("floored") == "true":
        yield Remark("info", "The answer has no usable tip: it was judged at once, at the rubric's floor.")
    if tags.get("held") == "true":
        yield Remark(
            "warn", "Some scores are held: their judge is beyond the drift limit, so they are kept and do not count."
        )
    if run["state"] == "pending" and tags.get("provisional_judge"):
        yield Remark("info", "The scores are provisional: no judge whose scores count has seen this answer yet.")


def _odd(run: Mapping[str, Any]) -> Iterator[Remark]:
    tags, metrics = run["tags"], run["metrics"]
    if tags.get("foreign_resident") == "true":
        yield Remark(
            "warn", "Another client's model was in memory while this was generated: the times are not comparable."
        )
    if tags.get("truncated") == "true":
        yield Remark("warn", "The answer was cut off at the limit of tokens (num_predict).")
    if tags.get("done_reason") == "aborted":
        yield Remark("warn", "The server stopped the model, which repeated itself; what it had written is the answer.")
    if metrics.get("format_ok") == 0 and tags.get("floored") != "true" and run["state"] != "failed":
        yield Remark("info", "The answer is not the asked format; the tips were found in it all the same.")


def other_texts(run: Mapping[str, Any], *, with_key: bool = False) -> list[tuple[str, str]]:
    """The texts that have no place of their own on the page. The key to a blinding only when it is asked for."""
    apart = _SHOWN_APART if run["tags"].get("kind") == RunKind.CELL else ()
    kept = {name: text for name, text in run["texts"].items() if name not in apart and (with_key or name != KEY)}
    return sorted(kept.items(), key=lambda each: (each[0] == RUBRIC, each[0]))


def shown_params(run: Mapping[str, Any], *, with_key: bool = False) -> list[tuple[str, str]]:
    """The params by name. The seed of a sheet leads to its key, so it is shown with the key alone."""
    hidden = ("seed",) if run["tags"].get("kind") == RunKind.JUDGING and not with_key else ()
    return sorted((name, value) for name, value in run["params"].items() if name not in hidden)


def readable(text: str) -> str:
    """JSON with its lines broken; any other text as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(value, ensure_ascii=False, indent=2) if isinstance(value, dict | list) else text


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None
