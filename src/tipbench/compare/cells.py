"""Reads and filters the cells of a board, with the rubric and floor of their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tipbench.compare.matrix import Pair
from tipbench.errors import MixedRubrics, NotEnoughData, SuiteError, UsageError
from tipbench.generate.parsing import is_overlong, parse_answer
from tipbench.judge.material import RAW
from tipbench.judge.scores import RUBRIC, SCORES, CellScores, Judgement, read_scores
from tipbench.plan.rubric import FLAGS, Rubric, parse_rubric
from tipbench.record.reader import newest_run, stale_runs, twin_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore


def find_rubric(store: RunStore, experiment_id: str, tag: str, runs: Iterable[StoredRun]) -> Rubric | None:
    """Returns the rubric with this tag, stored with a cell scored under it or with a sheet; None if not found."""
    for text in _texts(store, experiment_id, tag, runs):
        rubric = read_rubric(text)
        if rubric is not None and rubric.tag == tag:
            return rubric
    return None


def read_rubric(text: str | None) -> Rubric | None:
    """Parses a stored rubric; None if it is missing or this version cannot parse it."""
    try:
        return parse_rubric(text, Path("rubric.md")) if text is not None else None
    except SuiteError:
        return None


def floor_values(rubric: Rubric) -> Mapping[str, float]:
    """Returns the scores of an answer without a usable tip."""
    return {**rubric.floor, "composite": rubric.floor_composite}


def _texts(store: RunStore, experiment_id: str, tag: str, runs: Iterable[StoredRun]) -> Iterator[str | None]:
    scored = next((run for run in runs if run.tags.get("scores_rubric", run.params.get("rubric")) == tag), None)
    if scored is not None:
        yield store.get(scored.run_id)[1].get(RUBRIC)
    where = {"kind": str(RunKind.JUDGING), "params.rubric": tag}
    for _, texts in store.read(experiment_id, where=where, texts=(RUBRIC,), limit=1):
        yield texts.get(RUBRIC)


@dataclass(frozen=True)
class CellFilter:
    """Filters on cells and scores."""

    where: Mapping[str, str] = field(default_factory=dict)
    judge: str | None = None  # only this judge's scores
    provisional: bool = False  # use provisional scores even where judges have scored


@dataclass(frozen=True)
class BoardCell:
    """One cell of a board; `values` has the composite, scales and flags, and is empty if no scores count."""

    run: StoredRun
    values: Mapping[str, float]
    computed: Mapping[str, float] | None = None  # computed flags, if the run's flags come from judges that do not count

    @property
    def measured(self) -> Mapping[str, float]:
        """Metrics available without scores: diversity, speed and computed flags."""
        if self.computed is None:
            return self.run.metrics
        return {**{name: value for name, value in self.run.metrics.items() if name not in FLAGS}, **self.computed}

    @property
    def floored(self) -> bool:
        return self.run.tags.get("floored") == "true"

    @property
    def pair(self) -> Pair:
        return Pair(self.run.params.get("model", ""), self.run.params.get("prompt_version", ""))

    @property
    def scenario(self) -> str:
        return self.run.params.get("scenario", "")

    @property
    def persona(self) -> str:
        return self.run.params.get("persona", "")

    @property
    def failed(self) -> bool:
        return self.run.state == RunState.FAILED


@dataclass(frozen=True)
class BoardCells:
    """The cells of one board, and what is excluded from it."""

    cells: tuple[BoardCell, ...]
    rubric: str  # id@sha256; empty if nothing is scored
    judges: tuple[str, ...]
    provisional: bool
    stale: Mapping[Pair, int]  # number of runs of older builds
    other_conditions: int  # number of runs under other conditions, which are excluded
    conditions: str
    other_ids: tuple[str, ...] = ()  # ids of the other conditions, newest first
    question: CellFilter = field(default_factory=CellFilter)

    @property
    def gone(self) -> frozenset[Pair]:
        """Pairs whose runs are all stale."""
        return frozenset(self.stale) - {cell.pair for cell in self.cells}


def read_board(store: RunStore, experiment_id: str, question: CellFilter) -> BoardCells:
    """Reads an experiment's cells and selects those of the board. Raises NotEnoughData if none match."""
    kind = str(RunKind.CELL)
    if question.where.get("kind", kind) != kind:
        raise UsageError(f"--where kind={question.where['kind']} excludes every cell; a leaderboard needs kind=cell.")
    where = {"kind": kind, **question.where}
    texts = (SCORES, RAW) if question.judge or question.provisional else (SCORES,)
    read = list(store.read(experiment_id, where=where, texts=texts))
    twins = twin_runs(run for run, _ in read)
    found = [(run, stored) for run, stored in read if run.tags.get("superseded") != "true" and run.run_id not in twins]
    if not found:
        raise NotEnoughData("No cells match, so there is nothing to compare. See `tipbench runs list`.")
    board = select_cells([(run, read_scores(stored.get(SCORES))) for run, stored in found], question)
    return _with_rubric(store, experiment_id, board, {run.run_id: stored.get(RAW) for run, stored in found})


