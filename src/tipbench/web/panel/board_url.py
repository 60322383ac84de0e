"""Board URLs: parsing and building their query parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from tipbench.compare.matrix import Pair
from tipbench.record.reader import FILTERS
from tipbench.text import short_name
from tipbench.web.board_query import parse_board_query
from tipbench.web.errors import checked
from tipbench.web.panel.template_filters import experiment_path, quote_path
from tipbench.web.queries import BoardQuery

API = "/api/bench/leaderboard"
_LABEL = 60  # characters of a name on a chip
_NAMES = {value: name for name, value in FILTERS.items()}
Params = tuple[tuple[str, str], ...]


class _Query(BaseModel):
    """The board's query parameters; empty form fields are removed before validation."""

    model_config = ConfigDict(extra="ignore")

    baseline: str | None = Field(None, max_length=500)
    where: list[str] = Field(default_factory=list, max_length=20)
    judge: str | None = Field(None, max_length=200)
    by: Literal["model", "prompt"] | None = None
    cluster: Literal["persona"] | None = None
    provisional: bool = False


@dataclass(frozen=True)
class Chip:
    """An active filter and the URL of the board without it."""

    label: str
    value: str
    remove: str


@dataclass(frozen=True)
class BoardUrl:
    """URLs of a board's pages, charts and files; `extra` holds parameters of the page itself."""

    experiment: str
    ask: BoardQuery = field(default_factory=BoardQuery)
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> Params:
        """The board query as URL parameters."""
        return ask_params(self.ask)

    def page(self, **changes: str | None) -> str:
        """Returns the URL of the leaderboard page, with changes to `extra`."""
        return self._at(experiment_path(self.experiment), {**self.extra, **changes})

    def asking(self, **changes: Any) -> str:
        """Returns the URL with changes to the board query; changing `by` changes the rows, so it drops the baseline."""
        dropped: dict[str, Any] = {"baseline": None} if "by" in changes else {}
        return replace(self, ask=replace(self.ask, **dropped, **changes)).page()

    def pair(self, pair: Pair, **extra: str | None) -> str:
        """Returns the URL of a row's page."""
        named = {"model": pair.model, "prompt": pair.prompt, **extra}
        return self._at(experiment_path(self.experiment, "pairs"), named)

    def chart(self, kind: str, *, theme: str, narrow: bool, revision: str | None) -> str:
        """Returns the URL of a chart; it contains the revision, so that browsers can cache the chart."""
        own = {"theme": theme, "narrow": "true" if narrow else None, "revision": revision}
        return self._at(experiment_path(self.experiment, "charts", f"{kind}.svg"), own)

    def api(self, *rest: str, **extra: str | None) -> str:
        """Returns the URL of the board in the API: the JSON, or a download."""
        return self._at("/".join([API, quote_path(self.experiment), *rest]), extra)

    def run(self, run_id: str) -> str:
        """Returns the URL of a run's page."""
        return experiment_path(self.experiment, "runs", run_id)

    def chips(self) -> list[Chip]:
        """Returns the active filters."""
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
        shown = [(short_name(chip.label, _LABEL), short_name(chip.value, _LABEL)) for chip in chips]
        return [replace(chip, label=label, value=value) for chip, (label, value) in zip(chips, shown, strict=True)]

    def hidden(self, *without: str) -> Params:
        """Returns the parameters a form must include as hidden fields, so that it changes only its own."""
        carried = (*self.params, *self.extra.items())
        return tuple((name, value) for name, value in carried if name not in without)

    def _at(self, path: str, extra: Mapping[str, str | None]) -> str:
        given = [*self.params, *((name, value) for name, value in extra.items() if value is not None)]
        return f"{path}?{urlencode(given, errors='backslashreplace')}" if given else path


def ask_params(ask: BoardQuery) -> Params:
    """Returns the URL parameters of a board query; `page_ask` parses them back to the same query."""
    found: list[tuple[str, str]] = [("where", f"{key}={value}") for key, value in ask.where]
    plain = {"judge": ask.judge, "by": ask.by, "cluster": ask.cluster, "baseline": baseline_text(ask) or None}
    found += [(name, value) for name, value in plain.items() if value is not None]
    return (*found, ("provisional", "true")) if ask.provisional else tuple(found)


def baseline_text(ask: BoardQuery) -> str:
    """Returns the baseline as a URL parameter, empty if none; only its name on a board by model or prompt."""
    pair = ask.baseline
    if pair is None:
        return ""
    return row_text(pair, ask.by)


def row_text(pair: Pair, by: str | None) -> str:
    """Returns a row in the form of the `baseline` parameter."""
    return {"model": pair.model, "prompt": pair.prompt}.get(by or "", str(pair))


def page_ask(request: Request) -> BoardQuery:
    """Parses a page's query parameters like the API; empty form fields are ignored."""
    given: dict[str, Any] = {"where": []}
    for name, value in _filled(request.query_params.multi_items()):
        if name == "where":
            given["where"].append(value)
        else:
            given[name] = value
    return parse_board_query(**checked(_Query, given, "query").model_dump())


PageAsk = Annotated[BoardQuery, Depends(page_ask)]


def tidy_url(request: Request, path: str) -> str | None:
    """Returns the URL without empty form fields, or None if there are none."""
    given = request.query_params.multi_items()
    kept = list(_filled(given))
    if len(kept) == len(given):
        return None
    return f"{path}?{urlencode(kept, errors='backslashreplace')}" if kept else path


def _filled(given: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Drops empty parameters; a filter `KEY=` is not empty, it matches an empty value."""
    return ((name, value) for name, value in given if value.strip())
