"""Files and runs written by earlier versions must stay readable; tests/data/README.md describes them.

Only commands and HTTP requests are used here, because the data outlives the modules that wrote it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shutil
import sqlite3
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from support.rest_dump import LoadedDump, load_dump
from support.scripted_ollama import ModelSpec, ScriptedOllama
from tipbench.cli.main import app
from web.panels import API, ServedPanel, serve_panel
from web.sample_pages import page_text

DATA = Path(__file__).parent / "data" / "2026-11"
NAME = "tip-bench-recorded"
RECORDED_URL = "http://localhost:5000"
HOOK = {"TIPBENCH_HOOK_URL": "http://localhost:9000/tipbench", "TIPBENCH_HOOK_SECRET": "a-secret-of-the-webhook-1234"}


def read_stored(name: str) -> Any:
    return json.loads((DATA / name).read_text("utf-8"))


TOKENS = read_stored("tokens.json")


def run_command(*arguments: str, code: int = 0) -> str:
    """Run a command and return its stdout."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == code, done.stderr
    return done.stdout


def run_json(*arguments: str) -> Any:
    return json.loads(run_command(*arguments, "--json"))


def known_part(found: Any, expected: Any) -> Any:
    """What was found, without additional keys; numbers that differ in the last digits become the expected ones."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return {key: known_part(found[key], value) for key, value in expected.items() if key in found}
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        return [known_part(*pair) for pair in zip(found, expected, strict=True)]
    if isinstance(found, float) and isinstance(expected, float) and math.isclose(found, expected, rel_tol=1e-9):
        return expected
    return found


def check_same_as_stored(found: Any, name: str, *without: str) -> None:
    """Check that the result has every value of the version that wrote the data, except those under some keys."""
    expected = read_stored(f"expected/{name}.json")
    for path in without:
        *above, last = path.split(".")
        inner = expected
        for key in above:
            inner = inner[key]
        del inner[last]
    assert known_part(found, expected) == expected


@pytest.fixture(scope="module")
def mlflow_url(real_mlflow_url: str) -> str:
    """A real MLflow, into which the dumps are loaded."""
    return real_mlflow_url


@pytest.fixture(scope="module")
def unchanged_dump(mlflow_url: str) -> LoadedDump:
    """The experiment for tests that only read it."""
    return load_dump(DATA, mlflow_url, f"{NAME}-unchanged")


@pytest.fixture(scope="module")
def changing_dump(mlflow_url: str) -> LoadedDump:
    """The experiment with the name that sheets, journal and batch contain; each test changes another part of it."""
    return load_dump(DATA, mlflow_url, NAME)


@pytest.fixture(autouse=True)
def use_session_server(mlflow_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)


# The experiment


MEASURED = {
    *("model", "composite", "ci_low", "ci_high", "relevance", "actionability", "tone", "format_ok", "overlong"),
    *("diversity", "latency_s", "tokens_per_s", "n_scenarios", "judged", "total", "failed"),
}


def test_board_has_the_same_measurements_and_the_same_leader(unchanged_dump: LoadedDump) -> None:
    """What is inferred from them has changed since: CHANGELOG, "For users of an earlier commit"."""
    board = json.loads(run_command("compare", unchanged_dump.name, "--format", "json"))
    inferred = ("experiment", "verdict", "standings", "attribution", "attribution_details", "duels", "notes")
    check_same_as_stored(board, "leaderboard", *inferred)
    expected = read_stored("expected/leaderboard.json")
    for name in ("leader", "decided", "n_scenarios"):
        assert board["verdict"][name] == expected["verdict"][name]
    incomplete = {"model": "gemma3:1b", "prompt_version": "v2-mentor"}
    assert board["verdict"]["tied_with_leader"] == [*expected["verdict"]["tied_with_leader"], incomplete]
    assert board["verdict"]["scenarios_needed"] is None, "1632 scenarios were named for rows that are too close to call"
    assert "Not a planned look: no looks were planned before the first score." in board["verdict"]["text"]
    (reference,) = board["references"]
    assert (reference["model"], reference["prompt_version"]) == ("baseline:template", "none")
    rows = {(row["model"], row["prompt_version"]): row for row in board["standings"]}
    for row in expected["standings"]:
        known = {name: value for name, value in row.items() if name in MEASURED}
        if row["n_scenarios"] < 6:
            known |= {"ci_low": None, "ci_high": None}
        found = reference if row["model"] == reference["model"] else rows[row["model"], row["prompt_version"]]
        assert known_part(found, known) == known


def test_board_decided_without_an_unranked_row_is_now_undecided_with_the_reason(
    unchanged_dump: LoadedDump,
) -> None:
    """The version that stored these cells called this board decided, although a row of it was not ranked."""
    board = json.loads(
        run_command("compare", unchanged_dump.name, "--exclude", "qwen2.5:0.5b/v2-mentor", "--format", "json")
    )
    verdict = board["verdict"]
    assert (verdict["leader"], verdict["decided"], verdict["tied_with_leader"]) == (
        {"model": "qwen2.5:0.5b", "prompt_version": "v1"},
        False,
        [{"model": "gemma3:1b", "prompt_version": "v2-mentor"}],
    )
    assert "every other ranked pair is clearly worse." in verdict["text"]
    assert "Not decided: gemma3:1b/v2-mentor (judged in 3 scenarios) may still lead." in verdict["text"]


def test_judges_held_and_open_sheets_are_the_same(unchanged_dump: LoadedDump) -> None:
    status = run_json("judge", "status", "--experiment", unchanged_dump.name)
    check_same_as_stored(status, "status", "experiment")
    assert {sheet["status"] for sheet in status["history"]} == {"applied", "held"}
    assert {sheet["judge"] for sheet in status["open_sheets"]} >= {"cleo", "reviewer-1"}


def test_cells_have_the_same_states_and_scores(unchanged_dump: LoadedDump) -> None:
    cells = run_json("runs", "list", "--experiment", unchanged_dump.name)
    rows = [
        [
            *(cell["params"][name] for name in ("model", "prompt_version", "scenario")),
            *(cell["state"], cell["tags"].get("superseded", "false"), cell["metrics"].get("composite")),
        ]
        for cell in cells
    ]
    check_same_as_stored(sorted(rows), "cells")
    counts = next(row for row in run_json("experiments") if row["experiment"] == unchanged_dump.name)
    assert counts | {"cells": 31, "pending": 3, "judged": 27, "failed": 1} == counts


def test_runs_of_every_kind_are_read_with_their_texts(unchanged_dump: LoadedDump) -> None:
    one_of_each = {}
    for old, recorded in unchanged_dump.runs.items():
        tags = {tag["key"]: tag["value"] for tag in recorded["data"]["tags"]}
        if recorded["info"]["status"] != "RUNNING":
            sort = [tags.get(key) for key in ("kind", "state", "superseded", "floored", "sheet_status", "sheet_kind")]
            one_of_each[str([*sort, "artifact:raw.txt.meta" in tags])] = (old, recorded, tags)
    assert len(one_of_each) >= 14
    for old, recorded, tags in one_of_each.values():
        shown = run_json("runs", "show", unchanged_dump.ids[old])
        data = recorded["data"]
        assert shown["params"] == {param["key"]: param["value"] for param in data["params"]}
        assert shown["metrics"] == {metric["key"]: metric["value"] for metric in data.get("metrics", [])}
        plain = {key: value for key, value in tags.items() if not key.startswith("artifact:")}
        assert known_part(shown["tags"], plain) == plain
        check_texts(shown["texts"], {key: unchanged_dump.translate(tags[key]) for key in tags.keys() - plain.keys()})


def check_texts(texts: Mapping[str, str], tags: Mapping[str, str]) -> None:
    """Check that every text is complete: equal to its single tag, or with the length and the hash of its `.meta`."""
    whole = {key for key in tags if not key.endswith(".meta") and not key[-3:].isdigit()}
    metas = {key.removesuffix(".meta"): json.loads(tags[key]) for key in tags if key.endswith(".meta")}
    assert set(texts) == whole | set(metas)
    for key in whole:
        assert "\u241b" in tags[key] or texts[key] == tags[key]
    for key, meta in metas.items():
        digest = hashlib.sha256(texts[key].encode("utf-8", "surrogatepass")).hexdigest()
        assert (len(texts[key]), digest) == (meta["chars"], meta["sha256"])


def test_decision_and_its_evidence_are_read(unchanged_dump: LoadedDump) -> None:
    recorded = next(old for old, run in unchanged_dump.runs.items() if run["info"]["run_name"].startswith("decision"))
    shown = run_json("runs", "show", unchanged_dump.ids[recorded])
    assert shown["params"] | {"model": "qwen2.5:0.5b", "prompt_version": "v1"} == shown["params"]
    assert shown["tags"]["reason"] == "It leads, and it is the smaller model."
    board = shown["texts"]["artifact:leaderboard.json"]
    assert hashlib.sha256(board.encode()).hexdigest() == shown["tags"]["leaderboard_sha256"]
    assert json.loads(board)["verdict"]["leader"] == {"model": "qwen2.5:0.5b", "prompt_version": "v1"}


# Filled-in files


def test_filled_sheet_is_applied_from_json_and_from_csv(changing_dump: LoadedDump, tmp_path: Path) -> None:
    sheet = read_stored("sheet.json")
    out = tmp_path / "again.json"
    run_command("judge", "export", "--experiment", NAME, "--sheet", sheet["sheet"], "--out", str(out))
    assert clear_scores(json.loads(out.read_text("utf-8"))) == clear_scores(sheet)
    with (DATA / "sheet.csv").open(newline="", encoding="utf-8") as file:
        assert file.readline().endswith(";sha256\r\n"), "a checkout has changed the line ends"
        assert len(list(csv.reader(file, delimiter=";"))) > 2 * len(sheet["items"])
    preview = run_json("judge", "apply", str(DATA / "sheet.json"), "--dry-run")
    assert (preview["changed"], preview["errors"]) == (len(sheet["items"]), [])
    applied = run_json("judge", "apply", str(DATA / "sheet.csv"))
    # agreement changes when another test applies scores; the limit follows the stated false-alarm rate
    check_same_as_stored(applied, "sheet-applied", "alpha", "drift.contrast_limit")
    assert run_json("judge", "apply", str(DATA / "sheet.json"))["changed"] == 0, "both files have the same scores"


def clear_scores(sheet: dict[str, Any]) -> dict[str, Any]:
    """Return the sheet without scores and notes."""
    for item in sheet["items"]:
        for tip in item["tips"]:
            tip |= {"scores": None, "note": ""}
    return sheet


def test_filled_duels_are_applied(changing_dump: LoadedDump) -> None:
    check_same_as_stored(run_json("judge", "apply", str(DATA / "duel.json")), "duel-applied")
    assert run_json("judge", "apply", str(DATA / "duel.json"))["changed"] == 0


# The home folder


@pytest.fixture
def stored_home(home: Path, changing_dump: LoadedDump, mlflow_url: str) -> Path:
    """The recorded home folder, with its run ids and its server's address replaced by the present ones."""
    server = f"http://localhost:{urlsplit(mlflow_url).port}"  # one spelling for every name of this machine
    shutil.copytree(DATA / "home", home)
    for dump in home.glob("*/*.sql"):
        sql = changing_dump.translate(dump.read_text("utf-8"))
        with sqlite3.connect(dump.with_suffix("")) as database:
            database.executescript(sql.replace(f"'{RECORDED_URL}'", f"'{server}'"))
        database.close()
        dump.unlink()
    (journal,) = (home / "journal").glob("*/*.jsonl")
    assert journal.parent.name == journal_key(RECORDED_URL)
    journal.write_text(changing_dump.translate(journal.read_text("utf-8")), "utf-8")
    journal.parent.rename(home / "journal" / journal_key(server))
    return home


