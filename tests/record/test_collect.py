"""Collect on a scripted server: complete and resumable, with the right reason for each failure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.collecting import Collecting
from support.polling import eventually
from support.scripted_mlflow import ApiError, ScriptedMlflow
from support.scripted_ollama import Fault, ModelSpec, ScriptedOllama
from tipbench.errors import (
    JournalError,
    LockHeld,
    MlflowError,
    MlflowUnavailable,
    ModelRefused,
    OllamaError,
    ResidencyError,
    ServerUnavailable,
    SuiteError,
    UsageError,
)
from tipbench.generate import ollama, ollama_api
from tipbench.generate.engine import FreeMemory
from tipbench.judge.material import read_cells
from tipbench.plan.design import Design, make_design, read_design
from tipbench.plan.suite import load_suite
from tipbench.record import journal, mlflow_http, writer
from tipbench.record.events import BlockFinished, BlockStarted, Event, Message, Recording, Resumed, Waiting
from tipbench.record.journal import count_unstored
from tipbench.record.mlflow import MlflowConnection, MlflowStore
from tipbench.record.plan import plan_json
from tipbench.record.reader import current_runs
from tipbench.record.run import NewRun, RunChange
from tipbench.record.store import MemoryStore
from tipbench.record.summary import Summary
from tipbench.workflows.plan_collect import plan_collect

CELLS = 2 * 3 * 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedOllama]:
    monkeypatch.setattr(ollama_api, "_RETRY_WAIT_S", 0.01)
    monkeypatch.setattr(writer, "_UNAVAILABLE_RETRY_S", 0.05)
    with ScriptedOllama(["alpha:135m", "beta:135m"]) as running:
        yield running


@pytest.fixture
def bench(home: Path, server: ScriptedOllama) -> Collecting:
    return Collecting(home, server.url)


def after_calls(server: ScriptedOllama, count: int) -> None:
    """Wait until the server has received `count` requests."""
    assert eventually(lambda: len(server.log.calls()) >= count)


def at_request(server: ScriptedOllama, number: int, action: Callable[[], object]) -> None:
    """Call `action` on a thread while the server holds request `number`; it answers afterwards."""
    server.add_faults(Fault("hold", calls=(number,)))

    def act() -> None:
        after_calls(server, number)
        action()
        server.clear_faults("hold")

    threading.Thread(target=act).start()


def has_event(bench: Collecting, wanted: Callable[[Event], bool]) -> bool:
    """Wait until the collect has emitted such an event."""
    return eventually(lambda: any(map(wanted, bench.events)))


def is_waiting(event: Event) -> bool:
    return isinstance(event, Waiting)


def chats(server: ScriptedOllama) -> int:
    return len(server.log.calls())


@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_whole_grid_is_recorded_with_one_load_per_model(
    bench: Collecting, server: ScriptedOllama, concurrency: int
) -> None:
    summary = bench.run(concurrency=concurrency)
    assert (summary.cells, summary.generated, summary.failed) == (CELLS, CELLS, 0)
    assert len({run.tags["cell_key"] for run in bench.finished()}) == CELLS
    assert dict(server.log.loads) == {"alpha:135m": 1, "beta:135m": 1}
    assert server.log.max_resident == 1
    assert not server.resident


def test_a_second_collect_generates_nothing(bench: Collecting, server: ScriptedOllama) -> None:
    bench.run()
    before = chats(server)
    again = bench.run()
    assert (again.generated, again.recorded_before) == (0, CELLS)
    assert chats(server) == before
    assert len(bench.runs()) == CELLS


def test_an_interrupt_before_a_batch_is_saved_loses_no_finished_answer(
    bench: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # The module's first sleep waits for more results of a batch. Other modules sleep as usual.
        patch.setattr("tipbench.record.generation.time", SimpleNamespace(**{**vars(time), "sleep": interrupt}))
        with pytest.raises(KeyboardInterrupt):
            bench.run(models="alpha:135m", prompts="v1")
    assert bench.run(models="alpha:135m", prompts="v1").generated < 4


def test_a_larger_grid_generates_only_what_is_new(bench: Collecting, server: ScriptedOllama) -> None:
    bench.run(prompts="v1")
    assert bench.run().generated == CELLS - 8
    assert len(bench.finished()) == CELLS


def design_of(bench: Collecting) -> Design | None:
    found = bench.store.experiment("tip-bench-auto")
    return read_design(found.tags) if found else None


def test_first_collect_records_the_design_and_a_later_one_adds_scenarios_until_a_person_has_scored(
    bench: Collecting,
) -> None:
    order = [scenario.id for scenario in load_suite("tips-32").scenarios]
    bench.run(models="baseline:template", suite="tips-32", n_scenarios=8)
    assert design_of(bench) == make_design(order[:8])
    bench.run(models="baseline:template", suite="tips-32", n_scenarios=4)
    assert design_of(bench) == make_design(order[:8]), "nothing new"
    bench.run(models="baseline:template", suite="tips-32", n_scenarios=16)
    assert design_of(bench) == make_design(order[:16])
    scored = {"state": "judged", "judge_pending": "false"}
    bench.store.update(bench.finished()[0].run_id, RunChange(tags=scored, at_ms=1))
    bench.run(models="baseline:template", suite="tips-32", n_scenarios=20)
    assert design_of(bench) == make_design(order[:16])
    assert "Scenarios are added after the first score" in bench.messages()


def test_one_look_can_be_planned(bench: Collecting) -> None:
    bench.run(models="baseline:template", suite="tips-32", n_scenarios=16, looks="one")
    design = design_of(bench)
    assert design is not None
    assert (design.looks, design.level) == ((16,), 0.05)
    bench.run(models="baseline:template", suite="tips-32", n_scenarios=20)
    assert (design_of(bench) or design).looks == (20,)


def test_experiment_with_scores_and_no_design_gets_none(bench: Collecting) -> None:
    bench.run(models="baseline:template")
    found = bench.store.experiment("tip-bench-auto")
    assert found is not None
    bench.store.tag_experiment(found.experiment_id, {"tipbench.design": ""})
    scored = {"state": "judged", "judge_pending": "false"}
    bench.store.update(bench.finished()[0].run_id, RunChange(tags=scored, at_ms=1))
    bench.run(models="baseline:template")
    assert design_of(bench) is None


def test_progress_is_reported_block_by_block(bench: Collecting) -> None:
    bench.run()
    blocks = [event for event in bench.events if isinstance(event, BlockStarted | BlockFinished)]
    assert blocks == [
        BlockStarted("alpha:135m", 12, 0),
        BlockFinished("alpha:135m"),
        BlockStarted("beta:135m", 12, 0),
        BlockFinished("beta:135m"),
    ]


def test_the_collection_run_holds_the_evidence(bench: Collecting, server: ScriptedOllama) -> None:
    server.set(call_s=0.05)
    summary = bench.run()
    (collection,) = bench.runs("collection")
    assert collection.metrics["most_resident"] == 1
    assert collection.metrics["handovers"] == 2
    assert collection.metrics["residency_samples"] >= 1
    assert summary.evidence is not None
    assert collection.tags["evidence"] == summary.evidence.sentence()
    _, texts = bench.store.get(collection.run_id)
    assert json.loads(texts["artifact:config.json"])["models"] == "alpha:135m,beta:135m"
    assert {run.tags["collection"] for run in bench.runs()} == {collection.tags["tipbench.record"]}


def test_a_login_in_an_address_is_not_recorded(bench: Collecting) -> None:
    bench.run(mlflow_url="http://me:secret@mlflow.example:5000", prompts="v1")
    (collection,) = bench.runs("collection")
    _, texts = bench.store.get(collection.run_id)
    assert json.loads(texts["artifact:config.json"])["mlflow_url"] == "http://mlflow.example:5000"
    assert not any("secret" in path.read_text() for path in bench.home.rglob("*") if path.is_file())


def test_failed_cells_are_recorded_and_tried_again_by_the_next_collect(
    bench: Collecting, server: ScriptedOllama
) -> None:
    server.add_faults(Fault("error_line", 3, calls=(2, 5)))
    first = bench.run()
    assert (first.generated, first.failed) == (CELLS, 2)
    assert len(bench.finished()) == CELLS - 2
    failed = [run for run in bench.runs() if run.status == "FAILED"]
    assert {run.tags["failure"] for run in failed} == {"incomplete"}
    assert all(run.tags["judge_pending"] == "false" for run in failed)

    second = bench.run()
    assert (second.generated, second.failed, second.recorded_before) == (2, 0, CELLS - 2)
    assert len(bench.finished()) == CELLS
    superseded = [run for run in bench.runs() if run.tags.get("superseded") == "true"]
    assert {run.run_id for run in superseded} == {run.run_id for run in failed}


def test_a_cell_that_fails_again_supersedes_its_first_failure(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_faults(Fault("error_line", 3, calls=(1,)))
    bench.run()
    server.clear_faults()
    server.add_faults(Fault("error_line", 3))
    assert bench.run().failed == 1
    states = sorted(run.tags.get("superseded", "no") for run in bench.runs() if run.status == "FAILED")
    assert states == ["no", "true"]


def test_a_model_deleted_in_mid_run_is_not_requested_for_every_cell(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_faults(Fault("missing", model="alpha:135m", calls=tuple(range(3, 99))))
    summary = bench.run()
    assert summary.failed == 10
    assert len(server.log.calls("alpha:135m")) == 3
    assert len(bench.finished()) == CELLS - 10


def test_a_model_that_will_not_load_is_given_up_after_three_cells(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_faults(Fault("load_error", model="alpha:135m"))
    summary = bench.run()
    assert summary.failed == 12
    assert len(server.log.calls("alpha:135m")) == 6
    assert len(bench.finished()) == 12


def test_an_ollama_that_restarts_loses_no_cell(bench: Collecting, server: ScriptedOllama) -> None:
    def restart() -> None:
        server.pause_listening(lose_models=True)
        assert has_event(bench, is_waiting)
        server.resume()

    at_request(server, 5, restart)
    summary = bench.run()
    assert (summary.generated, summary.failed) == (CELLS, 0)
    assert any(isinstance(event, Resumed) for event in bench.events)


def test_an_ollama_that_stays_unavailable_leaves_the_cells_untouched(bench: Collecting, server: ScriptedOllama) -> None:
    at_request(server, 4, server.pause_listening)
    with pytest.raises(ServerUnavailable, match="was unavailable for 1 s"):
        bench.run(server_wait_s=1)
    done = len(bench.finished())
    assert 0 < done < CELLS
    assert all(run.status == "FINISHED" for run in bench.runs())
    server.resume()
    assert bench.run().generated == CELLS - done


def lose_mlflow(bench: Collecting, server: ScriptedOllama, at: int, back: Callable[[Event], bool] | None) -> None:
    """Make MLflow unavailable from a request to Ollama on, until an event, or for good."""

    def act() -> None:
        bench.store.away = True
        if back is not None:
            threading.Thread(target=come_back).start()

    def come_back() -> None:
        assert back is not None
        assert has_event(bench, back)
        bench.store.away = False

    at_request(server, at, act)


def test_without_mlflow_generation_continues_into_the_journal(bench: Collecting, server: ScriptedOllama) -> None:
    bench.run(prompts="v1", n_scenarios=1)
    lose_mlflow(bench, server, 6, lambda event: isinstance(event, Message) and "kept in the journal" in event.text)
    summary = bench.run()
    assert summary.generated == CELLS - 2
    assert len(bench.finished()) == CELLS
    assert "Results are kept in the journal" in bench.messages()


def test_an_mlflow_that_stays_unavailable_loses_nothing(bench: Collecting, server: ScriptedOllama, home: Path) -> None:
    bench.run(prompts="v1", n_scenarios=1)
    lose_mlflow(bench, server, 6, back=None)
    with pytest.raises(MlflowUnavailable, match=r"\d+ results are safe in the journal"):
        bench.run(server_wait_s=1)
    assert chats(server) == CELLS
    left = count_unstored((home / "journal").iterdir())
    assert left > 0
    bench.store.away = False
    again = bench.run()
    assert again.generated == 0
    assert chats(server) == CELLS
    assert len(bench.finished()) == CELLS
    assert count_unstored((home / "journal").iterdir()) == 0


def test_a_damaged_line_of_the_journal_is_kept_and_its_cell_is_generated_again(
    bench: Collecting, server: ScriptedOllama, home: Path
) -> None:
    lose_mlflow(bench, server, 2, back=None)
    with pytest.raises(MlflowUnavailable):
        bench.run(models="alpha:135m", prompts="v1", server_wait_s=0.2)
    (path,) = (home / "journal").rglob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(at for at, line in enumerate(lines) if line.startswith(b'{"put":{"kind":"cell"'))
    lines[last] = lines[last].replace(b'"state":"', b'"state":"?')
    path.write_bytes(b"".join(lines))
    bench.store.away = False
    assert bench.run(models="alpha:135m", prompts="v1").generated == 1
    assert f"1 line of the journal {path} cannot be read" in bench.messages()
    assert lines[last] in path.with_name(f"{path.name}.damaged").read_bytes()
    assert len(bench.finished()) == 4


def test_a_journal_that_cannot_be_written_stops_the_run_at_once(
    bench: Collecting, server: ScriptedOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set(call_s=0.05)
    original = journal._write_all
    count = 0

    def full(fd: int, data: bytes) -> None:
        nonlocal count
        count += b'"put"' in data[:10]
        if count > 3:
            raise OSError(28, "No space left on device")
        original(fd, data)

    monkeypatch.setattr(journal, "_write_all", full)
    with pytest.raises(JournalError, match="No space left"):
        bench.run()
    assert chats(server) <= 8
    assert not server.resident


def test_a_model_too_large_is_refused_before_anything_is_generated(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_model(ModelSpec("x:e2b", params=4_460_000_000))
    with pytest.raises(ModelRefused, match=r"x:e2b has 4\.46B parameters; the limit is 4B.*--skip-refused"):
        bench.run(models="alpha:135m,x:e2b")
    assert chats(server) == 0
    assert bench.runs() == []


def test_skip_refused_runs_the_rest_and_records_the_refusal_once(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_model(ModelSpec("cloud:1b", remote_model="big", remote_host="https://elsewhere"))
    for _ in range(2):
        summary = bench.run(models="alpha:135m,cloud:1b,nosuch:1b", skip_refused=True)
    assert set(summary.refused) == {"cloud:1b", "nosuch:1b"}
    assert summary.event().refused == tuple(summary.refused.values()), "the job's reason is made of it"
    assert len(bench.finished()) == 12
    refused = bench.runs("refused")
    assert sorted(run.params["model"] for run in refused) == ["cloud:1b", "nosuch:1b"]
    assert server.log.calls("cloud:1b") == []


def test_with_every_model_refused_the_collect_fails(bench: Collecting) -> None:
    with pytest.raises(ModelRefused, match="ollama pull nosuch:1b"):
        bench.run(models="nosuch:1b", skip_refused=True)


def test_a_moved_tag_makes_new_cells(bench: Collecting, server: ScriptedOllama) -> None:
    bench.run(models="alpha:135m")
    server.add_model(ModelSpec("alpha:135m", blob="retrained"))
    assert bench.run(models="alpha:135m").generated == 12
    assert len({run.params["model_digest"] for run in bench.finished()}) == 2


def test_the_plan_counts_what_an_earlier_build_of_a_model_answered_as_stale(
    bench: Collecting, server: ScriptedOllama
) -> None:
    bench.run(models="alpha:135m")
    server.add_model(ModelSpec("alpha:135m", blob="retrained"))
    config = bench.config(models="alpha:135m")
    plan, _ = plan_collect(config, bench.home, lambda: MlflowConnection(bench.store, "memory", "memory"))
    assert (len(plan.missing), plan.n_stale) == (12, 12)
    assert plan_json(plan)["stale"] == 12


def test_a_second_collect_on_the_same_server_fails_or_waits(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_faults(Fault("hold", calls=(1,)))
    first = threading.Thread(target=lambda: bench.run(timeout_s=60))
    first.start()
    after_calls(server, 1)
    other = Collecting(bench.home, server.url, bench.store)
    with pytest.raises(LockHeld, match=r"in use by a collect into tip-bench-auto \(process \d+ .*--wait"):
        other.run(evict=True)
    server.clear_faults()
    summary = other.run(wait=True)
    first.join()
    assert summary.generated == 0
    assert len(bench.runs()) == CELLS
    assert server.log.max_resident == 1


def test_what_is_in_memory_at_the_start_is_evicted_only_on_request(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_model(ModelSpec("foreign:7b"))
    server.load_foreign("foreign:7b")
    with pytest.raises(
        ResidencyError, match=r"foreign:7b is in the Ollama server's memory.*must be empty at the start"
    ):
        bench.run(models="baseline:template,alpha:135m")
    assert chats(server) == 0
    assert bench.runs() == [], "the rule holds before any engine generates"
    assert bench.run(evict=True).generated == CELLS
    assert server.log.max_resident == 1


def test_a_foreign_model_in_mid_run_is_reported_and_its_cells_are_marked(
    bench: Collecting, server: ScriptedOllama
) -> None:
    server.add_model(ModelSpec("foreign:7b"))

    def load_and_unload() -> None:
        server.load_foreign("foreign:7b")
        assert has_event(bench, lambda event: isinstance(event, Message) and "another client" in event.text)
        server.unload_foreign("foreign:7b")

    at_request(server, 4, load_and_unload)
    summary = bench.run(models="alpha:135m")
    marked = [run for run in bench.finished() if run.tags.get("foreign_resident") == "true"]
    assert 0 < len(marked) < 12
    assert summary.evidence is not None
    assert summary.evidence.foreign == ("foreign:7b",)
    assert summary.evidence.most_resident == 2
    assert "another client loaded foreign:7b" in bench.messages()
    (collection,) = bench.runs("collection")
    assert collection.tags["foreign_models"] == "foreign:7b"


def test_a_foreign_model_that_stays_does_not_spoil_a_complete_collect(
    bench: Collecting, server: ScriptedOllama
) -> None:
    server.add_model(ModelSpec("foreign:7b"))
    at_request(server, 4, lambda: server.load_foreign("foreign:7b"))
    summary = bench.run(models="alpha:135m", server_wait_s=2)
    assert (summary.generated, summary.failed) == (12, 0)
    assert server.resident == ("foreign:7b",)


def test_a_foreign_model_between_two_models_ends_the_run_at_the_deadline(
    bench: Collecting, server: ScriptedOllama
) -> None:
    server.add_model(ModelSpec("foreign:7b"))
    at_request(server, 4, lambda: server.load_foreign("foreign:7b"))
    with pytest.raises(ResidencyError, match=r"foreign:7b is still in memory .* --evict"):
        bench.run(server_wait_s=1)
    assert len(bench.finished()) == 12
    assert server.log.calls("beta:135m") == []


def test_unload_call_pauses_for_an_absent_server_and_tolerates_a_foreign_model(
    bench: Collecting, server: ScriptedOllama
) -> None:
    server.add_model(ModelSpec("foreign:7b"))

    def disturb() -> None:
        server.pause_listening(lose_models=True)
        assert has_event(bench, is_waiting)
        server.load_foreign("foreign:7b")
        server.resume()

    at_request(server, 3, disturb)
    summary = bench.run(models="alpha:135m", unload="call")
    assert (summary.generated, summary.failed) == (12, 0)


def test_two_servers_do_not_generate_the_same_cells_at_the_same_time(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_faults(Fault("hold", calls=(1,)))
    with ScriptedOllama(["alpha:135m"]) as second:
        first = threading.Thread(target=lambda: bench.run(models="alpha:135m", timeout_s=60))
        first.start()
        after_calls(server, 1)
        other = Collecting(bench.home, second.url, bench.store)
        with pytest.raises(LockHeld, match="alpha:135m for tip-bench-auto"):
            other.run(models="alpha:135m")
        server.clear_faults()
        assert other.run(models="alpha:135m", wait=True).generated == 0
        first.join()
    assert len(bench.runs()) == 12


def test_a_tag_moved_while_queued_is_seen_before_anything_is_generated(
    bench: Collecting, server: ScriptedOllama
) -> None:
    other = Collecting(bench.home, server.url)

    def move_tag() -> None:
        assert has_event(other, lambda event: isinstance(event, Message) and "waiting for Ollama" in event.text)
        server.add_model(ModelSpec("beta:135m", blob="retrained"))

    at_request(server, 1, move_tag)
    first = threading.Thread(target=lambda: bench.run(models="alpha:135m", timeout_s=60))
    first.start()
    after_calls(server, 1)
    other.run(models="beta:135m", wait=True)
    first.join()
    assert {run.params["model_digest"] for run in other.runs()} == {ModelSpec("beta:135m", blob="retrained").manifest}
    assert not any(run.tags.get("foreign_resident") for run in other.runs())


def test_a_tag_moved_in_mid_block_stops_the_run_instead_of_recording_under_the_old_digest(
    bench: Collecting, server: ScriptedOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ollama, "KEEP_WARM_S", 2)  # the old weights no longer have a name to unload them by

    def move_tag() -> None:
        server.add_model(ModelSpec("alpha:135m", blob="retrained"))
        server.set(call_s=0.5)  # gives the monitor time to take a sample

    at_request(server, 4, move_tag)
    with pytest.raises(OllamaError, match="its tag was moved"):
        bench.run(models="alpha:135m")
    clean = [run for run in bench.finished() if "foreign_resident" not in run.tags]
    assert 0 < len(clean) < 12
    server.set(call_s=0.0)
    assert bench.run(models="alpha:135m", evict=True).generated == 12


def test_an_alias_is_counted_once_and_reported(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_model(ModelSpec("alias:135m", digest=ModelSpec("alpha:135m").manifest))
    assert bench.run(models="alpha:135m,alias:135m").cells == 12
    assert "alias:135m is the same model as alpha:135m" in bench.messages()


def test_a_mlflow_unavailable_for_long_is_still_waited_for_at_the_end(
    bench: Collecting, server: ScriptedOllama
) -> None:
    server.set(call_s=0.1)  # MLflow is unavailable for longer than it is waited for at the end
    lose_mlflow(bench, server, 2, lambda event: isinstance(event, Recording))
    summary = bench.run(models="alpha:135m", server_wait_s=1)
    assert summary.generated == 12
    assert len(bench.finished()) == 12


def test_a_result_that_mlflow_rejects_does_not_block_the_others(
    bench: Collecting, server: ScriptedOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = _Refusing(bench.store, status=500, nth=2)
    monkeypatch.setattr(bench.store, "record", refuse)
    with pytest.raises(MlflowError, match=r"refused 1 of the results.*1 result is safe in the journal"):
        bench.run(models="alpha:135m")
    assert len(bench.finished()) == 11
    refuse.status = 400
    assert bench.run(models="alpha:135m").generated == 1, "set aside by the drain, and generated again"
    assert "now in" in bench.messages()
    assert len(list((bench.home / "journal").rglob("*.refused"))) == 1


def test_a_result_that_met_server_errors_is_recorded_by_a_later_collect_and_never_set_aside(
    bench: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = _Refusing(bench.store, status=500, nth=2)
    monkeypatch.setattr(bench.store, "record", refuse)
    with pytest.raises(MlflowError, match="1 result is safe in the journal"):
        bench.run(models="alpha:135m")
    for _ in range(2):  # a drain that still meets the error keeps the result, and the cell is generated again
        bench.run(models="alpha:135m")
        assert not list((bench.home / "journal").rglob("*.refused"))
        assert len(list((bench.home / "journal").rglob("*.jsonl"))) == 1
    refuse.status = 0
    assert bench.run(models="alpha:135m").generated == 0
    assert not list((bench.home / "journal").rglob("*.jsonl"))
    assert len(bench.finished()) == 12


class _FailingMlflow(ScriptedMlflow):
    """Responds to requests of one kind with a server error, until `failing` is empty."""

    failing = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == self.failing:
            raise ApiError(500, "INTERNAL_ERROR", "database or disk is full")
        return super().answer(path, body)


@pytest.mark.parametrize("failing", ["runs/create", "runs/log-batch", "runs/update"])
def test_results_that_met_server_errors_of_mlflow_are_drained_and_no_half_written_run_remains(
    home: Path, server: ScriptedOllama, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(mlflow_http, "_RETRY_WAITS_S", (0.0, 0.0))
    with _FailingMlflow() as mlflow, MlflowStore(mlflow.url) as store:
        bench = Collecting(home, server.url, store=cast("MemoryStore", store))
        mlflow.failing = failing
        with pytest.raises(MlflowUnavailable, match=r"5 results are safe in the journal"):
            bench.run(models="alpha:135m", prompts="v1", server_wait_s=0.5)
        mlflow.failing = ""
        assert bench.run(models="alpha:135m", prompts="v1").generated == 0
        everything = list(store.search("1", where={}, include_half_written=True))
    assert sorted(run.status for run in everything) == ["FINISHED"] * 6  # four cells and two collections
    assert not list((home / "journal").rglob("*.*"))


@pytest.mark.parametrize(
    ("line", "failed"),
    [
        (b"[" * 200_000, 4),
        (b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}", 4),
        (b'{"message": {"content": "x"}, "done": true, "eval_count": 1e999, "eval_duration": NaN}', 0),
        (b'{"message": {"content": "x"}, "done": true, "total_duration": ' + b"9" * 400 + b"}", 0),
    ],
)
def test_odd_lines_of_the_server_do_not_end_the_collect(
    bench: Collecting, monkeypatch: pytest.MonkeyPatch, line: bytes, failed: int
) -> None:
    feed = ollama_api._AnswerReader.feed
    monkeypatch.setattr(ollama_api._AnswerReader, "feed", lambda reader, _chunk: feed(reader, line + b"\n"))
    summary = bench.run(models="alpha:135m", prompts="v1")
    assert (summary.generated, summary.failed) == (4, failed)
    assert len(bench.runs()) == 4


def test_an_mlflow_that_refuses_everything_stops_the_run_and_reports_what_is_safe(
    bench: Collecting, server: ScriptedOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set(call_s=0.2)
    monkeypatch.setattr(bench.store, "record", _Refusing(bench.store, status=400, nth=None))
    with pytest.raises(MlflowError, match=r"no such experiment.* safe in the journal"):
        bench.run()
    assert chats(server) < CELLS


class _Refusing:
    """The store's `record`, refusing the nth new result every time (None: all of them)."""

    def __init__(self, store: MemoryStore, *, status: int, nth: int | None) -> None:
        self._record = store.record
        self.status = status
        self._nth = nth
        self._seen: list[str] = []

    def __call__(self, experiment_id: str, run: NewRun, *, may_exist: bool = False) -> str:
        if run.record_id not in self._seen:
            self._seen.append(run.record_id)
        if self.status and (self._nth is None or self._seen.index(run.record_id) + 1 == self._nth):
            raise MlflowError("no such experiment", status=self.status)
        return self._record(experiment_id, run, may_exist=may_exist)


