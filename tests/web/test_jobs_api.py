"""Jobs over HTTP: started once, listed, followed, cancelled and retried; invalid ones are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tipbench.jobs.command import judge_request
from tipbench.jobs.job import JobState
from web.panels import API, EXPERIMENT, ServedPanel, answered_store, serve_panel

SMALL = {"models": "baseline:template", "prompts": "v1", "n_scenarios": 2, "n_tips": 3}
RUN = f"{API}/run"
JOBS = f"{API}/jobs"
JUDGE = f"{API}/judge/{EXPERIMENT}/run"


def start_run(served: ServedPanel, key: str | None = None, **changes: Any) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    return served.post(RUN, json={**SMALL, **changes}, headers=headers)


def accepted_job(response: Any) -> Any:
    assert response.status_code == 202, response.text
    return response.json()["job"]


def move(served: ServedPanel, job_id: str, *states: JobState, **details: Any) -> None:
    store = served.panel.jobs.store
    for state in states:
        assert store.move(job_id, store.get(job_id).state, state, **details) is not None


# starting runs


def test_a_run_is_accepted_as_a_job(served: ServedPanel) -> None:
    response = start_run(served)
    job = accepted_job(response)
    assert response.headers["location"] == f"{JOBS}/{job['id']}" == job["links"]["self"]
    assert {"id", "kind", "state", "experiment", "retry_of", "links"} <= set(job)
    assert (job["kind"], job["state"], job["experiment"], job["retry_of"]) == (
        "collect",
        "queued",
        "tip-bench-auto",
        None,
    )
    assert (job["started_by"], job["arguments"]["n_tips"], job["runner"]) == ("boss", 3, "local")
    assert (response.json()["place"], response.json()["new"]) == (1, True)


def test_every_link_of_a_job_works(served: ServedPanel) -> None:
    links = accepted_job(start_run(served, experiment="tip-bench-a/b c?"))["links"]
    assert links["experiment"] == "/experiments/tip-bench-a%2Fb%20c%3F"
    assert links["page"].startswith("/jobs/")
    assert served.get(links["self"]).status_code == served.get(links["log"]).status_code == 200
    assert "mlflow" not in links


def test_an_empty_body_runs_the_defaults(home: Path) -> None:
    with serve_panel(home, environment={"TIPBENCH_MODELS": "baseline:template", "TIPBENCH_N_TIPS": "4"}) as served:
        arguments = accepted_job(served.post(RUN))["arguments"]
    assert (arguments["models"], arguments["n_tips"]) == ("baseline:template", 4)


def test_the_same_key_gives_the_same_job(served: ServedPanel) -> None:
    first, again = start_run(served, "key-1"), start_run(served, "key-1")
    assert accepted_job(first)["id"] == accepted_job(again)["id"]
    assert (first.json()["new"], again.json()["new"]) == (True, False)
    assert len(served.get(JOBS).json()["items"]) == 1


def test_the_same_key_with_another_body_is_refused(served: ServedPanel) -> None:
    start_run(served, "key-1")
    assert served.error(start_run(served, "key-1", n_tips=4)) == (409, "job_conflict")
    assert served.error(served.post(JUDGE, json={"with": "rules"}, headers={"Idempotency-Key": "key-1"})) == (
        409,
        "job_conflict",
    )


def test_without_a_key_every_request_is_a_job(served: ServedPanel) -> None:
    assert len({accepted_job(start_run(served))["id"] for _ in range(3)}) == 3


def test_an_invalid_key_is_refused(served: ServedPanel) -> None:
    for key in ["", " ", "x" * 201, "a\tb", "caf\u00e9", " a", "a\x7f"]:
        response = served.post(RUN, json=SMALL, headers={"Idempotency-Key": key.encode("latin-1")})
        assert (response.status_code, response.json()["error"]["path"]) == (422, "header.Idempotency-Key")
        assert served.get(JOBS).json()["items"] == []


def test_twenty_concurrent_clicks_start_one_job(served: ServedPanel) -> None:
    started: list[tuple[str, bool]] = []
    start = threading.Barrier(20)

    def click() -> None:
        start.wait()
        response = start_run(served, "click-1")
        started.append((accepted_job(response)["id"], response.json()["new"]))

    threads = [threading.Thread(target=click) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(started) == 20
    assert len({job_id for job_id, _ in started}) == 1
    assert [new for _, new in started].count(True) == 1
    assert len(served.get(JOBS).json()["items"]) == 1


def test_a_malformed_body_is_refused_and_starts_nothing(served: ServedPanel) -> None:
    for content, kind in [
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"null", "application/json"),
        (b'"x"', "application/json"),
        (b'{"n_tips": NaN}', "application/json"),
        (b'{"n_tips": 1e999}', "application/json"),
        (b'{"n_tips": ' + b"9" * 5000 + b"}", "application/json"),
        (b'{"models": "\\ud800"}', "application/json"),
        (b'{"models": "a\\u0000b"}', "application/json"),
        (b'{"experiment": "tip-bench-\\u202e\\n"}', "application/json"),
        (b'{"models": "' + b"a:1b," * 5 + b"x" * 900 + b'"}', "application/json"),
        (
            b'{"models": ' + b'["a:1b"' + b"".join(b',"m%d:1b"' % number for number in range(4000)) + b"]}",
            "application/json",
        ),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"n_tips=3", "application/x-www-form-urlencoded"),
        (b"{}", "text/plain"),
        (b'{"key": 1}', "application/json"),
        (b'{"models": {"a": 1}}', "application/json"),
        (b'{"wait": "perhaps"}', "application/json"),
    ]:
        for path in [RUN, JUDGE]:
            response = served.post(path, content=content, headers={"Content-Type": kind})
            assert served.error(response)[0] == 422
            assert response.json()["error"]["path"].startswith("body")
            assert served.get(JOBS).json()["items"] == []


def test_an_unknown_prompt_is_refused_before_the_job_is_queued(served: ServedPanel) -> None:
    assert served.error(start_run(served, prompts="v9"))[0] == 400
    assert served.get(JOBS).json()["items"] == []


def test_a_server_that_is_not_allowed_is_refused(served: ServedPanel) -> None:
    for key in ["ollama_url", "mlflow_url"]:
        assert served.error(start_run(served, **{key: "http://169.254.169.254/latest"})) == (403, "not_allowed")
        assert served.get(JOBS).json()["items"] == []


def test_an_allowed_server_is_used_with_its_hidden_login(home: Path) -> None:
    environment = {"TIPBENCH_PANEL_URLS": "http://anna:hidden@gpu:11434"}
    with serve_panel(home, environment=environment) as served:
        response = start_run(served, ollama_url="http://gpu:11434")
        job = accepted_job(response)
        private = served.panel.jobs.store.get(job["id"]).private
        shown = [response.text, *(served.get(path).text for path in (JOBS, f"{JOBS}/{job['id']}", RUN))]
    assert job["arguments"]["ollama_url"] == "http://gpu:11434"
    assert private == {"TIPBENCH_OLLAMA_URL": "http://anna:hidden@gpu:11434"}
    assert not any("hidden" in text for text in shown)


# automatic judges


def test_an_automatic_judge_is_a_job(served: ServedPanel) -> None:
    job = accepted_job(served.post(JUDGE, json={"with": "rules", "limit": 8, "all": True}))
    assert (job["kind"], job["experiment"]) == ("judge", EXPERIMENT)
    assert job["arguments"] == {
        "with": "rules",
        "limit": 8,
        "all": True,
        "experiment": EXPERIMENT,
        "mlflow_url": None,
    }


def test_a_model_that_judges_waits_for_its_server(served: ServedPanel) -> None:
    job = accepted_job(served.post(JUDGE, json={"with": "ollama:a:1b", "max_model_b": 2}))
    assert "Ollama at http://localhost:11434" in served.panel.jobs.store.get(job["id"]).resources
    assert job["arguments"]["ollama_url"] == "http://localhost:11434"


def test_a_judges_wrong_option_is_named(served: ServedPanel) -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({}, 422, "body.with"),
        ({"with": "people"}, 422, "body.with"),
        ({"with": "ollama:"}, 422, "body.with"),
        ({"with": "ollama:a b"}, 422, "body.with"),
        ({"with": "command"}, 403, "body.with"),
        ({"with": "command:rm -rf /"}, 403, "body.with"),
        ({"with": "rules", "experiment": "tip-bench-other"}, 422, "body.experiment"),
        ({"with": "rules", "limit": 0}, 422, "body.limit"),
        ({"with": "rules", "batch": 3}, 422, "body"),
        ({"with": "rules", "with_": "rules"}, 422, "body.with_"),
        ({"with": "rules", "mlflow_url": "http://evil.example"}, 403, "body.mlflow_url"),
        ({"with": "rules", "suite": "/etc"}, 403, "body.suite"),
        ({"with": "rules", "seed": 2**70}, 422, "body.seed"),
        ({"with": "ollama:a:1b", "ollama_url": "http://evil.example"}, 403, "body.ollama_url"),
        ({"with": "ollama:a:1b", "num_ctx": "x"}, 422, "body.num_ctx"),
        ({"with": "ollama:a:1b", "accept_drift": "why not"}, 422, "body"),
        ({"with": "rules", "judge": ["a"]}, 422, "body.judge"),
        ({"with": "command:" + "x" * 5000}, 422, "body.with"),
        ({"with": "ollama:a:1b", "ollama_url": "nowhere"}, 422, "body.ollama_url"),
        ({"with": "rules", "mlflow_url": "file:///x"}, 422, "body.mlflow_url"),
    ]
    for body, status, place in cases:
        response = served.post(JUDGE, json=body)
        assert (response.status_code, response.json()["error"]["path"]) == (status, place), response.text
        assert served.get(JOBS).json()["items"] == []


def test_only_the_operators_program_judges(home: Path) -> None:
    with serve_panel(home, answered_store(), {"TIPBENCH_JUDGE_COMMAND": "python judge.py --quick"}) as served:
        job = accepted_job(served.post(JUDGE, json={"with": "command", "judge": " ben ", "batch": 5}))
        assert (job["arguments"]["with"], job["arguments"]["judge"]) == ("command", "ben")
        assert served.error(served.post(JUDGE, json={"with": "command:sh"})) == (403, "not_allowed")
        response = served.post(JUDGE, json={"with": "command", "judge": "rules"})
        assert (response.status_code, response.json()["error"]["path"]) == (422, "body.judge")


def test_a_program_that_cannot_be_read_starts_no_job_and_is_not_shown(home: Path) -> None:
    with serve_panel(home, answered_store(), {"TIPBENCH_JUDGE_COMMAND": 'scribe --key "hidden'}) as served:
        response = served.post(JUDGE, json={"with": "command"})
        assert served.error(response) == (403, "not_allowed")
        assert "hidden" not in response.text


def test_an_unknown_experiment_cannot_be_judged(served: ServedPanel) -> None:
    assert served.error(served.post(f"{API}/judge/tip-bench-none/run", json={"with": "rules"})) == (404, "not_found")
    assert served.error(served.post(f"{API}/judge/mine/run", json={"with": "rules"})) == (422, "invalid")


# the list


@pytest.fixture
def five_jobs(served: ServedPanel) -> list[str]:
    """Five jobs, oldest first: succeeded, failed, queued, queued behind it, and a judge."""
    ids = [accepted_job(start_run(served, experiment=f"tip-bench-{name}"))["id"] for name in ("a", "b", "c", "c")]
    move(served, ids[0], JobState.RUNNING, JobState.SUCCEEDED)
    move(served, ids[1], JobState.RUNNING)
    move(served, ids[1], JobState.FAILED, exit_code=1, reason="MLflow at http://anna:hidden@box is away")
    return [*ids, accepted_job(served.post(JUDGE, json={"with": "rules"}))["id"]]


def ids(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [item["id"] for item in response.json()["items"]]


def test_the_list_is_newest_first_with_places_in_the_queue(served: ServedPanel, five_jobs: list[str]) -> None:
    items = served.get(JOBS).json()["items"]
    assert [item["id"] for item in items] == five_jobs[::-1]
    assert [item["place"] for item in items] == [1, 2, 1, None, None]


def test_the_list_is_paged_without_repeating_a_row(served: ServedPanel, five_jobs: list[str]) -> None:
    seen, mark = [], ""
    for _ in range(5):
        page = served.get(f"{JOBS}?limit=2{mark}").json()
        seen += [item["id"] for item in page["items"]]
        start_run(served)  # new jobs do not shift the pages
        if page["next"] is None:
            break
        mark = f"&next={page['next']}"
    assert seen == five_jobs[::-1]


def test_the_list_is_filtered(served: ServedPanel, five_jobs: list[str]) -> None:
    assert ids(served.get(f"{JOBS}?state=failed")) == [five_jobs[1]]
    assert ids(served.get(f"{JOBS}?kind=judge")) == [five_jobs[4]]
    assert ids(served.get(f"{JOBS}?experiment=tip-bench-c&state=queued")) == [five_jobs[3], five_jobs[2]]
    assert ids(served.get(f"{JOBS}?experiment=tip-bench-none")) == []


def test_an_invalid_query_of_the_list_is_refused(served: ServedPanel) -> None:
    for query in ["state=done", "kind=x", "limit=0", "limit=501", "limit=x", "next=x", "next=-1", "next=" + "9" * 30]:
        response = served.get(f"{JOBS}?{query}")
        assert (response.status_code, response.json()["error"]["path"]) == (422, f"query.{query.partition('=')[0]}")


def test_one_job_shows_its_progress_and_why_it_failed_without_a_login(
    served: ServedPanel, five_jobs: list[str]
) -> None:
    body = served.get(f"{JOBS}/{five_jobs[1]}").json()
    assert (body["job"]["state"], body["job"]["exit_code"], body["place"]) == ("failed", 1, None)
    assert body["job"]["reason"] == "MLflow at http://box is away"
    assert body["progress"]["models"] == []
    assert served.get(f"{JOBS}/{five_jobs[3]}").json()["place"] == 2


def test_an_unknown_job_is_not_found(served: ServedPanel) -> None:
    for path in ["", "/log", "/events"]:
        assert served.error(served.get(f"{JOBS}/20260101-000000-00000000{path}")) == (404, "not_found")
        assert served.error(served.get(f"{JOBS}/{'x' * 65}{path}")) == (422, "invalid")
        assert served.error(served.get(f"{JOBS}/..%2e{path}")) == (422, "invalid")


def test_an_unknown_job_cannot_be_changed(served: ServedPanel) -> None:
    for path in ["/cancel", "/retry"]:
        assert served.error(served.post(f"{JOBS}/20260101-000000-00000000{path}")) == (404, "not_found")


# changes


def test_a_waiting_job_is_cancelled_at_once_and_once(served: ServedPanel, five_jobs: list[str]) -> None:
    for _ in range(2):
        body = served.post(f"{JOBS}/{five_jobs[2]}/cancel").json()
        assert (body["job"]["state"], body["job"]["cancel_requested"], body["place"]) == ("cancelled", True, None)
    assert served.get(f"{JOBS}/{five_jobs[3]}").json()["place"] == 1


def test_a_job_that_has_ended_cannot_be_cancelled(served: ServedPanel, five_jobs: list[str]) -> None:
    assert served.error(served.post(f"{JOBS}/{five_jobs[0]}/cancel")) == (409, "job_conflict")


def test_a_retry_is_a_new_job_that_names_the_old_one(served: ServedPanel, five_jobs: list[str]) -> None:
    old = served.get(f"{JOBS}/{five_jobs[1]}").json()["job"]
    response = served.post(f"{JOBS}/{five_jobs[1]}/retry")
    job = accepted_job(response)
    assert (job["retry_of"], job["state"], job["arguments"]) == (five_jobs[1], "queued", old["arguments"])
    assert response.headers["location"] == job["links"]["self"]
    assert accepted_job(served.post(f"{JOBS}/{five_jobs[1]}/retry"))["id"] == job["id"], "one retry at a time"


def test_the_same_key_gives_the_same_retry_in_any_state(served: ServedPanel, five_jobs: list[str]) -> None:
    def again() -> Any:
        return served.post(f"{JOBS}/{five_jobs[1]}/retry", headers={"Idempotency-Key": "again-1"})

    first = accepted_job(again())
    move(served, first["id"], JobState.RUNNING, JobState.FAILED)
    assert (accepted_job(again())["id"], again().json()["new"]) == (first["id"], False)
    assert accepted_job(served.post(f"{JOBS}/{five_jobs[1]}/retry"))["id"] != first["id"]


def test_a_succeeded_or_queued_job_is_not_retried(served: ServedPanel, five_jobs: list[str]) -> None:
    for number in [0, 2]:
        assert served.error(served.post(f"{JOBS}/{five_jobs[number]}/retry")) == (409, "job_conflict")


@pytest.mark.parametrize("old_form", [False, True])
def test_a_retry_runs_the_operators_program_of_today_or_none(home: Path, old_form: bool) -> None:
    store = answered_store()
    with serve_panel(home, store, {"TIPBENCH_JUDGE_COMMAND": "old --key x"}) as served:
        job_id = accepted_job(served.post(JUDGE, json={"with": "command"}))["id"]
        if old_form:
            options = {"with": "command:old --key x", "experiment": EXPERIMENT}
            job_id = served.panel.jobs.submit(judge_request(options, ollama_url="http://box:1")).job.id
        move(served, job_id, JobState.CANCELLED)
    with serve_panel(home, store) as served:
        assert served.error(served.post(f"{JOBS}/{job_id}/retry")) == (403, "not_allowed")
    with serve_panel(home, store, {"TIPBENCH_JUDGE_COMMAND": "new"}) as served:
        again = accepted_job(served.post(f"{JOBS}/{job_id}/retry"))
        assert again["arguments"]["with"] == "command"
        assert served.panel.jobs.store.get(again["id"]).private == {"TIPBENCH_JUDGE_COMMAND": "new"}


def test_a_retry_names_no_server_that_is_no_longer_allowed(home: Path) -> None:
    store = answered_store()
    with serve_panel(home, store, {"TIPBENCH_PANEL_URLS": "http://gpu:11434"}) as served:
        job_id = accepted_job(start_run(served, ollama_url="http://gpu:11434"))["id"]
        served.post(f"{JOBS}/{job_id}/cancel")
    with serve_panel(home, store) as served:
        assert served.error(served.post(f"{JOBS}/{job_id}/retry")) == (403, "not_allowed")


# metrics, documentation, settings


def test_the_counters_have_jobs_by_state_and_the_queue(served: ServedPanel, five_jobs: list[str]) -> None:
    assert len(five_jobs) == 5
    lines = served.get("/metrics").text.splitlines()
    assert 'tipbench_jobs{state="queued"} 3' in lines
    assert 'tipbench_jobs{state="failed"} 1' in lines
    assert 'tipbench_jobs{state="running"} 0' in lines
    assert "tipbench_queue_length 3" in lines
    assert "tipbench_event_streams 0" in lines


def documented_responses(served: ServedPanel, five_jobs: list[str]) -> Iterator[tuple[str, str, Any]]:
    yield f"{JOBS}", "get", served.get(JOBS)
    yield f"{JOBS}/{{job_id}}", "get", served.get(f"{JOBS}/{five_jobs[1]}")
    yield f"{JOBS}/{{job_id}}/cancel", "post", served.post(f"{JOBS}/{five_jobs[2]}/cancel")
    yield f"{JOBS}/{{job_id}}/retry", "post", served.post(f"{JOBS}/{five_jobs[1]}/retry")
    yield RUN, "post", start_run(served)
    yield f"{API}/judge/{{experiment}}/run", "post", served.post(JUDGE, json={"with": "rules"})


def test_real_responses_about_jobs_are_as_documented(served: ServedPanel, five_jobs: list[str]) -> None:
    document = served.get(f"{API}/openapi.json").json()
    for path, method, response in documented_responses(served, five_jobs):
        found = document["paths"][path][method]["responses"][str(response.status_code)]["content"]["application/json"]
        jsonschema.validate(response.json(), {**found["schema"], "components": document["components"]})


def test_the_key_is_documented_as_a_header(served: ServedPanel) -> None:
    operation = served.app.openapi()["paths"][RUN]["post"]
    (key,) = [each for each in operation["parameters"] if each["in"] == "header"]
    assert (key["name"], key["required"]) == ("Idempotency-Key", False)
    assert operation["responses"]["202"]["headers"]["Location"]


@pytest.mark.parametrize("days", ["-1", "many", "nan", "1e9"])
def test_a_wrong_number_of_days_is_refused_at_the_start(home: Path, days: str) -> None:
    from tipbench.errors import UsageError

    with (
        pytest.raises(UsageError, match="TIPBENCH_JOBS_KEEP_DAYS: "),
        serve_panel(home, environment={"TIPBENCH_JOBS_KEEP_DAYS": days}),
    ):
        pass
