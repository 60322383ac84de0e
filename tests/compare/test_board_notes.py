"""What must be known before a board is believed: it stands in the verdict, the notes and every form."""

from __future__ import annotations

from support.boards import TWELVE, board
from support.judged import scored
from tipbench.compare.leaderboard import BoardOptions, excluded_text, filter_text, make_board, unknown_pair_message
from tipbench.compare.matrix import Pair
from tipbench.compare.report import to_csv, to_markdown

A, B = Pair("a:1b", "v1"), Pair("b:1b", "v1")
LOW = [9.0, 12.0, 10.5, 8.0, 13.0, 11.0, 9.5, 12.5]


def test_a_provisional_verdict_begins_with_whose_scores_it_rests_on() -> None:
    made = board(TWELVE[:2], provisional=True, judges=("rules",))
    assert made.verdict.startswith("Provisional (scored by rules): ")
    assert made.to_json()["verdict"]["text"] == made.verdict
    assert "**Provisional \\(scored by rules\\): " in to_markdown(made)
    assert to_csv(made).splitlines()[1].endswith(",true")


def test_a_board_of_floors_alone_is_no_judges() -> None:
    cells = scored({A: [2.0] * 8, B: [2.0] * 8}, provisional=True, judges=())
    assert make_board("tip-bench-x", cells, BoardOptions()).verdict.startswith("Provisional (no usable answers): ")


def test_a_board_that_nobody_scored_has_nothing_provisional() -> None:
    cells = scored({A: [None] * 8, B: [None] * 8}, provisional=True, judges=())
    assert make_board("tip-bench-x", cells, BoardOptions()).verdict.startswith(
        "Not judged yet: 2 pairs without scores."
    )


def test_what_was_asked_is_said_in_words() -> None:
    assert filter_text({}, None) == ""
    assert filter_text({"a": "1"}, "anna") == "only cells with a=1; only anna's scores"


def test_numbers_and_verbs_agree() -> None:
    assert excluded_text(1, "of it") == "1 run of it is excluded"
    assert excluded_text(2, "of it") == "2 runs of it are excluded"


def test_a_stranger_is_told_from_a_pair_that_is_only_old() -> None:
    cells = scored({A: LOW}, stale={B: 1})
    assert unknown_pair_message(B, [A], cells).startswith(
        "The pair b:1b/v1 is not on this board: its only run is of an older build or prompt."
    )
    assert (
        unknown_pair_message(Pair("c", "v1"), [A], cells) == "The pair c/v1 is not on this board. Available: a:1b/v1."
    )
