"""Hidden items of a sheet: controls presented as answers, and repeats of items the judge has already scored.

Also makes new controls from tips on which several judges agree.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import comb, exp, log
from statistics import median_low
from typing import Any, NamedTuple

from tipbench.generate.parsing import Tip, is_overlong
from tipbench.judge.drift import MIN_CONTROLS
from tipbench.judge.material import AnsweredCell, EligibleCell
from tipbench.judge.sheet import SheetTip, TipItem, random_item_id
from tipbench.judge.sheet_store import ItemKind, SheetEntry, StoredSheet, control_id
from tipbench.plan.rubric import Control, Rubric, Scale

CONTROL_TIPS = 40  # minimum per sheet; on a sheet with fewer cells, one per cell
CONTROL_ANSWERS = 10  # minimum per sheet, because tips of one answer are scored alike; fewer on small sheets
MAX_CONTROL_TIPS = 60  # per sheet
MAX_REPEATS = 8  # per sheet
MIN_CELLS_FOR_REPEATS = 10  # on a smaller sheet nothing is repeated

_ONE_CONTROL = 1000  # the unit of target shares and excesses is a thousandth of a control
# Target share of each step of a five-step scale. More threes would hide a judge who always scores 3.
_FIVE_STEP_SHARES = (150, 200, 300, 200, 150)
_OWN_SHOWING_WEIGHT = 10_000  # of a showing to the sheet's judge; a showing to another judge has the weight 1
_MAX_SPARE = 4  # spare controls per control needed; limits the time for a very large pool

Source = str | tuple[str, ...]  # what an item shows: a run (its id), or controls (their ids)
Occurrences = frozenset[tuple[int, bool]]  # of an item on earlier sheets: (number of the sheet, whether scored there)


@dataclass(frozen=True)
class JudgeHistory:
    """The items that the judge of a new sheet and other judges have seen before."""

    judge: str | None = None
    shown: Sequence[str] = ()  # ids of the controls shown to this judge in any experiment, once for each showing
    scored: Sequence[EligibleCell] = ()  # cells that this judge has scored under the sheet's rubric
    sheets: Sequence[StoredSheet] = ()  # the experiment's sheets of all judges under this rubric, oldest first


def compose(
    cells: Sequence[EligibleCell],
    cards: Mapping[str, Mapping[str, Any]],
    controls: Sequence[Control],
    rubric: Rubric,
    history: JudgeHistory,
    *,
    sheet_id: str,
    rng: random.Random,
) -> tuple[SheetEntry, ...]:
    """Return the cells, repeats and controls of a sheet in their final order. `cards` are by scenario.

    Comparing the sheets of several judges must not reveal the controls. So a control answer of an earlier sheet returns
    with the same probability as real answers that were on the same sheets, and new control answers are added in
    proportion to new real answers. A new control answer imitates a real answer to its scenario, its donor: it has as
    many tips, with or without rationales.
    """
    real = sorted(cells, key=lambda cell: cell.run_id)
    repeats = _choose_repeats(real, history.scored, rng)
    returning = _returning_controls([*real, *repeats], controls, history, rng)
    returning_ids = {id_ for entry in returning for id_ in entry.controls}
    unused = [control for control in controls if control_id(control) not in returning_ids]
    earlier_entries = [entry for stored in history.sheets for entry in stored.entries]
    showings = Counter({id_: _OWN_SHOWING_WEIGHT * times for id_, times in Counter(history.shown).items()})
    showings.update(id_ for entry in earlier_entries for id_ in entry.controls)
    earlier_runs = {entry.run_id for entry in earlier_entries}
    possible_donors = [cell for cell in real if cell.run_id not in earlier_runs]
    tip_counts = [len(cell.tips) for cell in real if cell.tips]
    n_wanted = n_control_tips(len(real), tips_per_answer=sum(tip_counts) / max(1, len(tip_counts)))
    n_new = round(n_wanted * len(possible_donors) / len(real)) if real else 0
    if len(returning_ids) + n_new < min(MIN_CONTROLS, n_wanted):
        # Too few to measure the judge, as after a change of the suite's controls.
        possible_donors, n_new = real, n_wanted - len(returning_ids)
    pools = _scenario_pools(possible_donors, repeats, unused, showings, rng)
    donors_by_pool = _draw_all_donors(pools, n_new, rng)
    n_controls_by_pool = [sum(len(donor.tips) for donor in donors) for donors in donors_by_pool]
    controls_by_pool = _choose_controls(pools, n_controls_by_pool, rubric)

    def make_item(scenario: str, tips: Sequence[Tip], *, format_ok: bool) -> TipItem:
        sheet_tips = tuple(SheetTip(tip.tip, tip.rationale, is_overlong(tip.tip, rubric.word_limit)) for tip in tips)
        return TipItem("", cards[scenario], format_ok, sheet_tips)  # without an id until the order is known

    entries = [
        SheetEntry(make_item(cell.scenario, cell.tips, format_ok=cell.format_ok), kind, cell.run_id)
        for kind, group in ((ItemKind.CELL, real), (ItemKind.REPEAT, repeats))
        for cell in group
    ]
    entries += [
        replace(entry, item=make_item(entry.item.card["id"], entry.item.tips, format_ok=entry.item.format_ok))
        for entry in returning
    ]
    for donors, chosen in zip(donors_by_pool, controls_by_pool, strict=True):
        rng.shuffle(chosen)
        next_controls = iter(chosen)
        for donor in donors:
            answer_controls = list(islice(next_controls, len(donor.tips)))
            tips = [
                Tip(control.tip, control.rationale if donor_tip.rationale else "")
                for control, donor_tip in zip(answer_controls, donor.tips, strict=True)
            ]
            # A well-formed answer has all rationales, but a control of a user's own suite may have none.
            format_ok = donor.format_ok and all(tip.rationale for tip in tips)
            entries.append(
                SheetEntry(
                    make_item(donor.scenario, tips, format_ok=format_ok),
                    ItemKind.CONTROL,
                    controls=tuple(map(control_id, answer_controls)),
                    agreed_scores=tuple(control.scores for control in answer_controls),
                )
            )
    rng.shuffle(entries)
    return tuple(
        replace(entry, item=replace(entry.item, id=random_item_id(sheet_id, position, rng)))
        for position, entry in enumerate(entries)
    )


def n_control_tips(n_cells: int, tips_per_answer: float) -> int:
    """Return how many control tips to hide among this many cells."""
    n_answers = min(CONTROL_ANSWERS, n_cells / 4)  # one for every four cells on small sheets
    tips_of_answers = min(MAX_CONTROL_TIPS, round(n_answers * tips_per_answer))
    return max(min(CONTROL_TIPS, n_cells), tips_of_answers)


def _returning_controls(
    answers: Sequence[EligibleCell], controls: Sequence[Control], history: JudgeHistory, rng: random.Random
) -> list[SheetEntry]:
    """Draw control answers of earlier sheets, each with the probability that a comparable real answer returns.

    A real answer is comparable if it has the same scenario, was on the same earlier sheets, and was scored or left open
    there like the control answer.
    """
    current_scores = {control_id(control): control.scores for control in controls}
    on_new_sheet, shown_to_judge = {cell.run_id for cell in answers}, set(history.shown)
    occurrences_of: dict[Source, set[tuple[int, bool]]] = defaultdict(set)
    entry_of: dict[Source, SheetEntry] = {}
    for sheet_number, stored in enumerate(history.sheets):
        for entry in stored.entries:
            source = entry.run_id or entry.controls
            occurrences_of[source].add((sheet_number, entry.item.id in stored.scores))
            entry_of[source] = entry
    runs_of: dict[tuple[str, Occurrences], set[str]] = defaultdict(set)  # by scenario and occurrences
    for source, entry in entry_of.items():
        if isinstance(source, str):
            runs_of[entry.item.card["id"], frozenset(occurrences_of[source])].add(source)
    judge = history.judge
    sheets_of_judge = {number for number, stored in enumerate(history.sheets) if judge and stored.owner == judge}
    drawn: list[SheetEntry] = []
    drawn_ids: set[str] = set()
    for ids in sorted(source for source in entry_of if isinstance(source, tuple)):
        entry = entry_of[ids]
        comparable_runs = runs_of[entry.item.card["id"], frozenset(occurrences_of[ids])]
        probability = len(comparable_runs & on_new_sheet) / max(1, len(comparable_runs))  # 0 without comparable runs
        if rng.random() >= probability:
            continue
        outdated = [current_scores.get(id_) for id_ in ids] != list(entry.agreed_scores)
        new_to_judge = sheets_of_judge.isdisjoint(sheet_number for sheet_number, _ in occurrences_of[ids])
        shown_in_another_answer = new_to_judge and not shown_to_judge.isdisjoint(ids)
        if not outdated and not shown_in_another_answer and drawn_ids.isdisjoint(ids):
            drawn.append(entry)
            drawn_ids.update(ids)
    return drawn


def _choose_repeats(
    real: Sequence[EligibleCell], scored: Sequence[EligibleCell], rng: random.Random
) -> list[EligibleCell]:
    """Sample cells already scored by the judge, from the sheet's scenarios: about a tenth as many as new cells."""
    scenarios, on_sheet = {cell.scenario for cell in real}, {cell.run_id for cell in real}
    possible = {cell.run_id: cell for cell in scored if cell.scenario in scenarios and cell.run_id not in on_sheet}
    wanted = min(MAX_REPEATS, round(len(real) / 10)) if len(real) >= MIN_CELLS_FOR_REPEATS else 0
    return rng.sample([possible[run_id] for run_id in sorted(possible)], min(wanted, len(possible)))


