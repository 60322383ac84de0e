"""The command judge with real programs that fill, die, hang, flood and lie; valid items are kept."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.requests import SUITE
from tipbench.errors import UsageError
from tipbench.judge import command
from tipbench.judge.command import CommandJudge, choose_score, default_name, recover_items
from tipbench.judge.run import Unscored
from tipbench.judge.sheet import ItemScore, Sheet, SheetTip, TipItem, TipSheet, sheet_text

pytestmark = pytest.mark.process

PROGRAMS = Path(__file__).parent / "programs"


def sheet_of(n_items: int = 4, n_tips: int = 2, tip: str = "Write one line, then stop. 🌿") -> TipSheet:
    items = tuple(
        TipItem(
            f"item-{n}",
            SUITE.scenarios[n % len(SUITE.scenarios)].to_card(),
            format_ok=True,
            tips=tuple(SheetTip(f"{tip} {n}.{k}", "It is due.", overlong=False) for k in range(n_tips)),
        )
        for n in range(n_items)
    )
    return Sheet("sheet-1", "tip-bench-test", "agent", SUITE.rubric, items, "")


def run(program: str, *words: object) -> str:
    return shlex.join([sys.executable, str(PROGRAMS / f"{program}.py"), *map(str, words)])


Outcomes = dict[str, ItemScore | Unscored]


def judged(
    command_line: str, sheet: TipSheet | None = None, messages: list[str] | None = None, **options: float
) -> Outcomes:
    judge = CommandJudge(command_line, "agent", **options)  # type: ignore[arg-type]
    sheet = sheet or sheet_of()
    report: Callable[[str], None] = messages.append if messages is not None else lambda _text: None
    outcomes = list(judge.fill(sheet, report))
    names = [each.item for each in outcomes]
    assert sorted(names) == sorted(item.id for item in sheet.items), "one outcome for every item"
    return dict(zip(names, outcomes, strict=True))


def scored(outcomes: Outcomes) -> set[str]:
    return {name for name, outcome in outcomes.items() if isinstance(outcome, ItemScore)}


def reason(outcome: ItemScore | Unscored) -> str:
    assert isinstance(outcome, Unscored)
    assert len(outcome.reason) <= 300
    assert outcome.reason.isprintable()
    return outcome.reason


def gone(pid: int) -> bool:
    for _ in range(3000):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


ALL = {"item-0", "item-1", "item-2", "item-3"}


def test_an_honest_program_fills_every_item_and_counts_as_a_judge() -> None:
    assert not CommandJudge(run("honest"), "agent").provisional
    outcomes = judged(run("honest", 4), sheet_of(tip="broken \ud83d tip"))
    assert scored(outcomes) == ALL
    score = outcomes["item-2"]
    assert isinstance(score, ItemScore)
    assert [dict(tip.scores) for tip in score.tips] == [dict.fromkeys(SUITE.rubric.scale_names, 4)] * 2


def test_a_sheet_larger_than_a_pipe_buffer_is_sent_and_received() -> None:
    big = sheet_of(200, 8, "A tip of some length, " * 20)
    assert len(sheet_text(big)) > 500_000
    assert len(scored(judged(run("honest"), big))) == 200


def test_a_program_that_dies_half_way_keeps_what_it_finished(tmp_path: Path) -> None:
    messages: list[str] = []
    outcomes = judged(run("dies_halfway", tmp_path / "calls"), messages=messages)
    assert (tmp_path / "calls").read_text().split() == ["4", "2"], "one retry with the missing items"
    assert "2 of 4 scored" in "\n".join(messages)
    assert scored(outcomes) == {"item-0", "item-1", "item-2"}
    assert "exit code 3: Out of credit" in reason(outcomes["item-3"])


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"

    def clock() -> float:
        """The time, an hour later after each call that hangs, so that no limit passes before."""
        hanging = len(pids.read_text().splitlines()) if pids.exists() else 0
        return time.monotonic() + 3600 * hanging

    monkeypatch.setattr(command, "_TERM_S", 0.2)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=clock))
    outcomes = judged(run("hangs", pids), timeout_s=900)
    assert scored(outcomes) == {"item-0", "item-1"}, "one from each of the two calls"
    assert "exceeded 900 s" in reason(outcomes["item-3"])
    assert len(pids.read_text().split()) == 4
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_ctrl_c_kills_the_program_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_TERM_S", 0.2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pids = tmp_path / "pids"

    def interrupt() -> None:
        while not pids.exists() or len(pids.read_text().split()) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            judged(run("hangs", pids))
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_a_child_that_keeps_the_output_open_does_not_block_the_run(tmp_path: Path) -> None:
    assert scored(judged(run("leaves_a_child", tmp_path / "pid"))) == ALL
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_sheet_in_prose_and_a_fence_is_found() -> None:
    assert scored(judged(run("talks"))) == ALL


def test_batches_are_sent_one_after_the_other(tmp_path: Path) -> None:
    assert scored(judged(run("learns", tmp_path / "calls"), batch=3)) == ALL
    assert (tmp_path / "calls").read_text().split() == ["3", "2", "1"]


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("changed text", "Indeed."),
        ("off scale", "a whole number from 1 to 5"),
        ("unfinished", "unfinished"),
        ("twice", "more than once"),
        ("foreign item", "not returned"),
    ],
)
def test_one_wrong_item_is_unscored_with_its_reason_and_the_others_are_kept(how: str, complaint: str) -> None:
    outcomes = judged(run("mischief", how))
    assert scored(outcomes) == ALL - {"item-0"}
    assert complaint in reason(outcomes["item-0"])


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("other sheet", "another sheet"),
    ],
)
def test_output_for_another_sheet_is_ignored(how: str, complaint: str) -> None:
    outcomes = judged(run("mischief", how))
    assert scored(outcomes) == set()
    assert all(complaint in reason(outcome) for outcome in outcomes.values())


@pytest.mark.parametrize("how", ["items alone", "deep"])
def test_text_around_the_items_is_ignored(how: str) -> None:
    assert scored(judged(run("mischief", how))) == ALL


def test_markup_and_instructions_in_notes_stay_text() -> None:
    outcomes = judged(run("mischief", "notes"))
    assert scored(outcomes) == ALL
    score = outcomes["item-0"]
    assert isinstance(score, ItemScore)
    assert set(score.tips[0].scores.values()) == {3}, "a note changes no score"
    assert score.tips[0].note.startswith("<script>")


def test_excessive_output_is_stopped_and_earlier_scores_are_kept() -> None:
    assert scored(judged(run("floods"))) == ALL


def test_excessive_output_without_scores_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_OUTPUT", 1_000_000)
    outcomes = judged(run("ignores_stdin"))
    assert scored(outcomes) == set()
    assert "exceeded 1 MB of output" in reason(outcomes["item-0"])


def test_a_program_may_fill_the_file_in_place() -> None:
    assert scored(judged(run("files", "--sheet={sheet}"))) == ALL


def test_a_program_may_write_to_a_separate_file() -> None:
    assert scored(judged(run("files", "{sheet}", "{out}"))) == ALL


def test_an_unchanged_file_has_no_scores() -> None:
    outcomes = judged(f"{shlex.quote(sys.executable)} -c pass {{sheet}}")
    assert {reason(outcome) for outcome in outcomes.values()} == {"not returned"}


def test_the_program_gets_the_environment_without_tipbench_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TIPBENCH_ADMIN_TOKEN", "TIPBENCH_HOME", "MLFLOW_TRACKING_PASSWORD", "AGENT_KEY"):
        monkeypatch.setenv(name, "value of it")
    seen = tmp_path / "seen"
    judged(f"sh -c 'env > {shlex.quote(str(seen))}'")
    names = {line.partition("=")[0] for line in seen.read_text().splitlines()}
    assert {"PATH", "AGENT_KEY"} <= names
    assert not [name for name in names if name.startswith(("TIPBENCH_", "MLFLOW_TRACKING_"))]


def test_nothing_goes_through_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    judged(f"{run('honest')} ; touch {tmp_path / 'planted'}", sheet_of(1))
    assert not (tmp_path / "planted").exists()


def test_a_missing_program_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="was not found"):
        CommandJudge("no-such-program-anywhere --fast", "x")


def test_a_program_that_cannot_be_executed_is_a_usage_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x00\x01 no program")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match="could not be started"):
        judged(str(broken))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "'unbalanced",
        "a\0b",
    ],
)
def test_a_command_without_a_program_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="command"):
        CommandJudge(text, "x")


@pytest.mark.parametrize(
    ("text", "name"),
    [("claude -p 'judge this'", "claude"), ("/opt/bin/judge.py --x", "judge.py"), ("'a\tb' c", "a b")],
)
def test_the_default_name_is_the_programs_base_name(text: str, name: str) -> None:
    assert default_name(text) == name


FILLED = sheet_of(3)


@settings(max_examples=50)
@given(st.data())
def test_a_truncated_sheet_gives_exactly_its_complete_items(data: st.DataObject) -> None:
    raw = json.loads(sheet_text(FILLED))
    for item in raw["items"]:
        for tip in item["tips"]:
            tip["scores"] = dict.fromkeys(tip["scores"], 2)
    text = json.dumps(raw)
    cut = data.draw(st.integers(0, len(text)))
    found = recover_items(text[:cut].encode(), FILLED)
    complete = {item["item"] for item in raw["items"] if text.index(whole := json.dumps(item)) + len(whole) <= cut}
    assert set(found.versions) == complete
    for item in FILLED.items:
        assert isinstance(choose_score(item, FILLED.rubric, [found], ""), ItemScore) == (item.id in complete)


@settings(max_examples=50)
@given(st.binary(max_size=400))
def test_any_output_gives_scores_or_a_reason(output: bytes) -> None:
    outcome = choose_score(FILLED.items[0], FILLED.rubric, [recover_items(output, FILLED)], "")
    assert isinstance(outcome, Unscored)


@pytest.mark.parametrize(
    "piece",
    [
        '{"a":',
        '{"item":"x","a":{',
        '{"a":[0,0,0,',
        '\\"',
    ],
)
def test_hostile_output_is_parsed_in_bounded_time(piece: str) -> None:
    began = time.process_time()
    recover_items((piece * (1_000_000 // len(piece))).encode(), FILLED)
    assert time.process_time() - began < 30
