"""The page of one run: input, answer, scores, and other runs of the same cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.judging import EXPERIMENT, always, fill, items_of
from tipbench.judge.material import CANDIDATES
from tipbench.judge.scores import SCORES
from tipbench.judge.sheet_store import HIDDEN, KEY
from tipbench.record.run import RunChange
from tipbench.web.panel.run import other_texts
from web.judge_client import driver_of
from web.panels import HTML, ServedPanel, answered_store, serve_panel
from web.sample_pages import SamplePages, page_text, serve_sample_pages


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SamplePages]:
    with serve_sample_pages(tmp_path_factory.mktemp("run") / "home") as pages:
        yield pages


def page_of(served: ServedPanel, run_id: str, query: str = "") -> str:
    response = served.get(f"/experiments/{EXPERIMENT}/runs/{run_id}{query}", headers=HTML)
    assert response.status_code == 200, response.text
    return str(response.text)


def test_prompt_answer_and_tips_are_in_separate_blocks(pages: SamplePages) -> None:
    page = pages.run("judged")
    fences = re.findall(r'<pre class="fence[^>]*>(.*?)</pre>', page, re.DOTALL)
    assert any(fence.startswith("# system") for fence in fences)
    assert any("&#34;rationale&#34;" in fence or "&quot;rationale&quot;" in fence for fence in fences)
    assert "Before the tea, write the first line of the handover note; stop after five minutes." in fences


def test_each_tip_has_the_scores_of_each_judge(pages: SamplePages) -> None:
    text = page_text(pages.run("judged"))
    assert "Tip 1" in text
    assert "anna" in text
    assert "relevance actionability tone" in text
    assert "✓ counts" in text


def test_params_metrics_and_the_record_are_shown(pages: SamplePages) -> None:
    text = page_text(pages.run("judged"))
    for word in ("temperature 0.7", "engine ollama", "quantization Q4_K_M", "prompt tokens 900", "cell key", "top_k"):
        assert word in text


def test_the_evidence_of_its_collect_is_shown(pages: SamplePages) -> None:
    page = pages.run("judged")
    text = page_text(page)
    assert "never two models at once most models in memory at once 1 samples 412 largest gap 900 ms" in text
    assert "Other clients' models in memory: mistral:7b" in text
    assert f'{pages.content.runs["collection"]}">The collect that recorded this run' in page


def test_a_foreign_model_in_memory_is_shown(pages: SamplePages) -> None:
    assert "Another client's model was in memory" in page_text(pages.run("floored"))


def test_an_answer_without_a_tip_shows_why_it_has_the_floor(pages: SamplePages) -> None:
    assert "it has the rubric's lowest scores" in page_text(pages.run("floored"))


def test_a_failed_run_shows_the_reason_and_the_next_step(pages: SamplePages) -> None:
    text = page_text(pages.run("failed"))
    assert "The server closed the connection." in text
    assert "The next collect tries it again." in text


def test_a_superseded_try_and_its_successor_lead_to_each_other(pages: SamplePages) -> None:
    old, new = pages.content.runs["superseded"], pages.content.runs["judged"]
    assert f"/runs/{new}" in pages.run("superseded")
    assert f"/runs/{old}" in pages.run("judged")
    assert "a later attempt at the same cell has replaced this run" in pages.run("superseded")


def test_a_stale_run_leads_to_the_newer_build(pages: SamplePages) -> None:
    page = pages.run("stale")
    assert "Stale: the model" in page
    assert "Other model digest" in page


def test_previous_and_next_follow_the_list_of_runs(pages: SamplePages) -> None:
    query = "?model=newcomer%3A3b&state=pending"
    text = pages.run("pending", query)
    assert "3 of 3" in text
    newer = re.search(r'href="([^"]+)">← Newer', text)
    assert newer
    assert newer[1].endswith("?model=newcomer%3A3b&amp;state=pending")
    assert "Older →" not in text


def test_a_run_outside_the_list_has_no_previous_and_next(pages: SamplePages) -> None:
    page = pages.run("pending", "?state=failed")
    assert "Older →" not in page
    assert "Newer" not in page


@pytest.mark.parametrize(
    ("sort", "words"),
    [
        ("collection", "A collect"),
        ("judging", "A sheet"),
        ("leaderboard", "A recorded leaderboard"),
        ("decision", "A decision with its evidence"),
        ("refused", "27.4B parameters; the limit is 4B."),
    ],
)
def test_other_kinds_of_run_are_shown_too(pages: SamplePages, sort: str, words: str) -> None:
    assert words in page_text(pages.run(sort))


def test_the_key_of_a_sheet_is_on_the_page_only_on_request(pages: SamplePages) -> None:
    """An admin may be a judge as well; a closed fold would still be found by a search on the page."""
    hidden, shown = pages.run("judging"), pages.run("judging", "?key=shown")
    assert "Do not read this if you judge" in hidden
    assert KEY not in hidden
    assert "&#34;behind&#34;" not in hidden
    assert not re.search(r"<dt>seed</dt>", hidden)
    assert KEY in shown
    assert "behind" in shown
    assert re.search(r"<dt>seed</dt>", shown)


def test_the_names_of_hidden_items_are_shown_only_with_the_key() -> None:
    name = f"artifact:{HIDDEN}3f9a1c0b7e52.json"
    run = {"tags": {"kind": "judging"}, "texts": {name: "{}", KEY: "{}", "artifact:sheet.json": "{}"}}
    assert [shown for shown, _ in other_texts(run, with_key=False)] == ["artifact:sheet.json"]
    assert name in dict(other_texts(run, with_key=True))


def test_held_scores_are_shown_as_such(served: ServedPanel) -> None:
    driver = driver_of(served)
    judging = driver.export("anna", everything=True).stored
    raw = fill(judging, always(5))
    assert driver.apply(raw).held
    run_id = next(iter(items_of(raw, judging)))
    text = page_text(page_of(served, run_id))
    assert "Some scores are held" in text
    assert "anna ‖ held" in text
    assert "Composite –" in text


def test_revised_scores_are_shown_as_history(served: ServedPanel) -> None:
    driver = driver_of(served)
    judging = driver.export("anna", everything=True).stored
    raw = fill(judging)
    driver.apply(raw)
    run_id, item = next(iter(items_of(raw, judging).items()))
    item["tips"][0]["scores"]["tone"] = (
        6 - item["tips"][0]["scores"]["tone"] if item["tips"][0]["scores"]["tone"] != 3 else 4
    )
    item["tips"][0]["note"] = "looked <b>again</b>"
    driver.apply(raw)
    page = page_of(served, run_id)
    assert "1 earlier judgement" in page
    assert "looked &lt;b&gt;again&lt;/b&gt;" in page


def test_provisional_scores_are_named(home: Path) -> None:
    from tipbench.judge.export import ExportRequest
    from tipbench.judge.rules import RulesJudge
    from tipbench.judge.run import run_judge

    store = answered_store()
    experiment = store.ensure_experiment(EXPERIMENT)
    run_judge(store, experiment, RulesJudge(), ExportRequest())
    with serve_panel(home, store) as served:
        text = page_text(page_of(served, next(iter(driver_of(served).cells()))))
    assert "The scores are provisional" in text
    assert "Composite, provisional" in text
    assert "rules ~ provisional" in text


def test_tips_beyond_the_requested_number_are_shown_as_not_judged(home: Path) -> None:
    import json

    from support.judging import record_cells
    from tipbench.record.store import MemoryStore

    many = json.dumps([{"tip": f"Tip {n}", "rationale": "r"} for n in range(5)])
    store = MemoryStore()
    record_cells(store, n_scenarios=1, write=lambda _cell, _rng: many)
    with serve_panel(home, store) as served:
        page = page_of(served, next(iter(driver_of(served).cells())))
    assert page.count("more than requested, not judged") == 2


def test_a_damaged_text_is_named_and_the_rest_is_shown(served: ServedPanel) -> None:
    run_id = next(iter(driver_of(served).cells()))
    served.store.update(run_id, RunChange(texts={SCORES: '{"odd": true}', CANDIDATES: "[" * 100_000}, at_ms=1))
    text = page_text(page_of(served, run_id))
    assert "The text artifact:candidates.json is not in tipbench's format" in text
    assert "A text cannot be read" in text
    assert "# system" in text


def test_a_run_of_another_experiment_is_not_found_here(served: ServedPanel) -> None:
    from support.judging import record_cells

    other = record_cells(served.store, experiment="tip-bench-other", n_scenarios=1)
    run = next(iter(served.store.search(other.experiment_id, where={"kind": "cell"})))
    response = served.get(f"/experiments/{EXPERIMENT}/runs/{run.run_id}", headers=HTML)
    assert response.status_code == 404


def test_an_unknown_run_has_an_error_page(served: ServedPanel) -> None:
    for run_id in ["0" * 32, "0" * 31, "x"]:
        response = served.get(f"/experiments/{EXPERIMENT}/runs/{run_id}", headers=HTML)
        assert response.status_code in (404, 422)
        assert response.headers["content-type"].startswith("text/html")


def test_the_page_leads_to_its_json(pages: SamplePages) -> None:
    page = pages.run("judged")
    found = re.search(r'href="([^"]+)">JSON', page)
    assert found
    assert pages.served.get(found[1]).json()["run_id"] == pages.content.runs["judged"]
