"""Warnings about a board: in the verdict, the notes and every format."""

from __future__ import annotations

from support.boards import PAIRS, board
from support.judged import cells_of
from tipbench.compare.leaderboard import BoardOptions, make_board
from tipbench.compare.matrix import Pair
from tipbench.compare.report import to_csv, to_markdown
from tipbench.compare.verdict import unknown_pair_message

A, B = Pair("a:1b", "v1"), Pair("b:1b", "v1")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]


def test_a_provisional_verdict_begins_with_the_judge_of_its_scores() -> None:
    leaderboard = board(PAIRS[:2], provisional=True, judges=("rules",))
    assert leaderboard.verdict.startswith("Provisional (scored by rules): ")
    assert leaderboard.to_json()["verdict"]["text"] == leaderboard.verdict
    assert "**Provisional \\(scored by rules\\): " in to_markdown(leaderboard)
    assert to_csv(leaderboard).splitlines()[1].endswith(",true")


def test_an_unscored_board_is_not_provisional() -> None:
    cells = cells_of({A: [None] * 8, B: [None] * 8}, provisional=True, judges=())
    assert make_board("tip-bench-x", cells, BoardOptions()).verdict.startswith(
        "Not judged yet: 2 pairs without scores."
    )


def test_an_unknown_pair_and_a_stale_pair_have_different_messages() -> None:
    cells = cells_of({A: LOW}, stale={B: 1})
    assert unknown_pair_message(B, [A], cells).startswith(
        "The pair b:1b/v1 is not on this board: its only run is of an older build or prompt."
    )
    assert (
        unknown_pair_message(Pair("c", "v1"), [A], cells) == "The pair c/v1 is not on this board. Available: a:1b/v1."
    )
