"""Board queries: filters, baseline and judge from the URL, for the API and the pages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from tipbench.charts import THEMES, to_svg
from tipbench.compare.charts import forest, heat_map, pareto
from tipbench.compare.matrix import ALL, Pair, parse_pair
from tipbench.errors import UsageError
from tipbench.judge.check import name_problem, normalize_name
from tipbench.record.reader import FILTERS, cells, parse_filter
from tipbench.record.run import StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.text import short_name
from tipbench.web.errors import Invalid, checked
from tipbench.web.queries import BoardQuery, Queries, experiment_path, quote_path, revision

Where = tuple[tuple[str, str], ...]
_LONGEST = 500


def where_of(texts: Sequence[str], named: Mapping[str, str] | None = None) -> Where:
    """Parse KEY=VALUE texts into a filter, in the given order. Raises Invalid if a key has two values."""
    filters = dict(named or {})
    for text in texts:
        try:
            key, value = parse_filter(text[:_LONGEST])
        except UsageError as exc:
            raise Invalid(str(exc).removeprefix("--"), path="query.where") from exc
        if filters.setdefault(key, value) != value:
            raise Invalid(
                f"{key} has two values, {filters[key]} and {value}; no cell matches both.", path="query.where"
            )
    return tuple(filters.items())


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
) -> BoardQuery:
    """Parse the options of `tipbench compare` from the query string."""
    if judge is not None and provisional:
        raise Invalid(
            "judge and provisional cannot be combined: the scores of a named judge count, provisional ones do not.",
            path="query.judge",
        )
    return BoardQuery(
        where=where_of(where),
        judge=_judge(judge),
        provisional=provisional,
        baseline=_baseline(baseline, by),
        by=by,
        cluster=cluster,
    )


BoardQueryParam = Annotated[BoardQuery, Depends(parse_board_query)]


def _judge(name: str | None) -> str | None:
    if name is None:
        return None
    if fault := name_problem(name):
        raise Invalid(f"judge must be {fault} (got {name[:80]!r}).", path="query.judge")
    return normalize_name(name)


def _baseline(text: str | None, by: str | None) -> Pair | None:
    """Parse a baseline; a model or prompt name is enough when ranking by one of them."""
    if text is None:
        return None
    if by == "model":
        return Pair(text.strip().removesuffix(f"/{ALL}"), ALL)
    if by == "prompt":
        return Pair(ALL, text.strip().removeprefix(f"{ALL}/"))
    pair = parse_pair(text.strip())
    if pair is None:
        raise Invalid(
            f"baseline must be MODEL/PROMPT (got {text[:120]!r}), for example qwen2.5:0.5b/v1", path="query.baseline"
        )
    return pair


ChartKind = Literal["forest", "heat", "pareto"]
ThemeName = Literal["light", "dark"]
_DRAW: Mapping[ChartKind, Callable[..., Any]] = {"forest": forest, "heat": heat_map, "pareto": pareto}
# Charts are laid out for Arial. An SVG image cannot use the page's style sheet, so it lists fonts of equal width.
_FONTS = (
    '<style>text{font-family:Arial,"Liberation Sans",Arimo,Helvetica,"Nimbus Sans","DejaVu Sans Condensed",sans-serif}'
    "</style>"
)
# A page requests three charts at once; drawing one at a time leaves a core for other requests.
_one_drawing = threading.Lock()


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
    key = ("facets", experiment.experiment_id)
    return queries.small.get(key, revision(experiment), lambda: _facets(cells(view, experiment.experiment_id, {})))


def _facets(runs: list[StoredRun]) -> Facets:
    return Facets(
        cells=len(runs),
        models=_values(runs, "model"),
        prompts=_values(runs, "prompt_version"),
        personas=_values(runs, "persona"),
        suites=_values(runs, "suite"),
        conditions=tuple(Counter(run.tags["conditions"] for run in runs if "conditions" in run.tags).items()),
    )


def _values(runs: Iterable[StoredRun], param: str) -> tuple[str, ...]:
    return tuple(sorted({run.params[param] for run in runs if run.params.get(param)}))


def chart(
    queries: Queries, store: RunStore, experiment: Experiment, ask: BoardQuery, picture: ChartQuery
) -> str | None:
    """Return a chart of the board as SVG, cached per revision; None if the board has no chart of this kind."""
    board = queries.board(store, experiment, ask)
    draw = partial(_DRAW[picture.kind], board, THEMES[picture.theme], narrow=picture.narrow, titled=False)

    def make() -> str | None:
        with _one_drawing:
            made = draw()
            return None if made is None else to_svg(made, THEMES[picture.theme]).replace(">", f">{_FONTS}", 1)

    return queries.charts.get((experiment.experiment_id, ask, picture), revision(experiment), make)


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
