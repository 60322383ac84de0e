"""The page and API of policies: what they show of the policy server's store, and the switches of shadows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.policy_site import TIPS
from tipbench.serve.event_log import open_database
from tipbench.serve.recommender import Recommender
from tipbench.serve.service import PolicyService
from tipbench.serve.switches import Switches
from web.panels import API, ServedPanel

URL = f"{API}/policies"


def learn(home: Path, rewards: int = 6) -> None:
    """Let the active policy serve one user, with a shadow, as the server does."""
    service = PolicyService(home)
    recommender = Recommender(service)
    recommender.switches.set_shadow("egreedy-v2-shadow", True)
    for number in range(rewards):
        answer = recommender.recommend({"user_id": "u1", "candidates": TIPS, "at": "2026-04-27T08:00:00Z"})  # type: ignore[typeddict-item]
        recommender.queue_for_shadows(answer)
        service.reward(None, {"user_id": "u1", "event_id": answer.body["event_id"], "reward": (number % 3) / 2})
    recommender.wait()
    recommender.close()
    service.close()


def test_without_a_store_the_page_shows_how_to_start_the_server(served: ServedPanel) -> None:
    assert served.get(URL).json() == {"active": None, "policies": [], "shadows": [], "user": None}
    page = served.get("/policies")
    assert "No policy server has run yet" in page.text
    assert "tipbench serve" in page.text
    assert not (served.home / "serve").exists()


def test_page_and_api_show_rewards_weights_and_shadows(served: ServedPanel) -> None:
    learn(served.home)
    report = served.get(URL).json()
    assert report["active"] == "egreedy/v1"
    (v1,) = [each for each in report["policies"] if each["name"] == "egreedy/v1"]
    assert (v1["n"], v1["mean_reward"], v1["pending"]) == (6, 0.5, 0)
    (day,) = v1["rewards"]
    assert day["n"] == 6
    assert day["low"] < 0.5 < day["high"]
    assert len(v1["weights"]) == 7
    (shadow,) = [each for each in report["shadows"] if each["name"] == "egreedy-v2-shadow"]
    assert (shadow["enabled"], shadow["calls"], shadow["dropped"], shadow["errors"]) == (True, 6, 0, 0)
    assert shadow["agreement"]["n"] == 6
    page = served.get("/policies").text
    for text in ("+0.500", "hour_cos", "egreedy-v2-shadow", day["day"], "Disable", URL):
        assert text in page, text


def test_one_users_state_is_shown_by_id_and_another_user_has_none(served: ServedPanel) -> None:
    learn(served.home)
    (v1,) = [each for each in served.get(f"{URL}?user_id=u1").json()["user"] if each["n"]]
    assert (v1["name"], v1["n"], len(v1["weights"])) == ("egreedy/v1", 6, 7)
    assert "for this user" in served.get("/policies?user_id=u1").text
    assert "No policy has learned anything about this user" in served.get("/policies?user_id=u2").text


@pytest.mark.parametrize("user", ["../x", "a b", "x" * 129])
def test_an_invalid_user_id_is_refused(served: ServedPanel, user: str) -> None:
    learn(served.home, 1)
    response = served.get(URL, params={"user_id": user})
    assert served.error(response) == (422, "invalid")
    assert response.json()["error"]["path"] == "query.user_id"
    assert served.get("/policies", params={"user_id": user}).status_code == 422


def test_a_switch_on_the_page_is_stored_for_the_server(served: ServedPanel) -> None:
    learn(served.home, 1)
    assert served.post("/policies/shadows/egreedy-v2-shadow", data={"enabled": "false"}).status_code == 303
    assert served.post("/policies/shadows/linucb-shadow", data={"enabled": "true"}).status_code == 303
    database = open_database(served.home)
    assert Switches(database).shadows() == {
        "egreedy-v2-shadow": False,
        "egreedy-v3-shadow": False,
        "linucb-shadow": True,
    }
    database.close()
    assert served.error(served.post("/policies/shadows/x", data={"enabled": "true"})) == (404, "not_found")


def test_every_interval_has_its_numbers_as_text(served: ServedPanel) -> None:
    learn(served.home)
    page = served.get("/policies?user_id=u1").text
    pictures = re.findall(r"<svg class=\"interval\"[^>]*>", page)
    assert len(pictures) == 1 + 7 + 7  # one day, the weights of all users, the weights of this one
    assert all('aria-hidden="true"' in picture for picture in pictures)