# Donors


@dataclass(frozen=True)
class _ScenarioPool:
    """A scenario of the sheet, with its donors and controls."""

    donors: Sequence[EligibleCell]  # real answers whose shape a control answer may have
    max_control_answers: int  # as many as there are possible donors and repeats
    controls: Sequence[Control]  # least often shown first, ties in random order
    showings: Sequence[int]  # how often each of `controls` was shown; weighted, see _OWN_SHOWING_WEIGHT


class _Option(NamedTuple):
    """Sums up all ways to choose a given number of controls, those least often shown, from one or several pools."""

    showings: int  # sum of the controls' showings, the same for all of these ways
    log_ways: float  # logarithm of the number of ways, weighted by the probability of their donors


def _scenario_pools(
    possible_donors: Sequence[EligibleCell],
    repeats: Sequence[EligibleCell],
    controls: Sequence[Control],
    showings: Mapping[str, int],
    rng: random.Random,
) -> list[_ScenarioPool]:
    donors, ids_of = defaultdict(list), defaultdict(list)  # by scenario
    for cell in possible_donors:
        if cell.tips:
            donors[cell.scenario].append(cell)
    control_of = {control_id(control): control for control in controls}
    order = {id_: (showings.get(id_, 0), rng.random()) for id_ in sorted(control_of)}
    for id_ in sorted(order, key=order.__getitem__):
        ids_of[control_of[id_].scenario].append(id_)
    n_answers_of = Counter(cell.scenario for cell in (*possible_donors, *repeats))
    return [
        _ScenarioPool(
            donors=donors[scenario],
            max_control_answers=n_answers_of[scenario],
            controls=[control_of[id_] for id_ in ids_of[scenario]],
            showings=[showings.get(id_, 0) for id_ in ids_of[scenario]],
        )
        for scenario in sorted(donors.keys() & ids_of.keys())
    ]


