"""Compare two experiments on the scenarios they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from tipbench.compare.cells import BoardCells
from tipbench.compare.gate import check_on_board
from tipbench.compare.leaderboard import COMPOSITE, CONDITIONS
from tipbench.compare.matrix import Pair, pair_json
from tipbench.compare.report import markdown_table, plain_markdown
from tipbench.compare.statistics import Difference, estimate_json, simultaneous_differences
from tipbench.compare.verdict import excluded_text, filter_text
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError
from tipbench.text import UNCLEAR, csv_text, join_names

COLUMNS = ("model", "prompt", "scenarios", "first", "second", "diff", "low", "high", "p")


@dataclass(frozen=True)
class PairComparison:
    """One pair in both experiments; `other` is its name in the second, None if the same."""

    pair: Pair
    other: Pair | None
    n_scenarios: int  # judged in both
    first: float | None  # mean over these scenarios
    second: float | None
    difference: Difference | None  # second − first

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form specified in PRODUCT.md, plus `mapped_to` if the names differ."""
        return {
            **(pair_json(self.pair) or {}),
            **({"mapped_to": pair_json(self.other)} if self.other else {}),
            "n_scenarios": self.n_scenarios,
            "first": self.first,
            "second": self.second,
            "diff": estimate_json(self.difference),
        }

    def row(self) -> list[object]:
        """Return one row of the table, in the order of COLUMNS."""
        pair, other, diff = self.pair, self.other, self.difference
        model = f"{pair.model} → {other.model}" if other and other.model != pair.model else pair.model
        prompt = f"{pair.prompt} → {other.prompt}" if other and other.prompt != pair.prompt else pair.prompt
        numbers = [diff.mean, diff.ci_low, diff.ci_high, diff.p] if diff else [None] * 4
        return [model, prompt, self.n_scenarios, self.first, self.second, *numbers]


@dataclass(frozen=True)
class ExperimentComparison:
    """The second experiment compared with the first, pair by pair."""

    experiments: tuple[str, str]
    pairs: tuple[PairComparison, ...]
    provisional: bool
    notes: tuple[str, ...] = ()  # how else the two differ, and what was left out

    @property
    def verdict(self) -> str:
        """A sentence listing the pairs that changed."""
        first, second = self.experiments
        changed = [each for each in self.pairs if each.difference and each.difference.separated]
        parts = []
        for word, sign in (("better", 1), ("worse", -1)):
            names = [str(each.pair) for each in changed if each.difference and each.difference.mean * sign > 0]
            if names:
                parts.append(f"{word} in {second}: {', '.join(names)}")
        unshared = sum(each.n_scenarios == 0 for each in self.pairs)
        rest = len(self.pairs) - len(changed) - unshared
        if rest:
            parts.append(f"{rest} of {len(self.pairs)} pairs are {UNCLEAR} from their results in {first}")
        if unshared:
            parts.append(f"{unshared} of {len(self.pairs)} pairs have no scenario scored in both")
        sentence = "; ".join(parts)
        verdict = f"{sentence[:1].upper()}{sentence[1:]}."
        return f"Provisional: {verdict}" if self.provisional else verdict

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form specified in PRODUCT.md."""
        return {
            "experiments": list(self.experiments),
            "pairs": [each.to_json() for each in self.pairs],
            "provisional": self.provisional,
            "notes": list(self.notes),
        }

    def markdown(self) -> str:
        """Return the verdict, table and notes as Markdown."""
        columns, rows = self.table()
        parts = [
            f"**{plain_markdown(self.verdict)}**",
            markdown_table(columns, rows, text=("model", "prompt")).rstrip(),
            "\n".join(f"- Note: {plain_markdown(note)}" for note in self.notes),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def csv(self) -> str:
        """Return the table as CSV with unrounded numbers."""
        columns, rows = self.table()
        return csv_text([*columns, "provisional"], [[*row, str(self.provisional).lower()] for row in rows])

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Return columns and rows; unknown values are None."""
        return list(COLUMNS), [each.row() for each in self.pairs]


def compare_experiments(
    names: tuple[str, str], boards: tuple[BoardCells, BoardCells], mapping: Iterable[tuple[Pair, Pair]] = ()
) -> ExperimentComparison:
    """Compare pairs with the same name and mapped pairs. Raises NotEnoughData if there are none."""
    first, second = boards
    _check_comparable(names, first, second)
    matched = _match_pairs(names, first, second, list(mapping))
    scores = _by_scenario(first), _by_scenario(second)
    scenarios = sorted({key for side in scores for _, key in side})
    values = np.array(  # pairs × experiments × scenarios
        [[[side.get((pair, key), np.nan) for key in scenarios] for side, pair in zip(scores, both, strict=True)]
         for both in matched]
    ).reshape(len(matched), 2, len(scenarios))  # fmt: skip
    differences = simultaneous_differences((values[:, 1] - values[:, 0]).T, np.zeros(len(scenarios)))
    pairs = []
    for (before, after), (first_scores, second_scores), difference in zip(matched, values, differences, strict=True):
        shared = ~np.isnan(first_scores) & ~np.isnan(second_scores)
        first_mean, second_mean = (
            float(scores_of[shared].mean()) if shared.any() else None for scores_of in (first_scores, second_scores)
        )
        other = after if after != before else None
        pairs.append(PairComparison(before, other, int(shared.sum()), first_mean, second_mean, difference))
    return ExperimentComparison(names, tuple(pairs), first.provisional, tuple(_notes(names, first, second, matched)))


