"""A judge's requests to the panel: open a batch, judge its items by a rule, close it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from support.judging import Rule, SheetDriver, agreed, fill
from tipbench.judge.sheet_store import StoredSheet, find_sheet
from tipbench.web.auth import Role
from tipbench.web.batch_items import BatchShape
from web.panels import API, EXPERIMENT, ServedPanel

GOOD = {"relevance": 4, "actionability": 5, "tone": 3}
BATCHES = f"{API}/judge/{EXPERIMENT}/batches"


def batch_shape(**fields: Any) -> BatchShape:
    """A batch as the service returns it."""
    counts = dict.fromkeys(("items", "done", "draft", "skipped", "empty", "seconds"), 0)
    unknown = dict.fromkeys(("closed", "minutes_per_item", "note", "accepted", "outcome"))
    links = dict.fromkeys(("self", "items", "close", "reopen", "page"), "/")
    text = {"sheet": "s1", "experiment": EXPERIMENT, "judge": "anna", "kind": "sheet", "status": "open"}
    times = dict.fromkeys(("opened", "updated"), "2026-05-04T10:15:00.000Z")
    return BatchShape.model_validate({**counts, **unknown, **text, **times, "links": links, **fields})


@dataclass(frozen=True)
class JudgeClient:
    """One judge's requests."""

    served: ServedPanel
    token: str

    @classmethod
    def create(cls, served: ServedPanel, name: str, role: Role = Role.JUDGE) -> JudgeClient:
        """Create a judge's token and return its client."""
        return cls(served, served.panel.authenticator.tokens.create(role, name, life_s=3600)[1])

    def request(self, method: str, path: str = "", **options: Any) -> Any:
        """Send a request to a path under the batches."""
        return self.served.request(method, f"{BATCHES}{path}", token=self.token, **options)

    def open(self, **options: Any) -> dict[str, Any]:
        """Open the judge's batch."""
        response = self.request("POST", json=options)
        assert response.status_code in (200, 201), response.text
        batch: dict[str, Any] = response.json()["batch"]
        return batch

    def get_batch(self, sheet: str) -> dict[str, Any]:
        """Return a batch with its items."""
        response = self.request("GET", f"/{sheet}")
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def put(self, sheet: str, item: str, version: int, state: str = "draft", **body: Any) -> Any:
        """Save an item."""
        return self.request("PUT", f"/{sheet}/items/{item}", json={"version": version, "state": state, **body})

    def undo(self, sheet: str, item: str, version: int) -> Any:
        """Undo the last change of an item."""
        return self.request("POST", f"/{sheet}/items/{item}/undo", json={"version": version})

    def submit(self, raw: Mapping[str, Any], *, omit_last: int = 0) -> None:
        """Submit every item of a filled sheet in its current version, except the last `omit_last`."""
        items = raw["items"][: len(raw["items"]) - omit_last]
        versions = {item["item"]: item["answer"]["version"] for item in self.get_batch(raw["sheet"])["items"]}
        for item in items:
            response = self.put(raw["sheet"], item["item"], versions[item["item"]], "submitted", **item_body(item))
            assert response.status_code == 200, response.text

    def close(self, sheet: str) -> Any:
        """Close a batch."""
        return self.request("POST", f"/{sheet}/close")

    def judge_batch(self, rule: Rule = agreed, *, omit_last: int = 0, **options: Any) -> dict[str, Any]:
        """Open, judge and close a batch."""
        sheet = self.open(**options)["sheet"]
        self.submit(fill(stored_sheet(self.served, sheet), rule), omit_last=omit_last)
        response = self.close(sheet)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


def item_body(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request that saves a filled item."""
    if "winner" in item:
        return {"winner": item["winner"]}
    tips = [{"scores": tip["scores"], "overlong": tip["overlong"], "note": tip["note"]} for tip in item["tips"]]
    return {"format_ok": item["format_ok"], "tips": tips}


def first_item(judge_client: JudgeClient) -> tuple[str, dict[str, Any]]:
    """Return the judge's batch and its first item."""
    sheet = judge_client.open()["sheet"]
    return sheet, judge_client.get_batch(sheet)["items"][0]


def driver_of(served: ServedPanel, name: str = EXPERIMENT) -> SheetDriver:
    """Return a driver of an experiment in the panel's store."""
    experiment = served.store.experiment(name)
    assert experiment is not None
    return SheetDriver(served.store, experiment)


def stored_sheet(served: ServedPanel, sheet: str) -> StoredSheet:
    """Return the stored sheet with its key."""
    found = find_sheet(served.store, driver_of(served).experiment, sheet)
    assert found is not None
    return found


def blank_scores(body: Mapping[str, Any]) -> dict[str, None]:
    """Return an empty score for each scale."""
    return {scale["name"]: None for scale in body["rubric"]["scales"]}


def scored_tips(item: Mapping[str, Any], **over: Any) -> list[dict[str, Any]]:
    """Return all tips of an item with scores, as a request sends them."""
    return [{"scores": GOOD, **over} for _ in item["tips"]]


def error_of(judge_client: JudgeClient, response: Any) -> tuple[int, str, str | None]:
    """Return the status, code and path of an error response."""
    return (*judge_client.served.error(response), response.json()["error"]["path"])