def _draw_all_donors(pools: Sequence[_ScenarioPool], wanted: int, rng: random.Random) -> list[list[EligibleCell]]:
    """Draw each scenario's donors, with `wanted` tips in total.

    If this total is not possible, the next larger possible one is used, or else the largest. A scenario needs as many
    controls as its donors have tips, and uses those least often shown. The draw is random among the sets of donors for
    which these controls have the fewest showings in total. This is dynamic programming over the scenarios: the first
    loop counts the ways to reach each total, and the second one draws.
    """
    largest = max((len(donor.tips) for pool in pools for donor in pool.donors), default=1)
    bound = wanted + largest - 1  # with more tips, one donor could be left out and `wanted` still be reached
    all_log_chances = [_log_chances(pool, bound) for pool in pools]
    options = [_options(pool, log_chances) for pool, log_chances in zip(pools, all_log_chances, strict=True)]
    # Element i: the option for each total number of tips that is possible with the last i scenarios.
    tables = [{0: _Option(showings=0, log_ways=0.0)}]
    for scenario_options in reversed(options):
        sums: dict[int, list[_Option]] = defaultdict(list)
        for n_tips, option in scenario_options.items():
            for n_later_tips, later_option in tables[-1].items():
                if n_tips + n_later_tips <= bound:
                    sums[n_tips + n_later_tips].append(_combine(option, later_option))
        table = {}
        for total, possible in sums.items():
            least = min(option.showings for option in possible)
            log_ways = [option.log_ways for option in possible if option.showings == least]
            table[total] = _Option(least, _log_sum(log_ways))
        tables.append(table)
    totals = tables[-1]
    enough = [total for total in totals if total >= wanted]
    remaining = min(enough) if enough else max(totals)  # tips still to be drawn
    drawn = []
    later_tables = reversed(tables[:-1])  # for each scenario, the table of the scenarios after it
    for pool, log_chances, scenario_options, later in zip(pools, all_log_chances, options, later_tables, strict=True):
        combined = {
            n_tips: _combine(option, later[remaining - n_tips])
            for n_tips, option in scenario_options.items()
            if remaining - n_tips in later
        }
        least = min(option.showings for option in combined.values())
        log_ways_of = {n_tips: option.log_ways for n_tips, option in combined.items() if option.showings == least}
        n_tips = _draw_key(log_ways_of, rng)
        drawn.append(_draw_donors(pool, log_chances, n_tips, rng))
        remaining -= n_tips
    return drawn