def test_unload_call_frees_the_memory_after_every_cell(bench: Collecting, server: ScriptedOllama) -> None:
    bench.run(unload="call", prompts="v1", concurrency=4)
    assert dict(server.log.loads) == {"alpha:135m": 4, "beta:135m": 4}
    assert server.log.max_resident == 1
    bench.run(prompts="v1", experiment="tip-bench-one-at-a-time")
    one_at_a_time = bench.runs(experiment="tip-bench-one-at-a-time")
    assert {run.tags["memory_bytes"] for run in bench.runs()} == {run.tags["memory_bytes"] for run in one_at_a_time}


def test_an_answer_without_done_is_recorded_as_aborted(bench: Collecting, server: ScriptedOllama) -> None:
    server.add_faults(Fault("no_done", 20, model="alpha:135m"))
    summary = bench.run()
    assert summary.failed == 0
    aborted = [run for run in bench.finished() if run.tags["done_reason"] == "aborted"]
    assert len(aborted) == 12
    assert {run.state for run in aborted} <= {"pending", "judged"}


def test_engines_without_ollama_need_no_ollama(home: Path) -> None:
    bench = Collecting(home, "http://127.0.0.1:9")
    assert bench.run(models="baseline:template").generated == 4
    (collection,) = bench.runs("collection")
    assert "most_resident" not in collection.metrics


