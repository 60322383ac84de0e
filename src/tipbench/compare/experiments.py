"""Compare two experiments on the scenarios they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from tipbench.compare.cells import COMPOSITE, BoardCells, short_tag
from tipbench.compare.gate import check_on_board
from tipbench.compare.leaderboard import CONDITIONS
from tipbench.compare.matrix import Pair
from tipbench.compare.report import markdown_table, plain_markdown
from tipbench.compare.statistics import Difference, estimate_json, simultaneous_differences
from tipbench.compare.verdict import NOT_CLEARLY_DIFFERENT, excluded_text, filter_text
from tipbench.errors import MixedRubrics, NotEnoughData, UsageError
from tipbench.text import capitalized, csv_text, join_names

COLUMNS = ("model", "prompt", "scenarios", "first", "second", "diff", "low", "high", "p")


@dataclass(frozen=True)
class PairComparison:
    """One pair in both experiments."""

    pair: Pair
    mapped_to: Pair | None  # the pair in the second experiment, if --map gives it another name
    n_scenarios: int  # scenarios judged in both experiments
    first_mean: float | None  # mean composite over these scenarios; None if there are none
    second_mean: float | None
    difference: Difference | None  # second − first

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; it has `mapped_to` only if the names differ."""
        mapped_to = {"mapped_to": self.mapped_to.to_json()} if self.mapped_to else {}
        return {
            **self.pair.to_json(),
            **mapped_to,
            "n_scenarios": self.n_scenarios,
            "first": self.first_mean,
            "second": self.second_mean,
            "diff": estimate_json(self.difference),
        }

    def table_row(self) -> list[object]:
        """Return the values of the table, in the order of COLUMNS."""
        first, second, diff = self.pair, self.mapped_to or self.pair, self.difference
        model = first.model if first.model == second.model else f"{first.model} → {second.model}"
        prompt = first.prompt if first.prompt == second.prompt else f"{first.prompt} → {second.prompt}"
        numbers = [diff.mean, diff.ci_low, diff.ci_high, diff.p] if diff else [None] * 4
        return [model, prompt, self.n_scenarios, self.first_mean, self.second_mean, *numbers]


