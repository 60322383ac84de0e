"""Progress: the state of a job that its events add up to, from any event on."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from support.scripted_runner import progress_of
from tipbench.jobs.progress import ModelProgress, Phase, Progress
from tipbench.record import events as wire


def cell_finished(done: int, total: int = 3, model: str = "a:1b", **changes: float | str) -> wire.CellFinished:
    return wire.CellFinished(model, "v1", "nurse@morning", done, total, **changes)  # type: ignore[arg-type]


COLLECT_EVENTS: list[wire.Event] = [
    wire.Started("1.0"),
    wire.BlockStarted("a:1b", 3, 1),
    cell_finished(2, output_tokens=50, tokens_per_s=12.5),
    cell_finished(3, failed=1, failure="time-out"),
    wire.BlockFinished("a:1b"),
    wire.BlockStarted("b:1b", 2),
    cell_finished(1, 2, "b:1b"),
    cell_finished(2, 2, "b:1b"),
    wire.BlockFinished("b:1b"),
    wire.Recording(2),
    wire.Evidence(40, 1, 0.3, 2),
    wire.Collected("tip-bench-a", 5, 1, 4, 1),
    wire.Exit(1),
]


def test_a_model_goes_through_loading_generating_unloading_and_empty() -> None:
    phases = []
    progress = Progress()
    for event in COLLECT_EVENTS[:5]:
        progress = progress.after(event)
        phases.append([model.phase for model in progress.models])
    assert phases == [[], [Phase.LOADING], [Phase.GENERATING], [Phase.UNLOADING], [Phase.EMPTY]]
    assert progress.models == (ModelProgress("a:1b", Phase.EMPTY, 3, 3, 1, 50, 12.5, recorded=1),)


def test_the_events_of_a_collect_end_with_its_totals() -> None:
    progress = progress_of(COLLECT_EVENTS)
    assert [model.phase for model in progress.models] == [Phase.EMPTY, Phase.EMPTY]
    assert progress.memory == wire.Evidence(40, 1, 0.3, 2)
    assert progress.collected is not None
    assert (progress.collected.generated, progress.recording_left, progress.exit_code) == (4, 0, 1)


def test_a_model_interrupted_in_the_middle_is_stopped_and_not_empty() -> None:
    progress = progress_of([*COLLECT_EVENTS[:3], wire.Message("a:1b unloaded"), wire.Exit(130)])
    assert [model.phase for model in progress.models] == [Phase.STOPPED]
    assert progress.messages == (wire.Message("a:1b unloaded"),)


def test_a_server_that_is_unavailable_is_named_until_it_is_back() -> None:
    away = progress_of([wire.Waiting("ollama", 300), wire.Waiting("MLflow"), wire.Waiting("ollama", 300)])
    assert away.waiting_for == ("MLflow", "ollama")
    assert away.after(wire.Resumed("MLflow")).waiting_for == ("ollama",)
    assert away.after(wire.Exit(1)).waiting_for == ()


def test_only_the_last_messages_are_kept() -> None:
    progress = progress_of(wire.Message(str(number)) for number in range(100))
    assert [message.text for message in progress.messages] == [str(number) for number in range(80, 100)]


def test_judging_events_show_the_progress_of_a_judge() -> None:
    judged = wire.Judged("s1", "rules", 40, 0, held=False, provisional=True)
    progress = progress_of([wire.Judging("rules", 10, 0, 40), wire.Judging("rules", 40, 0, 40), judged])
    assert (progress.judging, progress.judged) == (wire.Judging("rules", 40, 0, 40), judged)


@given(st.integers(0, len(COLLECT_EVENTS)))
def test_progress_can_be_continued_from_any_event(cut: int) -> None:
    assert progress_of(COLLECT_EVENTS[cut:], progress_of(COLLECT_EVENTS[:cut])) == progress_of(COLLECT_EVENTS)


@given(st.integers(0, len(COLLECT_EVENTS)))
def test_progress_is_plain_json_after_every_event(cut: int) -> None:
    plain = progress_of(COLLECT_EVENTS[:cut]).to_json()
    assert json.loads(json.dumps(plain)) == plain


def test_progress_is_complete_for_a_late_reader() -> None:
    assert progress_of(COLLECT_EVENTS[3:4]).models[0].done == 3
