"""Help texts: complete, with valid examples, and fast."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from invoke_command import invoke

import tipbench
from support.command_list import COMMANDS

HEAVY = ("httpx", "numpy", "mlflow", "rich", "xllamacpp", "scipy")


def test_help_explains_every_command_and_option() -> None:
    for path, command in COMMANDS.items():
        result = invoke(*path, "--help")
        assert (result.code, result.stderr) == (0, "")
        assert result.stdout.startswith(f"Usage: tipbench {' '.join(path)}")
        assert "Example" in result.stdout or result.stdout.count(". ") + result.stdout.count(".\n") >= 2, path
        for parameter in command.params:
            assert parameter.help, f"{' '.join(path)} {parameter.name} has no help"
    assert invoke("collect", "-h").stdout == invoke("collect", "--help").stdout


def test_every_list_of_commands_shows_each_with_a_whole_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "tipbench demo" in invoke("--help").stdout
    for group in {(), *(path[:-1] for path in COMMANDS)}:
        assert "..." not in invoke(*group, "--help").stdout.split("Commands:")[1], group


def test_examples_in_help_use_options_that_exist() -> None:
    for path, command in COMMANDS.items():
        for line in (command.help or "").splitlines():
            words = line.split()
            if words[:1] != ["tipbench"]:
                continue
            at = 1
            while words[1 : at + 1] and tuple(words[1 : at + 1]) not in COMMANDS:
                at += 1
            known = {name for parameter in COMMANDS[tuple(words[1 : at + 1])].params for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, f"{' '.join(path)}: {line}"


def test_examples_are_not_wrapped_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for path, command in COMMANDS.items():
        shown = invoke(*path, "--help").stdout.splitlines()
        examples = [line.strip() for line in (command.help or "").splitlines() if line.startswith("  tipbench ")]
        assert {f"    {example}" for example in examples} <= set(shown), path


def test_commands_are_listed_in_the_order_of_the_flow() -> None:
    shown = [line.split()[0] for line in invoke("--help").stdout.split("Commands:")[1].splitlines() if line.strip()]
    assert shown[:5] == ["demo", "plan", "collect", "judge", "compare"]


def test_version_is_printed() -> None:
    assert invoke("--version").stdout == f"tipbench {tipbench.__version__}\n"


def test_no_command_is_a_usage_error_and_shows_help() -> None:
    result = invoke()
    assert result.code == 2
    assert "Usage: tipbench" in result.stdout + result.stderr


@pytest.mark.process
def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['tipbench', '--help']\n"
        "from tipbench.cli.main import app\n"
        "app(standalone_mode=False)\n"
        "print('MODULES', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rsplit("MODULES", 1)[1].split())
    assert "tipbench" in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.process
def test_help_starts_almost_as_fast_as_its_two_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares processor times, as the machine may be slow or busy; BaseModel, because `import pydantic` is lazy."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    help_s: list[float] = []
    imports_s: list[float] = []
    for _ in range(4):  # the first time, all modules are compiled
        help_s.append(_processor_seconds("-m", "tipbench", "--help"))
        imports_s.append(_processor_seconds("-c", "import typer; from pydantic import BaseModel"))
    assert min(help_s) <= 3 * min(imports_s)


def _processor_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.process
def test_the_command_starts_without_the_command_line_of_its_http_library() -> None:
    script = """
import sys
from pathlib import Path
from tipbench.__main__ import main
sys.argv = ["tipbench", "--version"]
try:
    main()
except SystemExit:
    import httpx
    print("pygments" in sys.modules)
"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.splitlines() == [f"tipbench {tipbench.__version__}", "False"]
