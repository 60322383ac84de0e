"""The cells of a board with the scores that count, read from MLflow and filtered; and the cells to judge next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tipbench.compare.matrix import ALL, Pair, parse_pair
from tipbench.compare.ranking import Ranking
from tipbench.errors import CorruptText, MixedRubrics, NotEnoughData, SuiteError, UsageError
from tipbench.generate.engine import engine_type_of
from tipbench.generate.parsing import is_overlong, parse_answer
from tipbench.judge.material import RAW
from tipbench.judge.scores import RUBRIC, SCORES, CellScores, read_scores
from tipbench.plan.design import MIN_SCENARIOS
from tipbench.plan.prompts import NO_PROMPT_VERSION
from tipbench.plan.rubric import FLAGS, Rubric, parse_rubric
from tipbench.record.reader import duplicate_runs, newest_answered_run, stale_runs
from tipbench.record.run import RunKind, RunState, StoredRun
from tipbench.record.store import RunStore
from tipbench.text import plural

COMPOSITE = "composite"  # the name of an answer's score in `BoardCell.values`


def find_rubric(store: RunStore, experiment_id: str, rubric_tag: str, runs: Iterable[StoredRun]) -> Rubric | None:
    """Return the rubric with this tag (id@sha256), as stored with a cell or a sheet; None if it is not found."""
    # The rubric of a run is that of its scores, or of its suite if it has no scores.
    matching_runs = (run for run in runs if run.tags.get("scores_rubric", run.params.get("rubric")) == rubric_tag)
    matching_run = next(matching_runs, None)
    if matching_run is not None:
        _, texts = store.get(matching_run.run_id)
        rubric = read_rubric(texts.get(RUBRIC))
        if rubric is not None and rubric.tag == rubric_tag:
            return rubric
    where = {"kind": str(RunKind.JUDGING), "params.rubric": rubric_tag}
    for _, texts in store.read(experiment_id, where=where, texts=(RUBRIC,), limit=1):
        rubric = read_rubric(texts.get(RUBRIC))
        if rubric is not None and rubric.tag == rubric_tag:
            return rubric
    return None


def read_rubric(text: str | None) -> Rubric | None:
    """Parse a stored rubric; None if it is missing, or invalid for this version of tipbench."""
    if text is None:
        return None
    try:
        return parse_rubric(text, Path("rubric.md"))
    except SuiteError:
        return None


def short_tag(tag: str) -> str:
    """Shorten the hash in the tag of a rubric, id@sha256, to eight characters."""
    rubric_id, _, sha256 = tag.partition("@")
    return f"{rubric_id}@{sha256[:8]}"


def floor_values(rubric: Rubric) -> Mapping[str, float]:
    """Return the scores of an answer without a usable tip."""
    return {**rubric.floor, COMPOSITE: rubric.floor_composite}


@dataclass(frozen=True)
class CellFilter:
    """Filters on cells and scores."""

    where: Mapping[str, str] = field(default_factory=dict)
    judge: str | None = None  # only this judge's scores
    provisional: bool = False  # use provisional scores even if people have scored
    exclude: tuple[str, ...] = ()  # MODEL, MODEL/PROMPT or */PROMPT to leave out


def is_reference(pair: Pair) -> bool:
    """Return whether a pair is a reference, which is compared with the leader but not ranked."""
    return engine_type_of(pair.model).is_reference


def without_reference_prompt(pair: Pair) -> Pair:
    """Return the pair as shown on the board. A reference has no prompt there, even if it was recorded with one."""
    return Pair(pair.model, NO_PROMPT_VERSION) if is_reference(pair) else pair


@dataclass(frozen=True)
class BoardCell:
    """One cell of a board."""

    run: StoredRun
    values: Mapping[str, float]  # the run's metrics, including the scores that count; empty if none count
    flags_are_uncertain: bool = False  # the run's flags may be corrections by a judge whose scores do not count
    recomputed_flags: Mapping[str, float] = field(default_factory=dict)  # used instead of uncertain ones, if known
    rubric: str = ""  # id@sha256 of the rubric of the scores that count
    judges: tuple[str, ...] = ()  # whose scores count; empty for a floored answer

    @property
    def metrics(self) -> Mapping[str, float]:
        """`values`; if they are empty, the metrics of the run, with recomputed flags instead of uncertain ones.

        The run's metrics may contain scores that do not count. Use only diversity, speed and flags.
        """
        if self.values:
            return self.values
        if not self.flags_are_uncertain:
            return self.run.metrics
        without_flags = {name: value for name, value in self.run.metrics.items() if name not in FLAGS}
        return {**without_flags, **self.recomputed_flags}

    @property
    def floored(self) -> bool:
        """Whether the answer has no usable tip and therefore the rubric's lowest scores."""
        return self.run.tags.get("floored") == "true"

    @cached_property
    def pair(self) -> Pair:
        return without_reference_prompt(_recorded_pair(self.run))

    @cached_property
    def is_reference(self) -> bool:
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
    def waits_for_judge(self) -> bool:
        """Whether there is an answer, and no scores of it count yet."""
        return not self.values and not self.failed


