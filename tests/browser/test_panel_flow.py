"""Plan, collect, judge and compare in a real browser, with a panel process, a real MLflow and the embedded model."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.judging import fill
from support.panel_pages import BrowserTab, TabOpener
from tipbench.judge.sheet_store import find_sheet
from tipbench.record.mlflow import MlflowStore
from web.panel_process import PanelProcess
from web.panels import OPERATOR

if TYPE_CHECKING:
    from playwright.sync_api import Page

EMBEDDED, TEMPLATE = "embedded:smollm2:135m", "baseline:template"
TIMEOUT_MS = 240_000  # a busy machine takes several seconds per cell
JUDGE = "anna"


@pytest.fixture
def panel(home: Path, weights_home: Path, mlflow_url: str) -> Iterator[PanelProcess]:
    """`tipbench panel` as a subprocess."""
    home.mkdir()
    (home / "models").symlink_to(weights_home / "models")
    environment = {"MLFLOW_TRACKING_URI": mlflow_url, "OLLAMA_HOST": "127.0.0.1:9", "PYTHONWARNINGS": "error"}
    with PanelProcess(home, environment) as process:
        yield process


@pytest.fixture
def tab(panel: PanelProcess, open_tab: TabOpener) -> BrowserTab:
    return open_tab.without_session(str(panel.client.base_url).rstrip("/"), accept_downloads=True)


def test_from_login_to_logout(panel: PanelProcess, tab: BrowserTab, mlflow_url: str, tmp_path: Path) -> None:
    page, experiment = tab.page, f"tip-bench-flow-{uuid.uuid4().hex[:8]}"
    log_in(page, tab.origin)
    start_run(page, experiment, models=(EMBEDDED, TEMPLATE), scenarios=2, tokens=48)
    wait_for_end(page, cells=4)
    cancel_run(page, f"{experiment}-long")
    sheet = export_sheet(page, experiment)
    import_sheet(page, fill_sheet(mlflow_url, experiment, sheet, tmp_path))
    check_board(page, experiment)
    log_out(page, tab.origin)
    assert (tab.external_requests, tab.console_errors, tab.missing_resources) == ([], [], [])
    assert "Traceback" not in panel.stderr


def log_in(page: Page, origin: str) -> None:
    page.goto(f"{origin}/run")
    assert "/login?next=" in page.url
    page.get_by_role("textbox", name="Token").fill(OPERATOR)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{origin}/run")


def start_run(page: Page, experiment: str, *, models: tuple[str, ...], scenarios: int, tokens: int) -> None:
    """Fill in the form, show the plan and start the run."""
    for model in (EMBEDDED, TEMPLATE):
        page.get_by_role("checkbox", name=model).set_checked(model in models)
    page.get_by_label("Other models").fill("")
    for prompt in ("v2-mentor", "v3-few-shot"):
        page.get_by_role("checkbox", name=prompt).uncheck()
    page.get_by_label("Experiment", exact=True).fill(experiment)
    page.get_by_label("Number of scenarios (0 = all)").fill(str(scenarios))
    page.get_by_label("Tips per answer", exact=True).fill("3")
    page.get_by_text("Sampling", exact=True).click()
    page.get_by_label("Longest answer, in tokens").fill(str(tokens))
    page.get_by_role("button", name="Show plan").click()
    page.get_by_text(f"{len(models) * scenarios} cells to generate").wait_for()
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/jobs/*")


def wait_for_end(page: Page, cells: int) -> None:
    """Watch the job until it ends, without reloading the page."""
    page.evaluate("document.body.dataset.same = 'yes'")
    page.locator("#connection[data-state=live], #connection[data-state=ended]").first.wait_for()
    page.wait_for_selector("#live[data-ended=yes]", timeout=TIMEOUT_MS, state="attached")
    assert page.evaluate("document.body.dataset.same") == "yes"
    page.locator(".job-state", has_text=f"{cells} cells generated").wait_for()
    assert page.title().startswith("Succeeded")


def cancel_run(page: Page, experiment: str) -> None:
    page.get_by_role("link", name="Run", exact=True).click()
    start_run(page, experiment, models=(EMBEDDED,), scenarios=8, tokens=700)
    page.locator(".strip-row.is-generating").wait_for(timeout=TIMEOUT_MS)
    page.get_by_text("Cancel…").click()
    page.get_by_role("button", name="Yes, cancel the job").click()
    page.wait_for_selector("#live[data-ended=yes]", timeout=TIMEOUT_MS, state="attached")
    page.locator(".job-state", has_text="Cancelled").wait_for()


def export_sheet(page: Page, experiment: str) -> str:
    """Create a sheet, download it and return its id."""
    page.get_by_role("link", name="Experiments").first.click()
    page.get_by_role("link", name=experiment, exact=True).click()
    page.wait_for_url(f"**/experiments/{experiment}")
    page.get_by_role("link", name="Judges", exact=True).click()
    page.wait_for_url(f"**/experiments/{experiment}/judges")
    page.locator("#export").get_by_label("Judge", exact=True).fill(JUDGE)
    page.get_by_role("button", name="Create sheet").click()
    with page.expect_download() as download:
        page.locator("#made").get_by_role("link", name="Download JSON").click()
    sheet = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert (sheet["judge"], sheet["experiment"]) == (JUDGE, experiment)
    assert "smollm2" not in json.dumps(sheet["items"])
    return str(sheet["sheet"])


def fill_sheet(mlflow_url: str, experiment: str, sheet: str, folder: Path) -> Path:
    """Return the sheet filled with the reference scores of the controls."""
    with MlflowStore(mlflow_url) as store:
        found = store.experiment(experiment)
        assert found is not None
        judging = find_sheet(store, found, sheet)
    assert judging is not None
    path = folder / "filled.json"
    path.write_text(json.dumps(fill(judging)), "utf-8")
    return path


def import_sheet(page: Page, file: Path) -> None:
    """Preview the changes, then confirm them; nothing is saved before."""
    before = page.locator(".lead").inner_text()
    assert " judged" in before
    judges = page.url.partition("?")[0]
    page.get_by_label("Filled file").set_input_files(file)
    page.locator("#import").get_by_role("button", name="Preview").click()
    page.locator("#preview").wait_for()
    page.locator("#preview").get_by_text(JUDGE).first.wait_for()
    page.wait_for_load_state()
    assert page.locator("table.changes tbody tr").count() >= 2
    preview = page.url
    page.goto(judges)
    assert page.locator(".lead").inner_text() == before
    page.goto(preview)
    page.get_by_role("button", name="Apply these").click()
    page.get_by_text("Applied", exact=True).first.wait_for()
    page.get_by_role("link", name="The judges").click()
    page.locator("#standing").wait_for()
    assert page.locator(".lead").inner_text() != before


def check_board(page: Page, experiment: str) -> None:
    """Check the summary card and both rows, also with another baseline."""
    page.get_by_role("link", name="Leaderboard", exact=True).click()
    page.locator(".summary-card").wait_for()
    page.wait_for_load_state()
    assert TEMPLATE in page.locator(".summary-lines").inner_text()
    assert page.locator("tbody th.row-name").count() == 2
    page.locator(".baseline-form button").wait_for(state="hidden")  # the script is ready
    page.locator("#choose-baseline").select_option(f"{EMBEDDED}/v1")  # goes there by itself
    page.wait_for_url("**baseline=**")
    chosen = page.locator("th.row-name", has_text=EMBEDDED).first
    chosen.locator(".badge", has_text="baseline").wait_for()
    assert experiment in page.title()


def log_out(page: Page, origin: str) -> None:
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url(f"{origin}/login")
    page.goto(f"{origin}/settings")
    assert "/login?next=" in page.url
