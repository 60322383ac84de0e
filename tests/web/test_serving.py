"""The policy server over real HTTP: the requirements, the semantics of events, limits and access."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.policy_site import DEADLINE_S, TIPS, PolicySite, ServerChooser, policy_site
from support.polling import eventually
from support.simulated_requests import drive
from tipbench.serve.catalogue import Catalogue, CatalogueTip
from tipbench.serve.event_log import Entry, read_entries
from tipbench.serve.policy import POLICIES, Policy
from tipbench.serve.service import PolicyService
from tipbench.serve.switches import SHADOWS
from tipbench.simulate.rollout import find_arm, rollout
from tipbench.simulate.world import World
from tipbench.web import serving
from tipbench.web.auth import Role

DAY_S = 24 * 3600
PROFILE = {"completion_rate_30d": 0.4, "dismiss_rate_30d": 0.2, "mean_dwell_ms_30d": 42000, "preferred_hour": 9}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicySite]:
    """One server for the tests of this file: each uses other users."""
    with policy_site(tmp_path_factory.mktemp("serving")) as served:
        yield served


def score_and_reward(site: PolicySite, policy: str, user: str, **more: Any) -> dict[str, Any]:
    """Score and reward once; returns the answer to the reward."""
    event = site.score(policy, user, **more)["event_id"]
    response = site.post(f"/reward/{policy}", {"user_id": user, "event_id": event, "action": "completed", **more})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_r01_egreedy_v2_scores_learns_and_reports(site: PolicySite) -> None:
    answer = site.score("egreedy/v2", "r1", event_id="e1", at="2026-04-27T08:30:00+02:00", profile_features=PROFILE)
    assert (answer["event_id"], answer["policy"], answer["dim"], answer["n"]) == ("e1", "egreedy/v2", 12, 0)
    assert sum(tip["probability"] for tip in answer["ranking"]) == pytest.approx(1.0)
    assert {tip["tip_id"] for tip in answer["ranking"]} == {"t9", "t4"}
    reward = {"user_id": "r1", "event_id": "e1", "action": "completed", "dwell_ms": 42000}
    assert site.post("/reward/egreedy/v2", reward).json() == {"applied": True, "reward": 1.0, "late": False, "n": 1}
    stats = site.get("/stats/egreedy/v2", params={"user_id": "r1"}).json()
    assert (stats["n"], stats["mean_reward"], stats["pending"], len(stats["theta"])) == (1, 1.0, 0, 12)
    assert stats["theta"]["completion_rate"] > 0
    totals = site.get("/stats/egreedy/v2").json()
    assert totals["n"] >= 1
    assert "theta" not in totals


@pytest.mark.parametrize(
    ("path", "policy"), [("egreedy", "egreedy/v1"), *((name, name) for name in POLICIES if name != "egreedy/v2")]
)
def test_r02_the_other_policies_have_the_same_routes(site: PolicySite, path: str, policy: str) -> None:
    user = f"r2-{path.replace('/', '-')}"
    assert site.score(path, user)["policy"] == policy
    assert score_and_reward(site, path, user)["n"] == 1
    stats = site.get(f"/stats/{path}", params={"user_id": user}).json()
    assert (stats["policy"], stats["n"], stats["pending"]) == (policy, 1, 1)
    assert list(stats["theta"]) == list(POLICIES[policy].features.names)


def test_r10_reset_clears_every_policy_of_that_user_only(site: PolicySite) -> None:
    for policy in POLICIES:
        score_and_reward(site, policy, "r10")
    score_and_reward(site, "egreedy/v2", "r10-other")
    assert site.post("/reset", {"user_id": "r10"}).json() == {"cleared": dict.fromkeys(POLICIES, True)}
    for policy in POLICIES:
        stats = site.get(f"/stats/{policy}", params={"user_id": "r10"}).json()
        assert (stats["n"], stats["mean_reward"]) == (0, None)
    assert site.get("/stats/egreedy/v2", params={"user_id": "r10-other"}).json()["n"] == 1
    assert site.post("/reset", {"user_id": "r10"}).json() == {"cleared": dict.fromkeys(POLICIES, False)}


def test_r11_every_shadow_is_disabled_by_default(site: PolicySite) -> None:
    answer = site.get("/policies").json()
    assert answer["active"] == "egreedy/v1"
    assert {name: state["enabled"] for name, state in answer["shadows"].items()} == dict.fromkeys(SHADOWS, False)
    assert "egreedy-v2-shadow" in answer["shadows"]


def test_r12_an_enabled_shadow_scores_after_the_answer_and_changes_nothing(tmp_path: Path) -> None:
    running, release = threading.Event(), threading.Event()

    def slow(_service: PolicyService, _policy: str, _entry: Entry) -> dict[str, Any]:
        running.set()
        release.wait()
        raise RuntimeError("too late")

    with policy_site(tmp_path, scorer=slow) as site:
        site.recommender.switches.set_shadow("egreedy-v2-shadow", True)
        for number in range(5):  # all answered while the shadow is still busy with the first
            body = {"user_id": "u", "event_id": f"e{number}", "candidates": TIPS}
            assert site.post("/recommend", body).json()["policy"] == "egreedy/v1"
            assert running.wait(30)
        assert site.get("/stats/egreedy/v2", params={"user_id": "u"}).json()["n"] == 0
        release.set()


def test_r13_an_enabled_shadow_publishes_its_signal(tmp_path: Path) -> None:
    with policy_site(tmp_path) as site:
        site.recommender.switches.set_shadow("egreedy-v2-shadow", True)
        site.post("/recommend", {"user_id": "u", "event_id": "e", "candidates": TIPS})
        site.wait_for_shadows()
        site.service.log.wait()
        signals = {entry.body["signal"]: entry for entry in read_entries(site.service.log.database)}
    assert signals.keys() == {"serve", "shadow:egreedy-v2-shadow"}
    shadow = signals["shadow:egreedy-v2-shadow"]
    assert (shadow.event, shadow.policy, shadow.user) == ("e", "egreedy/v2", signals["serve"].user)
    assert sum(shadow.body["probabilities"].values()) == pytest.approx(1.0)
    assert shadow.body["agrees"] == (shadow.body["chosen"] == signals["serve"].body["chosen"])


@pytest.mark.parametrize("policy", POLICIES)
def test_r16_profile_features_may_be_an_object_null_partial_or_absent(site: PolicySite, policy: str) -> None:
    kinds: list[dict[str, Any]] = [{}, {"profile_features": None}, {"profile_features": PROFILE}]
    for number, more in enumerate([*kinds, {"profile_features": {"preferred_hour": None}}]):
        assert score_and_reward(site, policy, f"r16-{policy.replace('/', '-')}", **more)["n"] == number + 1


# Events


def test_the_same_score_again_gives_the_same_bytes(site: PolicySite) -> None:
    body = {"user_id": "same", "event_id": "e", "candidates": TIPS, "at": "2026-04-27T08:30:00Z"}
    first = site.post("/score/linucb", body)
    score_and_reward(site, "linucb", "same")
    assert site.post("/score/linucb", body).content == first.content


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/score/linucb", {"context": {"open_tasks": 3}}),
        ("/score/linucb", {"candidates": TIPS[:1]}),
        ("/score/egreedy/v2", {}),
        ("/recommend", {}),
    ],
)
def test_an_event_id_of_another_request_is_a_conflict(site: PolicySite, path: str, change: dict[str, Any]) -> None:
    body = {"user_id": "other-body", "event_id": "e", "candidates": TIPS}
    assert site.post("/score/linucb", body).status_code == 200
    assert site.error(site.post(path, {**body, **change}))[0] == 409


def test_the_same_reward_again_is_not_applied_and_another_is_a_conflict(site: PolicySite) -> None:
    event = site.score("egreedy/v1", "twice")["event_id"]
    reward = {"user_id": "twice", "event_id": event, "action": "snoozed"}
    assert site.post("/reward/egreedy", reward).json()["applied"] is True
    assert site.post("/reward/egreedy/v1", reward).json() == {"applied": False, "reward": 0.1, "late": False, "n": 1}
    assert site.error(site.post("/reward", {**reward, "action": "dismissed"}))[:2] == (409, "event_conflict")
    stats = site.get("/stats/egreedy", params={"user_id": "twice"}).json()
    assert (stats["n"], stats["duplicates"]) == (1, 1)


def test_an_unknown_event_is_not_found_and_nothing_is_learned(site: PolicySite) -> None:
    event = site.score("egreedy/v1", "known")["event_id"]
    for user, unknown in (("known", "x"), ("unknown", event)):
        response = site.post("/reward/egreedy/v1", {"user_id": user, "event_id": unknown, "reward": 0.5})
        assert site.error(response)[:2] == (404, "not_found")
        assert site.get("/stats/egreedy/v1", params={"user_id": user}).json()["n"] == 0


def test_a_reward_on_the_route_of_another_policy_is_a_conflict(site: PolicySite) -> None:
    event = site.score("egreedy/v1", "route")["event_id"]
    reward = {"user_id": "route", "event_id": event, "reward": 1.0}
    assert site.error(site.post("/reward/egreedy/v2", reward))[:2] == (409, "event_conflict")
    assert site.get("/stats/egreedy/v2", params={"user_id": "route"}).json()["n"] == 0
    assert site.post("/reward", reward).json()["n"] == 1


def test_rewards_out_of_order_are_learned_with_their_own_features(site: PolicySite) -> None:
    events = [site.score("egreedy/v3", "order", event_id=f"e{at}")["event_id"] for at in range(4)]
    for place, event in enumerate(reversed(events)):
        answer = site.post("/reward/egreedy/v3", {"user_id": "order", "event_id": event, "reward": 0.5}).json()
        assert (answer["applied"], answer["n"]) == (True, place + 1)


def test_a_reward_after_a_day_is_late_and_not_learned(tmp_path: Path) -> None:
    with policy_site(tmp_path) as site:
        events = [site.score("egreedy/v1", "u", event_id=f"e{n}", at="2020-01-01T00:00:00Z") for n in range(2)]
        site.clock.ahead = DAY_S - 60  # by the server's clock; `at` is years ago
        rewards = [{"user_id": "u", "event_id": event["event_id"], "action": "completed"} for event in events]
        assert site.post("/reward", rewards[0]).json()["late"] is False
        site.clock.ahead = DAY_S + 60
        answer = site.post("/reward", rewards[1]).json()
        assert (answer["applied"], answer["late"], answer["n"]) == (False, True, 1)
        assert site.get("/stats/egreedy/v1", params={"user_id": "u"}).json()["late"] == 1


def test_a_reward_from_before_a_reset_conflicts_and_after_an_erase_is_unknown(site: PolicySite) -> None:
    event = site.score("egreedy/v1", "gone")["event_id"]
    reward = {"user_id": "gone", "event_id": event, "reward": 1.0}
    site.post("/reset", {"user_id": "gone"})
    assert site.error(site.post("/reward/egreedy/v1", reward))[0] == 409
    site.post("/reset", {"user_id": "gone", "erase": True})
    assert site.error(site.post("/reward/egreedy/v1", reward))[0] == 404


def test_no_user_id_is_on_disk(tmp_path: Path) -> None:
    with policy_site(tmp_path) as site:
        score_and_reward(site, "egreedy/v3", "Very-Recognisable-Name")
        site.get("/stats/egreedy/v3", params={"user_id": "Very-Recognisable-Name"})
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"Recognisable" in path.read_bytes()]


# Limits


HOSTILE = ["", "../x", "a/b", "a\0b", "x" * 129, "x" * 10_000, "ü", "а", "u 1", "u\n", "%2e", "${x}", "'--"]


@pytest.mark.parametrize("user", HOSTILE)
def test_an_invalid_user_id_is_refused_with_its_place(site: PolicySite, user: str) -> None:
    for path in ("/score/egreedy/v2", "/recommend"):
        response = site.post(path, {"user_id": user, "candidates": TIPS})
        assert site.error(response) == (422, "invalid", "body.user_id")
    response = site.post("/reward", {"user_id": user, "event_id": "e", "reward": 0})
    assert site.error(response) == (422, "invalid", "body.user_id")
    assert site.error(site.post("/reset", {"user_id": user})) == (422, "invalid", "body.user_id")
    assert site.error(site.get("/stats/linucb", params={"user_id": user})) == (422, "invalid", "query.user_id")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"candidates": TIPS}, "body.user_id"),
        ({"user_id": "u", "candidates": []}, "body.candidates"),
        ({"user_id": "u", "candidates": [{"tip_id": f"{n}"} for n in range(201)]}, "body.candidates"),
        ({"user_id": "u", "candidates": [TIPS[0], TIPS[0]]}, "body.candidates"),
        ({"user_id": "u", "candidates": [{"tip_id": "t", "composite": float("nan")}]}, "body.candidates.0.composite"),
        ({"user_id": "u", "candidates": TIPS, "colour": 1}, "body.colour"),
        ({"user_id": "u", "candidates": TIPS, "at": "yesterday"}, "body.at"),
        ({"user_id": "u", "candidates": TIPS, "profile_features": {"preferred_hour": 25}},
         "body.profile_features.preferred_hour"),
    ],
)  # fmt: skip
def test_an_invalid_body_is_refused_with_the_path_of_the_field(
    site: PolicySite, body: dict[str, Any], place: str
) -> None:
    response = site.post("/score/egreedy/v1", content=json.dumps(body).encode())
    assert site.error(response) == (422, "invalid", place)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"user_id": "u"', b'{"a": "\\ud800"}'])
def test_a_body_that_is_not_json_is_a_bad_request(site: PolicySite, body: bytes) -> None:
    assert site.error(site.post("/recommend", content=body)) == (400, "not_json", "body")


def test_a_body_over_the_limit_is_refused_also_without_a_length(site: PolicySite) -> None:
    large = b" " * (256 * 1024 + 1)
    assert site.error(site.post("/recommend", content=large)) == (413, "too_large", "body")
    assert site.error(site.post("/recommend", content=iter([large[:1000], large]))) == (413, "too_large", "body")
    most = json.dumps({"user_id": "most", "candidates": TIPS}).encode().ljust(256 * 1024)
    assert site.post("/recommend", content=most).status_code == 200


def test_a_length_over_the_limit_is_refused_before_the_body_arrives(site: PolicySite) -> None:
    address = httpx.URL(site.url)
    head = f"POST /recommend HTTP/1.1\r\nHost: x\r\nAuthorization: {site.headers('app')['Authorization']}\r\n"
    with socket.create_connection((address.host, address.port or 80), timeout=30) as client:
        client.sendall(head.encode() + b"Content-Length: 99999999999\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_full_queue_is_unavailable_with_the_time_to_retry(tmp_path: Path) -> None:
    with policy_site(tmp_path, queue=2) as site, ThreadPoolExecutor(8) as pool:
        with site.service.log.write_database.transaction():  # the writer waits for this to end
            sent = [pool.submit(site.post, "/score/linucb", {"user_id": f"u{n}", "candidates": TIPS}) for n in range(8)]
            response = next(as_completed(sent, timeout=60)).result()
        assert site.error(response)[:2] == (503, "queue_full")
        assert response.headers["retry-after"] == "1"
        assert {each.result().status_code for each in sent} == {200, 503}


# Access


def routes(site: PolicySite) -> list[tuple[str, str]]:
    return [(method, path) for path, method in site.app.paths.items()]


def test_every_route_refuses_without_a_token_and_with_a_judges(site: PolicySite) -> None:
    assert len(routes(site)) == 21
    for method, path in routes(site):
        for token, expected in ((None, (401, "unauthorised")), ("judge", (403, "forbidden"))):
            headers = site.headers(token)
            assert site.error(site.client.request(method, path, headers=headers))[:2] == expected, path
        assert site.client.request(method, path, headers=site.headers("admin")).status_code in (200, 400), path


def test_health_needs_no_token(site: PolicySite) -> None:
    assert site.get("/healthz", as_=None).json()["status"] == "ok"


def test_load_balancers_may_request_the_health_with_head(site: PolicySite) -> None:
    response = site.client.head("/healthz")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) == len(site.get("/healthz", as_=None).content)
    assert site.client.head("/metrics", headers=site.headers("app")).status_code == 405


def test_wrong_tokens_are_slowed_down(tmp_path: Path) -> None:
    with policy_site(tmp_path) as site:
        tries = [site.get("/policies", as_="tipbench_wrong").status_code for _ in range(8)]
        assert (tries[0], tries[-1]) == (401, 429)
        assert site.get("/policies").status_code == 200


def test_a_revoked_token_is_refused_after_five_seconds_at_most(site: PolicySite) -> None:
    token, secret = site.tokens.create(Role.APP, "phone", life_s=None)
    assert site.get("/policies", as_=secret).status_code == 200
    site.tokens.revoke(token.id)
    site.token_clock.ahead += 5.01
    assert site.get("/policies", as_=secret).status_code == 401


def test_a_token_in_use_is_checked_again_before_it_has_to_be(site: PolicySite) -> None:
    token, secret = site.tokens.create(Role.APP, "phone", life_s=None)
    for _ in range(4):
        site.token_clock.ahead += 4.5
        assert site.get("/policies", as_=secret).status_code == 200
    assert site.app._checking == set()
    site.tokens.revoke(token.id)
    site.token_clock.ahead += 4.5
    assert site.get("/policies", as_=secret).status_code == 401


def test_one_token_written_in_many_ways_does_not_fill_the_memory(
    site: PolicySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_MAX_CACHED_TOKENS", 3)
    for spaces in range(1, 9):
        headers = {"Authorization": f"Bearer{' ' * spaces}{site.secrets['app']}"}
        assert site.client.get("/policies", headers=headers).status_code == 200
    assert len(site.app._authorised) <= 3


def test_unknown_paths_and_methods_are_refused(site: PolicySite) -> None:
    assert site.error(site.get("/score/egreedy/v4"))[:2] == (404, "not_found")
    for method, path in (*routes(site), ("GET, HEAD", "/healthz")):
        other = "DELETE" if method == "POST" else "POST"
        response = site.client.request(other, path, headers=site.headers("app"))
        assert (response.status_code, response.headers["allow"]) == (405, method), path


def test_the_access_log_has_no_query_string(site: PolicySite, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tipbench.serving"):
        site.get("/stats/linucb", params={"user_id": "private-person"})
        assert eventually(lambda: "GET /stats/linucb 200" in caplog.text)  # logged once the response is sent
    assert "private" not in caplog.text


def test_a_path_cannot_forge_a_line_of_the_access_log(site: PolicySite, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tipbench.serving"):
        site.get("/x%0d%0aGET /forged%1b[2J")
        assert eventually(lambda: "GET /x" in caplog.text)
    assert "GET /x%0D%0AGET%20/forged%1B%5B2J 404" in caplog.text


def test_metrics_count_requests_and_shadow_calls(site: PolicySite) -> None:
    site.score("egreedy/v2", "metrics")
    text = site.get("/metrics").text
    assert 'route="/score/egreedy/v2",status="200"' in text
    assert 'tipbench_shadow_dropped_total{shadow="egreedy-v2-shadow"} 0' in text


# Catalogue and shadows


def test_without_candidates_the_tip_comes_from_the_catalogue_with_its_text(tmp_path: Path) -> None:
    tips = [CatalogueTip(tip_id=f"c{n}", tip=f"Text {n}", category="focus", slot_hour=n % 24) for n in range(300)]
    with policy_site(tmp_path, catalogue=Catalogue(tips)) as site:
        body = {"user_id": "u", "event_id": "e", "at": "2026-04-27T09:00:00Z"}
        answer = site.post("/recommend", body).json()
        assert len(answer["ranking"]) == 200
        assert answer["tip"] == f"Text {answer['chosen'][1:]}"
        assert site.post("/recommend", body).json() == answer
        assert site.error(site.post("/recommend", {"user_id": "u", "candidates": []}))[0] == 422


def test_without_candidates_and_catalogue_the_request_is_invalid(site: PolicySite) -> None:
    assert site.error(site.post("/recommend", {"user_id": "u"})) == (422, "invalid", "body.candidates")


def test_shadows_that_sleep_raise_or_flood_leave_the_answers_unchanged(tmp_path: Path) -> None:
    release = threading.Event()

    def broken(_service: PolicyService, policy: str, _entry: Entry) -> dict[str, Any]:
        if policy == "egreedy/v2":
            release.wait()
        raise RuntimeError(policy)

    def answers(site: PolicySite) -> list[bytes]:
        kept = []
        for number in range(40):
            body = {
                "user_id": f"u{number % 3}",
                "event_id": f"e{number}",
                "candidates": TIPS,
                "at": "2026-04-27T08:00Z",
            }
            kept.append(site.post("/recommend", body).content)
            kept.append(
                site.post("/reward", {"user_id": body["user_id"], "event_id": f"e{number}", "reward": 1}).content
            )
        return kept

    with policy_site(tmp_path / "plain") as site:
        expected = answers(site)
    (tmp_path / "shadowed").mkdir()
    (tmp_path / "shadowed" / "serve.secret").write_bytes((tmp_path / "plain" / "serve.secret").read_bytes())
    (tmp_path / "shadowed" / "serve.secret").chmod(0o600)
    with policy_site(tmp_path / "shadowed", scorer=broken, shadow_queue=2) as site:
        for name in SHADOWS:
            site.recommender.switches.set_shadow(name, True)
        assert answers(site) == expected
        assert site.get("/policies").json()["shadows"]["egreedy-v2-shadow"]["dropped"] >= 37
        release.set()
        site.wait_for_shadows()
        assert site.get("/policies").json()["shadows"]["linucb-shadow"]["errors"] > 0


@pytest.mark.parametrize("policy", ["egreedy/v2", "egreedy/v3", "linucb"])
def test_the_server_decides_for_simulated_users_as_the_vectorised_rollout_does(site: PolicySite, policy: str) -> None:
    """Every decision and reward is a request with `profile_features`; the draws come from the server's secret."""
    world, keys = World("lossy", 4, 8, 12), site.service.keys
    for user in range(len(world)):
        site.post("/reset", {"user_id": f"user-{user}", "erase": True})

    def draws(_policy: Policy, number: int) -> np.ndarray:
        users = [keys.hash_user_id(f"user-{user}") for user in range(len(world))]
        return np.array([keys.repeatable_random(policy, user, f"round-{number}") for user in users])

    fast = rollout(world, [find_arm(policy)], draws=draws, record=True)[0]
    with httpx.Client(base_url=site.url, headers=site.headers("app"), trust_env=False, timeout=DEADLINE_S) as client:
        served = drive(world, ServerChooser(client, policy))
    assert fast.chosen is not None
    assert served.chosen is not None
    assert served.chosen.tolist() == fast.chosen.tolist()
    assert served.reward.tolist() == fast.reward.tolist()
