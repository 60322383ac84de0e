"""Compares two experiments on the scenarios they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tipbench.compare.cells import BoardCell, BoardCells
from tipbench.compare.gate import check_on_board
from tipbench.compare.leaderboard import COMPOSITE, difference_json, excluded_text, filter_text, pair_json
from tipbench.compare.matrix import Floats, Pair, Score, score_matrix
from tipbench.compare.report import markdown_table, plain_markdown
from tipbench.compare.resampling import step_down
from tipbench.compare.statistics import Difference, paired_difference
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError
from tipbench.text import csv_text, join_names

COLUMNS = ("model", "prompt", "scenarios", "first", "second", "diff", "low", "high", "p")
_CONDITIONS = ("n_tips", "temperature", "diversity", "seed", "num_ctx", "num_predict", "sampling")


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
        """Returns the JSON form specified in PRODUCT.md, plus `mapped_to` if the names differ."""
        return {
            **(pair_json(self.pair) or {}),
            **({"mapped_to": pair_json(self.other)} if self.other else {}),
            "n_scenarios": self.n_scenarios,
            "first": self.first,
            "second": self.second,
            "diff": difference_json(self.difference),
        }

    def row(self) -> list[object]:
        """Returns one row of the table, in the order of COLUMNS."""
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
    notes: tuple[str, ...] = ()  # other differences between the two, and what is excluded

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
            parts.append(f"{rest} of {len(self.pairs)} pairs are not clearly different from {first}")
        if unshared:
            parts.append(f"{unshared} of {len(self.pairs)} pairs have no scenario scored in both")
        sentence = "; ".join(parts)
        verdict = f"{sentence[:1].upper()}{sentence[1:]}."
        return f"Provisional: {verdict}" if self.provisional else verdict

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON form specified in PRODUCT.md."""
        return {
            "experiments": list(self.experiments),
            "pairs": [each.to_json() for each in self.pairs],
            "provisional": self.provisional,
            "notes": list(self.notes),
        }

    def markdown(self) -> str:
        """Returns the verdict, table and notes as Markdown."""
        columns, rows = self.table()
        parts = [
            f"**{plain_markdown(self.verdict)}**",
            markdown_table(columns, rows, text=("model", "prompt")).rstrip(),
            "\n".join(f"- Note: {plain_markdown(note)}" for note in self.notes),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def csv(self) -> str:
        """Returns the table as CSV with unrounded numbers."""
        columns, rows = self.table()
        return csv_text([*columns, "provisional"], [[*row, str(self.provisional).lower()] for row in rows])

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Returns columns and rows; unknown values are None."""
        return list(COLUMNS), [each.row() for each in self.pairs]


def compare_experiments(
    names: tuple[str, str], boards: tuple[BoardCells, BoardCells], mapping: Iterable[tuple[Pair, Pair]] = ()
) -> ExperimentComparison:
    """Compares pairs with the same name and mapped pairs. Raises NotEnoughData if there are none."""
    first, second = boards
    _check_comparable(names, first, second)
    matched = _matched(names, first, second, list(mapping))
    scores = _by_scenario(first), _by_scenario(second)
    scenarios = sorted({key for side in scores for _, key in side})
    columns = [
        tuple(_column(side, pair, scenarios) for side, pair in zip(scores, both, strict=True)) for both in matched
    ]
    differences = np.stack([after - before for before, after in columns], axis=1)
    adjusted = step_down(differences)
    pairs = [
        _pair_of_two(both, before, after, p)
        for both, (before, after), p in zip(matched, columns, adjusted, strict=True)
    ]
    return ExperimentComparison(names, tuple(pairs), first.provisional, tuple(_notes(names, first, second, matched)))


def _check_comparable(names: tuple[str, str], first: BoardCells, second: BoardCells) -> None:
    if first.provisional != second.provisional:
        judged, not_yet = names if second.provisional else names[::-1]
        raise NotEnoughData(
            f"{judged} has judges' scores, {not_yet} has only provisional ones; these cannot be compared. Judge "
            f"{not_yet} first, or pass --provisional to compare the provisional scores of both."
        )
    if first.provisional and first.judges and second.judges and first.judges != second.judges:
        raise NotEnoughData(
            f"The provisional scores of {names[0]} are by {_judges(first)}, those of {names[1]} by {_judges(second)}: "
            "they cannot be compared. Score both with the same judge (`tipbench judge run --with …`)."
        )
    if first.rubric and second.rubric and first.rubric != second.rubric:
        tags = [f"{name} under {_short(board.rubric)}" for name, board in zip(names, (first, second), strict=True)]
        raise MixedRubrics(
            f"The experiments were scored under different rubrics: {' and '.join(tags)}. They cannot be compared. "
            "Score the older one again with `tipbench judge export --rejudge`."
        )


def _matched(
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


_Key = tuple[str, str]  # scenario id and content hash


def _by_scenario(board: BoardCells) -> Mapping[tuple[Pair, _Key], float]:
    """Returns the mean score of each scored (pair, scenario)."""
    keys = {_key_text(_key(cell)): _key(cell) for cell in board.cells}
    scores = [
        Score(cell.pair, _key_text(_key(cell)), cell.persona, cell.values[COMPOSITE])
        for cell in board.cells
        if cell.values
    ]
    matrix = score_matrix(scores)
    return {
        (pair, keys[scenario]): float(matrix.values[row, column])
        for row, scenario in enumerate(matrix.scenarios)
        for column, pair in enumerate(matrix.pairs)
        if matrix.judged[row, column]
    }


def _key(cell: BoardCell) -> _Key:
    return cell.scenario, cell.run.tags.get("scenario_hash", "")


def _key_text(key: _Key) -> str:
    return "\0".join(key)


def _column(scores: Mapping[tuple[Pair, _Key], float], pair: Pair, scenarios: Sequence[_Key]) -> Floats:
    return np.array([scores.get((pair, key), np.nan) for key in scenarios], dtype=np.float64)


def _pair_of_two(both: tuple[Pair, Pair], before: Floats, after: Floats, p: float | None) -> PairComparison:
    shared = ~np.isnan(before) & ~np.isnan(after)
    n = int(shared.sum())
    return PairComparison(
        pair=both[0],
        other=both[1] if both[1] != both[0] else None,
        n_scenarios=n,
        first=float(before[shared].mean()) if n else None,
        second=float(after[shared].mean()) if n else None,
        difference=paired_difference(before, after, p),
    )


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
        before, after = (_params(board) for board in (first, second))
        changed = [f"{name} {before[name]} → {after[name]}" for name in _CONDITIONS if before[name] != after[name]]
        yield f"Collected under different conditions: {', '.join(changed) or 'see `tipbench runs show`'}."
    for name, board, used in zip(names, (first, second), zip(*matched, strict=True), strict=True):
        unmatched = {cell.pair for cell in board.cells} - set(used)
        if unmatched:
            yield f"Only in {name}: {_some(unmatched)}."
        if board.other_conditions:
            yield f"{excluded_text(board.other_conditions, f'of {name} under other conditions')}; see --where."
        if stale := sum(board.stale.values()):
            yield f"{excluded_text(stale, f'of {name} of older model builds, prompts or scenarios')}."


def _params(board: BoardCells) -> Mapping[str, str | None]:
    params = board.cells[0].run.params if board.cells else {}
    return {name: params.get(name) for name in _CONDITIONS}


def _judges(board: BoardCells) -> str:
    return ", ".join(board.judges) or "no one"


def _some(pairs: Iterable[Pair]) -> str:
    return join_names(sorted(pairs), 6) or "none"


def _short(tag: str) -> str:
    name, _, sha256 = tag.partition("@")
    return f"{name}@{sha256[:8]}"
