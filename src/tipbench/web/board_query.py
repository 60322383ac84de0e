"""Board queries: filters, baseline and judge from the URL, for the API and the pages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Query, Request
from pydantic import validate_call

from tipbench.charts import THEMES, to_svg
from tipbench.compare.charts import CHARTS, ChartKind
from tipbench.compare.matrix import ALL, Pair
from tipbench.record.reader import FILTERS, cells
from tipbench.record.store import Experiment, RunStore
from tipbench.text import short_name
from tipbench.web.errors import invalid_at, options_at
from tipbench.web.queries import Queries, experiment_path, quote_path, revision
from tipbench.workflows.board import BoardQuery, Where, board_query, parse_filters

_LONGEST = 500


def where_of(texts: Sequence[str], named: Mapping[str, str] | None = None) -> Where:
    """Parse KEY=VALUE texts into a filter, in the given order. Raises Invalid if a key has two values."""
    with options_at("query"):
        return parse_filters([text[:_LONGEST] for text in texts], named)


def parse_board_query(
    baseline: Annotated[
        str | None, Query(max_length=_LONGEST, description="MODEL/PROMPT: also show differences to this pair.")
    ] = None,
    where: Annotated[
        list[str], Query(max_length=20, description="KEY=VALUE: any tag, or params.NAME; repeatable.")
    ] = [],  # noqa: B006 - FastAPI copies it
    judge: Annotated[str | None, Query(max_length=200, description="Only this judge's scores.")] = None,
    by: Annotated[
        Literal["model", "prompt"] | None, Query(description="Rank models or prompts instead of pairs.")
    ] = None,
    cluster: Annotated[
        Literal["persona"] | None,
        Query(description="Cluster by persona; generalises to new personas. Needs more scenarios."),
    ] = None,
    provisional: Annotated[
        bool, Query(description="Use the provisional judge's scores, even if people have judged.")
    ] = False,
    exclude: Annotated[
        list[str], Query(max_length=100, description="MODEL, MODEL/PROMPT or */PROMPT: leave these out; repeatable.")
    ] = [],  # noqa: B006 - FastAPI copies it
) -> BoardQuery:
    """Parse the options of `tipbench compare` from the query string."""
    with options_at("query"):
        return board_query(
            baseline=baseline,
            where=[text[:_LONGEST] for text in where],
            judge=judge,
            by=by,
            cluster=cluster,
            provisional=provisional,
            exclude=[name[:_LONGEST] for name in exclude],
        )


BoardQueryParam = Annotated[BoardQuery, Depends(parse_board_query)]
_OPTIONS = frozenset(signature(parse_board_query).parameters)
_validated_query = validate_call(parse_board_query)  # with the same limits as FastAPI


ThemeName = Literal["light", "dark"]
# Charts are laid out for Arial. An SVG image cannot use the page's style sheet, so it lists fonts of equal width.
_FONTS = (
    '<style>text{font-family:Arial,"Liberation Sans",Arimo,Helvetica,"Nimbus Sans","DejaVu Sans Condensed",sans-serif}'
    "</style>"
)
# A page requests three charts at once; drawing one at a time leaves a core for other requests.
one_drawing = threading.Lock()


@dataclass(frozen=True)
class ChartQuery:
    """A chart of a board."""

    kind: ChartKind
    theme: ThemeName = "light"
    narrow: bool = False


@dataclass(frozen=True)
class Facets:
    """Values that the cells of an experiment can be filtered by, regardless of the current filter."""

    cells: int
    models: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    personas: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    conditions: tuple[tuple[str, int], ...] = ()  # (conditions, number of cells), newest first


def facets(queries: Queries, store: RunStore, experiment: Experiment) -> Facets:
    """Return the recorded models, prompts, personas, suites and conditions."""
    view = queries.view(store, experiment)

    def read() -> Facets:
        runs = cells(view, experiment.experiment_id, {})

        def values(param: str) -> tuple[str, ...]:
            return tuple(sorted({run.params[param] for run in runs if run.params.get(param)}))

        return Facets(
            cells=len(runs),
            models=values("model"),
            prompts=values("prompt_version"),
            personas=values("persona"),
            suites=values("suite"),
            conditions=tuple(Counter(run.tags["conditions"] for run in runs if "conditions" in run.tags).items()),
        )

    return queries.small.get(("facets", experiment.experiment_id), revision(experiment), read)


def chart(
    queries: Queries, store: RunStore, experiment: Experiment, query: BoardQuery, picture: ChartQuery
) -> str | None:
    """Return a chart of the board as SVG, cached per revision; None if the board has no chart of this kind."""
    board = queries.board(store, experiment, query)
    draw = partial(CHARTS[picture.kind].draw, board, THEMES[picture.theme], narrow=picture.narrow, titled=False)

    def make() -> str | None:
        with one_drawing:
            made = draw()
            return None if made is None else to_svg(made, THEMES[picture.theme]).replace(">", f">{_FONTS}", 1)

    return queries.charts.get((experiment.experiment_id, query, picture), revision(experiment), make)


API = "/api/bench/leaderboard"
_LABEL = 60  # characters of a name on a chip
_NAMES = {value: name for name, value in FILTERS.items()}
Params = tuple[tuple[str, str], ...]


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
    query: BoardQuery = field(default_factory=BoardQuery)
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> Params:
        """The board query as URL parameters."""
        return query_params(self.query)

    def page(self, **changes: str | None) -> str:
        """Return the URL of the leaderboard page, with changes to `extra`."""
        return self._at(experiment_path(self.experiment), {**self.extra, **changes})

    def with_changes(self, **changes: Any) -> str:
        """Return the URL with changes to the board query; changing `by` changes the rows, so it drops the baseline."""
        dropped: dict[str, Any] = {"baseline": None} if "by" in changes else {}
        return replace(self, query=replace(self.query, **dropped, **changes)).page()

    def pair(self, pair: Pair, **extra: str | None) -> str:
        """Return the URL of a row's page."""
        named = {"model": pair.model, "prompt": pair.prompt, **extra}
        return self._at(experiment_path(self.experiment, "pairs"), named)

    def scenario(self, scenario: str | None = None, **extra: str | None) -> str:
        """Return the URL of the scenario matrix, or of the answers of all pairs to one scenario."""
        return self._at(experiment_path(self.experiment, "scenarios"), {"scenario": scenario, **extra})

    def chart(self, kind: str, *, theme: str, narrow: bool, revision: str | None) -> str:
        """Return the URL of a chart; it contains the revision, so that browsers can cache the chart."""
        own = {"theme": theme, "narrow": "true" if narrow else None, "revision": revision}
        return self._at(experiment_path(self.experiment, "charts", f"{kind}.svg"), own)

    def api(self, *rest: str, **extra: str | None) -> str:
        """Return the URL of the board in the API: the JSON, or a download."""
        return self._at("/".join([API, quote_path(self.experiment), *rest]), extra)

    def run(self, run_id: str) -> str:
        """Return the URL of a run's page."""
        return experiment_path(self.experiment, "runs", run_id)

    def chips(self) -> list[Chip]:
        """Return the active filters."""
        query = self.query
        found: list[tuple[str, str, dict[str, Any]]] = []  # label, value, and the change that removes it
        for key, value in query.where:
            others = tuple(each for each in query.where if each[0] != key)
            found.append((_NAMES.get(key, key.removeprefix("params.")), value, {"where": others}))
        found += [
            ("without", name.removeprefix(f"{ALL}/"), {"exclude": tuple(sorted({*query.exclude} - {name}))})
            for name in query.exclude
        ]
        if query.judge is not None:
            found.append(("judge", query.judge, {"judge": None}))
        if query.cluster is not None:
            found.append(("means per", query.cluster, {"cluster": None}))
        if query.provisional:
            found.append(("scores", "rules instead of people", {"provisional": False}))
        if query.baseline is not None:
            found.append(("baseline", baseline_text(query), {"baseline": None}))
        return [
            Chip(short_name(label, _LABEL), short_name(value, _LABEL), self.with_changes(**change))
            for label, value, change in found
        ]

    def hidden(self, *without: str) -> Params:
        """Return the parameters a form must include as hidden fields, so that it changes only its own."""
        carried = (*self.params, *self.extra.items())
        return tuple((name, value) for name, value in carried if name not in without)

    def _at(self, path: str, extra: Mapping[str, str | None]) -> str:
        given = [*self.params, *((name, value) for name, value in extra.items() if value is not None)]
        return f"{path}?{urlencode(given, errors='backslashreplace')}" if given else path


