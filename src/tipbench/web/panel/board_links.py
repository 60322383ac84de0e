"""A board's address: what a URL asks for, the same question written back, and what stands between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from tipbench.compare.matrix import Pair
from tipbench.compare.report import one_line, shortened
from tipbench.record.reading import FILTERS
from tipbench.web.asking import board_ask
from tipbench.web.errors import checked
from tipbench.web.panel.showing import experiment_path, quote_path
from tipbench.web.queries import BoardAsk

API = "/api/bench/leaderboard"
_LABEL = 60  # letters of a name on a chip
_NAMES = {value: name for name, value in FILTERS.items()}
Params = tuple[tuple[str, str], ...]


class _Query(BaseModel):
    """The board's part of a query; a form sends what is not chosen as empty text, which is left out before."""

    model_config = ConfigDict(extra="ignore")

    baseline: str | None = Field(None, max_length=500)
    where: list[str] = Field(default_factory=list, max_length=20)
    judge: str | None = Field(None, max_length=200)
    by: Literal["model", "prompt"] | None = None
    cluster: Literal["persona"] | None = None
    provisional: bool = False


@dataclass(frozen=True)
class Chip:
    """One thing the board is narrowed by, and the address of the board without it."""

    label: str
    value: str
    remove: str


@dataclass(frozen=True)
class BoardUrl:
    """Where a board's pages, pictures and files are; `extra` is the page's own part of the query."""

    experiment: str
    ask: BoardAsk = field(default_factory=BoardAsk)
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> Params:
        """The question as a query has it."""
        return ask_params(self.ask)

    def page(self, **changes: str | None) -> str:
        """The leaderboard, with changes to the page's own part of the query."""
        return self._at(experiment_path(self.experiment), {**self.extra, **changes})

    def asking(self, **changes: Any) -> str:
        """The leaderboard with another question; a baseline is a row of the kind that is ranked, so `by` drops it."""
        dropped: dict[str, Any] = {"baseline": None} if "by" in changes else {}
        return replace(self, ask=replace(self.ask, **dropped, **changes)).page()

    def pair(self, pair: Pair, **extra: str | None) -> str:
        """One row closely."""
        named = {"model": pair.model, "prompt": pair.prompt, **extra}
        return self._at(experiment_path(self.experiment, "pairs"), named)

    def chart(self, kind: str, *, theme: str, narrow: bool, revision: str | None) -> str:
        """A picture; with the revision in its address a browser may keep it."""
        own = {"theme": theme, "narrow": "true" if narrow else None, "revision": revision}
        return self._at(experiment_path(self.experiment, "charts", f"{kind}.svg"), own)

    def api(self, *rest: str, **extra: str | None) -> str:
        """The board over the API: the JSON itself, or a file of it."""
        return self._at("/".join([API, quote_path(self.experiment), *rest]), extra)

    def run(self, run_id: str) -> str:
        """A run's page."""
        return experiment_path(self.experiment, "runs", run_id)

    def chips(self) -> list[Chip]:
        """What the board is narrowed by."""
        ask = self.ask
        chips = [
            Chip(
                _NAMES.get(key, key.removeprefix("params.")),
                value,
                self.asking(where=tuple(each for each in ask.where if each[0] != key)),
            )
            for key, value in ask.where
        ]
        if ask.judge is not None:
            chips.append(Chip("judge", ask.judge, self.asking(judge=None)))
        if ask.cluster is not None:
            chips.append(Chip("means per", ask.cluster, self.asking(cluster=None)))
        if ask.provisional:
            chips.append(Chip("scores", "provisional", self.asking(provisional=False)))
        if ask.baseline is not None:
            chips.append(Chip("baseline", baseline_text(ask), self.asking(baseline=None)))
        shown = [(shortened(one_line(chip.label), _LABEL), shortened(one_line(chip.value), _LABEL)) for chip in chips]
        return [replace(chip, label=label, value=value) for chip, (label, value) in zip(chips, shown, strict=True)]

    def hidden(self, *without: str) -> Params:
        """What a form must carry along so that it changes only its own fields."""
        carried = (*self.params, *self.extra.items())
        return tuple((name, value) for name, value in carried if name not in without)

    def _at(self, path: str, extra: Mapping[str, str | None]) -> str:
        given = [*self.params, *((name, value) for name, value in extra.items() if value is not None)]
        return f"{path}?{urlencode(given, errors='backslashreplace')}" if given else path


def ask_params(ask: BoardAsk) -> Params:
    """A question as the query that asks it; reading it gives the same question."""
    found: list[tuple[str, str]] = [("where", f"{key}={value}") for key, value in ask.where]
    plain = {"judge": ask.judge, "by": ask.by, "cluster": ask.cluster, "baseline": baseline_text(ask) or None}
    found += [(name, value) for name, value in plain.items() if value is not None]
    return (*found, ("provisional", "true")) if ask.provisional else tuple(found)


def baseline_text(ask: BoardAsk) -> str:
    """A baseline as it is asked for; among models or prompts its name alone."""
    pair = ask.baseline
    if pair is None:
        return ""
    return row_text(pair, ask.by)


def row_text(pair: Pair, by: str | None) -> str:
    """A row as `baseline` names it."""
    return {"model": pair.model, "prompt": pair.prompt}.get(by or "", str(pair))


def page_ask(request: Request) -> BoardAsk:
    """What a page's URL asks, as the API reads it; fields that were left empty are not asked for."""
    given: dict[str, Any] = {"where": []}
    for name, value in _filled(request.query_params.multi_items()):
        if name == "where":
            given["where"].append(value)
        else:
            given[name] = value
    return board_ask(**checked(_Query, given, "query").model_dump())


PageAsk = Annotated[BoardAsk, Depends(page_ask)]


def tidy_url(request: Request, path: str) -> str | None:
    """The same address without the fields a form sent empty; None when there are none."""
    given = request.query_params.multi_items()
    kept = list(_filled(given))
    if len(kept) == len(given):
        return None
    return f"{path}?{urlencode(kept, errors='backslashreplace')}" if kept else path


def _filled(given: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """A typed filter may also be `KEY=`: that is a value, and an empty one."""
    return ((name, value) for name, value in given if value.strip())