def _log_chances(pool: _ScenarioPool, bound: int) -> list[dict[int, float]]:
    """Return a list. Its element k has, by total number of tips, the log probability that k donors have this total."""
    most_tips = min(bound, len(pool.controls))
    n_donors_by_size = Counter(len(donor.tips) for donor in pool.donors)  # size: number of tips
    log_chances = [{0: 0.0}]
    while len(log_chances) <= pool.max_control_answers and log_chances[-1]:
        terms: dict[int, list[float]] = defaultdict(list)
        for total, log_chance in log_chances[-1].items():
            for size, n_donors in n_donors_by_size.items():
                if total + size <= most_tips:
                    terms[total + size].append(log_chance + log(n_donors / len(pool.donors)))
        log_chances.append({total: _log_sum(logs) for total, logs in terms.items()})
    return log_chances


def _options(pool: _ScenarioPool, log_chances: Sequence[Mapping[int, float]]) -> dict[int, _Option]:
    """Return the option for each number of tips that the pool's donors can have in total."""
    options = {}
    for n_tips in sorted({total for chances in log_chances for total in chances}):
        log_chance = _log_sum([chances[n_tips] for chances in log_chances if n_tips in chances])
        n_fixed, n_tied = _fixed_and_tied(pool, n_tips)
        options[n_tips] = _Option(sum(pool.showings[:n_tips]), log_chance + log(comb(n_tied, n_tips - n_fixed)))
    return options


def _fixed_and_tied(pool: _ScenarioPool, count: int) -> tuple[int, int]:
    """Return how many controls are in every choice of the `count` least shown, and how many tie for the rest."""
    if not count:
        return 0, 0
    limit = pool.showings[count - 1]
    return sum(times < limit for times in pool.showings), sum(times == limit for times in pool.showings)


def _combine(one: _Option, other: _Option) -> _Option:
    return _Option(one.showings + other.showings, one.log_ways + other.log_ways)


