"""Two judges on one queue at once, each in several tabs, over a network that loses and repeats requests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from support.judging import fill
from web.batching import JudgeClient, driver_of, first_item, given, kept, whole_tips
from web.panels import Served

JUDGES = ("anna", "ben")
TABS = 3
LOST, ANSWER_LOST, TWICE = 0.15, 0.15, 0.1  # what the network does to a request
TRIES = 50


def together(works: Sequence[Callable[[], object]]) -> None:
    """Run all functions concurrently; raise the first failure."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - raised below, by the test itself
            failed.append(exc)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


def submitted(judge_client: JudgeClient, sheet: str, item: Mapping[str, Any], rng: random.Random) -> int:
    """Submit until a response arrives; return the number of requests that reached the panel."""
    arrived = 0
    for _ in range(TRIES):
        if rng.random() < LOST:
            continue
        times = 2 if rng.random() < TWICE else 1
        responses = [judge_client.put(sheet, item["item"], 0, "submitted", **given(item)) for _ in range(times)]
        arrived += times
        if rng.random() < ANSWER_LOST:
            continue
        assert [response.status_code for response in responses] == [200] * times, responses[0].text
        assert responses[-1].json()["answer"]["version"] == 1
        return arrived
    raise AssertionError("every request was lost")


def test_concurrent_submissions_are_not_lost_doubled_or_shown_to_others(served: Served) -> None:
    judge_clients = {name: JudgeClient.named(served, name) for name in JUDGES}
    together([partial(judge_client.open, limit=24) for judge_client in judge_clients.values()])
    raws = {}
    for name, judge_client in judge_clients.items():
        raw = raws[name] = fill(kept(served, judge_client.open()["sheet"]))
        for item in raw["items"]:
            item["tips"][0]["note"] = f"only-{name}-knows"
    requests: list[int] = []

    def tab(name: str, number: int) -> None:
        rng, raw = random.Random(f"{name}/{number}"), raws[name]
        requests.extend(submitted(judge_clients[name], raw["sheet"], item, rng) for item in raw["items"][number::TABS])

    together([partial(tab, name, number) for name in JUDGES for number in range(TABS)])
    assert len(requests) == sum(len(raw["items"]) for raw in raws.values()) >= 48
    assert sum(requests) > len(requests)  # some came twice
    together([partial(judge_clients[name].close, raws[name]["sheet"]) for name in JUDGES])
    for name, judge_client in judge_clients.items():
        check_whole(judge_client, raws[name])
        check_alone(judge_client, name, raws)


def check_whole(judge_client: JudgeClient, raw: Mapping[str, Any]) -> None:
    """Check that no score is lost or duplicated in the batch, the sheet's run and the cells."""
    body, judging = judge_client.whole(raw["sheet"]), kept(judge_client.served, raw["sheet"])
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


def check_alone(judge_client: JudgeClient, name: str, raws: Mapping[str, Any]) -> None:
    """Check that a judge does not see another's scores, notes or batches."""
    other = next(each for each in JUDGES if each != name)
    theirs = raws[other]
    responses = [
        judge_client.ask("GET"),
        judge_client.ask("GET", f"/{raws[name]['sheet']}"),
        judge_client.close(raws[name]["sheet"]),
    ]
    assert [response.status_code for response in responses] == [200] * 3
    for response in responses:
        assert f"only-{other}-knows" not in response.text
        assert theirs["sheet"] not in response.text
    item = theirs["items"][0]["item"]
    assert judge_client.served.error(judge_client.ask("GET", f"/{theirs['sheet']}")) == (404, "not_found")
    assert judge_client.served.error(judge_client.put(theirs["sheet"], item, 1, "empty")) == (404, "not_found")


def test_two_tabs_on_one_item_share_out_every_version(served: Served) -> None:
    """In any order, each version is made by one tab, and every 409 shows the current version."""
    judge_client = JudgeClient(served, served.judge)
    sheet, item = first_item(judge_client)
    made: list[int] = []

    def tab(name: str) -> None:
        version = 0
        for number in range(15):
            body = {"tips": whole_tips(item, note=f"{name} {number}")}
            response = judge_client.put(sheet, item["item"], version, "draft", **body)
            if response.status_code == 409:
                version = response.json()["detail"]["answer"]["version"]
                continue
            version = response.json()["answer"]["version"]
            made.append(version)

    together([lambda: tab("left"), lambda: tab("right")])
    steps = judge_client.ask("GET", f"/{sheet}/items/{item['item']}/history").json()["items"]
    assert sorted(made) == list(range(1, len(made) + 1)) == sorted(step["version"] for step in steps)


def test_closing_twice_at_once_applies_once(served: Served) -> None:
    judge_client = JudgeClient(served, served.judge)
    sheet = judge_client.open(limit=6)["sheet"]
    raw = fill(kept(served, sheet))
    judge_client.submit(raw)
    responses: list[Any] = []
    together([lambda: responses.append(judge_client.close(sheet)) for _ in range(4)])
    assert {response.status_code for response in responses} == {200}
    assert len({response.text for response in responses}) == 1
    assert all(len(found.history) == 0 for found in driver_of(served).scores().values())
