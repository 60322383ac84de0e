"""The run's form: made from the schema, checked at its fields, planned and started without a script."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from support.scripted_ollama import ModelSpec, ScriptedOllama
from tipbench.plan.collect_config import CollectConfig
from tipbench.web.panel import start
from web.page_forms import HEADERS, PageForm
from web.panels import API, ServedPanel, serve_panel

SMALL: dict[str, Any] = {"models": "baseline:template", "prompts": "v1", "n_scenarios": "2", "n_tips": "3"}
UNREACHABLE = "127.0.0.1:9"


@pytest.fixture
def served(home: Path) -> Iterator[ServedPanel]:
    """A panel without recorded runs and without Ollama; jobs stay in the queue."""
    with serve_panel(home, environment={"OLLAMA_HOST": UNREACHABLE}) as panel:
        yield panel


def form_of(served: ServedPanel, query: str = "") -> PageForm:
    response = served.get(f"/run{query}")
    assert response.status_code == 200, response.text
    return PageForm(response.text, "/run")


def post_form(served: ServedPanel, body: str) -> Any:
    return served.post("/run", content=body, headers=HEADERS)


def plan_run(served: ServedPanel, **changes: Any) -> Any:
    return post_form(served, form_of(served).body(do="plan", **{**SMALL, **changes}))


def start_run(served: ServedPanel, form: PageForm | None = None, **changes: Any) -> Any:
    return post_form(served, (form or form_of(served)).body(do="start", **{**SMALL, **changes}))


def list_jobs(served: ServedPanel) -> list[Any]:
    return list(served.get(f"{API}/jobs").json()["items"])


def message_at(page: str, key: str) -> str:
    """Return the message at a field, or an empty text."""
    _, _, after = page.partition(f'id="{key}-error">')
    return unescape(after.partition("</p>")[0].partition("</span>")[2]).strip()


# the form


def test_every_key_of_the_configuration_is_a_field(served: ServedPanel) -> None:
    assert form_of(served).names >= set(CollectConfig.model_fields)


def test_the_untouched_form_is_the_default_configuration(home: Path) -> None:
    with (
        ScriptedOllama(["alpha:135m"]) as ollama,
        serve_panel(
            home,
            environment={
                "TIPBENCH_N_TIPS": "4",
                "TIPBENCH_EVICT": "true",
                "OLLAMA_HOST": ollama.url,
                "TIPBENCH_MODELS": "alpha:135m",
            },
        ) as served,
    ):
        assert post_form(served, form_of(served).body(do="start")).status_code == 303
        arguments = list_jobs(served)[0]["arguments"]
        assert CollectConfig.model_validate(arguments) == served.panel.permissions.config({})


def test_an_unticked_box_is_false_even_if_the_default_is_true(home: Path) -> None:
    with serve_panel(home, environment={"TIPBENCH_EVICT": "true", "OLLAMA_HOST": UNREACHABLE}) as served:
        assert form_of(served).value("evict") == ["true"]
        start_run(served, evict=None)
        assert list_jobs(served)[0]["arguments"]["evict"] is False


def test_the_url_fills_the_form(served: ServedPanel) -> None:
    form = form_of(served, "?models=baseline:template,x:1b&n_tips=2&diversity=true&experiment=tip-bench-a/b&nonsense=1")
    assert sorted(form.value("models")) == ["baseline:template", "x:1b"]
    assert (form.value("n_tips"), form.value("diversity")) == (["2"], ["true"])
    assert form.value("experiment") == ["tip-bench-a/b"]
    assert "nonsense" not in form.names


def test_an_earlier_job_fills_the_form(served: ServedPanel) -> None:
    job_path = start_run(served, n_tips="7", experiment="tip-bench-before").headers["location"]
    form = form_of(served, f"?from={job_path.rpartition('/')[2]}&n_scenarios=1")
    assert (form.value("n_tips"), form.value("experiment")) == (["7"], ["tip-bench-before"])
    assert (form.value("models"), form.value("n_scenarios")) == (["baseline:template"], ["1"])
    assert form_of(served, "?from=never").value("n_tips") == ["5"]


def test_the_suites_prompts_and_our_own_models_can_be_ticked(served: ServedPanel) -> None:
    form = form_of(served)
    assert form.checkboxes["prompts"] == ["v1", "v2-mentor", "v3-few-shot"]
    assert form.checkboxes["models"] == ["embedded:smollm2:135m", "baseline:template"]


def test_ticked_and_typed_values_are_one_list(served: ServedPanel) -> None:
    start_run(served, models=["baseline:template", "embedded:smollm2:135m, baseline:template"], skip_refused="true")
    assert list_jobs(served)[0]["arguments"]["models"] == "baseline:template,embedded:smollm2:135m"


def test_suites_of_an_allowed_folder_are_suggested(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "suites" / "mine"
    folder.mkdir(parents=True)
    (folder / "suite.toml").write_text("")
    with serve_panel(home, environment={"TIPBENCH_PANEL_SUITES": str(tmp_path / "suites")}) as served:
        assert f'<option value="{folder}">' in served.get("/run").text


def test_hostile_text_in_the_url_stays_text(served: ServedPanel) -> None:
    evil = "tip-bench-%22%3E%3Cscript%3Ealert(1)%3C/script%3E"
    page = served.get(f"/run?experiment={evil}&models={evil}&suite={evil}").text
    assert "<script>alert" not in page
    assert form_of(served, f"?experiment={evil}").value("experiment") == ['tip-bench-"><script>alert(1)</script>']


# Ollama's models


def test_models_on_ollama_are_offered_and_allowed_ones_preselected(home: Path) -> None:
    large = ModelSpec("large:e2b", params=4_460_000_000)
    with (
        ScriptedOllama(["alpha:135m", large]) as ollama,
        serve_panel(home, environment={"OLLAMA_HOST": ollama.url}) as served,
    ):
        body = served.get("/run/models").json()
        offered = {each["name"]: (each["preselected"], each["refusal"]) for each in body["items"]}
        assert offered["alpha:135m"] == (True, None)
        assert "4.46B parameters; the limit is 4B" in offered["large:e2b"][1]
        form = form_of(served)  # cached by the earlier request
        assert form.checkboxes["models"] == ["alpha:135m", "large:e2b", "embedded:smollm2:135m", "baseline:template"]
        assert form.value("models") == ["alpha:135m", "baseline:template"]
        assert "Refused: large:e2b has 4.46B" in unescape(served.get("/run").text)
        assert form_of(served, "?models=large:e2b").value("models") == ["large:e2b"]


def test_without_ollama_the_form_reports_it_and_preselects_what_runs_without_it(served: ServedPanel) -> None:
    assert served.get("/run/models").json()["away"].startswith(f"Ollama at http://{UNREACHABLE} does not respond")
    assert "does not respond. Start it (ollama serve)" in served.get("/run").text
    assert form_of(served).value("models") == ["baseline:template"]


def test_a_run_that_would_fail_is_not_started_and_can_skip_what_is_refused(served: ServedPanel) -> None:
    unavailable = start_run(served, models="alpha:135m")
    assert (unavailable.status_code, "does not respond" in message_at(unavailable.text, "ollama_url")) == (503, True)
    mixed = start_run(served, models=["baseline:template", "embedded:smollm2:135m"])
    assert (mixed.status_code, "Not started" in mixed.text) == (422, True)
    assert "needs its weights" in unescape(mixed.text)
    assert list_jobs(served) == []
    skipping = post_form(served, PageForm(mixed.text, "/run").body(do="skip"))
    assert skipping.status_code == 303
    assert list_jobs(served)[0]["arguments"]["skip_refused"] is True


def test_an_ollama_without_a_response_does_not_block_the_page(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with serve_panel(home, environment={"OLLAMA_HOST": address}) as served:
            monkeypatch.setattr(start, "OLLAMA_TIMEOUT_S", 60)
            began = time.monotonic()
            page = served.get("/run").text
            assert time.monotonic() - began < 60
            assert 'data-models-url="/run/models"' in page
            monkeypatch.setattr(start, "OLLAMA_TIMEOUT_S", 0.2)
            assert served.get("/run/models").json()["answered"] is False


def test_only_allowed_servers_are_queried_for_models(served: ServedPanel) -> None:
    with ScriptedOllama(["alpha:135m"]) as ollama:
        body = served.get("/run/models", params={"ollama_url": ollama.url}).json()
        assert {each["name"] for each in body["items"]} == {"embedded:smollm2:135m", "baseline:template"}
        assert not ollama.log.requests


# the plan


def test_a_plan_counts_cells_and_starts_nothing(served: ServedPanel) -> None:
    response = plan_run(served)
    assert response.status_code == 200
    assert "<strong>2 cells to generate</strong>" in response.text
    assert "0 of 2 cells already recorded" in response.text
    assert "cannot be ranked. Judging 2 answers takes about 60 s." in response.text
    assert list_jobs(served) == []
    assert served.store.experiment("tip-bench-auto") is None


def test_after_a_plan_the_form_keeps_its_values(served: ServedPanel) -> None:
    form = form_of(served)
    again = PageForm(post_form(served, form.body(do="plan", **SMALL, wait="true")).text, "/run")
    assert (again.value("n_tips"), again.value("wait"), again.value("models")) == (["3"], ["true"], [SMALL["models"]])
    assert again.value("key") == form.value("key")


def test_a_refused_model_is_shown_with_its_reason(served: ServedPanel) -> None:
    page = unescape(plan_run(served, models=["baseline:template", "embedded:smollm2:135m"]).text)
    assert "embedded:smollm2:135m needs its weights" in page
    assert 'name="do" value="skip">Skip refused and start' in page
    skipping = plan_run(served, models=["baseline:template", "embedded:smollm2:135m"], skip_refused="true").text
    assert 'name="do" value="start">Start' in skipping


def test_a_plan_with_every_model_refused_shows_it(served: ServedPanel) -> None:
    assert "No model may run" in plan_run(served, models="embedded:smollm2:135m").text


def test_recorded_cells_are_counted(served: ServedPanel) -> None:
    from support.collecting import Collecting

    Collecting(served.home, f"http://{UNREACHABLE}", store=served.store).run(**SMALL)  # type: ignore[arg-type]
    page = plan_run(served, num_predict="64").text
    assert "2 of 2 cells already recorded: nothing to generate" in page


def test_an_unavailable_mlflow_is_a_warning(served: ServedPanel) -> None:
    served.store.away = True  # type: ignore[attr-defined]
    response = plan_run(served)
    assert response.status_code == 200
    assert "The plan counts nothing as recorded" in response.text


def test_an_unavailable_ollama_is_reported_at_its_field(served: ServedPanel) -> None:
    response = plan_run(served, models="alpha:135m")
    assert response.status_code == 503
    assert "does not respond" in message_at(response.text, "ollama_url")


# mistakes


def test_an_invalid_value_is_reported_at_its_field_and_kept(served: ServedPanel) -> None:
    for button in ["plan", "start"]:
        for key, value, message in [
            ("n_tips", "0", "greater than or equal to 1"),
            ("n_tips", "many", "valid integer"),
            ("n_tips", "", "A value is required; the default is 5."),
            ("temperature", "nan", "finite"),
            ("experiment", "mine", "starts with tip-bench-"),
            ("num_predict", "5000", "must be smaller than num_ctx"),
            ("models", "", "Choose at least one."),
            ("models", "a b", "no spaces"),
            ("prompts", "v9", "Suite tips has no prompt v9; it has v1"),
            ("suite", "/etc", "TIPBENCH_PANEL_SUITES"),
            ("ollama_url", "http://evil.example:11434", "a server that the operator allows"),
            ("unload", "never", "'model' or 'call'"),
            ("seed", "9" * 5000, "At most 4000 characters"),
        ]:
            response = post_form(served, form_of(served).body(**{**SMALL, key: value, "do": button}))
            assert response.status_code == 422
            assert message in message_at(response.text, key)
            assert PageForm(response.text, "/run").value(key) == ([value] if value else [])
            assert list_jobs(served) == []


def test_all_mistakes_are_reported_at_once(served: ServedPanel) -> None:
    page = plan_run(served, n_tips="0", temperature="9", experiment="mine").text
    assert all(message_at(page, key) for key in ("n_tips", "temperature", "experiment"))
    assert page.count('<li><a href="#') == 3


def test_a_group_with_a_mistake_is_unfolded(served: ServedPanel) -> None:
    assert '<details class="card" open>' not in served.get("/run").text
    assert '<details class="card" open>' in plan_run(served, seed="-1").text


def test_a_broken_form_is_refused_and_starts_nothing(served: ServedPanel) -> None:
    for body in ["", "do=start", "&".join(f"x{n}=1" for n in range(300)), "key=%00", "%ff=%fe"]:
        assert post_form(served, body).status_code == 422
        assert list_jobs(served) == []


def test_a_body_that_is_not_a_form_is_refused(served: ServedPanel) -> None:
    assert served.post("/run", json=SMALL).status_code == 422


# starting


def test_start_leads_to_the_job(served: ServedPanel) -> None:
    response = start_run(served)
    assert response.status_code == 303
    (job,) = list_jobs(served)
    assert response.headers["location"] == f"/jobs/{job['id']}"
    assert (job["started_by"], job["arguments"]["n_tips"]) == ("boss", 3)


def test_a_form_that_is_sent_twice_starts_one_job(served: ServedPanel) -> None:
    form = form_of(served)
    locations = {start_run(served, form).headers["location"] for _ in range(5)}
    assert len(locations) == len(list_jobs(served)) == 1


def test_two_forms_start_two_jobs(served: ServedPanel) -> None:
    assert start_run(served).headers["location"] != start_run(served).headers["location"]


def test_a_form_sent_again_with_other_values_needs_a_confirmation(served: ServedPanel) -> None:
    form = form_of(served)
    start_run(served, form)
    response = start_run(served, form, n_tips="4")
    assert response.status_code == 409
    assert "press Start again" in response.text
    assert len(list_jobs(served)) == 1
    again = PageForm(response.text, "/run")
    assert post_form(served, again.body(do="start")).status_code == 303
    assert sorted(job["arguments"]["n_tips"] for job in list_jobs(served)) == [3, 4]


# CSRF token, JSON


def test_with_a_cookie_the_form_needs_its_csrf_token(served: ServedPanel) -> None:
    served.log_in(served.admin)
    page = served.get("/run", token=None).text
    form = PageForm(page, "/run")
    body = form.body(do="start", csrf=None, **SMALL)
    assert served.post("/run", token=None, content=body, headers=HEADERS).status_code == 403
    assert list_jobs(served) == []
    body = form.body(do="start", **SMALL)
    assert served.post("/run", token=None, content=body, headers=HEADERS).status_code == 303


def test_the_page_links_to_its_json(served: ServedPanel) -> None:
    assert f'href="{API}/config"' in served.get("/run").text