def test_a_200_kb_answer_with_emoji_and_nuls_is_read_back_byte_for_byte(
    bench: Collecting, server: ScriptedOllama
) -> None:
    server.add_faults(Fault("huge", 200_000))
    bench.run(models="alpha:135m", prompts="v1", n_scenarios=1)
    (run,) = bench.runs()
    _, texts = bench.store.get(run.run_id)
    assert len(texts["artifact:raw.txt"].encode()) >= 200_000
    assert "\x00" in texts["artifact:raw.txt"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"suite": "nosuch"}, SuiteError),
        ({"prompts": "v9"}, UsageError),
    ],
)
def test_an_invalid_plan_is_refused_before_any_request_is_sent(
    home: Path, changes: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Collecting(home, "http://127.0.0.1:9").run(**changes)


def test_two_homes_at_once_leave_one_counted_run_per_cell(
    bench: Collecting, server: ScriptedOllama, tmp_path: Path
) -> None:
    both_have_planned = threading.Barrier(2, timeout=30)

    def planned(_model: str) -> FreeMemory:
        both_have_planned.wait()
        return FreeMemory()

    with ScriptedOllama(["alpha:135m"]) as second_server:
        second = replace(bench, home=tmp_path / "second", ollama_url=second_server.url, events=[], free_memory=planned)
        ended: list[Summary] = []
        threads = [
            threading.Thread(target=lambda each=each: ended.append(each.run(models="alpha:135m")))
            for each in (replace(bench, free_memory=planned), second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert [summary.generated for summary in ended] == [12, 12]
    experiment = bench.store.experiment("tip-bench-auto")
    assert experiment is not None
    assert len(bench.finished()) == 24
    assert len(current_runs(bench.store, experiment.experiment_id, where={})) == 12
    assert len(read_cells(bench.store, experiment.experiment_id)) == 12
    tagged = [run for run in bench.finished() if run.tags.get("superseded") == "true"]
    assert len(tagged) == 12
    assert {run.tags["cell_key"] for run in tagged} == {run.tags["cell_key"] for run in bench.finished()}
