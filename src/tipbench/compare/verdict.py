"""Sentences about a board: the verdict, the next judging task, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tipbench.compare.cells import BoardCells
from tipbench.compare.duels import DuelTable
from tipbench.compare.matrix import OTHER_SIDE, Pair, shared_by_all
from tipbench.compare.ranking import NextLook
from tipbench.plan.design import LEVELS, MIN_SCENARIOS, least_scenarios
from tipbench.text import capitalized, join_names, percent, plural

if TYPE_CHECKING:  # the board has its verdict as a property, so it imports this module
    from tipbench.compare.leaderboard import Leaderboard

# Words for rows without a significant difference.
TIED = "tied"  # in tables
NOT_CLEARLY_DIFFERENT = "not clearly different"  # in sentences
WORDING = {"TIED": TIED, "NOT_CLEARLY_DIFFERENT": NOT_CLEARLY_DIFFERENT}  # for templates
_MAX_NAMES = 3  # names in a sentence
_MAX_MISSING = 5  # missing scenarios in a sentence
_MAX_LISTED = 12  # names in a list
_MIN_CHANCE = 0.05  # a smaller chance to decide is not shown as a number


def verdict_text(board: Leaderboard) -> str:
    """Return the verdict. It never calls a tied row worse: the leader has the highest mean, perhaps only by chance."""
    sentences = [leader_sentence(board)]
    if board.ranking.leader is not None:
        sentences += _qualifications(board)
    duels = board.duels
    if isinstance(duels, DuelTable) and duels.winner is not None:
        sentences.append(f"{duels.winner} wins the duels between the {TIED} rows; duels do not change ranks.")
    elif isinstance(duels, DuelTable) and duels.absent:
        absent = join_names(duels.absent, _MAX_NAMES)
        sentences.append(f"The duels between the {TIED} rows have no winner yet: no duels of {absent}.")
    text = " ".join(sentences)
    if board.provisional and board.judges:
        return f"Provisional (scored by {', '.join(board.judges)}): {text}"
    return text


def _qualifications(board: Leaderboard) -> Iterator[str]:
    ranking = board.ranking
    if board.fragile:
        yield "This is fragile: it could change if the leader gave unusable answers more often than seen so far."
    if (to_reference := ranking.to_reference) is not None and to_reference.separated is not None:
        state = f"{NOT_CLEARLY_DIFFERENT} from"
        if to_reference.separated:
            state = "clearly better than" if to_reference.better else "clearly worse than"
        yield f"The leader is {state} the reference {ranking.references[0].pair.model}."
    if ranking.tied_ranked:
        yield _outlook(board)
    if board.unplanned_reason:
        yield f"Not a planned look: {board.unplanned_reason}."
    if ranking.ahead:
        where = f"the {ranking.look.at} scenarios of the look" if ranking.look else "the scenarios that both have"
        yield f"Clearly better than the leader in {where}, though not overall: {join_names(ranking.ahead, _MAX_NAMES)}."
    if ranking.unranked:
        yield unranked_sentence(board)
    higher = [row.pair for row in ranking.unranked if row.to_leader is not None and row.to_leader.mean > 0]
    if higher:
        yield f"Not ranked, but ahead of the leader in the scenarios that both have: {join_names(higher, _MAX_NAMES)}."
    if ranking.silent and not ranking.decided:  # if decided, `leader_sentence` counts them
        yield f"{plural(len(ranking.silent), board.row_noun)} gave no answer: {join_names(ranking.silent, _MAX_NAMES)}."
    if board.judges and not board.provisional:
        yield f"Judged by {join_names(board.judges, _MAX_NAMES)}."
    only_judge = ", the only judge," if len(board.judges) == 1 else ""
    concerns = board.judging.concerns
    sentences = [f"{judge}{only_judge} {concerns[judge]}" for judge in board.judges if judge in concerns]
    if sentences:
        yield f"{'; '.join(sentences[:_MAX_NAMES])}."


def leader_sentence(board: Leaderboard) -> str:
    """Return the sentence naming the leader and the rows tied with it, or why there is no leader."""
    ranking = board.ranking
    leader, look = ranking.leader, ranking.look
    if leader is None:
        return _no_leader(board)
    over_scenarios = f"over {plural(ranking.n_units, board.unit)}"
    if look is not None and look.of > 1:
        at = "" if look.at == ranking.n_units else f" at {look.at}"
        over_scenarios += f" (look {look.number} of {look.of}{at})"
    if len(ranking.ranked) == 1:
        return f"{leader} is the only ranked {board.row_noun}, {over_scenarios}: there is nothing to compare it with."
    if ranking.decided:
        n_stale = sum(row.is_stale for row in ranking.rows)
        left_out = []
        if ranking.silent:
            left_out.append(f"{plural(len(ranking.silent), board.row_noun)} that gave no answer")
        if n_stale:
            left_out.append(f"{plural(n_stale, board.row_noun)} of an older build, prompt or scenario")
        without = f", not counting {' and '.join(left_out)}" if left_out else ""
        return f"{leader} leads {over_scenarios}; every other {board.row_noun} is clearly worse{without}."
    leaders = [row.pair for row in ranking.rows if row.rank == 1]
    if len(leaders) > 1:
        others = [pair for pair in ranking.tied_ranked if pair not in leaders]
        rest = ": their mean scores are equal"
        if others:
            rest = f" and are {NOT_CLEARLY_DIFFERENT} from {join_names(others, _MAX_NAMES)}"
        return f"{join_names(leaders, _MAX_NAMES)} share the lead {over_scenarios}{rest}."
    if not ranking.tied_ranked:
        rest = "" if ranking.ahead else f"; every other ranked {board.row_noun} is clearly worse"
        return f"{leader} leads {over_scenarios}{rest}."
    tied = join_names(ranking.tied_ranked, _MAX_NAMES)
    return f"{leader} leads {over_scenarios}, but is {NOT_CLEARLY_DIFFERENT} from {tied}."


def unranked_sentence(board: Leaderboard) -> str:
    """Return the sentence on rows judged in too few scenarios to be ranked."""
    unranked = board.ranking.unranked
    counts = [row.estimate.n if row.estimate else 0 for row in unranked]
    fewest, most = min(counts), max(counts)
    judged = plural(most, board.unit) if fewest == most else f"{fewest} to {plural(most, board.unit)}"
    names = join_names((row.pair for row in unranked), _MAX_NAMES)
    return f"Not decided: {names} (judged in {judged}) may still lead."


def _no_leader(board: Leaderboard) -> str:
    ranking, noun = board.ranking, board.row_noun
    missing = ranking.missing_scores
    if board.obstacle:
        return f"Nothing can be ranked: {board.obstacle}."
    if not ranking.rows:
        if ranking.references:
            return f"Nothing to rank: only the reference {ranking.references[0].pair.model} is recorded."
        return "Nothing is recorded yet."
    if all(row.is_stale for row in ranking.rows):
        pairs = plural(len(ranking.rows), noun)
        return f"Nothing to rank: all runs of {pairs} are of an older build, prompt or scenario."
    if missing is None:
        return f"Not judged yet: {plural(len(ranking.rows), noun)} without scores."
    closest = f"the closest, {missing.closest}, lacks {join_names(missing.lacks, _MAX_MISSING)}"
    if missing.n_core:
        needed = "all" if missing.n_needed == missing.n_core else str(missing.n_needed)
        core = f"{plural(missing.n_core, 'core scenario')} (judged for half of the {noun}s)"
        return f"No {noun} is judged in {needed} of the {core}; {closest}."
    return f"No scenario is judged for half of the {plural(missing.n_pairs, noun)}; {closest}."


def _outlook(board: Leaderboard) -> str:
    """Return the sentence on the next look, or on why there is none."""
    ranking = board.ranking
    next_look = ranking.next_look
    if next_look is not None:
        look = next_look.look
        name = f"Next look ({look.number} of {look.of}) at {plural(look.at, 'scenario')}"
        return f"{name}: {next_look_task(next_look)}." if next_look.n_answers else f"{name}."
    if ranking.too_few_units:
        n_with_looks = least_scenarios(
            LEVELS[-1]
        )  # the strictest significance level: that of a design with the most looks
        needed = f"at least {MIN_SCENARIOS} needed ({n_with_looks} with several looks)"
        return f"Too few {board.unit}s: {ranking.n_units}; {needed}."
    if ranking.look is not None and ranking.look.of > 1:
        return "Too close to call at the last look."
    if ranking.units_needed is not None:
        return f"About {plural(ranking.units_needed, board.unit)} in all would decide, if the lead is as estimated."
    return "Too close to call."


def next_look_task(next_look: NextLook) -> str:
    """Return the judging that the next look needs, as text."""
    return judging_task(next_look.n_answers, next_look.n_scenarios, minutes=next_look.minutes, power=next_look.power)


def judging_task(
    n_answers: int,
    n_scenarios: int = 0,
    *,
    minutes: float | None = None,
    power: float | None = None,
    unit: str = "scenario",
) -> str:
    """Return a task as text: "judge 8 more scenarios (72 answers), about 25 minutes, 62 % chance to decide".

    A number that is 0 is left out. `power` is the chance that the ranking is decided afterwards. None means unknown.
    """
    if not n_scenarios:
        task = f"judge {plural(n_answers, 'more answer')}"
    elif n_answers:
        task = f"judge {plural(n_scenarios, f'more {unit}')} ({plural(n_answers, 'answer')})"
    else:
        task = f"judge {plural(n_scenarios, f'more {unit}')}"
    if minutes is not None:
        task += f", about {plural(max(1, round(minutes)), 'minute')}"
    if power is None:
        return f"{task}; the chance to decide is not known yet"
    if power < _MIN_CHANCE:
        return f"{task}; probably too close to call even then"
    return f"{task}, {percent(min(power, 0.999))} chance to decide"  # never 100 %: the power is an estimate


def board_notes(board: Leaderboard, cells: BoardCells) -> Iterator[str]:
    """Yield the notes on a board, most important first."""
    ranking, by = board.ranking, board.by
    flags = {flag for standing in board.standings for flag in standing.flags}
    if not cells.has_scores:
        if cells.all_unusable:
            yield unusable_text(sum(not cell.failed for cell in cells.candidate_cells))
        elif any(cell.waits_for_judge for cell in cells.cells):
            yield "Not judged yet. Create a sheet for a judge with `tipbench judge export`."
    elif board.provisional:
        note = f"Provisional: scored by {', '.join(board.judges)}, not by people."
        if (coverage := board.coverage) and coverage.n_by_people:
            note += f" People have judged {coverage.n_by_people} of {plural(coverage.n_scenarios, 'scenario')}."
        yield note
    if filters := filter_text(board.where, board.judge):
        yield f"{capitalized(filters)}."
    if cells.n_other_conditions:
        excluded = excluded_text(cells.n_other_conditions, "under other conditions")
        options = " or ".join(f"--where conditions={each}" for each in cells.other_conditions[:_MAX_NAMES])
        yield f"{excluded}; {options or '--where'} to show them."
    if n_stale := sum(cells.stale.values()):
        yield f"{excluded_text(n_stale, 'of older model builds, prompts or scenarios')} (flag: stale)."
    if by is not None:
        pairs = {cell.pair for cell in cells.candidate_cells}
        shared = shared_by_all(pairs, by)
        other_side = OTHER_SIDE[by]
        unshared = sorted({getattr(pair, other_side) for pair in pairs} - shared)
        if not shared:
            yield f"No {other_side} is shared by all {by}s, so the {by}s cannot be ranked."
        elif unshared:
            yield f"Excluded from the means by {by}, because not all {by}s have it: {', '.join(unshared)}."
    if cells.excluded:
        yield f"Left out with --exclude: {join_names(cells.excluded, _MAX_LISTED)}."
    if "incomplete" in flags and ranking.leader:
        needed = plural(min(MIN_SCENARIOS, ranking.n_units), board.unit)
        yield f"Rows that share fewer than {needed} with the leader are not ranked (flag: incomplete)."
    if "adjusted" in flags:
        yield "Some rows lack scenarios: ranks use means adjusted for the missing ones (flag: adjusted)."
    has_p_best = any(row.p_best is not None for row in ranking.rows)
    if has_p_best and ranking.too_few_units:  # then `best_text` hides it
        yield f"P(best) needs at least {MIN_SCENARIOS} {board.unit}s and is not shown."
    if len(board.hosts) > 1:
        yield f"Latency and tokens/s come from {len(board.hosts)} hosts and are not comparable across hosts."


def unusable_text(n_answers: int) -> str:
    """Return the sentence for a board on which no answer has a usable tip."""
    return f"None of {plural(n_answers, 'answer')} has a usable tip, so there is nothing to judge."


def filter_text(where: Mapping[str, str], judge: str | None) -> str:
    """Return the filters as text; empty if there are none."""
    filters = join_names((f"{key}={value}" for key, value in where.items()), _MAX_LISTED)
    parts = []
    if filters:
        parts.append(f"only cells with {filters}")
    if judge:
        parts.append(f"only {judge}'s scores")
    return "; ".join(parts)


def excluded_text(n_runs: int, which: str) -> str:
    """Return "3 runs of older prompts are excluded", where `which` is "of older prompts"."""
    return f"{plural(n_runs, 'run')} {which} {'is' if n_runs == 1 else 'are'} excluded"


def unknown_pair_message(pair: Pair, available: Sequence[Pair], cells: BoardCells) -> str:
    """Return the error message for a pair that is not on the board, with the available pairs."""
    if n_stale := cells.stale.get(pair, 0):
        runs = f"all {n_stale} runs of it are" if n_stale > 1 else "its only run is"
        return f"The pair {pair} is not on this board: {runs} of an older build or prompt. Collect it again."
    message = f"The pair {pair} is not on this board. Available: {join_names(available, _MAX_LISTED)}."
    if cells.n_other_conditions:
        message += f" {excluded_text(cells.n_other_conditions, 'under other conditions')}."
    return message