def journal_key(server: str) -> str:
    """The name of the journal's folder, by which the results of a killed collect are found."""
    return hashlib.sha256(f"{server}\n{NAME}".encode()).hexdigest()[:16]


def test_journal_is_drained_and_nothing_is_generated_again(stored_home: Path, changing_dump: LoadedDump) -> None:
    assert list(stored_home.glob("journal/*/*.jsonl"))
    with ScriptedOllama([ModelSpec("gemma3:1b", params=999_885_952)]) as ollama:
        done = run_json(
            *("collect", "--models", "gemma3:1b", "--prompts", "v1,v2-mentor", "--n-tips", "2", "--n-scenarios", "7"),
            *("--num-predict", "256", "--experiment", NAME, "--ollama-url", ollama.url),
        )
        chats = [request for request in ollama.log.requests if request.path == "/api/chat"]
    assert (done["cells"], done["recorded_before"], done["generated"], chats) == (14, 14, 0, [])
    assert not list(stored_home.glob("journal/*/*.jsonl"))
    cells = run_json("runs", "list", "--experiment", NAME, "--model", "gemma3:1b")
    assert len(cells) == 14, "the failed cell is superseded, the half-written run completed"
    assert "failed" not in {cell["state"] for cell in cells}
    (half,) = (old for old, run in changing_dump.runs.items() if run["info"]["status"] == "RUNNING")
    assert changing_dump.ids[half] in {cell["run_id"] for cell in cells}