def select_cells(runs: Sequence[tuple[StoredRun, CellScores]], question: CellFilter) -> BoardCells:
    """Selects the newest conditions and the newest build of every name, with their scores."""
    conditions = newest_run(run for run, _ in runs).tags.get("conditions", "")
    same = [(run, scores) for run, scores in runs if run.tags.get("conditions", "") == conditions]
    old = stale_runs([run for run, _ in same])
    current = [(run, scores) for run, scores in same if run.run_id not in old]
    provisional = question.provisional or (question.judge is None and not _any_judge(current))
    scored = _provisional(current) if provisional else _judged(current, question.judge)
    judges = {name for _, _, names in scored for name in names}
    if question.judge is not None and not judges:
        raise NotEnoughData(_no_scores_message(question.judge, current))
    return BoardCells(
        cells=tuple(cell for cell, _, _ in scored),
        rubric=_rubric_of(scored, provisional=provisional),
        judges=tuple(sorted(judges)),
        provisional=provisional,
        stale=Counter(_pair(run) for run, _ in same if run.run_id in old),
        other_conditions=len(runs) - len(same),
        conditions=conditions,
        other_ids=_newest_first(run for run, _ in runs if run.tags.get("conditions", "") != conditions),
        question=question,
    )


def _with_rubric(store: RunStore, experiment_id: str, board: BoardCells, raws: Mapping[str, str | None]) -> BoardCells:
    """Applies the rubric text: its floor to cells floored under another rubric, and flags without judges' changes."""
    other = any(_floored_elsewhere(cell, board.rubric) for cell in board.cells)
    flags = any(cell.computed is not None for cell in board.cells)
    if not board.rubric or not (other or flags):
        return board
    rubric = find_rubric(store, experiment_id, board.rubric, (cell.run for cell in board.cells))
    if rubric is None:
        return board
    return replace(board, cells=tuple(_cell_under(rubric, cell, raws.get(cell.run.run_id)) for cell in board.cells))


def _cell_under(rubric: Rubric, cell: BoardCell, raw: str | None) -> BoardCell:
    if _floored_elsewhere(cell, rubric.tag):
        return replace(cell, values={**cell.values, **floor_values(rubric)})
    if cell.computed is None or raw is None or not cell.run.params.get("n_tips", "").isdecimal():
        return cell
    n_tips = int(cell.run.params["n_tips"])
    answer = parse_answer(raw, n_tips)
    judged = answer.tips[:n_tips]
    overlong = sum(is_overlong(tip.tip, rubric.word_limit) for tip in judged) / max(len(judged), 1)
    return replace(cell, computed={"format_ok": float(answer.format_ok), "overlong": overlong})


def _floored_elsewhere(cell: BoardCell, rubric: str) -> bool:
    return cell.floored and cell.run.tags.get("scores_rubric") != rubric