@dataclass(frozen=True)
class Coverage:
    """Numbers of covered scenarios, and of all.

    A scenario is covered if at least half of the candidates are scored or floored, and at least one is scored. If there
    are no candidates, references count.
    """

    n_by_people: int  # covered by people
    n_automatic: int  # covered by automatic judges
    n_scenarios: int


@dataclass(frozen=True)
class BoardCells:
    """The cells of one board, and counts of the cells excluded from it."""

    cells: tuple[BoardCell, ...]
    rubric: str  # id@sha256; empty if nothing is scored
    judges: tuple[str, ...]
    provisional: bool
    stale: Mapping[Pair, int]  # number of excluded stale runs of each pair
    n_other_conditions: int  # excluded runs under other conditions
    conditions: str  # id of the board's conditions
    other_conditions: tuple[str, ...] = ()  # ids of the other conditions, newest first
    cell_filter: CellFilter = field(default_factory=CellFilter)
    rubric_content: Rubric | None = None  # None if nothing is scored or the rubric is not found
    coverage: Coverage | None = None
    excluded: tuple[Pair, ...] = ()  # pairs left out by the filter

    @property
    def candidate_cells(self) -> list[BoardCell]:
        """The cells that are ranked: all except those of references."""
        return [cell for cell in self.cells if not cell.is_reference]

    @property
    def has_scores(self) -> bool:
        """Whether a person or an automatic judge has scored. Floors do not count."""
        return any(cell.values and not cell.floored for cell in self.cells)

    @property
    def all_unusable(self) -> bool:
        """Whether the candidates have answered, but none of their answers has a usable tip, and nothing is scored."""
        answered = [cell for cell in self.candidate_cells if not cell.failed]
        return bool(answered) and not self.has_scores and all(cell.floored for cell in answered)

    @property
    def only_stale(self) -> frozenset[Pair]:
        """Pairs whose runs are all stale."""
        return frozenset(self.stale) - {cell.pair for cell in self.cells}

    @cached_property
    def finished_scenarios(self) -> frozenset[str]:
        """Scenarios in which no answer of a candidate waits for a judge."""
        candidate_cells = self.candidate_cells
        waiting = {cell.scenario for cell in candidate_cells if cell.waits_for_judge}
        return frozenset({cell.scenario for cell in candidate_cells} - waiting)

    @cached_property
    def silent(self) -> frozenset[Pair]:
        """Candidates without a single answer."""
        candidate_cells = self.candidate_cells
        answered = {cell.pair for cell in candidate_cells if not cell.failed}
        return frozenset({cell.pair for cell in candidate_cells} - answered)


