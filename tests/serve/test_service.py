"""Events of the policy service: repeated, conflicting, late and unknown ones, resets, threads, a full queue or disk."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.clock import Clock
from support.serving import learn, open_service, reward_request, score_request
from tipbench.errors import EventConflict, EventNotFound, LockHeld, QueueFull, TipbenchError, UsageError
from tipbench.serve.event_log import FILE, FOLDER, open_database, read_entries
from tipbench.serve.features import FEATURES
from tipbench.serve.policy import POLICIES, Ridge
from tipbench.serve.prior import Prior
from tipbench.serve.service import LATE_AFTER_S, PolicyService
from tipbench.sqlite import Database

HOUR = 3600.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[PolicyService]:
    with open_service(tmp_path, clock=clock) as service:
        yield service


def entry_kinds(service: PolicyService) -> list[str]:
    service.log.wait()
    return [entry.kind for entry in read_entries(service.log.database)]


@pytest.mark.parametrize("policy", POLICIES)
def test_r01_r02_each_policy_scores_learns_and_reports(service: PolicyService, policy: str) -> None:
    answer = service.score(policy, score_request(k=4)).body
    assert answer["policy"] == policy
    assert answer["dim"] == POLICIES[policy].features.dim
    assert [each["score"] for each in answer["ranking"]] == sorted(
        (each["score"] for each in answer["ranking"]), reverse=True
    )
    assert sum(each["probability"] for each in answer["ranking"]) == pytest.approx(1)
    assert (
        answer["probability"] == {each["tip_id"]: each["probability"] for each in answer["ranking"]}[answer["chosen"]]
    )
    reward = service.reward(policy, reward_request(answer["event_id"]))
    assert reward.committed is not None
    reward.committed.result()
    assert reward.body == {"applied": True, "reward": 1.0, "late": False, "n": 1}
    stats = service.stats(policy, "u1")
    assert (stats["n"], stats["mean_reward"], stats["pending"]) == (1, 1.0, 0)
    assert tuple(stats["theta"]) == tuple(stats["sd"]) == POLICIES[policy].features.names
    assert service.stats(policy)["n"] == 1
    others = [name for name in POLICIES if name != policy]
    assert [service.stats(name, "u1")["n"] for name in others] == [0, 0, 0]


def test_rewards_use_the_features_of_the_score(service: PolicyService) -> None:
    answer = service.score("egreedy/v2", score_request(event_id="e"))
    assert answer.entry is not None
    x = np.array(answer.entry.body["x"])
    service.reward("egreedy/v2", reward_request("e", profile_features={"completion_rate_30d": 0.9}))
    expected = Ridge(12)
    expected.update(x, 1.0)
    theta = service.stats("egreedy/v2", "u1")["theta"]
    np.testing.assert_allclose(list(theta.values()), expected.theta, atol=1e-12)


def test_a_repeated_score_has_the_same_answer_and_is_logged_once(service: PolicyService, tmp_path: Path) -> None:
    request = score_request(event_id="e", k=9)
    first = service.score("egreedy/v3", request).body
    learn(service, "egreedy/v3", 5, prefix="x")
    assert service.score("egreedy/v3", request).body == first
    service.close()
    with open_service(tmp_path) as later:
        assert later.score("egreedy/v3", request).body == first
        assert entry_kinds(later).count("score") == 6


@pytest.mark.parametrize(
    ("policy", "change"),
    [("egreedy/v2", {}), ("egreedy/v1", {"context": {"open_tasks": 8}}), ("egreedy/v1", {"k": 4})],
)
def test_a_score_with_a_used_event_id_and_another_policy_or_body_conflicts(
    service: PolicyService, policy: str, change: dict[str, Any]
) -> None:
    service.score("egreedy/v1", score_request(event_id="e"))
    with pytest.raises(EventConflict, match="e was s"):
        service.score(policy, score_request(event_id="e", **change))
    service.score(policy, score_request("u2", event_id="e", **change))  # another user's event is another event


def test_a_repeated_reward_is_not_applied_and_a_different_one_conflicts(service: PolicyService, tmp_path: Path) -> None:
    service.score("linucb", score_request(event_id="e"))
    service.reward("linucb", reward_request("e"))
    for again in range(2):
        if again:
            service.close()
        with open_service(tmp_path) if again else contextlib.nullcontext(service) as present:
            assert present.reward(None, reward_request("e")).body == {
                "applied": False,
                "reward": 1.0,
                "late": False,
                "n": 1,
            }
            with pytest.raises(EventConflict, match="has the reward 1, not -1"):
                present.reward("linucb", reward_request("e", action="dismissed"))
            assert present.stats("linucb", "u1")["duplicates"] == again + 1


def test_a_reward_for_an_unknown_event_or_another_user_s_is_not_found(service: PolicyService) -> None:
    service.score("linucb", score_request(event_id="e"))
    for request in (reward_request("f"), reward_request("e", "u2")):
        with pytest.raises(EventNotFound, match="no event"):
            service.reward(None, request)
    assert entry_kinds(service) == ["score"]


def test_r14_a_reward_on_the_route_of_another_policy_conflicts_and_nothing_is_learned(service: PolicyService) -> None:
    service.score("egreedy/v1", score_request(event_id="e"))
    with pytest.raises(EventConflict, match=r"served by egreedy/v1, not egreedy/v2: nothing was learned"):
        service.reward("egreedy/v2", reward_request("e"))
    assert entry_kinds(service) == ["score"]
    assert service.reward(None, reward_request("e")).body["n"] == 1


def test_a_reward_for_features_of_another_version_conflicts_and_is_never_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_service(tmp_path) as service:
        learn(service, "egreedy/v1", 2)
        service.score("egreedy/v1", score_request(event_id="open"))
    newer = replace(POLICIES["egreedy/v1"], features=replace(FEATURES["v1"], version="features-v1/2"))
    monkeypatch.setitem(POLICIES, "egreedy/v1", newer)
    with closing(open_database(tmp_path)) as database, database.transaction() as db:
        db.execute("DELETE FROM state")  # the document of the old version would be refused
    with open_service(tmp_path) as service:
        with pytest.raises(EventConflict, match=r"scored with features-v1/1.*no longer uses"):
            service.reward(None, reward_request("open"))
        assert service.stats("egreedy/v1", "u1")["n"] == 0


def test_a_reward_is_late_by_the_servers_clock_never_by_the_time_sent(service: PolicyService, clock: Clock) -> None:
    for event, at in (("in-time", "2020-01-01T00:00:00Z"), ("late", "2030-01-01T00:00:00Z")):
        service.score("egreedy/v3", score_request(event_id=event, at=at))
    clock.now += LATE_AFTER_S
    assert service.reward(None, reward_request("in-time")).body["applied"]
    clock.now += 1
    answer = {"applied": False, "reward": 1.0, "late": True, "n": 1}
    assert service.reward(None, reward_request("late")).body == answer
    assert service.reward(None, reward_request("late")).body == answer
    with pytest.raises(EventConflict):
        service.reward(None, reward_request("late", action="dismissed"))
    stats = service.stats("egreedy/v3", "u1")
    assert (stats["n"], stats["late"], stats["duplicates"], stats["pending"]) == (1, 1, 1, 0)
    assert entry_kinds(service) == ["score", "score", "reward", "late", "duplicate"]


def test_rewards_out_of_order_are_learned(service: PolicyService) -> None:
    for number in range(5):
        service.score("egreedy/v1", score_request(event_id=f"e{number}"))
    for number in (3, 0, 4, 1):
        assert service.reward("egreedy/v1", reward_request(f"e{number}")).body["applied"]
    stats = service.stats("egreedy/v1", "u1")
    assert (stats["n"], stats["pending"]) == (4, 1)


def test_stats_of_an_unknown_user_are_empty(service: PolicyService) -> None:
    stats = service.stats("egreedy/v2", "nobody")
    assert (stats["n"], stats["mean_reward"], stats["pending"]) == (0, None, 0)
    assert set(stats["theta"].values()) == {0.0}
    assert set(stats["sd"].values()) == {1.0}
    with pytest.raises(UsageError, match="There is no policy"):
        service.stats("egreedy/v9")


@pytest.mark.parametrize(("query", "user"), [("policy_totals", None), ("user_stats", "u1")])
def test_a_long_statistics_query_delays_no_score(
    service: PolicyService, monkeypatch: pytest.MonkeyPatch, query: str, user: str | None
) -> None:
    started, release = threading.Event(), threading.Event()

    def slow(database: Database, *_: Any, **__: Any) -> dict[str, Any]:
        with database._lock:  # as during a query
            started.set()
            release.wait(30)
        return {}

    monkeypatch.setattr(f"tipbench.serve.service.{query}", slow)
    with ThreadPoolExecutor(1) as pool:
        stats = pool.submit(service.stats, "egreedy/v1", user)
        assert started.wait(30)
        service.score("egreedy/v1", score_request("u2", event_id="e"))  # reads the log: is this event there already?
        assert not stats.done()
        release.set()


# Reset and erase


def test_r10_reset_clears_every_policy_of_this_user_only(service: PolicyService) -> None:
    for policy in POLICIES:
        for user in ("u1", "u2"):
            learn(service, policy, 3, user, prefix=policy.replace("/", "-"))
    service.score("egreedy/v1", score_request(event_id="open"))
    assert service.reset("u1") == {"cleared": dict.fromkeys(POLICIES, True)}
    assert [service.stats(policy, "u1")["n"] for policy in POLICIES] == [0, 0, 0, 0]
    assert [service.stats(policy, "u2")["n"] for policy in POLICIES] == [3, 3, 3, 3]
    assert service.score("egreedy/v3", score_request("u1")).entry is not None
    with pytest.raises(EventConflict, match="before the user's reset"):
        service.reward(None, reward_request("open"))
    assert service.reset("u1") == {"cleared": dict.fromkeys(POLICIES, False)}
    assert service.reset("stranger") == {"cleared": dict.fromkeys(POLICIES, False)}


def test_a_reset_clears_the_tallies(service: PolicyService) -> None:
    def rates_of_event(event: str) -> list[float]:
        entry = service.score("egreedy/v3", score_request(event_id=event)).entry
        assert entry is not None
        return list(entry.body["x"][7:9])

    assert rates_of_event("a") == [0.25, 0.25]
    service.reward(None, reward_request("a"))
    assert rates_of_event("b") != [0.25, 0.25]
    service.reset("u1")
    assert rates_of_event("c") == [0.25, 0.25]


@pytest.mark.parametrize("state", ["sqlite", "files"])
def test_erase_deletes_the_users_events_from_disk(tmp_path: Path, state: str) -> None:
    with open_service(tmp_path, store_kind=state) as service:
        learn(service, "egreedy/v1", 4, "u1", prefix="secret-event-")
        learn(service, "egreedy/v1", 4, "u2", prefix="other-event-")
        service.flush()
        service.reset("u1", erase=True)
        key = service.keys.hash_user_id("u1")
        assert [entry.kind for entry in read_entries(service.log.database, user=key)] == ["reset"]
        with pytest.raises(EventNotFound):
            service.reward(None, reward_request("secret-event-1"))
        assert service.stats("egreedy/v1", "u1")["pending"] == 0
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or b"secret-event-" not in path.read_bytes(), path
            assert key not in path.name
        assert b"other-event-" in (tmp_path / FOLDER / FILE).read_bytes()
        learn(service, "egreedy/v1", 2, "u1", prefix="secret-event-")  # the ids may be used again
        assert service.stats("egreedy/v1", "u1")["n"] == 2


def test_an_erase_still_applies_after_a_later_reset_and_a_restart(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        score = service.score("egreedy/v1", score_request()).entry
        assert score is not None
        service.reset("u1", erase=True)
        service.reset("u1")
    signal = {"signal": "shadow:linucb-shadow", "agrees": True}
    with open_service(tmp_path) as service:
        service.log_signal(score, "linucb", signal)
        later = service.score("egreedy/v1", score_request()).entry
        assert later is not None
        service.log_signal(later, "linucb", signal)
        service.log.wait()
        assert [entry.event for entry in read_entries(service.log.database, kinds=("signal",))] == [later.event]


def test_more_users_than_fit_into_memory_keep_their_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tipbench.serve.service._MAX_USERS", 5)
    monkeypatch.setattr("tipbench.serve.service._MAX_EVENTS", 5)
    users = [f"u{number}" for number in range(80)]
    with open_service(tmp_path) as service:
        for user in users:
            service.score("egreedy/v1", score_request(user, event_id="e"))
            service.log.wait()
        service.flush()
        assert len(service._users) == 5
        for user in users:
            assert service.reward(None, reward_request("e", user)).body["applied"]
            service.log.wait()
        service.flush()
        assert len(service._users) == 5
        assert len(service._events) == 5
        for user in users:
            assert service.stats("egreedy/v1", user)["n"] == 1
            assert not service.reward(None, reward_request("e", user)).body["applied"]


def test_an_event_rewarded_but_not_committed_yet_is_not_rewarded_twice(
    service: PolicyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tipbench.serve.service._MAX_EVENTS", 3)
    for number in range(3):
        service.score("egreedy/v1", score_request(event_id=f"e{number}"))
    service.log.wait()
    with service.log.write_database.transaction():  # keeps the writer waiting
        assert service.reward(None, reward_request("e0")).body["applied"]
        service.score("egreedy/v1", score_request(event_id="e3"))  # takes the place of the oldest event in memory
        assert not service.reward(None, reward_request("e0")).body["applied"]


def test_no_user_id_is_on_disk(tmp_path: Path) -> None:
    user = "someone@example.org"
    with open_service(tmp_path, store_kind="files") as service:
        learn(service, "egreedy/v3", 3, user)
        service.flush()
        for path in tmp_path.rglob("*"):
            assert user not in str(path)
            assert not path.is_file() or user.encode() not in path.read_bytes()


# Priors


def test_a_prior_is_used_logged_and_can_be_changed_without_relearning(tmp_path: Path) -> None:
    features = FEATURES["v3"]

    def prior(value: float) -> Prior:
        return Prior("egreedy/v3", features.version, features.names, (value,) * 12)

    with open_service(tmp_path) as plain:
        learn(plain, "egreedy/v3", 20)
        learned = plain.stats("egreedy/v3", "u1")
    with open_service(tmp_path, priors=[prior(0.5)]) as service:
        stats = service.stats("egreedy/v3", "u1")
        assert (stats["n"], stats["mean_reward"]) == (20, learned["mean_reward"])
        assert stats["prior"] == prior(0.5).hash
        assert stats["theta"] != learned["theta"]
        assert service.stats("egreedy/v3", "new")["theta"]["bias"] == pytest.approx(0.5)
        answer = service.score("egreedy/v3", score_request(event_id="p"))
        assert answer.body["prior"] == prior(0.5).hash
        service.reward(None, reward_request("p"))
        service.log.wait()
        last = list(read_entries(service.log.database))[-1]
        assert last.body["prior"] == prior(0.5).hash
    with open_service(tmp_path, priors=[prior(0.5)]) as again:
        assert again.stats("egreedy/v3", "u1")["n"] == 21
    of_other_policy = replace(prior(1.0), policy="egreedy/v2")
    with pytest.raises(UsageError, match="prior was fitted"), open_service(tmp_path, priors=[of_other_policy]):
        pass


# Threads, processes, limits


@pytest.mark.simulation
def test_32_threads_with_1000_rewards_each_for_one_user_equal_the_serial_result(tmp_path: Path) -> None:
    threads, each = 32, 1000
    rng = np.random.default_rng(7)
    values = rng.uniform(-1, 1, (threads, each)).round(3)
    with open_service(tmp_path) as service:
        request = score_request(k=2, profile_features=None)

        def work(thread: int) -> None:
            for number in range(each):
                event = f"{thread}-{number}"
                again = True
                while again:
                    try:
                        service.score("egreedy/v1", {**request, "event_id": event})
                        service.reward(
                            "egreedy/v1", {"user_id": "u1", "event_id": event, "reward": values[thread, number]}
                        )
                        again = False
                    except QueueFull:
                        with contextlib.suppress(TipbenchError):
                            service.log.wait()

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        service.log.wait()
        serial = Ridge(7)
        for entry in read_entries(service.log.database, kinds=("reward",)):
            serial.update(np.array(entry.body["x"]), entry.reward or 0.0)
        stats = service.stats("egreedy/v1", "u1")
        assert stats["n"] == serial.n == threads * each
        assert stats["mean_reward"] == pytest.approx(values.mean(), abs=1e-9)
        np.testing.assert_allclose(list(stats["theta"].values()), serial.theta, atol=1e-9)


@pytest.mark.process
def test_a_second_process_on_the_same_store_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tipbench.serve.service import PolicyService\n"
        "PolicyService(Path(sys.argv[1]))"
    )
    with open_service(tmp_path):
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
        assert "LockHeld: the store" in done.stderr
        assert "Stop it first" in done.stderr
        with pytest.raises(LockHeld, match="in use by tipbench serve"):
            PolicyService(tmp_path)
    with open_service(tmp_path):
        pass


def test_a_full_queue_is_refused_and_nothing_is_learned(tmp_path: Path) -> None:
    with open_service(tmp_path, queue_capacity=3) as service:
        service.score("egreedy/v1", score_request(event_id="e"))
        service.log.wait()
        with service.log.write_database.transaction():  # keeps the writer waiting
            with contextlib.suppress(QueueFull):
                for _ in range(7):  # three wait, and the writer may have taken up to three at once
                    service.score("egreedy/v1", score_request())
            with pytest.raises(QueueFull, match=r"At most 3 entries may wait for the disk; 3 are waiting\. Retry"):
                service.reward("egreedy/v1", reward_request("e"))
        service.log.wait()
        assert service.reward("egreedy/v1", reward_request("e")).body == {
            "applied": True,
            "reward": 1.0,
            "late": False,
            "n": 1,
        }


def test_on_a_full_disk_rewards_fail_and_nothing_is_lost_or_half_learned(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        learn(service, "egreedy/v1", 3)
        service.score("egreedy/v1", score_request(event_id="e"))
        service.log.wait()
        pages = service.log.write_database.execute("PRAGMA page_count")[0][0]
        service.log.write_database.execute(f"PRAGMA max_page_count = {pages}")
        big = score_request(k=200)
        failed = None
        while failed is None:  # fills the pages that are still free
            answer = service.score("egreedy/v1", big)
            reward = service.reward("egreedy/v1", reward_request(answer.body["event_id"]))
            assert reward.committed is not None
            failed = reward.committed.exception()
        assert isinstance(failed, TipbenchError)
        assert "full" in str(failed)
        committed = sum(entry.kind == "reward" for entry in read_entries(service.log.database))
        assert service.stats("egreedy/v1", "u1")["n"] == committed
        with pytest.raises(EventNotFound):
            service.reward(None, reward_request(answer.body["event_id"]))
        service.log.write_database.execute("PRAGMA max_page_count = 1000000")
        last = service.reward("egreedy/v1", reward_request("e"))
        assert last.committed is not None
        last.committed.result()
        assert last.body == {"applied": True, "reward": 1.0, "late": False, "n": committed + 1}


def test_a_replay_of_the_log_reproduces_every_decision(tmp_path: Path) -> None:
    """The random draw depends on the secret and the event, so request, state and secret give the same choice again."""
    with open_service(tmp_path) as service:
        learn(service, "egreedy/v3", 60)
        learn(service, "linucb", 60, prefix="l")
        for name in ("egreedy/v3", "linucb"):
            policy, ridge = POLICIES[name], POLICIES[name].ridge()
            for entry in read_entries(service.log.database):
                if entry.kind == "score" and entry.policy == name:
                    uniform = service.keys.repeatable_random(name, entry.user, entry.event or "")
                    assert policy.probabilities(entry.body["scores"]) == entry.body["probabilities"]
                    tips = [each["tip_id"] for each in entry.body["request"]["candidates"]]
                    total = np.cumsum(entry.body["probabilities"])
                    assert tips[int(np.searchsorted(total, uniform, side="right"))] == entry.body["chosen"]
                    assert entry.body["n"] == ridge.n
                    chosen = entry.body["scores"][tips.index(entry.body["chosen"])]
                    assert policy.scores(np.array([entry.body["x"]]), ridge) == [pytest.approx(chosen, abs=2e-9)]
                elif entry.kind == "reward" and entry.policy == name:
                    ridge.update(np.array(entry.body["x"]), entry.reward or 0.0)
