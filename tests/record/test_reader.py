"""Which runs count for their pair: the newest build of a model's name and the newest text of a prompt's version."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from tipbench.record.reader import duplicate_runs, newest_answered_run, stale_runs
from tipbench.record.run import StoredRun


def run(
    run_id: str,
    *,
    model: str = "m",
    digest: str = "d1",
    version: str = "v1",
    text: str = "p1",
    when: str = "c",
    at: int = 1,
) -> StoredRun:
    params = {"model": model, "model_digest": digest, "prompt_version": version}
    return StoredRun(run_id, "FINISHED", at, at, params, {}, {"conditions": when, "prompt_hash": text})


def test_a_moved_model_tag_makes_the_older_build_stale() -> None:
    assert stale_runs([run("old", at=1), run("new", digest="d2", at=2)]) == {"old"}


def test_a_changed_prompt_text_makes_the_older_one_stale_for_all_models() -> None:
    runs = [run("a", at=1), run("b", model="n", at=2), run("c", text="p2", at=3)]
    assert stale_runs(runs) == {"a", "b"}


def test_other_conditions_are_another_board_and_not_a_newer_build() -> None:
    assert stale_runs([run("cold", at=1), run("warm", digest="d2", text="p2", when="w", at=2)]) == set()


def test_another_model_or_prompt_makes_nothing_stale() -> None:
    assert (
        stale_runs([run("a"), run("b", model="n", digest="d9", at=5), run("c", version="v2", text="p9", at=6)]) == set()
    )


def test_no_runs_have_no_stale_runs() -> None:
    assert stale_runs([]) == set()


@dataclass(frozen=True)
class Kind:
    model: str
    digest: str
    version: str
    text: str
    when: str


kinds = st.builds(
    Kind,
    *(st.sampled_from(choice) for choice in (["m", "n"], ["d1", "d2", "d3"], ["v1", "v2"], ["p1", "p2"], ["c", "w"])),
)


@given(st.lists(kinds, max_size=12), st.randoms())
def test_what_is_left_never_mixes_two_builds_and_has_the_newest_of_each_name(many: list[Kind], rng: object) -> None:
    runs = [run(str(at), at=at, **vars(kind)) for at, kind in enumerate(many)]
    shuffled = sorted(runs, key=lambda _: rng.random())  # type: ignore[attr-defined]
    stale = stale_runs(shuffled)
    assert stale == stale_runs(runs), "the order they come in does not matter"
    for name, build in (("model", "model_digest"), ("prompt_version", "prompt_hash")):
        seen: dict[tuple[str, str], set[str]] = {}
        newest: dict[tuple[str, str], str] = {}
        for each in runs:
            key = each.tags["conditions"], each.params[name]
            value = each.params[build] if name == "model" else each.tags[build]
            newest[key] = value
            if each.run_id not in stale:
                seen.setdefault(key, set()).add(value)
        assert all(values == {newest[key]} for key, values in seen.items())


def failed(made: StoredRun) -> StoredRun:
    return replace(made, status="FAILED", tags={**made.tags, "state": "failed"})


def test_a_build_without_answers_makes_nothing_stale_and_is_not_stale() -> None:
    runs = [run("answered", at=1), failed(run("tried", digest="d2", text="p2", at=2))]
    assert stale_runs(runs) == set()


def test_a_failure_of_an_older_build_is_stale() -> None:
    assert stale_runs([failed(run("tried", at=1)), run("answered", digest="d2", at=2)]) == {"tried"}


def test_without_answers_the_newest_failure_decides() -> None:
    assert stale_runs([failed(run("old", at=1)), failed(run("new", digest="d2", at=2))]) == {"old"}


def test_a_scenario_that_was_rewritten_makes_its_older_content_stale() -> None:
    def at(run_id: str, content: str, when: int) -> StoredRun:
        made = run(run_id, at=when)
        return replace(made, params={**made.params, "scenario": "s"}, tags={**made.tags, "scenario_hash": content})

    assert stale_runs([at("old", "h1", 1), at("new", "h2", 2)]) == {"old"}
    assert stale_runs([at("old", "h1", 1), failed(at("tried", "h2", 2))]) == set()


def test_the_newest_answered_run_is_the_same_in_whatever_order() -> None:
    runs = [run("a", at=1), run("b", at=1), failed(run("c", at=9))]
    assert newest_answered_run(runs) == newest_answered_run(runs[::-1]) == runs[1]
    assert newest_answered_run(runs[2:]) == runs[2]


def cell(run_id: str, *, at: int, state: str = "pending", key: str = "k", status: str = "FINISHED") -> StoredRun:
    return replace(run(run_id, at=at), status=status, tags={"cell_key": key, "state": state})


def test_of_duplicates_the_scored_run_counts_or_else_the_oldest() -> None:
    assert duplicate_runs([cell("b", at=2), cell("a", at=1), cell("c", at=1)]) == {"b", "c"}
    assert duplicate_runs([cell("a", at=1), cell("b", at=2, state="judged"), cell("c", at=3)]) == {"a", "c"}


def test_floors_failures_other_keys_and_superseded_runs_are_not_duplicates() -> None:
    floored = cell("b", at=2, state="judged")
    floored = replace(floored, tags={**floored.tags, "floored": "true"})
    assert duplicate_runs([cell("a", at=1), floored]) == {"b"}
    assert duplicate_runs([cell("a", at=1), cell("b", at=2, status="FAILED"), cell("c", at=3, key="other")]) == set()
    gone = replace(cell("a", at=1), tags={**cell("a", at=1).tags, "superseded": "true"})
    assert duplicate_runs([gone, cell("b", at=2)]) == set()