def _draw_donors(
    pool: _ScenarioPool, log_chances: Sequence[Mapping[int, float]], n_tips: int, rng: random.Random
) -> list[EligibleCell]:
    """Draw donors independently, on the condition that they have `n_tips` tips in total."""
    n_donors = _draw_key({k: chances[n_tips] for k, chances in enumerate(log_chances) if n_tips in chances}, rng)
    donors = []
    for n_donors_after in reversed(range(n_donors)):  # donors still to be drawn after this one
        log_chance_of: dict[int, float] = {}  # by index of the donor
        for index, donor in enumerate(pool.donors):
            n_tips_after = n_tips - len(donor.tips)
            if n_tips_after in log_chances[n_donors_after]:
                log_chance_of[index] = log_chances[n_donors_after][n_tips_after]
        chosen = pool.donors[_draw_key(log_chance_of, rng)]
        donors.append(chosen)
        n_tips -= len(chosen.tips)
    return donors


def _draw_key(log_weights: Mapping[int, float], rng: random.Random) -> int:
    """Draw a key; its weight is exp(log weight)."""
    largest = max(log_weights.values())  # subtracted below, so that exp does not overflow
    weights = [exp(value - largest) for value in log_weights.values()]
    [key] = rng.choices(list(log_weights), weights)
    return key


def _log_sum(logs: Sequence[float]) -> float:
    """Return log(sum(exp(x))) without overflow."""
    largest = max(logs)
    return largest + log(sum(exp(value - largest) for value in logs))


# Choice of controls


class _PoolChoice(NamedTuple):
    """The controls chosen from a pool, and others that may be swapped in."""

    chosen: list[Control]
    n_fixed: int  # the first `n_fixed` of the chosen ones are never swapped
    spare: list[Control]


def _choose_controls(pools: Sequence[_ScenarioPool], counts: Sequence[int], rubric: Rubric) -> list[list[Control]]:
    """Choose from each pool as many controls as its count, those shown least often; returns them by pool.

    Controls that were shown equally often are swapped to balance the agreed scores over the steps of each scale.
    """
    choices = []
    for pool, count in zip(pools, counts, strict=True):
        n_fixed, n_tied = _fixed_and_tied(pool, count)
        spare_end = min(n_fixed + n_tied, count + _MAX_SPARE * count)
        choices.append(_PoolChoice(list(pool.controls[:count]), n_fixed, list(pool.controls[count:spare_end])))
    balance = _Balance(rubric.scales, [control for choice in choices for control in choice.chosen])
    improving = True
    while improving:
        n_swaps = sum(balance.improve(choice) for choice in choices)
        improving = n_swaps > 0
    return [choice.chosen for choice in choices]


class _Balance:
    """By how much the number of chosen controls exceeds its target, for each step of each scale."""

    def __init__(self, scales: Sequence[Scale], controls: Sequence[Control]) -> None:
        self._names = [scale.name for scale in scales]
        self._excess = {
            (scale.name, step): -len(controls) * share
            for scale in scales
            for step, share in enumerate(_target_shares(scale), start=scale.min)
        }
        for control in controls:
            self._add(control, _ONE_CONTROL)

    def improve(self, choice: _PoolChoice) -> int:
        """Swap chosen and spare controls if that reduces the sum of squared excesses. Returns the number of swaps."""
        chosen, spare = choice.chosen, choice.spare
        n_swaps = 0
        for i in range(choice.n_fixed, len(chosen)):
            for j in range(len(spare)):
                old, new = chosen[i].scores, spare[j].scores
                changed = [name for name in self._names if new[name] != old[name]]
                # The change of the sum of squared excesses, divided by 2 * _ONE_CONTROL.
                growth = sum(
                    self._excess[name, new[name]] - self._excess[name, old[name]] + _ONE_CONTROL for name in changed
                )
                if growth < 0:
                    self._add(chosen[i], -_ONE_CONTROL)
                    self._add(spare[j], _ONE_CONTROL)
                    chosen[i], spare[j] = spare[j], chosen[i]
                    n_swaps += 1
        return n_swaps

    def _add(self, control: Control, amount: int) -> None:
        for name in self._names:
            self._excess[name, control.scores[name]] += amount