def query_params(query: BoardQuery) -> Params:
    """Return the URL parameters of a board query; `page_query` parses them back to the same query."""
    found: list[tuple[str, str]] = [("where", f"{key}={value}") for key, value in query.where]
    found += [("exclude", name) for name in query.exclude]
    plain = {"judge": query.judge, "by": query.by, "cluster": query.cluster, "baseline": baseline_text(query) or None}
    found += [(name, value) for name, value in plain.items() if value is not None]
    return (*found, ("provisional", "true")) if query.provisional else tuple(found)


def baseline_text(query: BoardQuery) -> str:
    """Return the baseline as a URL parameter, empty if none; only its name on a board by model or prompt."""
    return row_text(query.baseline, query.by) if query.baseline is not None else ""


def row_text(pair: Pair, by: str | None) -> str:
    """Return a row in the form of the `baseline` parameter."""
    return {"model": pair.model, "prompt": pair.prompt}.get(by or "", str(pair))


def page_query(request: Request) -> BoardQuery:
    """Parse a page's query parameters like the API; empty form fields are ignored."""
    given: dict[str, Any] = {"where": [], "exclude": []}
    for name, value in _filled(request.query_params.multi_items()):
        if name in ("where", "exclude"):
            given[name].append(value)
        elif name in _OPTIONS:
            given[name] = value
    with invalid_at("query"):
        return _validated_query(**given)


PageQuery = Annotated[BoardQuery, Depends(page_query)]


def tidy_url(request: Request, path: str) -> str | None:
    """Return the URL without empty form fields, or None if there are none."""
    given = request.query_params.multi_items()
    kept = list(_filled(given))
    if len(kept) == len(given):
        return None
    return f"{path}?{urlencode(kept, errors='backslashreplace')}" if kept else path


def _filled(given: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
    """Drop empty parameters; a filter `KEY=` is not empty, it matches an empty value."""
    return ((name, value) for name, value in given if value.strip())
