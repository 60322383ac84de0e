"""The pages: generated ones are fresh, links lead somewhere, commands and options they mention exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import COMMANDS
from tipbench.cli.main import EXIT_CODES
from tipbench.errors import TipbenchError
from tipbench.settings import SETTINGS

ROOT = Path(__file__).parents[1]
CLI = ROOT / "docs" / "cli.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LATER = {"serve", "simulate", "promote"}  # PRODUCT's other phases


def test_the_command_line_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    for name in ("generate.py", "rules-judge.md", "cli.md"):
        text = (ROOT / "docs" / name).read_text("utf-8")
        (tmp_path / name).write_text(text.replace("--n-tips", "--n-tipps") if name == "cli.md" else text, "utf-8")
    check = [sys.executable, str(tmp_path / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cli.md is out of date" in done.stderr
    assert "rules-judge.md is out of date" not in done.stderr
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
    def tree(kind: type[TipbenchError]) -> Iterator[type[TipbenchError]]:
        yield kind
        for sub in kind.__subclasses__():
            yield from tree(sub)

    assert {kind.exit_code for kind in tree(TipbenchError)} <= set(EXIT_CODES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for named in re.findall(r"`((?:tests|docs|src|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / named).exists(), f"{page.name} names {named}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_on_the_pages_exist(page: Path) -> None:
    for words in calls(page.read_text("utf-8")):
        if words[0] in LATER:
            continue
        if words[1:] == [] and any(known[0] == words[0] for known in COMMANDS):
            continue  # a group by its name
        path = tuple(words[:2]) if tuple(words[:2]) in COMMANDS else (words[0],)
        assert path in COMMANDS, f"{page.name}: tipbench {' '.join(words)}"
        known = {name for option in COMMANDS[path].params for name in (*option.opts, *option.secondary_opts)}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= known | {"--help"}, f"{page.name}: tipbench {' '.join(words)}"


def calls(text: str) -> Iterator[list[str]]:
    """The words after `tipbench` wherever a page shows a call of it: in code blocks, and in inline code."""
    fenced = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        found = re.findall(r"`tipbench ([a-z][^`]*)`", line)
        if fenced or line.startswith("    "):
            found = re.findall(r"^\s*(?:\$ )?tipbench ([a-z].*)", line)
        for call in found:
            yield re.split(r"\s+(?:#|/|>|…)", f"{call} ")[0].split()


def test_a_call_that_does_not_exist_would_be_seen() -> None:
    blocks = "    tipbench bogus --x  # why\n```\n$ tipbench plan > file\n```\n"
    text = f"tipbench prose\n`tipbench runs show X --json`\n\n{blocks}"
    assert list(calls(text)) == [["runs", "show", "X", "--json"], ["bogus", "--x"], ["plan"]]
