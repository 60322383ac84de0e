"""The cells of a board: read and filtered, with the rubric and floor of their scores, and which to judge next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tipbench.compare.matrix import ALL, Pair, parse_pair
from tipbench.compare.ranking import Ranking
from tipbench.errors import MixedRubrics, NotEnoughData, SuiteError, UsageError
from tipbench.generate.engine import engine_of
from tipbench.generate.parsing import is_overlong, parse_answer
from tipbench.judge.material import RAW
from tipbench.judge.scores import RUBRIC, SCORES, CellScores, read_scores
from tipbench.plan.design import MIN_SCENARIOS
from tipbench.plan.prompts import NO_PROMPT_VERSION
from tipbench.plan.rubric import FLAGS, Rubric, parse_rubric
from tipbench.record.reader import newest_run, stale_runs, twin_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore
from tipbench.text import plural


def find_rubric(store: RunStore, experiment_id: str, tag: str, runs: Iterable[StoredRun]) -> Rubric | None:
    """Return the rubric with this tag, stored with a cell scored under it or with a sheet; None if not found."""
    scored = next((run for run in runs if run.tags.get("scores_rubric", run.params.get("rubric")) == tag), None)
    texts = store.get(scored.run_id)[1] if scored else {}
    rubric = read_rubric(texts.get(RUBRIC))
    if rubric is None or rubric.tag != tag:
        where = {"kind": str(RunKind.JUDGING), "params.rubric": tag}
        for _, texts in store.read(experiment_id, where=where, texts=(RUBRIC,), limit=1):
            rubric = read_rubric(texts.get(RUBRIC))
    return rubric if rubric is not None and rubric.tag == tag else None


def read_rubric(text: str | None) -> Rubric | None:
    """Parse a stored rubric; None if it is missing or this version cannot parse it."""
    try:
        return parse_rubric(text, Path("rubric.md")) if text is not None else None
    except SuiteError:
        return None


def floor_values(rubric: Rubric) -> Mapping[str, float]:
    """Return the scores of an answer without a usable tip."""
    return {**rubric.floor, "composite": rubric.floor_composite}


@dataclass(frozen=True)
class CellFilter:
    """Filters on cells and scores."""

    where: Mapping[str, str] = field(default_factory=dict)
    judge: str | None = None  # only this judge's scores
    provisional: bool = False  # use provisional scores even where judges have scored
    exclude: tuple[str, ...] = ()  # MODEL, MODEL/PROMPT or */PROMPT to leave out


def is_reference(pair: Pair) -> bool:
    """Return whether a pair is a reference: of an engine that is compared with the leader, and not ranked."""
    return engine_of(pair.model).kind == "baseline"


def as_row(pair: Pair) -> Pair:
    """Return the row of a pair: a reference has no prompt, even if it was recorded or requested with one."""
    return Pair(pair.model, NO_PROMPT_VERSION) if is_reference(pair) else pair


@dataclass(frozen=True)
class BoardCell:
    """One cell of a board; `values` has the composite, scales and flags, and is empty if no scores count."""

    run: StoredRun
    values: Mapping[str, float]
    computed: Mapping[str, float] | None = None  # computed flags, if the run's flags come from judges that do not count
    rubric: str = ""  # id@sha256, of the scores that count
    judges: tuple[str, ...] = ()  # of the scores that count; none for a floored answer

    @property
    def measured(self) -> Mapping[str, float]:
        """Metrics available without scores: diversity, speed and computed flags."""
        if self.computed is None:
            return self.run.metrics
        return {**{name: value for name, value in self.run.metrics.items() if name not in FLAGS}, **self.computed}

    @property
    def floored(self) -> bool:
        """Whether the answer has no usable tip and therefore the rubric's lowest scores."""
        return self.run.tags.get("floored") == "true"

    @cached_property
    def pair(self) -> Pair:
        return as_row(_recorded_pair(self.run))

    @cached_property
    def reference(self) -> bool:
        return is_reference(self.pair)

    @property
    def scenario(self) -> str:
        return self.run.params.get("scenario", "")

    @property
    def persona(self) -> str:
        return self.run.params.get("persona", "")

    @property
    def failed(self) -> bool:
        return self.run.state == RunState.FAILED

    @property
    def waiting(self) -> bool:
        """Whether the answer waits for a judge."""
        return not self.values and not self.failed


