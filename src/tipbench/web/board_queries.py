"""What the leaderboard's pages ask beside the board itself: what one can filter by, its charts, and one row closely."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tipbench.charts import THEMES, to_svg
from tipbench.compare.drawing import forest, heat_map, pareto
from tipbench.record.reading import cells
from tipbench.record.run import StoredRun
from tipbench.record.store import Experiment, RunStore
from tipbench.web.queries import BoardAsk, Queries
from tipbench.web.snapshots import revision

ChartKind = Literal["forest", "heat", "pareto"]
ThemeName = Literal["light", "dark"]
_DRAW: Mapping[ChartKind, Callable[..., Any]] = {"forest": forest, "heat": heat_map, "pareto": pareto}
# The charts were measured in Arial. A picture knows no style sheet of its page, so the fonts as wide stand in it.
_FONTS = (
    '<style>text{font-family:Arial,"Liberation Sans",Arimo,Helvetica,"Nimbus Sans","DejaVu Sans Condensed",sans-serif}'
    "</style>"
)
# A page asks for three at a time: one after the other, they leave the other core to the pages.
_one_drawing = threading.Lock()


@dataclass(frozen=True)
class ChartAsk:
    """Which picture of a board."""

    kind: ChartKind
    theme: ThemeName = "light"
    narrow: bool = False


@dataclass(frozen=True)
class Facets:
    """What the cells of an experiment can be told apart by, whatever the board is filtered by now."""

    cells: int
    models: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    personas: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    conditions: tuple[tuple[str, int], ...] = ()  # each with its cells, newest first


def facets(queries: Queries, store: RunStore, experiment: Experiment) -> Facets:
    """Models, prompts, personas, suites and conditions that are recorded."""
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


def chart(queries: Queries, store: RunStore, experiment: Experiment, ask: BoardAsk, picture: ChartAsk) -> str | None:
    """A chart of the board as SVG, drawn once for a revision; None when the board has none of this kind."""
    board = queries.board(store, experiment, ask)
    draw = partial(_DRAW[picture.kind], board, THEMES[picture.theme], narrow=picture.narrow, titled=False)

    def make() -> str | None:
        with _one_drawing:
            made = draw()
            return None if made is None else to_svg(made, THEMES[picture.theme]).replace(">", f">{_FONTS}", 1)

    return queries.charts.get((experiment.experiment_id, ask, picture), revision(experiment), make)