def read_board_cells(store: RunStore, experiment_id: str, cell_filter: CellFilter) -> BoardCells:
    """Read an experiment's cells and select those of the board. Raises NotEnoughData if no cell matches."""
    kind = str(RunKind.CELL)
    if cell_filter.where.get("kind", kind) != kind:
        raise UsageError(
            f"--where kind={cell_filter.where['kind']} excludes every cell; a leaderboard needs kind=cell."
        )
    where = {"kind": kind, **cell_filter.where}
    stored = list(store.read(experiment_id, where=where, texts=(SCORES,)))
    duplicates = duplicate_runs(run for run, _ in stored)
    current = [
        (run, texts) for run, texts in stored if run.tags.get("superseded") != "true" and run.run_id not in duplicates
    ]
    if not current:
        raise NotEnoughData("No cells match, so there is nothing to compare. See `tipbench runs list`.")
    board_cells = select_cells([(run, read_scores(texts.get(SCORES))) for run, texts in current], cell_filter)
    runs = [cell.run for cell in board_cells.cells]
    rubric = find_rubric(store, experiment_id, board_cells.rubric, runs) if board_cells.rubric else None
    if rubric is None:
        return board_cells
    raw_answers: dict[str, str | None] = {}  # by run id; needed only to recompute flags
    if any(cell.flags_are_uncertain for cell in board_cells.cells):
        with_raw = store.read(experiment_id, where=where, texts=(RAW,))
        raw_answers = {run.run_id: texts.get(RAW) for run, texts in with_raw}
    cells = tuple(_apply_rubric(rubric, cell, raw_answers.get(cell.run.run_id)) for cell in board_cells.cells)
    return replace(board_cells, cells=cells, rubric_content=rubric)


def _apply_rubric(rubric: Rubric, cell: BoardCell, raw: str | None) -> BoardCell:
    """Return the cell with values under the board's rubric.

    A cell floored under another rubric gets this rubric's floor. Uncertain flags are recomputed from the raw answer.
    """
    if cell.floored and cell.run.tags.get("scores_rubric") != rubric.tag:
        return replace(cell, values={**cell.values, **floor_values(rubric)})
    n_tips_text = cell.run.params.get("n_tips", "")
    if not cell.flags_are_uncertain or raw is None or not n_tips_text.isdecimal():
        return cell
    n_tips = int(n_tips_text)
    answer = parse_answer(raw, n_tips)
    tips = answer.tips[:n_tips]
    overlong_share = sum(is_overlong(tip.tip, rubric.word_limit) for tip in tips) / max(len(tips), 1)
    return replace(cell, recomputed_flags={"format_ok": float(answer.format_ok), "overlong": overlong_share})


def select_cells(runs: Sequence[tuple[StoredRun, CellScores]], cell_filter: CellFilter) -> BoardCells:
    """Select the cells of the newest conditions that are not stale, with the scores that count."""
    conditions = newest_answered_run(run for run, _ in runs).tags.get("conditions", "")
    same_conditions = [(run, scores) for run, scores in runs if run.tags.get("conditions", "") == conditions]
    other_runs = [run for run, _ in runs if run.tags.get("conditions", "") != conditions]
    other_runs.sort(key=lambda run: (-run.start_ms, run.run_id))
    stale_ids = stale_runs([run for run, _ in same_conditions])
    not_stale = [(run, scores) for run, scores in same_conditions if run.run_id not in stale_ids]
    excluded = [run for run, _ in not_stale if is_excluded(_recorded_pair(run), cell_filter.exclude)]
    excluded_ids = {run.run_id for run in excluded}
    current = [(run, scores) for run, scores in not_stale if run.run_id not in excluded_ids]
    coverage = _coverage(current)
    judge = cell_filter.judge
    provisional_judgements = [each for _, scores in current for each in scores.provisional.values()]
    too_few_by_people = coverage.n_by_people < min(MIN_SCENARIOS, coverage.n_scenarios)
    provisional = cell_filter.provisional or (judge is None and bool(provisional_judgements) and too_few_by_people)
    if provisional:  # of several automatic judges, the latest counts
        latest = max(provisional_judgements, key=lambda judgement: judgement.applied_at, default=None)
        judge = latest.judge if latest is not None else ""  # no judge is named ""
    cells = _drop_older_references([_scored_cell(run, scores, judge, provisional) for run, scores in current])
    for cell in cells:
        if cell.values and COMPOSITE not in cell.values:
            raise CorruptText(
                f"The scores of run {cell.run.run_id} lack the composite, as if changed outside tipbench. "
                "Score the answer again: with `tipbench judge run --with rules`, or by another judge with "
                "`tipbench judge export --all`."
            )
    judges = {name for cell in cells for name in cell.judges}
    if cell_filter.judge is not None and not judges:
        counted = sorted({judgement.judge for _, scores in current for judgement in scores.counted})
        counted_text = f"scores of {', '.join(counted)} count" if counted else "no scores count yet"
        raise NotEnoughData(
            f"No score of {cell_filter.judge} counts here; {counted_text}. See `tipbench judge status`."
        )
    return BoardCells(
        cells=tuple(cells),
        rubric=_rubric_of(cells, provisional=provisional),
        judges=tuple(sorted(judges)),
        provisional=provisional,
        stale=Counter(
            without_reference_prompt(_recorded_pair(run)) for run, _ in same_conditions if run.run_id in stale_ids
        ),
        n_other_conditions=len(other_runs),
        conditions=conditions,
        other_conditions=tuple(dict.fromkeys(run.tags.get("conditions", "") for run in other_runs)),
        cell_filter=cell_filter,
        coverage=coverage,
        # A reference recorded with several prompts is one pair: not excluded if some of its runs are on the board.
        excluded=tuple(
            sorted({without_reference_prompt(_recorded_pair(run)) for run in excluded} - {cell.pair for cell in cells})
        ),
    )


