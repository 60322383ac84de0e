"""Two judges at once, each in several tabs, over a network that loses and repeats requests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from support.judging import fill
from support.threads import in_threads
from web.judge_client import JudgeClient, driver_of, first_item, item_body, scored_tips, stored_sheet
from web.panels import ServedPanel

JUDGES = ("anna", "ben")
TABS = 3
REQUEST_LOST, RESPONSE_LOST, SENT_TWICE = 0.15, 0.15, 0.1  # probabilities
TRIES = 50


def submit_until_answered(judge_client: JudgeClient, sheet: str, item: Mapping[str, Any], rng: random.Random) -> int:
    """Submit until a response arrives; return the number of requests that reached the panel."""
    arrived = 0
    for _ in range(TRIES):
        if rng.random() < REQUEST_LOST:
            continue
        times = 2 if rng.random() < SENT_TWICE else 1
        responses = [judge_client.put(sheet, item["item"], 0, "submitted", **item_body(item)) for _ in range(times)]
        arrived += times
        if rng.random() < RESPONSE_LOST:
            continue
        assert [response.status_code for response in responses] == [200] * times, responses[0].text
        assert responses[-1].json()["answer"]["version"] == 1
        return arrived
    raise AssertionError("every request was lost")


def test_concurrent_submissions_are_not_lost_doubled_or_shown_to_others(served: ServedPanel) -> None:
    judge_clients = {name: JudgeClient.create(served, name) for name in JUDGES}
    in_threads(len(JUDGES), lambda at: judge_clients[JUDGES[at]].open(limit=24))
    raws = {}
    for name, judge_client in judge_clients.items():
        raw = raws[name] = fill(stored_sheet(served, judge_client.open()["sheet"]))
        for item in raw["items"]:
            item["tips"][0]["note"] = f"only-{name}-knows"
    requests: list[int] = []

    def submit_in_tab(at: int) -> None:
        name, number = JUDGES[at // TABS], at % TABS
        rng, raw = random.Random(f"{name}/{number}"), raws[name]
        requests.extend(
            submit_until_answered(judge_clients[name], raw["sheet"], item, rng) for item in raw["items"][number::TABS]
        )

    in_threads(len(JUDGES) * TABS, submit_in_tab)
    assert len(requests) == sum(len(raw["items"]) for raw in raws.values()) >= 48
    assert sum(requests) > len(requests)  # some came twice
    in_threads(len(JUDGES), lambda at: judge_clients[JUDGES[at]].close(raws[JUDGES[at]]["sheet"]))
    for name, judge_client in judge_clients.items():
        check_nothing_lost(judge_client, raws[name])
        check_nothing_shown_to_others(judge_client, name, raws)


def check_nothing_lost(judge_client: JudgeClient, raw: Mapping[str, Any]) -> None:
    """Check that no score is lost or duplicated in the batch, the sheet's run and the cells."""
    body, judging = judge_client.get_batch(raw["sheet"]), stored_sheet(judge_client.served, raw["sheet"])
    assert (body["batch"]["done"], body["batch"]["status"]) == (len(raw["items"]), "applied")
    store = judge_client.served.app.state.batches._store
    scores = driver_of(judge_client.served).scores()
    for entry, item in zip(judging.entries, raw["items"], strict=True):
        stored = judging.scores[item["item"]]
        assert [dict(tip.scores) for tip in stored.tips] == [tip["scores"] for tip in item["tips"]]
        assert len(store.history(raw["sheet"], item["item"])) == 1
        if entry.kind == "cell" and entry.run_id is not None:
            own = [each for each in scores[entry.run_id].counted if each.judge == body["batch"]["judge"]]
            assert [each.tips for each in own] == [stored.tips]


def check_nothing_shown_to_others(judge_client: JudgeClient, name: str, raws: Mapping[str, Any]) -> None:
    """Check that a judge does not see another's scores, notes or batches."""
    other = next(each for each in JUDGES if each != name)
    other_sheet = raws[other]
    responses = [
        judge_client.request("GET"),
        judge_client.request("GET", f"/{raws[name]['sheet']}"),
        judge_client.close(raws[name]["sheet"]),
    ]
    assert [response.status_code for response in responses] == [200] * 3
    for response in responses:
        assert f"only-{other}-knows" not in response.text
        assert other_sheet["sheet"] not in response.text
    item = other_sheet["items"][0]["item"]
    assert judge_client.served.error(judge_client.request("GET", f"/{other_sheet['sheet']}")) == (404, "not_found")
    assert judge_client.served.error(judge_client.put(other_sheet["sheet"], item, 1, "empty")) == (404, "not_found")


def test_each_version_of_an_item_is_saved_by_one_of_two_tabs(served: ServedPanel) -> None:
    judge_client = JudgeClient(served, served.judge)
    sheet, item = first_item(judge_client)
    saved_versions: list[int] = []

    def save_in_tab(at: int) -> None:
        version = 0
        for number in range(15):
            body = {"tips": scored_tips(item, note=f"tab {at}, {number}")}
            response = judge_client.put(sheet, item["item"], version, "draft", **body)
            if response.status_code == 409:
                version = response.json()["detail"]["answer"]["version"]
                continue
            version = response.json()["answer"]["version"]
            saved_versions.append(version)

    in_threads(2, save_in_tab)
    steps = judge_client.request("GET", f"/{sheet}/items/{item['item']}/history").json()["items"]
    stored_versions = sorted(step["version"] for step in steps)
    assert sorted(saved_versions) == list(range(1, len(saved_versions) + 1)) == stored_versions


def test_closing_twice_at_once_applies_once(served: ServedPanel) -> None:
    judge_client = JudgeClient(served, served.judge)
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(stored_sheet(served, sheet))
    judge_client.submit(raw)
    responses = in_threads(4, lambda _at: judge_client.close(sheet))
    assert {response.status_code for response in responses} == {200}
    assert len({response.text for response in responses}) == 1
    assert all(len(found.history) == 0 for found in driver_of(served).scores().values())
