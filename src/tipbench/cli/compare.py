"""`tipbench compare`: rank model and prompt pairs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tipbench.cli.console import out, print_dropped_columns, print_json, print_message, print_table
from tipbench.cli.options import ExperimentOption, JsonOption, MlflowOption, chosen_experiment, open_store
from tipbench.errors import TipbenchError, UsageError
from tipbench.files import check_output, write_output
from tipbench.settings import load_settings
from tipbench.text import printable_lines

if TYPE_CHECKING:
    from tipbench.compare.cells import BoardCells, CellFilter
    from tipbench.compare.leaderboard import Leaderboard
    from tipbench.compare.matrix import Pair
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.store import Experiment


_NAMES = ("model", "prompt", "standing", "flags")  # left-aligned columns


class BoardFormat(StrEnum):
    """Output format of the leaderboard."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MARKDOWN = "md"


class Side(StrEnum):
    """What is ranked instead of pairs: models or prompts."""

    MODEL = "model"
    PROMPT = "prompt"


class Cluster(StrEnum):
    """Unit that scores are averaged by before testing."""

    PERSONA = "persona"


WhereOption = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="KEY=VALUE", help="Use only matching cells: any tag, or params.NAME; repeatable."),
]


ExperimentsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="EXPERIMENT", help="One experiment to rank, or two to compare.")
]
BoardFormatOption = Annotated[
    BoardFormat,
    typer.Option("--format", metavar="table|json|csv|md", help="Output format. [default: table]", show_default=False),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML report: one file, no network needed.")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png|.svg", help="Also save a chart of the standings.")
]
BaselineOption = Annotated[
    str | None, typer.Option("--baseline", metavar="MODEL/PROMPT", help="Also show differences to this pair.")
]
OneJudgeOption = Annotated[str | None, typer.Option("--judge", metavar="NAME", help="Use only this judge's scores.")]
ByOption = Annotated[Side | None, typer.Option("--by", metavar="model|prompt", help="Rank models or prompts.")]
ClusterOption = Annotated[
    Cluster | None,
    typer.Option("--cluster", metavar="persona", help="Cluster by persona; generalises to new personas."),
]
ProvisionalOption = Annotated[bool, typer.Option("--provisional", help="Use provisional scores instead of human ones.")]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PAIR|MODEL", help="Leave this pair or model out; repeatable, and recorded."),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="PAIR1=PAIR2", help="With two experiments: compare these two pairs; repeatable."),
]