@dataclass(frozen=True)
class Coverage:
    """In how many scenarios people and provisional judges have scored at least half of the candidate rows."""

    people: int
    rules: int
    scenarios: int


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
    rubric_content: Rubric | None = None  # None if it is not found
    covered: Coverage | None = None
    excluded: tuple[Pair, ...] = ()  # rows left out by the filter

    @property
    def candidates(self) -> list[BoardCell]:
        """The cells that are ranked: all except those of references."""
        return [cell for cell in self.cells if not cell.reference]

    @property
    def scored(self) -> bool:
        """Whether a person or an automatic judge has scored; floors are not given by a judge."""
        return any(cell.values and not cell.floored for cell in self.cells)

    @property
    def unusable(self) -> int:
        """The number of the candidates' answers if no judge has scored and none has a usable tip, otherwise 0."""
        answered = [cell for cell in self.candidates if not cell.failed]
        return 0 if self.scored or not all(cell.floored for cell in answered) else len(answered)

    @property
    def only_stale(self) -> frozenset[Pair]:
        """Pairs whose runs are all stale."""
        return frozenset(self.stale) - {cell.pair for cell in self.cells}

    @cached_property
    def finished(self) -> frozenset[str]:
        """Scenarios in which no answer of a candidate waits for a judge."""
        candidates = self.candidates
        waiting = {cell.scenario for cell in candidates if cell.waiting}
        return frozenset({cell.scenario for cell in candidates} - waiting)

    @cached_property
    def silent(self) -> frozenset[Pair]:
        """Candidates without a single answer."""
        candidates = self.candidates
        return frozenset({cell.pair for cell in candidates} - {cell.pair for cell in candidates if not cell.failed})


def read_board(store: RunStore, experiment_id: str, question: CellFilter) -> BoardCells:
    """Read an experiment's cells and select those of the board. Raises NotEnoughData if none match."""
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
    runs = [cell.run for cell in board.cells]
    rubric = find_rubric(store, experiment_id, board.rubric, runs) if board.rubric else None
    if rubric is None:
        return board
    raws = {run.run_id: stored.get(RAW) for run, stored in found}
    cells = tuple(_cell_under(rubric, cell, raws.get(cell.run.run_id)) for cell in board.cells)
    return replace(board, cells=cells, rubric_content=rubric)


def _cell_under(rubric: Rubric, cell: BoardCell, raw: str | None) -> BoardCell:
    """Apply the rubric's floor to a cell floored under another one, and compute flags that other judges changed."""
    if cell.floored and cell.run.tags.get("scores_rubric") != rubric.tag:
        return replace(cell, values={**cell.values, **floor_values(rubric)})
    if cell.computed is None or raw is None or not cell.run.params.get("n_tips", "").isdecimal():
        return cell
    n_tips = int(cell.run.params["n_tips"])
    answer = parse_answer(raw, n_tips)
    judged = answer.tips[:n_tips]
    overlong = sum(is_overlong(tip.tip, rubric.word_limit) for tip in judged) / max(len(judged), 1)
    return replace(cell, computed={"format_ok": float(answer.format_ok), "overlong": overlong})