def is_excluded(pair: Pair, names: Sequence[str]) -> bool:
    """Return whether a name (MODEL, MODEL/PROMPT or */PROMPT) matches the pair.

    For a reference, the prompt in MODEL/PROMPT can be any, and in */PROMPT it is the one shown on the board.
    """
    on_board = without_reference_prompt(pair)
    matching_names = (
        pair.model,  # MODEL
        str(pair),  # MODEL/PROMPT
        str(Pair(ALL, on_board.prompt)),  # */PROMPT
    )
    for name in names:
        if name in matching_names:
            return True
        parsed = parse_pair(name)
        if parsed and without_reference_prompt(parsed) == on_board:  # a reference with another prompt
            return True
    return False


def _coverage(runs: Sequence[tuple[StoredRun, CellScores]]) -> Coverage:
    pairs = [_recorded_pair(run) for run, _ in runs]
    candidates = {pair for pair in set(pairs) if not is_reference(pair)}
    rows = candidates or set(pairs)  # references count only if there are no candidates
    scenarios: set[str] = set()
    # For each scenario, the rows judged by people, scored by an automatic judge, and without a usable tip.
    people: dict[str, set[Pair]] = defaultdict(set)
    automatic: dict[str, set[Pair]] = defaultdict(set)
    floored: dict[str, set[Pair]] = defaultdict(set)
    for (run, scores), pair in zip(runs, pairs, strict=True):
        if pair in rows:
            scenario = run.params.get("scenario", "")
            scenarios.add(scenario)
            if run.state == RunState.JUDGED:
                is_floored = run.tags.get("floored") == "true"
                (floored if is_floored else people)[scenario].add(pair)
            if scores.provisional:
                automatic[scenario].add(pair)

    def count_covered(scored: Mapping[str, set[Pair]]) -> int:
        """Count the scenarios in which at least half of the rows are scored or floored, and at least one is scored."""
        return sum(
            2 * len(scored_rows | floored.get(scenario, set())) >= len(rows) for scenario, scored_rows in scored.items()
        )

    return Coverage(count_covered(people), count_covered(automatic), len(scenarios))


def _drop_older_references(cells: list[BoardCell]) -> list[BoardCell]:
    """Drop a reference's older runs in the scenarios in which a newer run is scored.

    Older runs of references were recorded with a prompt version, newer ones without.
    """
    references = [cell for cell in cells if cell.is_reference]
    older = {cell.run.run_id for cell in references if _recorded_pair(cell.run) != cell.pair}
    scored = {(cell.pair, cell.scenario) for cell in references if cell.values and cell.run.run_id not in older}
    return [cell for cell in cells if cell.run.run_id not in older or (cell.pair, cell.scenario) not in scored]


