"""Every command and request in docs/migrating.md works as written there, in the order of the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from support.command import tipbench
from support.experiments import find_experiment
from support.judging import fill
from support.scripted_ollama import ScriptedOllama
from tipbench.judge.sheet_store import find_sheet
from tipbench.record.mlflow import MlflowStore
from web.panels import serve_panel

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text("utf-8")
LINES = re.findall(r"^    (.+)$", PAGE, flags=re.MULTILINE)


def test_every_mapped_command_runs_in_the_order_of_the_page(
    home: Path, tmp_path: Path, mlflow_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_url)
    commands = [shlex.split(line)[1:] for line in LINES if line.startswith("tipbench ")]
    assert [arguments[0] for arguments in commands] == ["collect", "judge", "judge", "compare"]
    assert {"--models", "--prompts", "--experiment", "--n-tips", "--diversity", "--max-model-b"} <= set(commands[0])
    outputs = []
    with ScriptedOllama(["qwen2.5:0.5b", "gemma3:1b"]) as ollama:
        monkeypatch.setenv("OLLAMA_HOST", ollama.url)
        for arguments in commands:
            if arguments[:2] == ["judge", "apply"]:
                _fill_sheet(tmp_path / arguments[2], mlflow_url)
            outputs.append(tipbench(*arguments, home=home))
        assert len(ollama.log.calls()) == 2 * 2 * 8
    assert "qwen2.5:0.5b" in outputs[-1].stdout


def _fill_sheet(file: Path, mlflow_url: str) -> None:
    """Fill in a sheet with the reference scores of its controls."""
    raw = json.loads(file.read_text("utf-8"))
    with MlflowStore(mlflow_url) as store:
        found = find_sheet(store, find_experiment(store, raw["experiment"]), raw["sheet"])
        assert found is not None
        file.write_text(json.dumps(fill(found)), "utf-8")


def test_the_request_of_the_page_is_accepted(home: Path) -> None:
    (line,) = (line for line in LINES if line.startswith("curl "))
    arguments = shlex.split(line)
    url, body = next(word for word in arguments if word.startswith("http://")), arguments[arguments.index("-d") + 1]
    assert json.loads(body)["mlflow_url"] == "http://localhost:5000"
    with serve_panel(home, environment={}) as served:
        answer = served.post(url.removeprefix("http://127.0.0.1:5180"), json=json.loads(body))
        assert answer.status_code == 202, answer.text
        assert answer.json()["job"]["kind"] == "collect"
