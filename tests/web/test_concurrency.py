"""Concurrency limits: one token cannot use all threads or memory, and its body is not read without a slot.

A judge's response comes at a time that does not depend on the work.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tipbench.web import deps, security
from tipbench.web.security import JUDGES_RESPONSE_S, MAX_ADMIN_SHEET_REQUESTS, MAX_JUDGE_SHEET_BYTES, ConcurrencyLimits
from web.panels import API, EXPERIMENT, ServedPanel, answered_store, serve_panel

APPLY = f"{API}/judge/{EXPERIMENT}/apply?dry_run=true"
MULTIPART = {"Content-Type": "multipart/form-data; boundary=b"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait only briefly for a slot."""
    monkeypatch.setattr(security, "SHEET_REQUEST_WAIT_S", 0.1)
    monkeypatch.setattr(security, "FILLED_SHEET_WAIT_S", 0.1)


@pytest.fixture
def served(home: Path) -> Iterator[ServedPanel]:
    with serve_panel(home, answered_store()) as panel:
        yield panel


@contextmanager
def occupy_slots(served: ServedPanel, token: str, times: int = 1) -> Iterator[None]:
    """Occupy slots as slow requests of a token do."""
    known = served.panel.authenticator.by_token(token, "test")
    portal = served.client.portal
    assert portal is not None
    with ExitStack() as stack:
        for _ in range(times):
            stack.enter_context(portal.wrap_async_context_manager(served.panel.concurrency.sheet_request(known)))
        yield


def test_a_judges_parallel_reads_wait_without_slowing_others_down(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "JUDGE_REQUEST_WAIT_S", 0.1)
    judge, admin = (served.panel.authenticator.by_token(token, "test") for token in (served.judge, served.admin))
    portal = served.client.portal
    assert portal is not None
    batches = f"{API}/judge/{EXPERIMENT}/batches"
    with ExitStack() as stack:
        for identity in (judge, admin):
            for _ in range(security.MAX_JUDGE_REQUESTS):
                stack.enter_context(portal.wrap_async_context_manager(served.panel.concurrency.request(identity)))
        assert is_busy(served, served.get(batches, token=served.judge))
        assert served.get(batches).status_code == 200
    assert served.get(batches, token=served.judge).status_code == 200


def is_busy(served: ServedPanel, response: Any) -> bool:
    assert served.error(response) == (429, "busy"), response.text
    return int(response.headers["retry-after"]) > 0


def test_a_judges_second_slow_request_is_rejected_until_the_first_ends(served: ServedPanel) -> None:
    sheets = f"{API}/judge/{EXPERIMENT}/sheets"
    with occupy_slots(served, served.judge):
        assert is_busy(served, served.post(sheets, token=served.judge))
        assert is_busy(served, served.post(APPLY, token=served.judge, content=b"{", headers=JSON))
    assert served.post(sheets, token=served.judge).status_code == 201


def test_an_admin_has_more_slots_than_a_judge(served: ServedPanel) -> None:
    with occupy_slots(served, served.admin, MAX_ADMIN_SHEET_REQUESTS - 1):
        assert served.post(APPLY, content=b"{", headers=JSON).status_code == 422
    with occupy_slots(served, served.admin, MAX_ADMIN_SHEET_REQUESTS):
        assert is_busy(served, served.post(APPLY, content=b"{", headers=JSON))


def test_each_judge_has_its_own_slots(served: ServedPanel) -> None:
    with occupy_slots(served, served.judge):
        assert served.post(APPLY, content=b"{", headers=JSON).status_code == 422


def test_the_panel_responds_while_one_token_uses_all_its_slots(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deps, "JUDGING_WAIT_S", 120)
    path = f"{API}/judge/{EXPERIMENT}/batches"
    asking = [threading.Thread(target=served.post, args=(path,), kwargs={"token": served.judge}) for _ in range(60)]
    with served.panel.mlflow.judging_lock():  # each would wait for this, in a thread
        for each in asking:
            each.start()
        time.sleep(0.5)
        started = time.monotonic()
        assert served.get("/healthz", token=None).status_code == 200
        assert served.get(f"{API}/experiments").status_code == 200
        assert time.monotonic() - started < 60
    for each in asking:
        each.join(60)


@pytest.mark.parametrize("path", [APPLY, "/judge/preview"])
def test_the_body_is_not_read_without_a_slot(served: ServedPanel, path: str) -> None:
    served.log_in(served.judge)
    read: list[str] = []

    def body() -> Iterator[bytes]:
        read.append("some")
        yield b"--b--"

    with occupy_slots(served, served.judge):
        assert is_busy(served, served.post(path, token=None, content=body(), headers=MULTIPART))
    assert read == []