def select_cells(runs: Sequence[tuple[StoredRun, CellScores]], question: CellFilter) -> BoardCells:
    """Select the newest conditions and the newest build of every name, with their scores."""
    conditions = newest_run(run for run, _ in runs).tags.get("conditions", "")
    same = [(run, scores) for run, scores in runs if run.tags.get("conditions", "") == conditions]
    others = [run for run, _ in runs if run.tags.get("conditions", "") != conditions]
    others.sort(key=lambda run: (-run.start_ms, run.run_id))
    old = stale_runs([run for run, _ in same])
    newest = [(run, scores) for run, scores in same if run.run_id not in old]
    names = question.exclude
    excluded = [run for run, _ in newest if is_excluded(_recorded_pair(run), names)] if names else []
    left_out = {run.run_id for run in excluded}
    current = [(run, scores) for run, scores in newest if run.run_id not in left_out]
    covered, judge = _coverage(current), question.judge
    by_rules = [given for _, scores in current for given in scores.provisional.values()]
    too_few_by_people = covered.people < min(MIN_SCENARIOS, covered.scenarios)
    provisional = question.provisional or (judge is None and bool(by_rules) and too_few_by_people)
    if provisional:  # of several automatic judges, the latest counts
        judge = max(by_rules, key=lambda given: given.at).judge if by_rules else ""
    cells = _drop_older_references([_scored_cell(run, scores, judge, provisional) for run, scores in current])
    judges = {name for cell in cells for name in cell.judges}
    if question.judge is not None and not judges:
        counted = sorted({given.judge for _, scores in current for given in scores.counted})
        who = f"scores of {', '.join(counted)} count" if counted else "no scores count yet"
        raise NotEnoughData(f"No score of {question.judge} counts here; {who}. See `tipbench judge status`.")
    return BoardCells(
        cells=tuple(cells),
        rubric=_rubric_of(cells, provisional=provisional),
        judges=tuple(sorted(judges)),
        provisional=provisional,
        stale=Counter(as_row(_recorded_pair(run)) for run, _ in same if run.run_id in old),
        other_conditions=len(others),
        conditions=conditions,
        other_ids=tuple(dict.fromkeys(run.tags.get("conditions", "") for run in others)),
        question=question,
        covered=covered,
        excluded=tuple(sorted({as_row(_recorded_pair(run)) for run in excluded} - {cell.pair for cell in cells})),
    )


def is_excluded(pair: Pair, names: Sequence[str]) -> bool:
    """Return whether one of the names is the pair, its model or */PROMPT; a reference matches with any prompt."""
    row = as_row(pair)
    if any(name in (str(pair), pair.model, str(Pair(ALL, row.prompt))) for name in names):
        return True
    return any(other and as_row(other) == row for other in map(parse_pair, names))


def _coverage(runs: Sequence[tuple[StoredRun, CellScores]]) -> Coverage:
    pairs = [_recorded_pair(run) for run, _ in runs]
    rows = {pair for pair in set(pairs) if not is_reference(pair)} or set(pairs)  # references only
    scenarios: set[str] = set()
    # Rows by scenario: judged by people, scored by an automatic judge, without a usable tip.
    people: dict[str, set[Pair]] = defaultdict(set)
    rules: dict[str, set[Pair]] = defaultdict(set)
    floored: dict[str, set[Pair]] = defaultdict(set)
    for (run, scores), pair in zip(runs, pairs, strict=True):
        if pair in rows:
            scenario = run.params.get("scenario", "")
            scenarios.add(scenario)
            if run.state == RunState.JUDGED:
                (floored if run.tags.get("floored") == "true" else people)[scenario].add(pair)
            if scores.provisional:
                rules[scenario].add(pair)

    def covered(scored: Mapping[str, set[Pair]]) -> int:
        """Return the number of scenarios with scores in which, with the floored ones, half of the rows are scored."""
        return sum(2 * len(found | floored.get(scenario, set())) >= len(rows) for scenario, found in scored.items())

    return Coverage(covered(people), covered(rules), len(scenarios))


def _drop_older_references(cells: list[BoardCell]) -> list[BoardCell]:
    """Drop a reference's older runs, which have a prompt version, where a run without a prompt version is scored."""
    references = [cell for cell in cells if cell.reference]
    older = {cell.run.run_id for cell in references if _recorded_pair(cell.run) != cell.pair}
    scored = {(cell.pair, cell.scenario) for cell in references if cell.values and cell.run.run_id not in older}
    return [cell for cell in cells if cell.run.run_id not in older or (cell.pair, cell.scenario) not in scored]