@dataclass(frozen=True)
class ExperimentComparison:
    """The second experiment compared with the first, pair by pair."""

    experiments: tuple[str, str]
    pairs: tuple[PairComparison, ...]
    provisional: bool
    notes: tuple[str, ...] = ()  # for example on different conditions, and on excluded pairs and runs

    @property
    def verdict(self) -> str:
        """A sentence that lists better and worse pairs, and counts the others."""
        first, second = self.experiments
        better = [str(each.pair) for each in self.pairs if each.difference and each.difference.better]
        worse = [str(each.pair) for each in self.pairs if each.difference and each.difference.worse]
        parts = []
        if better:
            parts.append(f"better in {second}: {', '.join(better)}")
        if worse:
            parts.append(f"worse in {second}: {', '.join(worse)}")
        n_unshared = sum(each.n_scenarios == 0 for each in self.pairs)
        n_unclear = len(self.pairs) - len(better) - len(worse) - n_unshared
        if n_unclear:
            pairs = f"{n_unclear} of {len(self.pairs)} pairs"
            parts.append(f"{pairs} are {NOT_CLEARLY_DIFFERENT} from their results in {first}")
        if n_unshared:
            parts.append(f"{n_unshared} of {len(self.pairs)} pairs have no scenario scored in both")
        verdict = f"{capitalized('; '.join(parts))}."
        return f"Provisional: {verdict}" if self.provisional else verdict

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
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
            markdown_table(columns, rows, left_aligned=("model", "prompt")).rstrip(),
            "\n".join(f"- Note: {plain_markdown(note)}" for note in self.notes),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def csv(self) -> str:
        """Return the table as CSV with unrounded numbers."""
        columns, rows = self.table()
        return csv_text([*columns, "provisional"], [[*row, str(self.provisional).lower()] for row in rows])

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Return columns and rows; unknown values are None."""
        return list(COLUMNS), [each.table_row() for each in self.pairs]


def compare_experiments(
    names: tuple[str, str], boards: tuple[BoardCells, BoardCells], mapping: Iterable[tuple[Pair, Pair]] = ()
) -> ExperimentComparison:
    """Compare the pairs of `mapping` and the pairs that both boards have. Raises NotEnoughData if there are none."""
    first, second = boards
    _check_comparable(names, first, second)
    matched = _match_pairs(names, first, second, list(mapping))
    first_means, second_means = _scenario_means(first), _scenario_means(second)
    scenarios = sorted({scenario for _, scenario in (*first_means, *second_means)})
    # One row per pair and one column per scenario; NaN if the pair is not judged in the scenario.
    first_scores = np.array(
        [[first_means.get((pair, scenario), np.nan) for scenario in scenarios] for pair, _ in matched]
    )
    second_scores = np.array(
        [[second_means.get((pair, scenario), np.nan) for scenario in scenarios] for _, pair in matched]
    )
    changes = (second_scores - first_scores).T  # one column per pair; all are tested against 0 as one family
    differences = simultaneous_differences(changes, against=np.zeros(len(scenarios)))
    pairs = []
    for row, ((first_pair, second_pair), difference) in enumerate(zip(matched, differences, strict=True)):
        shared = ~np.isnan(first_scores[row]) & ~np.isnan(second_scores[row])
        pairs.append(
            PairComparison(
                pair=first_pair,
                mapped_to=second_pair if second_pair != first_pair else None,
                n_scenarios=int(shared.sum()),
                first_mean=float(first_scores[row][shared].mean()) if shared.any() else None,
                second_mean=float(second_scores[row][shared].mean()) if shared.any() else None,
                difference=difference,
            )
        )
    return ExperimentComparison(
        experiments=names,
        pairs=tuple(pairs),
        # If only one board is provisional, `_check_comparable` has made sure that the other has floor scores only.
        provisional=first.provisional or second.provisional,
        notes=tuple(_notes(names, first, second, matched)),
    )


def _check_comparable(names: tuple[str, str], first: BoardCells, second: BoardCells) -> None:
    """Raise NotEnoughData or MixedRubrics if the scores of the boards cannot be compared."""
    first_by_people = first.has_scores and not first.provisional
    second_by_people = second.has_scores and not second.provisional
    if first_by_people != second_by_people:
        judged, unjudged = names if first_by_people else (names[1], names[0])
        raise NotEnoughData(
            f"{judged} has judges' scores, {unjudged} has none or only provisional ones: they cannot be compared. "
            f"Judge {unjudged} first, or pass --provisional to compare the provisional scores of both."
        )
    if first.provisional and first.judges and second.judges and first.judges != second.judges:
        raise NotEnoughData(
            f"The provisional scores of {names[0]} are by {_judges_text(first)}, those of {names[1]} "
            f"by {_judges_text(second)}: they cannot be compared. "
            "Score both with the same judge (`tipbench judge run --with …`)."
        )
    if first.rubric and second.rubric and first.rubric != second.rubric:
        first_tag, second_tag = short_tag(first.rubric), short_tag(second.rubric)
        raise MixedRubrics(
            f"The experiments were scored under different rubrics: {names[0]} under {first_tag} and {names[1]} "
            f"under {second_tag}. They cannot be compared. "
            "Score the older one again with `tipbench judge export --rejudge`."
        )


def _match_pairs(
    names: tuple[str, str], first: BoardCells, second: BoardCells, mapping: Sequence[tuple[Pair, Pair]]
) -> list[tuple[Pair, Pair]]:
    """Return the pairs to compare, each as (pair in the first experiment, pair in the second)."""
    for first_pair, second_pair in mapping:
        check_on_board(first, first_pair)
        check_on_board(second, second_pair)
    matched = dict(mapping)
    if len(matched) < len(mapping):
        raise UsageError("--map names a pair of the first experiment twice; map each pair once.")
    in_first = {cell.pair for cell in first.cells}
    in_second = {cell.pair for cell in second.cells}
    matched |= {pair: pair for pair in in_first & in_second if pair not in matched}
    if not matched:
        raise NotEnoughData(
            f"{names[0]} and {names[1]} have no pair with the same name. Match pairs with --map PAIR1=PAIR2: "
            f"the first has {_pairs_text(in_first)}, the second {_pairs_text(in_second)}."
        )
    return sorted(matched.items())


def _scenario_means(board: BoardCells) -> Mapping[tuple[Pair, tuple[str, str]], float]:
    """Return mean composites by pair and scenario. A scenario is identified by its id and content hash."""
    scores: dict[tuple[Pair, tuple[str, str]], list[float]] = defaultdict(list)
    for cell in board.cells:
        if cell.values:
            scenario = cell.scenario, cell.run.tags.get("scenario_hash", "")
            scores[cell.pair, scenario].append(cell.values[COMPOSITE])
    return {key: fmean(composites) for key, composites in scores.items()}


def _notes(
    names: tuple[str, str], first: BoardCells, second: BoardCells, matched: Sequence[tuple[Pair, Pair]]
) -> Iterable[str]:
    if (first.provisional or second.provisional) and (first.judges or second.judges):
        yield f"Provisional: scored by {_judges_text(first if first.judges else second)}, not by people."
    elif first.judges != second.judges:
        judges = f"{_judges_text(first)}; {_judges_text(second)}"
        yield f"Scored by different judges ({judges}): differences may come from the judges."
    # Both boards were read with the same filter.
    if filters := filter_text(first.cell_filter.where, first.cell_filter.judge):
        yield f"{capitalized(filters)}."
    if first.conditions != second.conditions:
        first_params = first.cells[0].run.params if first.cells else {}
        second_params = second.cells[0].run.params if second.cells else {}
        changed = [
            f"{name} {first_params.get(name)} → {second_params.get(name)}"
            for name in CONDITIONS
            if first_params.get(name) != second_params.get(name)
        ]
        yield f"Collected under different conditions: {', '.join(changed) or 'see `tipbench runs show`'}."
    first_pairs, second_pairs = {pair for pair, _ in matched}, {pair for _, pair in matched}
    for name, board, compared in ((names[0], first, first_pairs), (names[1], second, second_pairs)):
        unmatched = {cell.pair for cell in board.cells} - compared
        if unmatched:
            yield f"Only in {name}: {_pairs_text(unmatched)}."
        if board.n_other_conditions:
            excluded = excluded_text(board.n_other_conditions, f"of {name} under other conditions")
            yield f"{excluded}; see --where."
        if n_stale := sum(board.stale.values()):
            excluded = excluded_text(n_stale, f"of {name} of older model builds, prompts or scenarios")
            yield f"{excluded}."


def _judges_text(board: BoardCells) -> str:
    return ", ".join(board.judges) or "no one"


def _pairs_text(pairs: Iterable[Pair]) -> str:
    return join_names(sorted(pairs), 6) or "none"