def _check_comparable(names: tuple[str, str], first: BoardCells, second: BoardCells) -> None:
    by_people = [board.scored and not board.provisional for board in (first, second)]
    if by_people[0] != by_people[1]:
        judged, not_yet = names if by_people[0] else names[::-1]
        raise NotEnoughData(
            f"{judged} has judges' scores, {not_yet} has none or only provisional ones: they cannot be compared. "
            f"Judge {not_yet} first, or pass --provisional to compare the provisional scores of both."
        )
    if first.provisional and first.judges and second.judges and first.judges != second.judges:
        raise NotEnoughData(
            f"The provisional scores of {names[0]} are by {_judges(first)}, those of {names[1]} by {_judges(second)}: "
            "they cannot be compared. Score both with the same judge (`tipbench judge run --with …`)."
        )
    if first.rubric and second.rubric and first.rubric != second.rubric:
        tags = []
        for name, board in zip(names, (first, second), strict=True):
            rubric, _, sha256 = board.rubric.partition("@")
            tags.append(f"{name} under {rubric}@{sha256[:8]}")
        raise MixedRubrics(
            f"The experiments were scored under different rubrics: {' and '.join(tags)}. They cannot be compared. "
            "Score the older one again with `tipbench judge export --rejudge`."
        )


def _match_pairs(
    names: tuple[str, str], first: BoardCells, second: BoardCells, mapping: Sequence[tuple[Pair, Pair]]
) -> list[tuple[Pair, Pair]]:
    for before, after in mapping:
        check_on_board(first, before)
        check_on_board(second, after)
    wanted = dict(mapping)
    if len(wanted) < len(mapping):
        raise UsageError("--map names a pair of the first experiment twice; map each pair once.")
    in_first, in_second = ({cell.pair for cell in board.cells} for board in (first, second))
    wanted |= {pair: pair for pair in in_first & in_second if pair not in wanted}
    if not wanted:
        raise NotEnoughData(
            f"{names[0]} and {names[1]} have no pair with the same name. Match pairs with --map PAIR1=PAIR2: "
            f"the first has {_some(in_first)}, the second {_some(in_second)}."
        )
    return sorted(wanted.items())


def _by_scenario(board: BoardCells) -> Mapping[tuple[Pair, tuple[str, str]], float]:
    """Return mean scores by pair and scenario; a scenario is identified by its id and content hash."""
    scores: dict[tuple[Pair, tuple[str, str]], list[float]] = defaultdict(list)
    for cell in board.cells:
        if cell.values:
            scenario = cell.scenario, cell.run.tags.get("scenario_hash", "")
            scores[cell.pair, scenario].append(cell.values[COMPOSITE])
    return {key: fmean(found) for key, found in scores.items()}


def _notes(
    names: tuple[str, str], first: BoardCells, second: BoardCells, matched: Sequence[tuple[Pair, Pair]]
) -> Iterable[str]:
    if first.provisional and (first.judges or second.judges):
        yield f"Provisional: scored by {_judges(first if first.judges else second)}, not by people."
    elif first.judges != second.judges:
        yield f"Scored by different judges ({_judges(first)}; {_judges(second)}): differences may come from the judges."
    if filters := filter_text(first.question.where, first.question.judge):
        yield f"{filters[:1].upper()}{filters[1:]}."
    if first.conditions != second.conditions:
        before, after = (board.cells[0].run.params if board.cells else {} for board in (first, second))
        pairs = ((name, before.get(name), after.get(name)) for name in CONDITIONS)
        changed = [f"{name} {one} → {two}" for name, one, two in pairs if one != two]
        yield f"Collected under different conditions: {', '.join(changed) or 'see `tipbench runs show`'}."
    for name, board, used in zip(names, (first, second), zip(*matched, strict=True), strict=True):
        unmatched = {cell.pair for cell in board.cells} - set(used)
        if unmatched:
            yield f"Only in {name}: {_some(unmatched)}."
        if board.other_conditions:
            yield f"{excluded_text(board.other_conditions, f'of {name} under other conditions')}; see --where."
        if stale := sum(board.stale.values()):
            yield f"{excluded_text(stale, f'of {name} of older model builds, prompts or scenarios')}."


def _judges(board: BoardCells) -> str:
    return ", ".join(board.judges) or "no one"


def _some(pairs: Iterable[Pair]) -> str:
    return join_names(sorted(pairs), 6) or "none"
