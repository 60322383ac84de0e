"""The RunStore port: one suite for the store in memory, a real MLflow server and the scripted MLflow of other tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.threads import in_threads
from tipbench.errors import CorruptText, MlflowError
from tipbench.record import mlflow
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import NewRun, RunChange, RunKind, StoredRun
from tipbench.record.store import MemoryStore, RunStore
from tipbench.record.texts import to_tags

TEXT = ("tip 😀\x00 — done\n" * 20_000)[:200_000]


@dataclass
class StoreBench:
    """A run store with a new experiment."""

    store: MemoryStore | MlflowStore
    experiment: str

    def half_write(self, run: NewRun) -> str:
        """Create a run without its content, as an interrupted `record` does."""
        if isinstance(self.store, MemoryStore):
            return self.store.begin(self.experiment, run)
        tags = {"kind": run.kind, "tipbench.record": run.record_id, "cell_key": run.cell_key or ""}
        body = {
            "experiment_id": self.experiment,
            "start_time": run.start_ms,
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        response = httpx.post(f"{self.store.url}/api/2.0/mlflow/runs/create", json=body, trust_env=False, timeout=60)
        return str(response.json()["run"]["info"]["run_id"])

    def delete_tag(self, run_id: str, key: str) -> None:
        """Delete a tag, which damages the text stored in it."""
        if isinstance(self.store, MemoryStore):
            del self.store._runs[run_id].text_tags[key]
            return
        body = {"run_id": run_id, "key": key}
        url = f"{self.store.url}/api/2.0/mlflow/runs/delete-tag"
        httpx.post(url, json=body, trust_env=False, timeout=60).raise_for_status()

    def text_tags(self, run_id: str) -> set[str]:
        """The keys of all tags that store texts."""
        if isinstance(self.store, MemoryStore):
            return set(self.store._runs[run_id].text_tags)
        url = f"{self.store.url}/api/2.0/mlflow/runs/get?run_id={run_id}"
        tags = httpx.get(url, trust_env=False, timeout=60).json()["run"]["data"]["tags"]
        return {tag["key"] for tag in tags if tag["key"].startswith("artifact:")}

    def all_runs(self) -> list[StoredRun]:
        return list(self.store.search(self.experiment, where={}, include_half_written=True))

    def run_ids(self, **where: str) -> list[str]:
        return [run.run_id for run in self.store.search(self.experiment, where=where)]


SCRIPTED = pytest.param("scripted MLflow", marks=pytest.mark.server)


@pytest.fixture(params=["memory", SCRIPTED, pytest.param("MLflow", marks=pytest.mark.real)])
def bench(request: pytest.FixtureRequest) -> Iterator[StoreBench]:
    if request.param == "memory":
        yield make_bench(MemoryStore())
    else:
        with MlflowStore(
            request.getfixturevalue("mlflow_url" if request.param == "scripted MLflow" else "real_mlflow_url")
        ) as store:
            yield make_bench(store)


def make_bench(store: MemoryStore | MlflowStore) -> StoreBench:
    return StoreBench(store, store.ensure_experiment(f"tip-bench-{uuid.uuid4().hex}").experiment_id)


def a_run(**changes: object) -> NewRun:
    run = NewRun(
        kind=RunKind.CELL,
        record_id=uuid.uuid4().hex,
        name="qwen2.5:0.5b v1 ana@morning",
        start_ms=1_700_000_000_000,
        end_ms=1_700_000_001_500,
        cell_key="key-1",
        params={"model": "qwen2.5:0.5b", "prompt_version": "v1", "empty": ""},
        metrics={"latency_s": 1.25, "n_candidates": 5},
        tags={"state": "pending", "judge_pending": "true"},
        texts={"artifact:raw.txt": "short", "artifact:prompt.txt": ""},
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def test_a_recorded_run_round_trips(bench: StoreBench) -> None:
    store: RunStore = bench.store
    run = a_run()
    stored, texts = store.get(store.record(bench.experiment, run))
    assert (stored.status, stored.start_ms, stored.end_ms) == ("FINISHED", run.start_ms, run.end_ms)
    assert stored.params == run.params
    assert stored.metrics == run.metrics
    assert stored.state == "pending"
    assert stored.tags["kind"] == "cell"
    assert stored.tags["cell_key"] == "key-1"
    assert stored.tags["tipbench.record"] == run.record_id
    assert stored.tags["mlflow.runName"] == run.name
    assert texts == run.texts


def test_200_kb_of_emoji_and_nuls_round_trip(bench: StoreBench) -> None:
    run = a_run(texts={"artifact:raw.txt": TEXT, "artifact:candidates.json": "[]"})
    _, texts = bench.store.get(bench.store.record(bench.experiment, run))
    assert texts["artifact:raw.txt"].encode() == TEXT.encode()


def test_runs_are_found_without_their_texts(bench: StoreBench) -> None:
    bench.store.record(bench.experiment, a_run(texts={"artifact:raw.txt": TEXT}))
    (found,) = bench.store.search(bench.experiment, where={})
    assert not [key for key in found.tags if key.startswith("artifact:")]


def test_unusual_values_of_tags_and_params_round_trip(bench: StoreBench) -> None:
    unusual = "a\x00b \ud800 ␛0000 ' \" \\ `tick` \r\n 😀 "
    run = a_run(params={"odd": unusual}, tags={"odd": unusual})
    bench.store.record(bench.experiment, run)
    (found,) = bench.store.search(bench.experiment, where={"odd": unusual, "params.odd": unusual})
    assert (found.tags["odd"], found.params["odd"]) == (unusual, unusual)


def test_a_failed_run_has_its_status(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run(ok=False))
    assert bench.store.get(run_id)[0].status == "FAILED"
    assert bench.run_ids() == [run_id]


def test_search_combines_tags_and_params(bench: StoreBench) -> None:
    wanted = bench.store.record(bench.experiment, a_run(tags={"state": "judged"}, params={"model": "m"}))
    bench.store.record(bench.experiment, a_run(tags={"state": "pending"}, params={"model": "m"}))
    bench.store.record(bench.experiment, a_run(tags={"state": "judged"}, params={"model": "n"}))
    assert bench.run_ids(**{"state": "judged", "params.model": "m"}) == [wanted]


VALUES = ["it's", 'say "hi"', "both ' and \"", "trail\\", "a' OR '1'='1", "`", "%_", "", "x' AND y = 'z", "--", ";"]


def test_search_accepts_values_with_any_quotes(bench: StoreBench) -> None:
    ids = {value: bench.store.record(bench.experiment, a_run(tags={"odd": value, "b": "c"})) for value in VALUES}
    for value in VALUES:
        assert bench.run_ids(odd=value, b="c") == [ids[value]]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.text(st.sampled_from("ab'\"\\`;()=,%- \n\x00\ud800é"), max_size=12))
def test_search_never_fails_on_a_value_and_never_finds_another(bench: StoreBench, value: str) -> None:
    if not bench.all_runs():
        bench.store.record(bench.experiment, a_run(tags={"odd": "plain"}))
    assert bench.run_ids(odd=value) == []
    assert bench.run_ids(**{"params.odd": value, "kind": "cell"}) == []


def test_search_accepts_any_valid_key(bench: StoreBench) -> None:
    keys = ["a b", "it's", 'say "x"', "tick`", "a.b:c/d-e", "ключ", "back\\slash"]
    ids = {key: bench.store.record(bench.experiment, a_run(tags={key: "v"})) for key in keys}
    for key, run_id in ids.items():
        assert bench.run_ids(**{key: "v"}) == [run_id]


def test_newest_runs_come_first_and_limit_counts(bench: StoreBench) -> None:
    ids = [bench.store.record(bench.experiment, a_run(start_ms=1000 + number)) for number in (3, 1, 2)]
    assert bench.run_ids() == [ids[0], ids[2], ids[1]]
    assert [run.run_id for run in bench.store.search(bench.experiment, where={}, limit=2)] == [ids[0], ids[2]]
    assert list(bench.store.search(bench.experiment, where={}, limit=0)) == []


def test_a_half_written_run_does_not_count_unless_requested(bench: StoreBench) -> None:
    half = bench.half_write(a_run())
    assert bench.run_ids() == []
    assert [run.run_id for run in bench.all_runs()] == [half]


def test_recording_again_leaves_the_finished_run(bench: StoreBench) -> None:
    run = a_run()
    first = bench.store.record(bench.experiment, run)
    assert bench.store.record(bench.experiment, run, may_exist=True) == first
    assert bench.run_ids() == [first]


def test_a_finished_run_of_the_same_key_is_unchanged(bench: StoreBench) -> None:
    first = bench.store.record(bench.experiment, a_run())
    assert bench.store.record(bench.experiment, a_run(metrics={"latency_s": 9.0}), may_exist=True) == first
    assert bench.store.get(first)[0].metrics["latency_s"] == 1.25


def test_a_half_written_run_of_the_same_record_is_completed(bench: StoreBench) -> None:
    run = a_run()
    half = bench.half_write(run)
    assert bench.store.record(bench.experiment, run, may_exist=True) == half
    stored, texts = bench.store.get(half)
    assert (stored.status, stored.params, texts) == ("FINISHED", run.params, run.texts)
    assert len(bench.all_runs()) == 1


def test_two_half_written_runs_of_one_record_become_one_run(bench: StoreBench) -> None:
    run = a_run()
    halves = {bench.half_write(run), bench.half_write(run)}
    assert bench.store.record(bench.experiment, run, may_exist=True) in halves
    assert len(bench.all_runs()) == 1


def test_an_older_half_written_run_of_another_record_is_deleted(bench: StoreBench) -> None:
    bench.half_write(a_run(start_ms=1_600_000_000_000))
    run_id = bench.store.record(bench.experiment, a_run(), may_exist=True)
    assert [run.run_id for run in bench.all_runs()] == [run_id]


def test_half_written_runs_next_to_a_finished_run_are_deleted(bench: StoreBench) -> None:
    first = bench.store.record(bench.experiment, a_run())
    run = a_run(start_ms=1_700_000_000_005)
    bench.half_write(run)
    assert bench.store.record(bench.experiment, run, may_exist=True) == first
    assert [each.run_id for each in bench.all_runs()] == [first]


def test_a_younger_half_written_run_of_another_record_is_left_to_its_writer(bench: StoreBench) -> None:
    half = bench.half_write(a_run(start_ms=1_800_000_000_000))
    run_id = bench.store.record(bench.experiment, a_run(), may_exist=True)
    assert {run.run_id for run in bench.all_runs()} == {half, run_id}


def test_a_half_written_run_of_another_key_is_unchanged(bench: StoreBench) -> None:
    half = bench.half_write(a_run(cell_key="key-2", start_ms=1_600_000_000_000))
    bench.store.record(bench.experiment, a_run(), may_exist=True)
    assert half in {run.run_id for run in bench.all_runs()}


def test_a_run_without_a_cell_key_is_found_by_its_record(bench: StoreBench) -> None:
    run = a_run(kind=RunKind.COLLECTION, cell_key=None)
    first = bench.store.record(bench.experiment, run)
    assert bench.store.record(bench.experiment, run, may_exist=True) == first
    assert bench.store.record(bench.experiment, a_run(cell_key=None), may_exist=True) != first
    assert "cell_key" not in bench.store.get(first)[0].tags


def test_a_failed_run_is_recorded_once_and_tried_again_as_a_new_one(bench: StoreBench) -> None:
    failed = a_run(ok=False)
    old = bench.store.record(bench.experiment, failed)
    assert bench.store.record(bench.experiment, failed, may_exist=True) == old
    new = bench.store.record(bench.experiment, a_run(supersedes=(old,)), may_exist=True)
    assert new != old
    assert bench.store.get(old)[0].tags["superseded"] == "true"
    assert "superseded" not in bench.store.get(new)[0].tags


def test_recording_again_sets_a_missing_superseded_tag(bench: StoreBench) -> None:
    old = bench.store.record(bench.experiment, a_run(ok=False))
    run = a_run()
    new = bench.store.record(bench.experiment, run)
    assert bench.store.record(bench.experiment, replace(run, supersedes=(old,)), may_exist=True) == new
    assert bench.run_ids(superseded="true") == [old]


def test_superseding_a_deleted_run_is_not_an_error(bench: StoreBench) -> None:
    gone = bench.half_write(a_run(start_ms=1))
    bench.store.record(bench.experiment, a_run(), may_exist=True)
    bench.store.record(bench.experiment, a_run(supersedes=("0" * 32, gone)))
    assert len(bench.run_ids()) == 2


def test_a_superseded_finished_run_does_not_prevent_recording(bench: StoreBench) -> None:
    old = bench.store.record(bench.experiment, a_run(tags={"superseded": "true"}))
    assert bench.store.record(bench.experiment, a_run(), may_exist=True) != old


REFUSED: dict[str, dict[str, object]] = {
    "long param": {"params": {"p": "x" * 6001}},
    "long tag": {"tags": {"t": "x" * 8001}},
    "long key": {"tags": {"t" * 251: "x"}},
    "long param key": {"params": {"t" * 251: "x"}},
    "long metric key": {"metrics": {"t" * 251: 1.0}},
    "long text key": {"texts": {"artifact:" + "t" * 240: "x" * 9000}},
    "empty key": {"tags": {"": "x"}},
    "half a character in a key": {"tags": {"\ud800": "x"}},
    "not a number": {"metrics": {"m": float("nan")}},
    "infinite": {"metrics": {"m": float("inf")}},
}


def test_values_over_the_limits_are_refused_before_anything_is_written(bench: StoreBench) -> None:
    for wrong in REFUSED.values():
        with pytest.raises(MlflowError):
            bench.store.record(bench.experiment, a_run(**wrong))
    assert bench.all_runs() == []


def test_a_text_among_the_tags_is_a_bug(bench: StoreBench) -> None:
    with pytest.raises(ValueError, match="artifact:raw"):
        bench.store.record(bench.experiment, a_run(tags={"artifact:raw.txt": "x"}))


def test_values_at_the_limits_round_trip(bench: StoreBench) -> None:
    run = a_run(params={"p" * 250: "😀" * 6000}, tags={"t" * 250: "😀" * 8000}, texts={"artifact:t": "😀" * 8000})
    stored, texts = bench.store.get(bench.store.record(bench.experiment, run))
    assert stored.params == run.params
    assert stored.tags["t" * 250] == "😀" * 8000
    assert texts == run.texts


def test_more_tags_params_and_metrics_than_one_batch_are_recorded(bench: StoreBench) -> None:
    run = a_run(
        params={f"p{number}": "x" for number in range(230)},
        metrics={f"m{number}": float(number) for number in range(1700)},
        tags={f"t{number}": "x" * 10 for number in range(330)},
    )
    stored, _ = bench.store.get(bench.store.record(bench.experiment, run))
    assert stored.params == run.params
    assert stored.metrics == run.metrics
    assert run.tags.items() <= stored.tags.items()


def test_an_unknown_run_is_refused_by_name(bench: StoreBench) -> None:
    with pytest.raises(MlflowError, match="0" * 32) as caught:
        bench.store.get("0" * 32)
    assert caught.value.code == "RESOURCE_DOES_NOT_EXIST"


def test_recording_into_an_unknown_experiment_is_refused(bench: StoreBench) -> None:
    with pytest.raises(MlflowError):
        bench.store.record("987654321", a_run())


def test_an_experiment_is_found_by_name_and_created_once(bench: StoreBench) -> None:
    name = f"tip-bench-{uuid.uuid4().hex} 'quoted'"
    assert bench.store.experiment(name) is None
    new = bench.store.ensure_experiment(name)
    found = replace(new, created=False)
    assert new.created
    assert bench.store.ensure_experiment(name) == found
    assert bench.store.experiment(name) == found
    assert new.name == name
    assert new.experiment_id in {each.experiment_id for each in bench.store.experiments()}


def test_concurrent_callers_of_ensure_get_the_same_experiment(bench: StoreBench) -> None:
    name = f"tip-bench-{uuid.uuid4().hex}"
    assert len(set(in_threads(6, lambda _: bench.store.ensure_experiment(name).experiment_id))) == 1


def test_mark_changed_sets_a_new_revision_each_time(bench: StoreBench) -> None:
    revisions = set()
    for _ in range(3):
        bench.store.mark_changed(bench.experiment)
        (found,) = [each for each in bench.store.experiments() if each.experiment_id == bench.experiment]
        revisions.add(found.tags["tipbench.revision"])
    assert len(revisions) == 3


def test_experiment_is_tagged_with_a_new_revision(bench: StoreBench) -> None:
    def tags() -> Mapping[str, str]:
        return next(each.tags for each in bench.store.experiments() if each.experiment_id == bench.experiment)

    bench.store.mark_changed(bench.experiment)
    before = tags()
    bench.store.tag_experiment(bench.experiment, {"tipbench.design": "{}", "other": "x" * 4000})
    assert (tags()["tipbench.design"], tags()["other"]) == ("{}", "x" * 4000)
    assert tags()["tipbench.revision"] != before["tipbench.revision"]
    bench.store.tag_experiment(bench.experiment, {"other": "y"})
    assert (tags()["tipbench.design"], tags()["other"]) == ("{}", "y")


def test_two_writers_at_once_lose_nothing(bench: StoreBench) -> None:
    def write(writer: int) -> None:
        for number in range(6):
            key = f"{writer}-{number}"
            bench.store.record(bench.experiment, a_run(cell_key=key, texts={"artifact:raw.txt": key}))

    in_threads(2, write)
    runs = list(bench.store.search(bench.experiment, where={"kind": "cell"}))
    assert len({run.tags["cell_key"] for run in runs}) == 12
    assert all(bench.store.get(run.run_id)[1]["artifact:raw.txt"] == run.tags["cell_key"] for run in runs)


# Reading texts in bulk


def test_read_gives_the_wanted_texts_and_no_others(bench: StoreBench) -> None:
    texts = {"artifact:raw.txt": TEXT, "artifact:prompt.txt": "p", "artifact:candidates.json": "[1]"}
    run_id = bench.store.record(bench.experiment, a_run(texts=texts))
    wanted = ["artifact:raw.txt", "artifact:candidates.json", "artifact:scores.json"]
    ((found, found_texts),) = bench.store.read(bench.experiment, where={"kind": "cell"}, texts=wanted)
    assert found == bench.store.get(run_id)[0]
    assert found_texts == {"artifact:raw.txt": TEXT, "artifact:candidates.json": "[1]"}


def test_read_finds_what_search_finds_in_the_same_order(bench: StoreBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow, "RUNS_PER_PAGE", 2)
    bench.half_write(a_run(start_ms=9000))
    for number in range(5):
        run = a_run(cell_key=str(number), start_ms=1000 + number, texts={"artifact:raw.txt": f"text {number}"})
        bench.store.record(bench.experiment, run)
    found = list(bench.store.read(bench.experiment, where={}, texts={"artifact:raw.txt"}))
    assert [run for run, _ in found] == list(bench.store.search(bench.experiment, where={}))
    assert [texts["artifact:raw.txt"] for _, texts in found] == [f"text {number}" for number in (4, 3, 2, 1, 0)]
    assert len(list(bench.store.read(bench.experiment, where={}, texts=(), limit=3))) == 3
    assert list(bench.store.read(bench.experiment, where={"state": "judged"}, texts=())) == []


def test_read_sees_damage_only_in_the_wanted_texts(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run(texts={"artifact:raw.txt": TEXT, "artifact:prompt.txt": "p"}))
    bench.delete_tag(run_id, "artifact:raw.txt.002")
    ((_, found_texts),) = bench.store.read(bench.experiment, where={}, texts=["artifact:prompt.txt"])
    assert found_texts == {"artifact:prompt.txt": "p"}
    with pytest.raises(CorruptText, match=r"artifact:raw\.txt"):
        list(bench.store.read(bench.experiment, where={}, texts=["artifact:raw.txt"]))


def test_reading_what_is_not_a_key_of_a_text_is_a_bug(bench: StoreBench) -> None:
    for key in ("candidates.json", "artifact:raw.txt.meta", "artifact:raw.txt.001"):
        with pytest.raises(ValueError, match="key"):
            bench.store.read(bench.experiment, where={}, texts=[key])


# Changing a run

AT = 1_700_000_100_000
KEY = "artifact:scores.json"
# Texts of one to five parts and an empty one, in an order in which they grow and shrink.
SIZES = ["s" * 8000, "", "t" * 8001, TEXT[:30_000], "f" * 40_000, "s", "f" * 40_000, "t" * 8001, "", TEXT[:30_000]]


def test_an_update_changes_what_it_names_and_nothing_else(bench: StoreBench) -> None:
    run = a_run()
    run_id = bench.store.record(bench.experiment, run)
    change = RunChange(
        metrics={"composite": 12.5, "latency_s": 2.0},
        tags={"state": "judged", "judge_pending": "false", "odd": "a\x00b \ud800 ␛0000 '\" 😀"},
        texts={KEY: "[1]", "artifact:raw.txt": "changed"},
        at_ms=AT,
    )
    bench.store.update(run_id, change)
    stored, texts = bench.store.get(run_id)
    assert stored.metrics == {**run.metrics, **change.metrics}
    assert change.tags.items() <= stored.tags.items()
    assert texts == {**run.texts, **change.texts}
    assert (stored.status, stored.params, stored.end_ms) == ("FINISHED", run.params, run.end_ms)
    assert stored.tags["cell_key"] == "key-1"
    assert bench.run_ids(state="judged") == [run_id]


def test_an_update_of_nothing_changes_nothing(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run())
    before = bench.store.get(run_id)
    bench.store.update(run_id, RunChange(at_ms=AT))
    assert bench.store.get(run_id) == before


def test_a_text_grows_and_shrinks_and_leaves_nothing_behind(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run(texts={}))
    for text in SIZES:
        bench.store.update(run_id, RunChange(texts={KEY: text}, at_ms=AT))
        assert bench.store.get(run_id)[1] == {KEY: text}
        assert bench.text_tags(run_id) == set(to_tags(KEY, text))


def test_texts_of_more_tags_than_a_batch_takes_are_replaced_and_shrink(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run(texts={KEY: "a" * 700_000}))
    for text in ("b" * 900_000, "c" * 850_000, "d"):
        change = RunChange(texts={KEY: text}, tags={"step": text[0]}, metrics={"m": float(len(text))}, at_ms=AT)
        bench.store.update(run_id, change)
        stored, texts = bench.store.get(run_id)
        assert texts == {KEY: text}
        assert (stored.tags["step"], stored.metrics["m"]) == (text[0], len(text))
    assert bench.text_tags(run_id) == {KEY}


def test_a_short_text_grows_beyond_one_batch_and_a_new_one_begins_there(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run(texts={KEY: "short"}))
    texts = {KEY: "x" * 900_000, "artifact:new.txt": "y" * 900_000}
    bench.store.update(run_id, RunChange(texts=texts, at_ms=AT))
    assert bench.store.get(run_id)[1] == texts


def test_more_metrics_and_tags_than_a_batch_takes_are_all_changed(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run())
    metrics = {f"m{number}": float(number) for number in range(1700)}
    tags = {f"t{number}": str(number) for number in range(230)} | {"state": "judged"}
    bench.store.update(run_id, RunChange(metrics=metrics, tags=tags, at_ms=AT))
    stored, _ = bench.store.get(run_id)
    assert metrics.items() <= stored.metrics.items()
    assert tags.items() <= stored.tags.items()


def test_a_corrected_metric_counts_even_if_the_clock_is_behind(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run())
    bench.store.update(run_id, RunChange(metrics={"tone": 2.0}, at_ms=AT))
    for at_ms, value in ((AT + 1, 1.0), (AT, 3.0), (1, 1.0), (0, 3.0), (AT + 1, 3.0), (AT, 1.0)):
        for _ in range(2):
            bench.store.update(run_id, RunChange(metrics={"tone": value}, at_ms=at_ms))
        assert bench.store.get(run_id)[0].metrics["tone"] == value


def test_the_same_update_twice_is_the_same_as_once(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run())
    change = RunChange(metrics={"tone": 2.0}, tags={"state": "judged"}, texts={KEY: TEXT}, at_ms=AT)
    bench.store.update(run_id, change)
    once = bench.store.get(run_id)
    bench.store.update(run_id, change)
    assert bench.store.get(run_id) == once


def test_a_run_is_judged_reopened_and_judged_again(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run())
    for state in ("pending", "judged", "judged", "pending", "judged"):
        bench.store.update(run_id, RunChange(tags={"state": state}, at_ms=AT))
        assert bench.store.get(run_id)[0].state == state


ILLEGAL = [("failed", "judged"), ("failed", "pending"), ("pending", "failed"), ("judged", "held"), (None, "judged")]


def test_an_illegal_transition_is_refused_and_nothing_is_written(bench: StoreBench) -> None:
    for old, new in ILLEGAL:
        run_id = bench.store.record(bench.experiment, a_run(tags={"state": old} if old else {}))
        before = bench.store.get(run_id)
        with pytest.raises(MlflowError, match=rf"{old or 'without a state'} .* not {new}") as caught:
            bench.store.update(run_id, RunChange(tags={"state": new}, metrics={"m": 1.0}, texts={KEY: "x"}, at_ms=AT))
        assert caught.value.code == "ILLEGAL_MOVE"
        assert bench.store.get(run_id) == before


def test_an_update_over_the_limits_is_refused_and_nothing_is_written(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run())
    before = bench.store.get(run_id)
    given = {"tags": {"state": "judged"}, "metrics": {"ok": 1.0}, "texts": {KEY: TEXT}}
    for refused in REFUSED.values():
        ((field, wrong),) = refused.items()
        if field == "params":
            continue
        change = RunChange(**{**given, field: {**given[field], **wrong}}, at_ms=AT)  # type: ignore[arg-type, dict-item]
        with pytest.raises(MlflowError):
            bench.store.update(run_id, change)
    for key in ("artifact:raw.txt", "kind", "cell_key", "tipbench.record", "mlflow.runName"):
        with pytest.raises(ValueError, match=key):  # a text or the identity among the tags is a bug
            bench.store.update(run_id, RunChange(tags={key: "x"}, at_ms=AT))
    assert bench.store.get(run_id) == before


def test_an_update_of_an_unknown_run_is_refused_by_name(bench: StoreBench) -> None:
    with pytest.raises(MlflowError, match="0" * 32) as caught:
        bench.store.update("0" * 32, RunChange(tags={"a": "b"}, at_ms=AT))
    assert caught.value.code == "RESOURCE_DOES_NOT_EXIST"


def test_a_damaged_text_is_repaired_by_writing_it_again(bench: StoreBench) -> None:
    run_id = bench.store.record(bench.experiment, a_run(texts={KEY: TEXT}))
    for lost in (".002", ".meta"):
        bench.delete_tag(run_id, KEY + lost)
        with pytest.raises(CorruptText):
            bench.store.get(run_id)
        bench.store.update(run_id, RunChange(texts={KEY: TEXT}, at_ms=AT))
        assert bench.store.get(run_id)[1] == {KEY: TEXT}
