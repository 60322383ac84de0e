"""Blind over HTTP: no response to a judge reveals the model, prompt or run of an item.

Every response to a judge, on every route, is searched for names that occur nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from support.judging import EXPERIMENT, agreed, always, fill, fill_csv
from tipbench.record.store import MemoryStore
from tipbench.web.auth import CSRF_HEADER
from tipbench.web.panel.pages import assets
from web.judge_client import BATCHES, JudgeClient, first_item, scored_tips, stored_sheet
from web.leak_detector import COLLEAGUE, MODELS, OTHER, PROGRAM, PROMPTS, TIED, LeakDetector, serve_with_secrets
from web.panels import API, HTML, ServedPanel, route_list

JSON = {"Accept": "application/json"}


@pytest.fixture
def detector(home: Path) -> Iterator[LeakDetector]:
    with serve_with_secrets(home) as detector:
        yield detector


def path_values(detector: LeakDetector, sheet: str, item: str) -> dict[str, str]:
    """Return an existing value for every path parameter."""
    served = detector.served
    experiment = served.store.experiment(EXPERIMENT)
    assert experiment is not None
    run = next(served.store.search(experiment.experiment_id, where={"kind": "cell"}, limit=1))
    job = served.get(f"{API}/jobs").json()["items"][0]["id"]
    token = served.get(f"{API}/tokens").json()["items"][0]["id"]
    return {
        "experiment": EXPERIMENT,
        "run_id": run.run_id,
        "job_id": job,
        "sheet": sheet,
        "item": item,
        "token_id": token,
        "upload_id": "0" * 32,
        "chart": "forest",
        "form": "json",
        "version": assets().version,
        "name": "site.js",
    }


def route_paths(served: ServedPanel, real: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Return every route with existing values in its path."""
    for method, path in route_list(served.app):
        yield method, re.sub(r"\{(\w+)(?::\w+)?\}", lambda part: real.get(part[1], "1"), path)


def test_no_route_answers_a_judge_with_anything_that_unblinds(detector: LeakDetector) -> None:
    served, judge_client = detector.served, detector.judge_client
    sheet, item = first_item(judge_client)
    requests = sorted(set(route_paths(served, path_values(detector, sheet, item["item"]))))
    assert len(requests) > 60
    for method, path in requests:
        served.request(method, path, token=served.judge, headers=JSON)
        served.request(method, path, token=served.judge, headers=HTML, json={"experiment": EXPERIMENT})
        csrf = served.log_in(served.judge)
        served.request(method, path, token=None, headers={**HTML, CSRF_HEADER: csrf})
        served.client.cookies.clear()
    assert detector.leaks() == []


def test_no_static_file_or_file_name_unblinds(detector: LeakDetector) -> None:
    for name in assets().content:
        assert detector.served.get(assets().url(name), token=None).status_code == 200
    assert detector.leaks() == []


def test_no_step_of_a_batch_unblinds_by_api(detector: LeakDetector) -> None:
    judge_client = detector.judge_client
    sheet, item = first_item(judge_client)
    theirs, their_item = first_item(JudgeClient.create(detector.served, "somebody"))
    for path in (f"/{theirs}", f"/{theirs}/items/{their_item['item']}/history", f"/{'0' * 12}", "?judge=*"):
        response = judge_client.request("GET", path)
        assert response.status_code == 403 or "somebody" not in response.text
    judge_client.put(sheet, item["item"], 0, "draft", tips=scored_tips(item, note="mine"))
    judge_client.put(sheet, item["item"], 0, "skipped", reason="too late")
    judge_client.put(sheet, item["item"], 1, "submitted")
    judge_client.put(sheet, item["item"], 1, "odd", winner="a", tips=[{"scores": {"tone": 9}}])
    judge_client.put(sheet, "0" * 12, 0)
    for version in (1, 2):
        judge_client.undo(sheet, item["item"], version)
    judge_client.request("GET", f"/{sheet}/items/{item['item']}/history")
    assert judge_client.close(sheet).status_code == 409
    judge_client.request(
        "PUT", f"/{sheet}/items/{item['item']}", content=b"{no json", headers={"Content-Type": JSON["Accept"]}
    )
    judge_client.submit(fill(stored_sheet(detector.served, sheet), always(5)))
    assert judge_client.close(sheet).json()["batch"]["status"] == "held"
    judge_client.request("POST", f"/{sheet}/accept", json={"reason": "x"})
    judge_client.request("POST", f"/{sheet}/return", json={"note": "x"})
    detector.served.post(f"{BATCHES}/{sheet}/return", json={"note": "Look again."})
    judge_client.get_batch(sheet)
    judge_client.submit(fill(stored_sheet(detector.served, sheet)))
    assert judge_client.close(sheet).json()["batch"]["status"] == "applied"
    judge_client.request("POST", f"/{sheet}/reopen")
    judge_client.close(sheet)
    for _ in range(6):  # until nothing waits
        opened = judge_client.request("POST")
        if opened.status_code == 409:
            break
        judge_client.judge_batch()
    assert opened.status_code == 409
    assert detector.leaks() == []


