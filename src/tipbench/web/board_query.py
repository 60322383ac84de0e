"""Board queries: filters, baseline and judge from the URL, for the API and the pages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Depends, Query

from tipbench.charts import THEMES, to_svg
from tipbench.compare.charts import forest, heat_map, pareto
from tipbench.compare.matrix import ALL, Pair, parse_pair
from tipbench.errors import UsageError
from tipbench.judge.check import name_problem, normalize_name
from tipbench.record.reader import cells, parse_filter
from tipbench.record.run import StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.web.errors import Invalid
from tipbench.web.queries import BoardQuery, Queries, revision

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
                f"{key} is asked for twice, as {filters[key]} and {value}; no cell is both.", path="query.where"
            )
    return tuple(filters.items())


def parse_board_query(
    baseline: Annotated[
        str | None, Query(max_length=_LONGEST, description="MODEL/PROMPT: show differences to this pair too.")
    ] = None,
    where: Annotated[
        list[str], Query(max_length=20, description="KEY=VALUE: any tag, or params.NAME; repeatable.")
    ] = [],  # noqa: B006 - FastAPI copies it
    judge: Annotated[str | None, Query(max_length=200, description="Only this judge's scores.")] = None,
    by: Annotated[Literal["model", "prompt"] | None, Query(description="Rank models, or prompts.")] = None,
    cluster: Annotated[
        Literal["persona"] | None, Query(description="Claim more: about other personas. Takes more scenarios.")
    ] = None,
    provisional: Annotated[
        bool, Query(description="The provisional judge's scores, also where people have judged.")
    ] = False,
) -> BoardQuery:
    """Parse the options of `tipbench compare` from the query string."""
    if judge is not None and provisional:
        raise Invalid(
            "judge names a judge whose scores count; provisional shows those that do not. Choose one.",
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
        raise Invalid(f"judge takes {fault} (got {name[:80]!r}).", path="query.judge")
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
            f"baseline takes MODEL/PROMPT (got {text[:120]!r}); for example qwen2.5:0.5b/v1", path="query.baseline"
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
    return queries.small.get(
        key, revision(experiment), lambda: _facets(list(cells(view, experiment.experiment_id, {})))
    )


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