def _rubric_of(scored: Iterable[_Scored], *, provisional: bool) -> str:
    """Returns the only rubric of the scores, or that of the newest floor if all scores are floors.

    Raises MixedRubrics if there are several. Floors are not given by a judge, so they do not count as mixed.
    """
    scored = list(scored)
    rubrics = Counter(rubric for cell, rubric, _ in scored if rubric and not cell.floored)
    if len(rubrics) > 1:
        raise MixedRubrics(_mixed_rubrics_message(rubrics, provisional=provisional))
    floors = [cell.run for cell, rubric, _ in scored if rubric and cell.floored]
    return next(iter(rubrics), newest_run(floors).tags["scores_rubric"] if floors else "")


_Scored = tuple[BoardCell, str, tuple[str, ...]]  # cell, rubric, judges


def _judged(runs: Iterable[tuple[StoredRun, CellScores]], judge: str | None) -> list[_Scored]:
    return [_judged_cell(run, scores, judge) for run, scores in runs]


def _judged_cell(run: StoredRun, scores: CellScores, judge: str | None) -> _Scored:
    cell = BoardCell(run, run.metrics)
    rubric = run.tags.get("scores_rubric", "")
    if run.state == RunState.JUDGED and cell.floored:
        return cell, rubric, ()
    if judge is None:
        judged = run.state == RunState.JUDGED
        return (cell, rubric, tuple(given.judge for given in scores.counted)) if judged else _unscored(run)
    counted = scores.counted if run.state == RunState.JUDGED else []
    own = next((given for given in counted if given.judge == judge), None)
    return _given(run, own) if own else _unscored(run, judged=bool(scores.judges))


def _provisional(runs: Sequence[tuple[StoredRun, CellScores]]) -> list[_Scored]:
    latest = max(
        (given for _, scores in runs for given in scores.provisional.values()), key=lambda given: given.at, default=None
    )
    return [_provisional_cell(run, scores, latest.judge if latest else None) for run, scores in runs]


def _provisional_cell(run: StoredRun, scores: CellScores, judge: str | None) -> _Scored:
    cell = BoardCell(run, run.metrics)
    if cell.floored:
        return cell, run.tags.get("scores_rubric", ""), ()
    given = scores.provisional.get(judge or "") if run.state != RunState.FAILED else None
    return _given(run, given) if given else _unscored(run, judged=bool(scores.judges))


def _given(run: StoredRun, given: Judgement) -> _Scored:
    return BoardCell(run, {**run.metrics, **given.means}), given.rubric, (given.judge,)


def _unscored(run: StoredRun, *, judged: bool = False) -> _Scored:
    """`judged` means judged by others: the run's flags are theirs and are not used."""
    return BoardCell(run, {}, {} if judged else None), "", ()


def _any_judge(runs: Iterable[tuple[StoredRun, CellScores]]) -> bool:
    return any(run.state == RunState.JUDGED and run.tags.get("floored") != "true" for run, _ in runs)


def _pair(run: StoredRun) -> Pair:
    return Pair(run.params.get("model", ""), run.params.get("prompt_version", ""))


def _newest_first(runs: Iterable[StoredRun]) -> tuple[str, ...]:
    """Returns the distinct conditions of the runs, newest first."""
    ordered = sorted(runs, key=lambda run: (-run.start_ms, run.run_id))
    return tuple(dict.fromkeys(run.tags.get("conditions", "") for run in ordered))


def _no_scores_message(judge: str, runs: Iterable[tuple[StoredRun, CellScores]]) -> str:
    others = sorted({given.judge for _, scores in runs for given in scores.counted})
    who = f"scores of {', '.join(others)} count" if others else "no scores count yet"
    return f"No score of {judge} counts here; {who}. See `tipbench judge status`."


def _mixed_rubrics_message(rubrics: Counter[str], *, provisional: bool) -> str:
    counts = ", ".join(
        f"{rubric.split('@')[0]}@{rubric.split('@')[-1][:8]} ({count} cell{'s' if count > 1 else ''})"
        for rubric, count in rubrics.most_common()
    )
    again = "tipbench judge run" if provisional else "tipbench judge export --rejudge"
    return (
        f"The scores were given under different rubrics: {counts}. They cannot be compared. "
        f"Score the older ones again with `{again}`."
    )