def test_no_step_of_judging_by_file_unblinds(detector: LeakDetector) -> None:
    served = detector.served
    place = f"{API}/judge/{EXPERIMENT}"
    csv = served.post(f"{place}/sheets", token=served.judge, json={"format": "csv"}).text
    raw = served.post(f"{place}/sheets", token=served.judge, json={}).json()
    judging = stored_sheet(served, raw["sheet"])
    wrong = {**raw, "judge": COLLEAGUE[:4], "items": [{**raw["items"][0], "tips": []}, *raw["items"][1:]]}
    for body in (raw, wrong, {}, fill(judging, always(5)), fill(judging)):
        for query in ("?dry_run=true", ""):
            served.post(f"{place}/apply{query}", token=served.judge, json=body)
    typed = {"Content-Type": "text/csv"}
    served.post(f"{place}/apply", token=served.judge, content=fill_csv(csv, fill(judging)).encode(), headers=typed)
    again = {"sheet": raw["sheet"], "filled": True}
    refused = ({"sheet": "0" * 12}, {"seed": 1}, {"focus": True}, {"judge": "x"}, {"limit": 3})
    for body in (again, {**again, "format": "csv"}, *refused):
        served.post(f"{place}/sheets", token=served.judge, json=body)
    assert detector.leaks() == []


@pytest.fixture
def as_judge(detector: LeakDetector) -> Callable[..., Any]:
    """A judge's browser: forms carry the CSRF token."""
    csrf = detector.served.log_in(detector.served.judge)

    def request(method: str, path: str, fields: Mapping[str, str] | None = None, **more: Any) -> Any:
        data = {"csrf": csrf, **(fields or {})} if method == "POST" else None
        return detector.served.request(method, path, token=None, headers=HTML, data=data, **more)

    return request


def test_no_page_of_a_judge_unblinds(detector: LeakDetector, as_judge: Callable[..., Any]) -> None:
    for path in ("/judge", f"/judge?experiment={EXPERIMENT}", "/judge?experiment=tip-bench-nowhere", "/nowhere", "/"):
        as_judge("GET", path)
    for name in (EXPERIMENT, TIED):
        for kind in ("sheet", "duel", "odd"):
            opened = as_judge("POST", "/judge/batches", {"experiment": name, "kind": kind})
            if opened.status_code == 303:
                as_judge("GET", opened.headers["location"])
    sheet = detector.judge_client.open()["sheet"]
    for rule, status in ((always(5), "held"), (agreed, "applied")):
        detector.judge_client.submit(fill(stored_sheet(detector.served, sheet), rule))
        assert detector.judge_client.close(sheet).json()["batch"]["status"] == status
        page = as_judge("GET", f"/judge/batches/{sheet}")
        assert (page.status_code, "too high" in page.text) == (200, status == "held")
        assert as_judge("POST", f"/judge/batches/{sheet}/reopen").status_code == 303
    file = as_judge("POST", "/judge/sheet", {"experiment": EXPERIMENT, "format": "json", "limit": "12"})
    wrong = file.text.replace('"sha256": "', '"sha256": "0', 3)
    for content in (file.text, wrong, "no sheet", json.dumps(fill(stored_sheet(detector.served, sheet)))):
        shown = as_judge("POST", "/judge/preview", {"experiment": EXPERIMENT}, files={"sheet": ("s.json", content)})
        for url in re.findall(r'action="(/judge/uploads/[^"]+)"', shown.text):
            done = as_judge("POST", unescape(url))
            as_judge("GET", done.headers["location"])
    assert detector.leaks() == []


def test_no_duel_unblinds(detector: LeakDetector) -> None:
    served, place = detector.served, f"{API}/judge/{TIED}/batches"
    opened = served.post(place, token=served.judge, json={"kind": "duel"})
    sheet = opened.json()["batch"]["sheet"]
    for item in served.get(f"{place}/{sheet}", token=served.judge).json()["items"]:
        body = {"version": 0, "state": "submitted", "winner": "a"}
        assert served.request("PUT", f"{place}/{sheet}/items/{item['item']}", token=served.judge, json=body).is_success
    assert served.post(f"{place}/{sheet}/close", token=served.judge).is_success
    served.post(f"{API}/judge/{EXPERIMENT}/batches", token=served.judge, json={"kind": "duel"})
    assert detector.leaks() == []


def test_no_failure_of_mlflow_unblinds(detector: LeakDetector, as_judge: Callable[..., Any]) -> None:
    sheet, item = first_item(detector.judge_client)
    detector.judge_client.put(sheet, item["item"], 0, "submitted", tips=scored_tips(item))
    store = detector.served.store
    assert isinstance(store, MemoryStore)
    store.away = True
    assert detector.judge_client.close(sheet).status_code == 503
    for path in ("/judge", f"/judge?experiment={EXPERIMENT}", f"/judge/batches/{sheet}", "/readyz", "/healthz"):
        as_judge("GET", path)
    as_judge("POST", "/judge/batches", {"experiment": TIED})
    detector.judge_client.request("POST", json={"kind": "duel"})
    for path in ("", f"/{sheet}"):
        detector.judge_client.request("GET", path)
    store.away = False
    assert detector.leaks() == []


def test_the_detector_finds_secrets_in_responses_to_an_admin(detector: LeakDetector) -> None:
    """Checks the detector itself."""
    served = detector.served
    served.log_in(served.admin)
    for path in (f"/experiments/{EXPERIMENT}/runs", "/settings", f"/experiments/{EXPERIMENT}/judges", "/"):
        assert served.get(path, token=None, headers=HTML).status_code == 200
    found = {secret for _, secret in detector.leaks()}
    assert found >= {*MODELS, *PROMPTS, COLLEAGUE, PROGRAM, OTHER}
