"""`tipbench compare`: rank model and prompt pairs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tipbench.cli.console import make_console, print_json, print_message, print_table
from tipbench.cli.options import (
    ExperimentOption,
    JsonOption,
    MlflowOption,
    OnlyJudgeOption,
    PlotOption,
    WhereOption,
    chosen_experiment,
    open_store,
)
from tipbench.errors import TipbenchError, UsageError
from tipbench.files import check_output, write_output
from tipbench.settings import load_settings
from tipbench.text import printable_lines

if TYPE_CHECKING:
    from tipbench.compare.cells import CellFilter
    from tipbench.compare.leaderboard import Leaderboard
    from tipbench.record.mlflow import MlflowStore
    from tipbench.record.store import Experiment

BoardFormat = Literal["table", "json", "csv", "md"]


def compare(
    experiments: Annotated[
        list[str] | None, typer.Argument(metavar="EXPERIMENT", help="One experiment to rank, or two to compare.")
    ] = None,
    experiment: ExperimentOption = None,
    format_: Annotated[
        BoardFormat,
        typer.Option(
            "--format", metavar="table|json|csv|md", help="Output format. [default: table]", show_default=False
        ),
    ] = "table",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write an HTML report: one file, no network needed.")
    ] = None,
    plot: PlotOption = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="MODEL/PROMPT", help="Also show differences to this pair.")
    ] = None,
    judge: OnlyJudgeOption = None,
    by: Annotated[
        Literal["model", "prompt"] | None,
        typer.Option(metavar="model|prompt", help="Rank models or prompts instead of pairs."),
    ] = None,
    cluster: Annotated[
        Literal["persona"] | None,
        typer.Option(metavar="persona", help="Average by persona first; generalises to new personas."),
    ] = None,
    provisional: Annotated[
        bool, typer.Option("--provisional", help="Use provisional scores instead of human ones.")
    ] = False,
    where: WhereOption = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PAIR|MODEL", help="Leave this pair or model out; repeatable, and recorded."),
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="PAIR1=PAIR2", help="With two experiments: compare these two pairs; repeatable."),
    ] = None,
    mlflow_url: MlflowOption = None,
    json_: JsonOption = False,
) -> None:
    """Rank model and prompt pairs with confidence intervals.

    Pairs are compared on the scenarios they share. Shows which pair leads, which pairs are tied with it, and whether
    the model or the prompt explains the differences. The leaderboard is saved in MLflow as a separate run.

    Two experiments are compared on the cells they share, for example to see whether a new prompt or model build helps.

    Examples:

      tipbench compare tip-bench-demo

      tipbench compare tip-bench-may --baseline qwen2.5:0.5b/v1 --html report.html --plot forest.png

      tipbench compare tip-bench-may tip-bench-june --format md
    """
    from tipbench.charts import LIGHT, check_chart_file, import_altair, save_chart
    from tipbench.compare import report
    from tipbench.compare.answers import read_answers
    from tipbench.compare.cells import is_excluded
    from tipbench.compare.charts import forest
    from tipbench.compare.html import html_report
    from tipbench.compare.leaderboard import record_board
    from tipbench.judge.status import judging_status
    from tipbench.workflows.board import board_query
    from tipbench.workflows.mlflow import existing_experiment

    settings = load_settings()
    given = list(experiments or ())
    if experiment:
        given.append(experiment)
    if len(given) > 2:
        raise UsageError(f"Name one experiment to rank or two to compare (got {len(given)}).")
    if len(given) == 2 and given[0] == given[1]:
        raise UsageError(f"{given[0]} is given twice; name two different experiments.")
    names = [chosen_experiment(settings, name) for name in given]
    if not names:
        names.append(chosen_experiment(settings, None))
    if plot is not None:
        check_chart_file(plot)
    if html is not None:
        check_output(html, "--html")
        import_altair()  # raises UsageError if it is not installed
    output_format: BoardFormat = "json" if json_ else format_
    query = board_query(
        baseline=baseline,
        where=where or (),
        judge=judge,
        by=by,
        cluster=cluster,
        provisional=provisional,
        exclude=exclude or (),
    )
    with open_store(settings, mlflow_url) as store:
        first_experiment, *others = [existing_experiment(store, name) for name in names]
        if others:
            ranking_options = {"html": html, "plot": plot, "baseline": baseline, "by": by, "cluster": cluster}
            if unusable := [f"--{name}" for name, value in ranking_options.items() if value is not None]:
                raise UsageError(f"{', '.join(unusable)} cannot be used with two experiments.")
            _compare_two(store, first_experiment, others[0], query.cell_filter, map_ or [], output_format)
            return
        if map_:
            raise UsageError("--map needs two experiments.")
        board, cells = query.read(store, first_experiment)
        for name in query.exclude:
            if not any(is_excluded(pair, (name,)) for pair in cells.excluded):  # no pair was excluded by this name
                print_message(f"warning: --exclude {name} matches no row of {names[0]}")
        if html is not None:
            answers = read_answers(store, first_experiment, board, cells)
            write_output(html, html_report(board, answers, judging_status(store, first_experiment)), "--html")
            print_message(f"report: {html}")
        if plot is not None:
            save_chart(forest(board, LIGHT, titled=True), plot)
            print_message(f"chart: {plot}")
        if output_format == "json":
            print_json(board.to_json())
        elif output_format == "csv":
            print(report.to_csv(board), end="")
            _print_notes(board)
        elif output_format == "md":
            print(report.to_markdown(board), end="")
        else:
            show_board(board)
        try:
            record_board(store, first_experiment.experiment_id, board)
        except TipbenchError as exc:  # for example, no write access
            print_message(f"note: the leaderboard could not be saved in MLflow ({exc})")


def _compare_two(
    store: MlflowStore,
    first: Experiment,
    second: Experiment,
    cell_filter: CellFilter,
    maps: list[str],
    output_format: BoardFormat,
) -> None:
    from tipbench.compare.cells import read_board_cells
    from tipbench.compare.experiments import compare_experiments
    from tipbench.workflows.board import parse_pair_option

    mapped_pairs = []
    for text in maps:
        pair, separator, other_pair = text.partition("=")
        if not separator:
            raise UsageError(f"--map must be PAIR1=PAIR2 (got {text[:120]!r}).")
        mapped_pairs.append((parse_pair_option(pair, "map"), parse_pair_option(other_pair, "map")))
    cells = (
        read_board_cells(store, first.experiment_id, cell_filter),
        read_board_cells(store, second.experiment_id, cell_filter),
    )
    result = compare_experiments((first.name, second.name), cells, mapped_pairs)
    if output_format == "json":
        print_json(result.to_json())
    elif output_format == "md":
        print(result.markdown(), end="")
    elif output_format == "csv":
        print(result.csv(), end="")
    else:
        columns, rows = result.table()
        print(printable_lines(f"{result.verdict}\n"))
        print_table(columns, rows, text_columns=("model", "prompt"))
    if output_format in ("csv", "table"):  # the other formats contain the notes
        for note in result.notes:
            print_message(f"note: {note}")


def show_board(board: Leaderboard) -> None:
    """Print the summary card, the leaderboard, the attribution of differences, and notes."""
    from rich.text import Text

    from tipbench.compare import report
    from tipbench.compare.card import summary_card

    console = make_console()
    card = summary_card(board)
    console.print(Text(printable_lines(card.title), style="bold"))
    for sentence in card.sentences:  # in Markdown
        console.print(Text(printable_lines(sentence.replace("`", ""))))
    print()
    columns, rows = report.table_rows(board)
    print_table(
        columns,
        rows,
        text_columns=report.TEXT_COLUMNS,
        n_always_shown=columns.index("standing") + 1,
        all_columns_option="--format csv",
    )
    print()
    for line in report.footer_lines(board):
        print(printable_lines(line))
    _print_notes(board)


def _print_notes(board: Leaderboard) -> None:
    sys.stdout.flush()  # before the notes on stderr
    for note in board.notes:
        print_message(f"note: {note}")