def compare(
    experiments: ExperimentsArgument = None,
    experiment: ExperimentOption = None,
    format_: BoardFormatOption = BoardFormat.TABLE,
    html: HtmlOption = None,
    plot: PlotOption = None,
    baseline: BaselineOption = None,
    judge: OneJudgeOption = None,
    by: ByOption = None,
    cluster: ClusterOption = None,
    provisional: ProvisionalOption = False,
    where: WhereOption = None,
    exclude: ExcludeOption = None,
    map_: MapOption = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Rank model and prompt pairs with confidence intervals.

    Pairs are compared on the scenarios they share: which pair leads, which are tied with it,
    and whether the model or the prompt explains the difference. The leaderboard is saved in MLflow as a separate run.

    Two experiments are compared on the cells they share, for example to see whether a new prompt or model build helps.

    Examples:

      tipbench compare tip-bench-demo

      tipbench compare tip-bench-may --baseline qwen2.5:0.5b/v1 --html report.html --plot forest.png

      tipbench compare tip-bench-may tip-bench-june --format md
    """
    from tipbench.charts import LIGHT, check_chart_file, import_altair, save_chart
    from tipbench.compare.cells import is_excluded
    from tipbench.compare.charts import forest
    from tipbench.compare.leaderboard import record_board
    from tipbench.workflows.board import board_query
    from tipbench.workflows.mlflow import existing_experiment

    settings = load_settings()
    given = [*(experiments or []), *([experiment] if experiment else [])]
    if len(given) > 2:
        raise UsageError(f"Name one experiment to rank or two to compare (got {len(given)}).")
    if len(given) == 2 and given[0] == given[1]:
        raise UsageError(f"{given[0]} is given twice; name two different experiments.")
    names = [chosen_experiment(settings, name) for name in given] or [chosen_experiment(settings, None)]
    if plot is not None:
        check_chart_file(plot)
    if html is not None:
        check_output(html, "--html")
        import_altair()
    chosen = BoardFormat.JSON if json_ else format_
    query = board_query(
        baseline=baseline,
        where=where or (),
        judge=judge,
        by=by.value if by else None,
        cluster=cluster.value if cluster else None,
        provisional=provisional,
        exclude=exclude or (),
    )
    with open_store(settings, mlflow_url) as store:
        found = [existing_experiment(store, name) for name in names]
        if len(found) == 2:
            options = {"html": html, "plot": plot, "baseline": baseline, "by": by, "cluster": cluster}
            if unused := [f"--{name}" for name, value in options.items() if value is not None]:
                raise UsageError(f"{', '.join(unused)} cannot be used with two experiments.")
            _compare_two(store, found, query.question, map_ or [], chosen)
            return
        if map_:
            raise UsageError("--map needs two experiments.")
        board, cells = query.read(store, found[0])
        for name in query.exclude:
            if not any(is_excluded(row, (name,)) for row in cells.excluded):
                print_message(f"warning: --exclude {name} matches no row of {names[0]}")
        if html is not None:
            _write_html(store, found[0], board, cells, html)
        if plot is not None:
            save_chart(forest(board, LIGHT, titled=True), plot)
            print_message(f"chart: {plot}")
        _print(board, chosen)
        try:
            record_board(store, found[0].experiment_id, board)
        except TipbenchError as exc:  # no write access
            print_message(f"note: the leaderboard could not be saved in MLflow ({exc})")


def _compare_two(
    store: MlflowStore, found: list[Experiment], question: CellFilter, mapped: list[str], format_: BoardFormat
) -> None:
    from tipbench.compare.cells import read_board
    from tipbench.compare.experiments import compare_experiments

    boards = [read_board(store, each.experiment_id, question) for each in found]
    names = (found[0].name, found[1].name)
    result = compare_experiments(names, (boards[0], boards[1]), [_mapping(text) for text in mapped])
    if format_ is BoardFormat.JSON:
        print_json(result.to_json())
        return
    if format_ is BoardFormat.CSV:
        print(result.csv(), end="")
    elif format_ is BoardFormat.MARKDOWN:
        print(result.markdown(), end="")
    else:
        columns, rows = result.table()
        print(printable_lines(f"{result.verdict}\n"))
        print_table(columns, rows, text=_NAMES)
    for note in result.notes if format_ is not BoardFormat.MARKDOWN else ():
        print_message(f"note: {note}")


def _mapping(text: str) -> tuple[Pair, Pair]:
    from tipbench.workflows.board import parse_pair_option

    first, separator, second = text.partition("=")
    if not separator:
        raise UsageError(f"--map must be PAIR1=PAIR2 (got {text[:120]!r}).")
    return parse_pair_option(first, "map"), parse_pair_option(second, "map")


def _print(board: Leaderboard, format_: BoardFormat) -> None:
    from tipbench.compare import report

    if format_ is BoardFormat.JSON:
        print_json(board.to_json())
    elif format_ is BoardFormat.CSV:
        print(report.to_csv(board), end="", flush=True)
        _print_notes(board)
    elif format_ is BoardFormat.MARKDOWN:
        print(report.to_markdown(board), end="")
    else:
        show_board(board)


def show_board(board: Leaderboard) -> None:
    """Print the answer card, the table, and what explains the differences."""
    from rich.text import Text

    from tipbench.compare import report
    from tipbench.compare.card import answer_card

    console, card = out(), answer_card(board)
    console.print(Text(printable_lines(card.title), style="bold"))
    for line in card.sentences:
        console.print(Text(printable_lines(line.replace("`", ""))))
    print()
    columns, rows = report.table_rows(board)
    dropped = print_table(columns, rows, text=report.TEXT_COLUMNS, keep=columns.index("standing") + 1)
    print(flush=True)
    print_dropped_columns(dropped, "--format csv")
    for line in report.footer_lines(board):
        print(printable_lines(line))
    _print_notes(board)


def _print_notes(board: Leaderboard) -> None:
    for note in board.notes:
        print_message(f"note: {note}")


def _write_html(store: MlflowStore, experiment: Experiment, board: Leaderboard, cells: BoardCells, path: Path) -> None:
    from tipbench.compare.answers import read_answers
    from tipbench.compare.html import html_report
    from tipbench.judge.status import judging_status

    answers = read_answers(store, experiment, board, cells)
    write_output(path, html_report(board, answers, judging_status(store, experiment)), "--html")
    print_message(f"report: {path}")
