"""What one can choose on the leaderboard's page: the baseline, and what the board is narrowed by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tipbench.compare.leaderboard import Leaderboard
from tipbench.compare.report import one_line, shortened
from tipbench.judge.status import JudgingStatus
from tipbench.web.board_queries import Facets
from tipbench.web.panel.board_links import BoardUrl, Params, baseline_text, row_text
from tipbench.web.panel.standings_view import LONGEST
from tipbench.web.queries import BoardAsk

_FACETS = (("params.model", "Model"), ("params.prompt_version", "Prompt"), ("params.persona", "Persona"))
_RARE = (("params.suite", "Suite"), ("conditions", "Conditions"))


@dataclass(frozen=True)
class Choice:
    """A field to choose from; the first option is to choose nothing."""

    id: str
    name: str
    label: str
    options: tuple[tuple[str, str], ...]  # value, words
    value: str


@dataclass(frozen=True)
class Options:
    """The forms of the page: each carries along what it does not change."""

    baseline: Choice | None
    baseline_hidden: Params
    filters: tuple[Choice, ...]
    filters_hidden: Params
    cluster: bool
    provisional: bool
    has_provisional: bool
    views: tuple[tuple[str, str, str], ...]  # key, words, address: what is ranked
    view: str


def options_of(url: BoardUrl, board: Leaderboard | None, found: Facets, judging: JudgingStatus) -> Options:
    """What can be chosen, with what is chosen now."""
    ask = url.ask
    filters = (*_filters(ask, found), *_judges(ask, judging))
    offered = {key for key, _ in (*_FACETS, *_RARE)} & {each.id for each in filters}
    others = tuple(("where", f"{key}={value}") for key, value in ask.where if key not in offered)
    views = (
        ("pair", "Pairs", url.asking(by=None)),
        ("model", "Models", url.asking(by="model")),
        ("prompt", "Prompts", url.asking(by="prompt")),
    )
    return Options(
        baseline=_baseline(ask, board) if board else None,
        baseline_hidden=url.hidden("baseline"),
        filters=filters,
        filters_hidden=(*others, *url.hidden("where", "judge", "cluster", "provisional")),
        cluster=ask.cluster is not None,
        provisional=ask.provisional,
        has_provisional=any(each.provisional and each.cells for each in judging.judges),
        views=views,
        view=ask.by or "pair",
    )


def _baseline(ask: BoardAsk, board: Leaderboard) -> Choice | None:
    rows = [row_text(standing.pair, board.by) for standing in board.standings]
    if len(rows) < 2:
        return None
    return Choice("baseline", "baseline", "Baseline", _listed("none: the leader only", rows), baseline_text(ask))


def _filters(ask: BoardAsk, found: Facets) -> Iterable[Choice]:
    values = {
        "params.model": found.models,
        "params.prompt_version": found.prompts,
        "params.persona": found.personas,
        "params.suite": found.suites,
    }
    chosen = dict(ask.where)
    for key, label in _FACETS:
        if values[key] and (len(values[key]) > 1 or key in chosen):
            yield _where(key, label, [(each, _short(each)) for each in values[key]], chosen.get(key))
    if len(found.suites) > 1:
        yield _where(
            "params.suite", "Suite", [(each, _short(each)) for each in found.suites], chosen.get("params.suite")
        )
    if len(found.conditions) > 1:
        counted = [(each, f"{_short(each)} ({n} cells)") for each, n in found.conditions]
        yield _where("conditions", "Conditions", counted, chosen.get("conditions"), "the newest")


def _where(key: str, label: str, values: Iterable[tuple[str, str]], chosen: str | None, nothing: str = "all") -> Choice:
    options = [("", nothing), *((f"{key}={value}", words) for value, words in values)]
    now = "" if chosen is None else f"{key}={chosen}"
    if now not in dict(options):  # a value that is not there is shown as what it is
        options.append((now, _short(chosen or "")))
    return Choice(key, "where", label, tuple(options), now)


def _judges(ask: BoardAsk, judging: JudgingStatus) -> Iterable[Choice]:
    names = [each.judge for each in judging.judges if not each.provisional and each.cells]
    if ask.judge is not None and ask.judge not in names:
        names.append(ask.judge)
    if len(names) > 1 or ask.judge is not None:
        yield Choice("judge", "judge", "Judge", _listed("all who count", names), ask.judge or "")


def _listed(nothing: str, values: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return (("", nothing), *((value, _short(value)) for value in values))


def _short(text: str) -> str:
    return shortened(one_line(text), LONGEST)