def _target_shares(scale: Scale) -> tuple[int, ...]:
    """Return each step's target share of the agreed scores in thousandths: most in the middle, enough at the ends."""
    n_steps = scale.max - scale.min + 1
    if n_steps == len(_FIVE_STEP_SHARES):
        return _FIVE_STEP_SHARES
    heights = [2 + min(step, n_steps - 1 - step) for step in range(n_steps)]
    return tuple(round(_ONE_CONTROL * height / sum(heights)) for height in heights)


# New controls, for a team's own suite

MIN_JUDGES = 2  # judges who agree on a tip
MAX_PER_SCENARIO = 10  # new controls per scenario
_MAX_APART = 1  # steps between the judges' scores of a tip on any scale


def agreed_controls(
    cells: Iterable[AnsweredCell],
    rubric: Rubric,
    *,
    min_judges: int = MIN_JUDGES,
    per_scenario: int = MAX_PER_SCENARIO,
    exclude: Iterable[str] = (),
) -> list[Control]:
    """Return new controls: tips scored by at least `min_judges` judges, who all agree within one step on every scale.

    Only counted scores are used; the agreed score is their (lower) median. If a scenario has more than `per_scenario`
    such tips, those returned are evenly spaced by composite. `exclude`: tips to leave out, such as existing controls.
    """
    used = set(exclude)
    by_scenario: dict[str, list[Control]] = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: cell.run.run_id):
        counted = [judgement for judgement in cell.scores.counted if judgement.rubric == rubric.tag]
        if len(counted) < min_judges:
            continue
        scenario, _ = cell.scenario_key
        scores_by_tip = zip(*(judgement.tips for judgement in counted), strict=True)
        # The lengths differ only if another program has changed the run.
        for tip, scores in zip(cell.tips, scores_by_tip, strict=False):
            by_scale = {name: [score.scores[name] for score in scores] for name in rubric.scale_names}
            agreed = all(max(values) - min(values) <= _MAX_APART for values in by_scale.values())
            if tip.tip in used or not agreed:
                continue
            used.add(tip.tip)
            agreed_scores = {name: median_low(values) for name, values in by_scale.items()}
            why = f"Agreed by {len(counted)} judges."
            by_scenario[scenario].append(Control(scenario, tip.tip, tip.rationale, agreed_scores, why))
    return [
        control for _, group in sorted(by_scenario.items()) for control in _evenly_spread(group, rubric, per_scenario)
    ]


def _evenly_spread(controls: Sequence[Control], rubric: Rubric, count: int) -> list[Control]:
    """Return at most `count` controls, evenly spaced in the order of their composite."""
    ranked = sorted(
        controls, key=lambda each: (rubric.composite(each.scores, format_ok=True, overlong=False), each.tip)
    )
    if len(ranked) <= count:
        return ranked
    last, intervals = len(ranked) - 1, max(1, count - 1)
    return [ranked[round(number * last / intervals)] for number in range(count)]


def controls_toml(controls: Sequence[Control], rubric: Rubric) -> str:
    """Return the content of a controls file."""
    lines = [f"# Private controls, scored under {rubric.tag}. Keep this file from judges.", ""]
    for control in controls:
        scores = ", ".join(f"{name} = {control.scores[name]}" for name in rubric.scale_names)
        texts = {"scenario": control.scenario, "tip": control.tip, "rationale": control.rationale}
        lines.append("[[controls]]")
        lines += [f"{name} = {_toml_string(text)}" for name, text in texts.items()]
        lines += [f"scores = {{ {scores} }}", f"why = {_toml_string(control.why)}", ""]
    return "\n".join(lines)


def _toml_string(text: str) -> str:
    """Return a TOML string. It is like a JSON string, except that TOML forbids DEL and lone surrogates."""
    encodable = text.encode("utf-8", "replace").decode()
    return json.dumps(encodable, ensure_ascii=False).replace("\x7f", "\\u007f")
