"""The recommender: the active policy answers, and shadows neither change nor delay its answers."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.clock import Clock
from support.serving import learn, open_service, reward_request, score_request
from tipbench.errors import EventConflict, QueueFull, UsageError
from tipbench.serve.catalogue import Catalogue, CatalogueTip
from tipbench.serve.event_log import Entry, read_entries
from tipbench.serve.policy import POLICIES
from tipbench.serve.recommender import Recommender, score_shadow
from tipbench.serve.request import RecommendRequest
from tipbench.serve.service import PolicyService
from tipbench.serve.switches import SHADOWS

V2 = "egreedy-v2-shadow"
DEADLINE_S = 60


@contextmanager
def open_recommender(home: Path, **options: Any) -> Iterator[Recommender]:
    with open_service(home, clock=Clock()) as service:
        recommender = Recommender(service, **options)
        try:
            yield recommender
        finally:
            recommender.close(timeout_s=0.1)


def request(event: str, user: str = "u1", **changes: Any) -> RecommendRequest:
    return score_request(user, event_id=event, **changes)  # type: ignore[return-value]


def logged_signals(service: PolicyService) -> list[Entry]:
    service.log.wait()
    return list(read_entries(service.log.database, kinds=("signal",)))


def recommend_events(recommender: Recommender, *events: str) -> list[bytes]:
    """Recommend a tip for each event and return the bytes of the answers; shadows start after each answer."""
    answers = []
    for event in events:
        answer = recommender.recommend(request(event))
        answers.append(json.dumps(answer.body).encode())
        recommender.queue_for_shadows(answer)
    return answers


def test_r11_every_shadow_is_disabled_by_default(tmp_path: Path) -> None:
    with open_recommender(tmp_path) as recommender:
        shadows = recommender.policies()["shadows"]
        assert {name: each["policy"] for name, each in shadows.items()} == {
            "egreedy-v2-shadow": "egreedy/v2",
            "egreedy-v3-shadow": "egreedy/v3",
            "linucb-shadow": "linucb",
        }
        assert not any(each["enabled"] for each in shadows.values())
        recommend_events(recommender, "a", "b")
        recommender.wait()
        assert logged_signals(recommender.service) == []
        assert [each["calls"] for each in recommender.policies()["shadows"].values()] == [0, 0, 0]


def test_r12_an_enabled_shadow_scores_read_only_after_the_answer(tmp_path: Path) -> None:
    with open_recommender(tmp_path) as recommender:
        service = recommender.service
        learn(service, "egreedy/v2", 6)
        recommender.switches.set_shadow(V2, True)
        before = service.stats("egreedy/v2", "u1")
        answer = recommender.recommend(request("shadowed"))
        assert logged_signals(service) == []  # not before the answer has been sent
        recommender.queue_for_shadows(answer)
        recommender.wait()
        assert len(logged_signals(service)) == 1
        after = service.stats("egreedy/v2", "u1")
        assert {name: after[name] for name in before} == before


def test_r13_a_shadow_publishes_its_signal_with_all_probabilities(tmp_path: Path) -> None:
    with open_recommender(tmp_path) as recommender:
        for name in SHADOWS:
            recommender.switches.set_shadow(name, True)
        recommend_events(recommender, "a")
        recommender.wait()
        found = {entry.body["signal"]: entry for entry in logged_signals(recommender.service)}
        assert set(found) == {"shadow:egreedy-v2-shadow", "shadow:egreedy-v3-shadow", "shadow:linucb-shadow"}
        signal = found["shadow:egreedy-v2-shadow"]
        (score,) = read_entries(recommender.service.log.database, kinds=("score",))
        assert (signal.event, signal.policy, signal.user) == ("a", "egreedy/v2", score.user)
        assert score.body["signal"] == "serve"
        assert set(signal.body["probabilities"]) == set(signal.body["scores"]) == {"t0", "t1", "t2"}
        assert sum(signal.body["probabilities"].values()) == pytest.approx(1)
        assert signal.body["agrees"] == (signal.body["chosen"] == score.body["chosen"]) == bool(signal.reward)


def test_a_signal_is_dropped_without_an_error_when_the_log_queue_is_full(tmp_path: Path) -> None:
    def full(_service: PolicyService, _policy: str, _entry: Entry) -> dict[str, Any]:
        raise QueueFull("the disk is behind")

    with open_recommender(tmp_path, scorer=full) as recommender:
        recommender.switches.set_shadow(V2, True)
        recommend_events(recommender, "a", "b")
        recommender.wait()
        shadow = recommender.policies()["shadows"][V2]
        assert (shadow["calls"], shadow["dropped"], shadow["errors"]) == (2, 2, 0)


def test_r14_a_shadow_gets_no_reward_and_keeps_no_state(tmp_path: Path) -> None:
    with open_recommender(tmp_path) as recommender:
        recommender.switches.set_shadow(V2, True)
        recommend_events(recommender, "a")
        recommender.wait()
        with pytest.raises(EventConflict, match=r"served by egreedy/v1, not egreedy/v2: nothing was learned"):
            recommender.service.reward("egreedy/v2", reward_request("a"))
        assert recommender.service.reward(None, reward_request("a")).body["applied"]
        recommender.service.flush()
        key = recommender.service.keys.hash_user_id("u1")
        rows = recommender.service.log.database.execute("SELECT name FROM state WHERE user = ?", (key,))
        assert sorted(name for (name,) in rows) == ["egreedy/v1", "tallies"]


def test_a_shadow_that_hangs_raises_or_floods_changes_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = [f"e{number}" for number in range(30)]
    secret = tmp_path / "plain" / "serve.secret"
    with open_recommender(tmp_path / "plain") as recommender:
        expected = recommend_events(recommender, *events)
    release, blocked = threading.Event(), threading.Event()

    def hang(*_: object) -> dict[str, Any]:
        blocked.set()
        release.wait(DEADLINE_S)
        return {}

    def fail(*_: object) -> dict[str, Any]:
        raise RuntimeError("a broken shadow")

    caplog.set_level(logging.CRITICAL)
    for name, scorer in (("hang", hang), ("fail", fail)):
        home = tmp_path / name
        home.mkdir()
        (home / "serve.secret").write_bytes(secret.read_bytes())
        with open_recommender(home, scorer=scorer, queue_capacity=4) as recommender:
            for shadow in SHADOWS:
                recommender.switches.set_shadow(shadow, True)
            assert recommend_events(recommender, *events) == expected  # returns although the shadow still hangs
            if name == "hang":
                assert blocked.wait(DEADLINE_S)
                counts = recommender.policies()["shadows"][V2]
                assert counts["calls"] == 30
                assert counts["dropped"] in (25, 26)  # four wait in the queue, and the thread may have taken one
                release.set()
            else:
                recommender.wait()
                counts = recommender.policies()["shadows"][V2]
                assert counts["errors"] == counts["calls"] - counts["dropped"] > 0
            assert logged_signals(recommender.service) == []


class SlowScorer:
    """Scores as a shadow does, then waits for `release`."""

    def __init__(self) -> None:
        self.scored, self.release = threading.Event(), threading.Event()

    def __call__(self, service: PolicyService, policy: str, entry: Entry) -> dict[str, Any]:
        choice = score_shadow(service, policy, entry)
        self.scored.set()
        assert self.release.wait(DEADLINE_S)
        return choice


def test_an_answer_does_not_wait_for_a_shadow_that_holds_a_snapshot(tmp_path: Path) -> None:
    """A shadow computes outside the lock, so rewards and scores of the same user are processed meanwhile."""
    slow = SlowScorer()
    with open_recommender(tmp_path, scorer=slow) as recommender:
        recommender.switches.set_shadow(V2, True)
        recommend_events(recommender, "a")
        assert slow.scored.wait(DEADLINE_S)
        assert recommender.service.reward(None, reward_request("a")).body["n"] == 1
        recommend_events(recommender, "b")
        slow.release.set()
        recommender.wait()
        assert len(logged_signals(recommender.service)) == 2


def test_a_signal_of_a_user_erased_meanwhile_is_dropped(tmp_path: Path) -> None:
    slow = SlowScorer()
    with open_recommender(tmp_path, scorer=slow) as recommender:
        recommender.switches.set_shadow(V2, True)
        recommend_events(recommender, "a")
        assert slow.scored.wait(DEADLINE_S)
        recommender.service.reset("u1", erase=True)
        slow.release.set()
        recommender.wait()
        assert logged_signals(recommender.service) == []
        assert recommender.policies()["shadows"][V2]["errors"] == 0


def test_counts_of_a_shadow_outlive_the_server(tmp_path: Path) -> None:
    for calls in (2, 4):
        with open_recommender(tmp_path) as recommender:
            recommender.switches.set_shadow(V2, True)
            recommend_events(recommender, f"{calls}a", f"{calls}b")
            recommender.wait()
            assert recommender.policies()["shadows"][V2]["calls"] == calls
    with open_recommender(tmp_path) as recommender:
        assert vars(recommender.switches.shadow_counts(V2)) == {"calls": 4, "dropped": 0, "errors": 0}


def test_a_shadow_without_a_prior_is_a_warning(tmp_path: Path) -> None:
    with open_recommender(tmp_path) as recommender:
        assert recommender.policies()["warnings"] == []
        recommender.switches.set_shadow(V2, True)
        assert [V2 in warning and "prior" in warning for warning in recommender.policies()["warnings"]] == [True]
        assert [each["name"] for each in recommender.policies()["policies"]] == list(POLICIES)


# Active policy and catalogue


def test_a_repeated_recommendation_has_the_same_answer_after_a_promotion(tmp_path: Path) -> None:
    with open_recommender(tmp_path) as recommender:
        first = recommender.recommend(request("a")).body
        assert first["policy"] == "egreedy/v1"
        recommender.switches.switch_unchecked("egreedy/v3", user="ops", reason="trial")
        assert recommender.recommend(request("a")).body == first
        assert recommender.recommend(request("b")).body["policy"] == "egreedy/v3"
        assert recommender.service.reward(None, reward_request("a")).body["n"] == 1
        assert recommender.service.stats("egreedy/v1", "u1")["n"] == 1
        with pytest.raises(EventConflict):
            recommender.service.score("egreedy/v3", score_request(event_id="a"))


def test_candidates_come_from_the_catalogue_if_the_request_has_none(tmp_path: Path) -> None:
    tips = [CatalogueTip(tip_id=f"c{hour}", tip="Do it.", category="focus", slot_hour=hour) for hour in (20, 9, 3)]
    with open_recommender(tmp_path, catalogue=Catalogue(tips)) as recommender:
        body = request("a")
        del body["candidates"]
        answer = recommender.recommend(body)
        assert answer.entry is not None
        assert [each["tip_id"] for each in answer.entry.body["request"]["candidates"]] == ["c9", "c3", "c20"]
        assert recommender.recommend(body).body == answer.body
        with pytest.raises(EventConflict):
            recommender.recommend(request("a"))
    with open_recommender(tmp_path / "none") as recommender, pytest.raises(UsageError, match="no catalogue"):
        recommender.recommend(body)
