"""Health endpoints without authentication, metrics for admins."""

from __future__ import annotations

import re
from functools import partial

import pytest

import tipbench
from tipbench.errors import MlflowUnavailable
from tipbench.web.metrics import Metrics
from web.panels import API, EXPERIMENT, ServedPanel

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)+\})? [0-9.e+-]+(inf)?', re.IGNORECASE)


def test_a_running_process_is_alive(served: ServedPanel) -> None:
    assert served.get("/healthz", token=None).json() == {"status": "ok", "version": tipbench.__version__}


def test_the_panel_is_ready_when_mlflow_answers(served: ServedPanel) -> None:
    assert served.get("/readyz", token=None).json() == {"status": "ready", "mlflow": "answers"}


def test_the_panel_is_alive_but_not_ready_while_mlflow_is_unavailable(served: ServedPanel) -> None:
    served.store.away = True  # type: ignore[attr-defined]
    response = served.get("/readyz", token=None)
    assert served.error(response) == (503, "not_ready")
    assert "memory" not in response.text  # anonymous clients do not get the reason
    assert served.get("/healthz", token=None).status_code == 200


def test_frequent_anonymous_requests_do_not_reach_mlflow_often(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    monkeypatch.setattr(served.store, "experiment", requests.append)
    for _ in range(20):
        served.get("/readyz", token=None)
    assert len(requests) == 1


def test_frequent_anonymous_requests_do_not_reach_an_unavailable_mlflow_often(
    served: ServedPanel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []

    def fail(name: str) -> None:
        requests.append(name)
        raise MlflowUnavailable("MLflow does not answer.")

    monkeypatch.setattr(served.store, "experiment", fail)
    errors = [served.error(served.get("/readyz", token=None)) for _ in range(20)]
    assert (set(errors), len(requests)) == ({(503, "not_ready")}, 1)


def test_the_counters_are_prometheus_text(served: ServedPanel) -> None:
    served.get(f"{API}/experiments")
    response = served.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    assert all(line.startswith("# ") or LINE.fullmatch(line) for line in lines), lines
    assert f'tipbench_http_requests_total{{method="GET",route="{API}/experiments",status="200"}} 1' in lines
    assert f'tipbench_info{{version="{tipbench.__version__}"}} 1' in lines


def test_counters_name_routes_and_never_paths(served: ServedPanel) -> None:
    served.get(f"{API}/runs/{EXPERIMENT}?model=private")
    served.get("/private/path")
    served.request("BREW", "/healthz")
    text = served.get("/metrics").text
    assert "private" not in text
    assert EXPERIMENT not in text
    assert 'method="other"' in text
    assert 'route="unmatched",status="404"' in text


def test_a_histograms_buckets_add_up() -> None:
    metrics = Metrics()
    for seconds in (0.001, 0.005, 0.02, 0.2, 5.0, 100.0):
        metrics.observe("GET", "/x", 200, seconds)
    counts = [int(line.rpartition(" ")[2]) for line in metrics.text().splitlines() if "_bucket{" in line]
    assert counts == [2, 3, 3, 4, 4, 4, 5, 6]
    assert 'tipbench_http_request_seconds_count{route="/x"} 6' in metrics.text()


def test_a_label_cannot_break_out_of_its_quotes() -> None:
    metrics = Metrics()
    metrics.register("x", "gauge", "X.", lambda: {(("name", 'a"b\\c\nd'),): 1.0})
    assert metrics.text().splitlines()[-1] == 'x{name="a\\"b\\\\c\\nd"} 1'


def test_any_number_is_formatted() -> None:
    for value in [float("inf"), 1e300, 0.1]:
        metrics = Metrics()
        metrics.register("x", "gauge", "X.", partial(dict, {(): value}))
        assert metrics.text().splitlines()[-1] == f"x {value:g}"