@contextmanager
def start_panel(home: Path, **environment: str) -> Iterator[ServedPanel]:
    """A panel on the recorded home that keeps its jobs, however old they are."""
    keep = {"MLFLOW_TRACKING_URI": os.environ["MLFLOW_TRACKING_URI"], "TIPBENCH_JOBS_KEEP_DAYS": "0"}
    with serve_panel(home, environment={**keep, **environment}, find_mlflow=True, run_jobs=True) as served:
        yield served


def test_tokens_are_accepted_until_they_are_revoked_or_expire(stored_home: Path) -> None:
    with start_panel(stored_home) as served:
        tokens = served.get(f"{API}/tokens", token=TOKENS["boss"]).json()["items"]
        codes = [served.get(f"{API}/experiments", token=TOKENS[name]).status_code for name in TOKENS]
    states = {token["name"]: (token["role"], token["state"]) for token in tokens[: len(TOKENS)]}
    assert states == {
        "boss": ("admin", "active"),
        "reviewer-1": ("judge", "active"),
        "former": ("judge", "revoked"),
        "guest": ("judge", "expired"),
    }
    assert dict(zip(TOKENS, codes, strict=True)) == {"boss": 200, "reviewer-1": 403, "former": 401, "guest": 401}


def test_half_judged_batch_is_shown_with_its_drafts_and_can_be_finished(stored_home: Path) -> None:
    rest = read_stored("batch-answers.json")
    token = TOKENS["reviewer-1"]
    batch_url = f"{API}/judge/{NAME}/batches/{rest['sheet']}"
    with start_panel(stored_home) as served:
        opened = served.post(f"{API}/judge/{NAME}/batches", token=token, json={})
        assert (opened.status_code, opened.json()["batch"]["sheet"]) == (200, rest["sheet"])
        body = served.get(batch_url, token=token).json()
        answers = {item["item"]: item["answer"] for item in body["items"]}
        check_same_as_stored({"batch": body["batch"], "answers": answers}, "batch")
        undone = next(item for item, answer in answers.items() if answer["version"] == 3)
        history = served.get(f"{batch_url}/items/{undone}/history", token=token).json()["items"]
        assert [step["state"] for step in history] == ["draft", "submitted", "draft"]
        for item, answer in rest["items"].items():
            body = {"version": answers[item]["version"], "state": "submitted", **answer}
            saved = served.request("PUT", f"{batch_url}/items/{item}", token=token, json=body)
            assert saved.status_code == 200, saved.text
        closed = served.post(f"{batch_url}/close", token=token).json()
    check_same_as_stored(closed["outcome"], "batch-closed")
    assert closed["batch"]["status"] == "applied"