def _scored_cell(run: StoredRun, scores: CellScores, judge: str | None, provisional: bool) -> BoardCell:
    """Return the cell with the scores that count: those of `judge`, or of all people if it is None."""
    judged = run.state == RunState.JUDGED
    rubric = run.tags.get("scores_rubric", "")
    # tipbench records every floored run as judged. If its state was changed outside tipbench, only a provisional board
    # counts it.
    if run.tags.get("floored") == "true" and (judged or provisional):
        return BoardCell(run, run.metrics, rubric=rubric)
    if judge is None:
        if not judged:
            return BoardCell(run, values={})
        return BoardCell(run, run.metrics, rubric=rubric, judges=tuple(each.judge for each in scores.counted))
    judgement = None
    if provisional and run.state != RunState.FAILED:
        judgement = scores.provisional.get(judge)
    elif judged:
        judgement = next((each for each in scores.counted if each.judge == judge), None)
    if judgement is None:
        return BoardCell(run, values={}, flags_are_uncertain=bool(scores.applied))
    return BoardCell(run, {**run.metrics, **judgement.means}, rubric=judgement.rubric, judges=(judgement.judge,))


def _rubric_of(cells: Sequence[BoardCell], *, provisional: bool) -> str:
    """Return the rubric of the scores. Raises MixedRubrics if there are several.

    Floors are not given by a judge, so their rubrics may differ. If there are only floors, the rubric of the newest run
    counts.
    """
    rubrics = Counter(cell.rubric for cell in cells if cell.rubric and not cell.floored)
    if len(rubrics) > 1:
        counts = ", ".join(f"{short_tag(tag)} ({plural(count, 'cell')})" for tag, count in rubrics.most_common())
        rejudge_command = "tipbench judge run" if provisional else "tipbench judge export --rejudge"
        raise MixedRubrics(
            f"The scores were given under different rubrics: {counts}. They cannot be compared. "
            f"Score the older ones again with `{rejudge_command}`."
        )
    if rubrics:
        return next(iter(rubrics))
    floors = [cell.run for cell in cells if cell.rubric and cell.floored]
    return newest_answered_run(floors).tags["scores_rubric"] if floors else ""


def _recorded_pair(run: StoredRun) -> Pair:
    return Pair(run.params.get("model", ""), run.params.get("prompt_version", ""))


@dataclass(frozen=True)
class Focus:
    """The cells to judge first: those of the leader and the rows tied with it, by scenario."""

    pairs: tuple[Pair, ...]
    scenarios: tuple[str, ...]  # most useful first
    run_ids: frozenset[str]


def focus(cells: BoardCells, ranking: Ranking) -> Focus | None:
    """Return the cells to judge next; None if there is no leader, no tie, or no useful cell left to judge.

    One more shared scenario reduces the squared standard error of a paired mean, sd² / n, by sd² / (n(n + 1)). A
    scenario's value is the sum of these reductions over the tied rows that it would newly pair with the leader. Each is
    weighted by the p value of the row's difference, because a high p means undecided.
    """
    leader = ranking.leader
    if leader is None or not ranking.tied:
        return None
    contenders = (leader, *ranking.tied)
    value_of_row: dict[Pair, float] = {}
    for row in ranking.rows:
        diff = row.to_leader
        if diff is None or diff.sd is None or diff.p is None:
            value_of_row[row.pair] = 1.0  # high, because the difference is unknown
        else:
            value_of_row[row.pair] = diff.p * diff.sd**2 / (diff.n * (diff.n + 1))
    scored: dict[str, set[Pair]] = defaultdict(set)
    waiting: dict[str, list[BoardCell]] = defaultdict(list)
    for cell in cells.cells:
        if cell.pair in contenders and cell.values:
            scored[cell.scenario].add(cell.pair)
        elif cell.pair in contenders and cell.waits_for_judge:
            waiting[cell.scenario].append(cell)
    value_of_scenario: dict[str, float] = {}
    for scenario, waiting_cells in waiting.items():
        before = scored[scenario]
        after = before | {cell.pair for cell in waiting_cells}
        if leader in after:
            already_paired = before if leader in before else set()  # with the leader
            newly_paired = [pair for pair in ranking.tied if pair in after and pair not in already_paired]
            value_of_scenario[scenario] = sum(value_of_row[pair] for pair in newly_paired)
    useful = [scenario for scenario, value in value_of_scenario.items() if value > 0]
    useful.sort(key=lambda scenario: (-value_of_scenario[scenario], scenario))
    run_ids = frozenset(cell.run.run_id for scenario in useful for cell in waiting[scenario])
    return Focus(contenders, tuple(useful), run_ids) if useful else None