@pytest.mark.parametrize("headers", [JSON, {"Content-Type": "text/csv"}])
def test_a_judges_sheet_has_a_lower_limit_than_an_admins(served: ServedPanel, headers: dict[str, str]) -> None:
    content = b" " * (MAX_JUDGE_SHEET_BYTES + 1)
    refused = served.post(APPLY, token=served.judge, content=content, headers=headers)
    assert served.error(refused) == (413, "too_large")
    assert "8 MB" in refused.json()["error"]["message"]
    assert served.post(APPLY, content=content, headers=headers).status_code == 422


def test_a_judges_sheet_without_content_length_is_limited(served: ServedPanel) -> None:
    pieces = (b" " * 1_000_000 for _ in range(9))
    refused = served.post(APPLY, token=served.judge, content=pieces, headers=JSON)
    assert served.error(refused) == (413, "too_large")


def test_the_judges_body_limit_raises_no_other_limit(served: ServedPanel) -> None:
    path = f"{API}/judge/{EXPERIMENT}/batches"
    refused = served.post(path, token=served.judge, content=(b" " * 600_000 for _ in range(2)), headers=JSON)
    assert served.error(refused) == (413, "too_large")


def response_time(work_s: float) -> float:
    """Return when a judge's response is sent, in seconds after the request arrived."""
    limits, slept = ConcurrencyLimits(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    limits.clock, limits.sleep = lambda: 100.0 + work_s, sleep
    asyncio.run(limits.wait_to_respond(100.0))
    return work_s + slept[0]


def test_a_judges_response_is_sent_at_a_fixed_time_whatever_the_work_takes() -> None:
    assert {round(response_time(work_s), 6) for work_s in (0.0, 0.155, 0.265, 1.99)} == {JUDGES_RESPONSE_S}


def test_a_response_after_the_fixed_time_is_sent_at_a_random_moment() -> None:
    times = [response_time(2.5) for _ in range(200)]
    assert 2.5 <= min(times) < 3.0
    assert 4.0 < max(times) <= 2.5 + JUDGES_RESPONSE_S


class RecordedSleep:
    """Replaces the wait before a judge's response: records it, and what others could do at that moment."""

    def __init__(self, served: ServedPanel) -> None:
        self._panel = served.panel
        self.seconds: list[float] = []
        served.panel.concurrency.judges_response_s = JUDGES_RESPONSE_S
        served.panel.concurrency.sleep = self

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        async with self._panel.concurrency.filled_sheet():  # raises Busy unless the slot for sheets is free

            def take_lock() -> None:
                with self._panel.mlflow.judging_lock():
                    pass

            await asyncio.to_thread(take_lock)


def test_a_judges_apply_and_close_wait_without_lock_and_slot_for_sheets(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "MAX_FILLED_SHEETS", 1)
    monkeypatch.setattr(deps, "JUDGING_WAIT_S", 0.1)
    base = f"{API}/judge/{EXPERIMENT}"
    with serve_panel(home, answered_store()) as served:
        sleep = RecordedSleep(served)

        def post(path: str, expected: int, **body: Any) -> float:
            """Send a judge's request and return when its response would be sent; nothing really waits."""
            started = time.perf_counter()
            response = served.post(path, token=served.judge, **body)
            assert response.status_code == expected, response.text
            return time.perf_counter() - started + sleep.seconds.pop()

        batch = served.post(f"{base}/batches", token=served.judge).json()["batch"]
        filled = served.post(f"{base}/sheets", token=served.judge).json()
        for item in filled["items"]:
            for tip in item["tips"]:
                tip["scores"] = dict.fromkeys(tip["scores"], 3)
        assert sleep.seconds == []  # an export is not delayed
        quick = post(f"{base}/apply", 422, content=b"{", headers=JSON)  # nothing is read or written
        slow = post(f"{base}/apply", 200, content=json.dumps(filled).encode(), headers=JSON)
        closed = post(f"{base}/batches/{batch['sheet']}/close", 200)
        assert min(quick, slow, closed) >= JUDGES_RESPONSE_S
        served.post(f"{base}/apply", content=b"{", headers=JSON)
        assert sleep.seconds == []  # an admin's response is not delayed


@pytest.mark.parametrize(("most", "statuses"), [(0, [429, 429]), (1, [422, 422])])
def test_filled_sheets_in_memory_are_limited(
    home: Path, monkeypatch: pytest.MonkeyPatch, most: int, statuses: list[int]
) -> None:
    monkeypatch.setattr(security, "MAX_FILLED_SHEETS", most)
    with serve_panel(home, answered_store()) as served:
        assert [served.post(APPLY, content=b"{", headers=JSON).status_code for _ in range(2)] == statuses