def test_jobs_are_listed_with_progress_and_log(stored_home: Path) -> None:
    expected = read_stored("expected/jobs.json")
    with start_panel(stored_home) as served:
        listed = [job["id"] for job in served.get(f"{API}/jobs", token=TOKENS["boss"]).json()["items"]]
        assert listed == list(expected)
        lost, *ended = listed
        for job in ended:
            found = served.get(f"{API}/jobs/{job}").json()
            assert known_part(found, expected[job]) == expected[job]
            log = (DATA / "home" / "jobs" / job / "log.txt").read_text("utf-8")
            assert served.get(f"{API}/jobs/{job}/log").text == log
        deadline = time.monotonic() + 30
        while (state := served.get(f"{API}/jobs/{lost}").json()["job"]["state"]) == "running":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert state == "lost", "its process was on another machine"


def test_webhook_deliveries_are_shown(stored_home: Path) -> None:
    with serve_panel(stored_home, environment=HOOK) as served:
        check_same_as_stored(served.get(f"{API}/hook/deliveries").json()["items"], "deliveries")


# Settings


def test_settings_are_read_from_the_file(home: Path) -> None:
    home.mkdir()
    shutil.copy(DATA / "tipbench.toml", home / "tipbench.toml")
    (home / "tipbench.toml").chmod(0o600)
    values = tomllib.loads((DATA / "tipbench.toml").read_text("utf-8"))
    secrets = {"TIPBENCH_HOOK_SECRET": HOOK["TIPBENCH_HOOK_SECRET"], "TIPBENCH_AIRFLOW_TOKEN": "not-a-real-token"}
    with serve_panel(home, environment=secrets) as served:
        options = served.get(f"{API}/config").json()["properties"]
        page = page_text(served.get("/settings", headers={"Accept": "text/html"}).text)
    for key, value in values.items():
        text = ",".join(value) if isinstance(value, list) else value
        if key in options:
            assert options[key]["default"] == text, key
        else:
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            if key == "judge_command":  # only the program: its arguments may be secret
                shown = shown.split()[0]
            assert f"{key} {shown.removesuffix('/tipbench')}" in page, key