def _scored_cell(run: StoredRun, scores: CellScores, judge: str | None, provisional: bool) -> BoardCell:
    """Return the cell with the scores that count: of all people, or of one judge.

    If only others have judged it, the run's flags are theirs and are not used.
    """
    judged, rubric = run.state == RunState.JUDGED, run.tags.get("scores_rubric", "")
    if run.tags.get("floored") == "true" and (judged or provisional):
        return BoardCell(run, run.metrics, rubric=rubric)
    if judge is None:
        names = tuple(given.judge for given in scores.counted)
        return BoardCell(run, run.metrics, rubric=rubric, judges=names) if judged else BoardCell(run, {})
    given = None
    if provisional and run.state != RunState.FAILED:
        given = scores.provisional.get(judge)
    elif judged:
        given = next((each for each in scores.counted if each.judge == judge), None)
    if given is None:
        return BoardCell(run, {}, {} if scores.judges else None)
    return BoardCell(run, {**run.metrics, **given.means}, rubric=given.rubric, judges=(given.judge,))


def _rubric_of(cells: Sequence[BoardCell], *, provisional: bool) -> str:
    """Return the only rubric of the scores, or that of the newest floor if all scores are floors.

    Raises MixedRubrics if there are several. Floors are not given by a judge, so they do not count as mixed.
    """
    rubrics = Counter(cell.rubric for cell in cells if cell.rubric and not cell.floored)
    if len(rubrics) > 1:
        counts = ", ".join(
            f"{rubric.split('@')[0]}@{rubric.split('@')[-1][:8]} ({plural(count, 'cell')})"
            for rubric, count in rubrics.most_common()
        )
        again = "tipbench judge run" if provisional else "tipbench judge export --rejudge"
        raise MixedRubrics(
            f"The scores were given under different rubrics: {counts}. They cannot be compared. "
            f"Score the older ones again with `{again}`."
        )
    floors = [cell.run for cell in cells if cell.rubric and cell.floored]
    return next(iter(rubrics), newest_run(floors).tags["scores_rubric"] if floors else "")


def _recorded_pair(run: StoredRun) -> Pair:
    return Pair(run.params.get("model", ""), run.params.get("prompt_version", ""))


@dataclass(frozen=True)
class Focus:
    """The cells to judge first: those of the leader and the rows tied with it, by scenario."""

    pairs: tuple[Pair, ...]
    scenarios: tuple[str, ...]  # most useful first
    run_ids: frozenset[str]


def focus(cells: BoardCells, ranking: Ranking) -> Focus | None:
    """Return the cells to judge next; None without a leader, without ties, or if no top cells are left to judge.

    One more shared scenario reduces the squared error of a paired mean by sd² / n(n + 1). The value of a scenario is
    the sum over the tied rows it would newly pair with the leader, each weighted by its p (how undecided it is).
    """
    leader = ranking.leader
    if leader is None or not ranking.tied:
        return None
    top = (leader, *ranking.tied)
    uncertainty = {}
    for row in ranking.rows:
        diff = row.to_leader
        if diff is None or diff.sd is None or diff.p is None:
            uncertainty[row.pair] = 1.0  # unknown difference: maximum uncertainty
        else:
            uncertainty[row.pair] = diff.p * diff.sd**2 / (diff.n * (diff.n + 1))
    done: dict[str, set[Pair]] = defaultdict(set)
    waiting: dict[str, list[BoardCell]] = defaultdict(list)
    for cell in cells.cells:
        if cell.pair in top and cell.values:
            done[cell.scenario].add(cell.pair)
        elif cell.pair in top and cell.waiting:
            waiting[cell.scenario].append(cell)
    value = {}
    for scenario, own in waiting.items():
        before, after = done[scenario], done[scenario] | {cell.pair for cell in own}
        newly_paired = [pair for pair in ranking.tied if pair in after and not {pair, leader} <= before]
        value[scenario] = sum(uncertainty[pair] for pair in newly_paired) if leader in after else 0.0
    useful = sorted((scenario for scenario in value if value[scenario] > 0), key=lambda each: (-value[each], each))
    run_ids = frozenset(cell.run.run_id for scenario in useful for cell in waiting[scenario])
    return Focus(top, tuple(useful), run_ids) if useful else None
