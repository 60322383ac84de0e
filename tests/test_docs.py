"""The docs: generated pages are up to date, links work, and the commands and options on them exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI

from support.command_list import COMMANDS
from tipbench.cli.main import EXIT_CODES
from tipbench.errors import TipbenchError
from tipbench.settings import SETTINGS
from web.panels import route_list, serve_panel

ROOT = Path(__file__).parents[1]
CLI = ROOT / "docs" / "cli.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BUILD = {"TIPBENCH_TEST_CACHE", "TIPBENCH_OLLAMA"}  # of the tests, not of the program


@pytest.fixture(scope="module")
def served_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastAPI]:
    with serve_panel(tmp_path_factory.mktemp("docs") / "home") as served:
        yield served.app


@pytest.fixture(scope="module")
def openapi(served_app: FastAPI) -> dict[str, Any]:
    return served_app.openapi()


@pytest.mark.process
def test_the_generated_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_outdated_pages_are_named(tmp_path: Path) -> None:
    stale = {"cli.md": "--n-tips", "api.md": "/api/bench/plan", "rules-judge.md": "| controls | tone |"}
    for page in (ROOT / "docs").iterdir():
        if page.is_file():
            word = stale.get(page.name, "\0")
            (tmp_path / page.name).write_text(page.read_text("utf-8").replace(word, f"{word}s"), "utf-8")
    check = [sys.executable, str(tmp_path / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert all(f"{page} is out of date" in done.stderr for page in stale)
    assert done.stderr.count("out of date") == len(stale)
    assert "make docs" in done.stderr


def test_every_command_option_variable_and_exit_code_is_documented() -> None:
    page = CLI.read_text("utf-8")
    for path, command in COMMANDS.items():
        assert f"### `tipbench {' '.join(path)}`" in page
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in page
    for variable in (variable for setting in SETTINGS for variable in setting.variables):
        assert f"`{variable}`" in page
    for code in EXIT_CODES:
        assert f"| {code} |" in page


def test_every_exception_ends_with_a_documented_code() -> None:
    def subclasses(kind: type[TipbenchError]) -> Iterator[type[TipbenchError]]:
        yield kind
        for sub in kind.__subclasses__():
            yield from subclasses(sub)

    assert {kind.exit_code for kind in subclasses(TipbenchError)} <= set(EXIT_CODES)


def test_every_operation_of_the_api_is_on_its_page_with_an_example(openapi: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    for path, methods in openapi["paths"].items():
        for method in methods:
            heading = f"### `{method.upper()} {path}`\n"
            assert page.count(heading) == 1, heading
            section = page.partition(heading)[2].partition("\n## ")[0].partition("\n### ")[0]
            assert "curl -sS" in section, heading
            assert "Role: " in section, heading


def test_examples_of_responses_match_the_openapi_document(openapi: dict[str, Any]) -> None:
    examples = json.loads((ROOT / "docs" / "api_examples.json").read_text("utf-8"))
    for name, example in examples.items():
        method, path = name.split()
        responses = openapi["paths"][path][method.lower()]["responses"]
        good = next(response for status, response in responses.items() if int(status) < 300)
        if "answer" in example:
            schema = {**good["content"]["application/json"]["schema"], "components": openapi["components"]}
            jsonschema.validate(example["answer"], schema)


def test_the_pages_that_the_panels_guide_names_exist(served_app: FastAPI) -> None:
    guide = (ROOT / "docs" / "panel.md").read_text("utf-8").partition("## Pages")[2].partition("\n## ")[0]
    named = re.findall(r"\*\* `(/[^`]*)`", guide)
    routes = {re.sub(r"\{[^}]*\}", "NAME", path) for method, path in route_list(served_app) if method == "GET"}
    assert len(named) >= 9
    assert set(named) <= routes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_variables_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    known = {variable for setting in SETTINGS for variable in setting.variables} | BUILD
    assert set(re.findall(r"\bTIPBENCH_[A-Z_]*[A-Z]\b", text)) <= known, page.name
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for named in re.findall(r"`((?:tests|docs|src|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / named).exists(), f"{page.name} names {named}"
    for file, test in re.findall(r"`(tests/[\w./-]+\.py)::(\w+)`", text):
        assert f"def {test}(" in (ROOT / file).read_text("utf-8"), f"{page.name} names {file}::{test}"


def test_commands_and_options_on_the_pages_exist() -> None:
    found = [(path.name, words) for path in PAGES for words in find_commands(path.read_text("utf-8"))]
    for page, words in found:
        if words[1:] == [] and any(known[0] == words[0] for known in COMMANDS):
            continue  # the name of a group
        path = tuple(words[:2]) if tuple(words[:2]) in COMMANDS else (words[0],)
        assert path in COMMANDS, f"{page}: tipbench {' '.join(words)}"
        known = {name for option in COMMANDS[path].params for name in (*option.opts, *option.secondary_opts)}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= known | {"--help"}, f"{page}: tipbench {' '.join(words)}"


def find_commands(text: str) -> Iterator[list[str]]:
    """Find the words after `tipbench` in code blocks and in inline code."""
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        found = re.findall(r"`tipbench ([a-z][^`]*)`", line)
        if fenced or line.startswith("    "):
            found = re.findall(r"^\s*(?:\$ )?tipbench ([a-z].*)", line)
        for call in found:
            yield re.split(r"\s+(?:#|/|>|…)", f"{call} ")[0].split()


def test_an_unknown_command_on_a_page_is_found() -> None:
    blocks = "    tipbench bogus --x  # why\n```\n$ tipbench plan > file\n```\n"
    text = f"tipbench prose\n`tipbench runs show X --json`\n\n{blocks}"
    assert list(find_commands(text)) == [["runs", "show", "X", "--json"], ["bogus", "--x"], ["plan"]]


def test_every_test_named_in_the_threat_model_and_the_requirements_exists() -> None:
    for page, least in (("security.md", 40), ("requirements.md", 80)):
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / page).read_text("utf-8"))
        assert len(named) > least
        for file, name in named:
            text = (ROOT / "tests" / file).read_text("utf-8")
            assert f"def {name}(" in text if name else text, f"{page}: {file}::{name}"


def test_every_requirement_has_a_proof_or_the_reason_why_there_is_none() -> None:
    page = (ROOT / "docs" / "requirements.md").read_text("utf-8")
    rows = re.findall(r"^\| ([QR]\d+) \| (.+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert [row[0] for row in rows] == [*(f"Q{n}" for n in range(1, 51)), *(f"R{n}" for n in range(1, 21))]
    for number, _, proof in rows:
        assert re.search(r"`[\w/]+\.py|\]\([\w/.#-]+\)|not provable here: |the tests of R1", proof), number
