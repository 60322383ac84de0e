"""The options of a leaderboard, from the command line or a URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tipbench.compare.cells import BoardCells, CellFilter, without_reference_prompt
from tipbench.compare.leaderboard import Leaderboard, read_leaderboard
from tipbench.compare.matrix import ALL, Pair, Side, parse_pair
from tipbench.errors import InvalidOption
from tipbench.judge.check import normalize_name, unmet_name_requirement
from tipbench.record.reader import parse_filter
from tipbench.record.store import Experiment, RunStore

Where = tuple[tuple[str, str], ...]  # keys and values of --where


@dataclass(frozen=True)
class BoardQuery:
    """Options of a board. Hashable, because the panel caches boards by their options."""

    where: Where = ()
    judge: str | None = None
    provisional: bool = False
    baseline: Pair | None = None
    by: Side | None = None
    cluster: Literal["persona"] | None = None
    exclude: tuple[str, ...] = ()  # MODEL, MODEL/PROMPT or */PROMPT

    @property
    def cell_filter(self) -> CellFilter:
        """The options that select cells."""
        return CellFilter(dict(self.where), self.judge, self.provisional, self.exclude)

    def read(self, store: RunStore, experiment: Experiment) -> tuple[Leaderboard, BoardCells]:
        """Return the board and its cells. Raises NotEnoughData if no cells match."""
        return read_leaderboard(
            store, experiment, self.cell_filter, baseline=self.baseline, by=self.by, cluster=self.cluster
        )


def board_query(
    *,
    baseline: str | None = None,
    where: Sequence[str] = (),
    judge: str | None = None,
    by: Side | None = None,
    cluster: Literal["persona"] | None = None,
    provisional: bool = False,
    exclude: Sequence[str] = (),
) -> BoardQuery:
    """Parse the options of a board. Raises InvalidOption for an invalid one."""
    if judge is not None and provisional:
        raise InvalidOption(
            "judge", "cannot be combined with provisional: a judge's scores are not provisional. Choose one."
        )
    return BoardQuery(
        where=parse_filters(where),
        judge=judge_name(judge),
        provisional=provisional,
        baseline=_parse_baseline(baseline, by),
        by=by,
        cluster=cluster,
        exclude=tuple(sorted({name.strip() for name in exclude} - {""})),
    )


def parse_filters(texts: Sequence[str], other_filters: Mapping[str, str] | None = None) -> Where:
    """Return `other_filters` and the KEY=VALUE texts. Raises InvalidOption if a key has two different values."""
    filters = dict(other_filters or {})
    for key, value in map(parse_filter, texts):
        earlier = filters.setdefault(key, value)
        if earlier != value:
            raise InvalidOption("where", f"has two values for {key}, {earlier} and {value}; no cell matches both.")
    return tuple(filters.items())


def parse_pair_option(text: str, option: str) -> Pair:
    """Parse MODEL/PROMPT. Raises InvalidOption. The PROMPT of a reference is ignored: references have none."""
    pair = parse_pair(text.strip())
    if pair is None:
        raise InvalidOption(option, f"takes MODEL/PROMPT (got {text[:120]!r}), for example qwen2.5:0.5b/v1.")
    return without_reference_prompt(pair)


def judge_name(text: str | None) -> str | None:
    """Return the normalized name of a judge, or None without a name. Raises InvalidOption."""
    if text is None:
        return None
    if requirement := unmet_name_requirement(text):
        raise InvalidOption("judge", f"takes {requirement} (got {text[:80]!r}).")
    return normalize_name(text)


def _parse_baseline(text: str | None, by: Side | None) -> Pair | None:
    """Parse MODEL/PROMPT; on a board of models MODEL or MODEL/*; on a board of prompts PROMPT or */PROMPT."""
    if text is None:
        return None
    if by == "model":
        return Pair(text.strip().removesuffix(f"/{ALL}"), ALL)
    if by == "prompt":
        return Pair(ALL, text.strip().removeprefix(f"{ALL}/"))
    return parse_pair_option(text, "baseline")
