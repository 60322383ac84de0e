"""One format for all errors, with a status for every kind of failure."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from starlette.responses import HTMLResponse

from tipbench import errors
from tipbench.web.errors import STATUSES_AND_CODES
from web.panels import API, EXPERIMENT, ServedPanel


def subclasses(kind: type[errors.TipbenchError]) -> Iterator[type[errors.TipbenchError]]:
    yield kind
    for sub in kind.__subclasses__():
        if sub.__module__ == "tipbench.errors":
            yield from subclasses(sub)


def status_and_code(kind: type[errors.TipbenchError]) -> tuple[int, str]:
    return next((status, code) for known, status, code in STATUSES_AND_CODES if issubclass(kind, known))


def test_every_exception_of_the_tree_has_a_status() -> None:
    chosen = {known for known, _, _ in STATUSES_AND_CODES}
    assert set(subclasses(errors.TipbenchError)) <= chosen


def test_a_subclass_is_matched_before_its_parent() -> None:
    kinds = [known for known, _, _ in STATUSES_AND_CODES]
    for at, kind in enumerate(kinds):
        assert not any(issubclass(later, kind) for later in kinds[at + 1 :])


def test_each_kind_of_failure_has_its_http_status() -> None:
    cases: list[tuple[type[errors.TipbenchError], int]] = [
        (errors.UsageError, 400),
        (errors.NotEnoughData, 409),
        (errors.MlflowUnavailable, 503),
        (errors.OllamaUnavailable, 503),
        (errors.LocalMlflowError, 503),
        (errors.MlflowError, 502),
        (errors.LockHeld, 409),
        (errors.MixedRubrics, 409),
        (errors.SheetRefused, 422),
    ]
    for kind, status in cases:
        assert status_and_code(kind)[0] == status


def test_a_wrong_value_is_named_by_its_place_and_shown(served: ServedPanel) -> None:
    response = served.get(f"{API}/runs/{EXPERIMENT}?limit=many&state=odd")
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["path"]) == (422, "invalid", "query.state")
    assert "query.limit" in error["message"]
    assert "'many'" in error["message"]


def test_a_missing_resource_has_the_error_format(served: ServedPanel) -> None:
    assert served.error(served.get("/no/such/page")) == (404, "not_found")
    assert served.error(served.get(f"{API}/runs/tip-bench-nowhere")) == (404, "not_found")


def test_a_wrong_method_gets_the_allowed_ones(served: ServedPanel) -> None:
    response = served.request("DELETE", f"{API}/experiments")
    assert served.error(response) == (405, "method_not_allowed")
    assert response.headers["allow"] == "GET"


def test_an_unavailable_server_has_a_retry_after(served: ServedPanel) -> None:
    served.store.away = True  # type: ignore[attr-defined]
    response = served.get(f"{API}/experiments")
    assert served.error(response) == (503, "mlflow_away")
    assert int(response.headers["retry-after"]) > 0


def test_a_body_that_is_not_a_json_object_is_refused(served: ServedPanel) -> None:
    for body in [b"{", b"[]", b"1", b'{"n_tips": NaN}', b"[" * 100_000, b"\xff\xfe"]:
        response = served.post(f"{API}/plan", content=body, headers={"Content-Type": "application/json"})
        assert served.error(response) == (422, "invalid")
        assert response.json()["error"]["path"] == "body"


def test_a_body_of_another_kind_is_refused(served: ServedPanel) -> None:
    """A form from another site could be sent as text without asking; JSON cannot."""
    response = served.post(f"{API}/plan", content=b"{}", headers={"Content-Type": "text/plain"})
    assert served.error(response) == (422, "invalid")


def test_pages_may_bring_their_own_error_page(served: ServedPanel) -> None:
    def page(_request: Request, status: int, error: dict[str, str]) -> HTMLResponse:
        return HTMLResponse(f"<h1>{error['code']}</h1>", status)

    served.app.state.error_page = page
    shown = served.get("/nothing", token=None, headers={"Accept": "text/html"})
    assert (shown.status_code, shown.text) == (404, "<h1>not_found</h1>")
    assert served.error(served.get(f"{API}/nothing", headers={"Accept": "text/html"})) == (404, "not_found")
