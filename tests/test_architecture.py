"""The two rules of the layout: which steps a step may import, and which files may use HTTP, processes or databases.

`violations` reads the source code, so imports inside functions count. Planted violations show that it finds them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tipbench"

# A step may import only what comes after it. The last line has the modules at the root.
ORDER = (
    *(
        "cli",
        "web",
        "settings",
        "jobs",
        "workflows",
        "simulate",
        "serve",
        "compare",
        "judge",
        "record",
        "generate",
        "plan",
    ),
    *("charts", "markup", "sqlite", "files", "http", "text", "errors"),
)
LEVEL = {step: level for level, step in enumerate(ORDER)}
ENTRY = {"__main__": "cli"}

OUTSIDE = {
    "httpx": {"http.py", "generate/ollama_api.py", "record/mlflow.py", "record/mlflow_http.py",
              "jobs/airflow_api.py", "web/webhook.py", "web/panel/start.py"},
    "sqlite3": {"sqlite.py"},
    "subprocess": {"generate/engine.py", "generate/weights.py", "record/local_mlflow.py",
                   "judge/command.py", "jobs/local.py", "cli/", "web/"},
    "fcntl": {"files.py"},
    "fastapi": {"web/"},
    "xllamacpp": {"generate/llamacpp.py"},
    "mlflow": set(),
}  # fmt: skip
LAZY = {"xllamacpp", "mlflow", "scipy", "krippendorff", "altair", "vl_convert"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "types", "misc"}


def module_sources() -> dict[str, str]:
    """Every module of the package by its path inside it."""
    return {str(path.relative_to(PACKAGE).as_posix()): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}


def violations(path: str, source: str) -> list[str]:
    """Return the violations of one module."""
    tree = ast.parse(source)
    found = []
    if PurePosixPath(path).stem in VAGUE_NAMES or VAGUE_NAMES & set(PurePosixPath(path).parts):
        found.append(f"{path}: its name says nothing about its content")
    if not ast.get_docstring(tree):
        found.append(f"{path}: has no docstring")
    at_top = set(_at_module_level(tree))
    for node in ast.walk(tree):
        for name in _imported_names(node, path):
            found += _import_violations(path, name, at_top=node in at_top)
    return found


def _import_violations(path: str, name: str, *, at_top: bool) -> Iterator[str]:
    top = name.partition(".")[0]
    if top == "tipbench":
        own, other = _step(path), [*name.split("."), ""][1]
        if other in LEVEL and not _may_import(own, other):
            yield f"{path}: imports {name}, which comes later than {own or 'the package itself'}"
        elif other and other not in LEVEL:
            yield f"{path}: imports {name}, which is not a step of the flow"
    if top in OUTSIDE and not any(
        path == place or (place[-1] == "/" and path.startswith(place)) for place in OUTSIDE[top]
    ):
        yield f"{path}: {top} belongs to the outside"
    if top in LAZY and at_top:
        yield f"{path}: {top} is imported before it is needed"


def _may_import(own: str, other: str) -> bool:
    if own == other:
        return True
    return own in LEVEL and LEVEL[own] < LEVEL[other]


def _step(path: str) -> str:
    """Return the step of a file; the package's own `__init__` has none."""
    first = PurePosixPath(path).parts[0].removesuffix(".py")
    return ENTRY.get(first, "" if first == "__init__" else first)


def _imported_names(node: ast.AST, path: str) -> list[str]:
    """Return the absolute names that a statement imports, also relatively or by `import_module("x")`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _absolute_module(node, path)
        return [f"{base}.{alias.name}" if base == "tipbench" else base for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "importlib.import_module",
        "import_module",
        "__import__",
    ):
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def _absolute_module(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    package = ("tipbench", *PurePosixPath(path).parts[:-1])
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run on import: none in functions or under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_module_level(child)


def test_every_module_keeps_to_the_layout() -> None:
    assert [problem for path, source in sorted(module_sources().items()) for problem in violations(path, source)] == []


def test_every_imported_package_is_declared() -> None:
    """A package that is installed only because another one needs it may be gone after its next release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [
        *project["dependencies"],
        *(each for name in ("local", "embedded", "charts", "panel", "serve") for each in extras[name]),
    ]
    declared = {re.split(r"[\[<>=]", each)[0].replace("-", "_") for each in listed}
    declared = {{"vl_convert_python": "vl_convert"}.get(name, name) for name in declared}
    imported = {
        name.partition(".")[0]
        for path, source in module_sources().items()
        for node in ast.walk(ast.parse(source))
        for name in _imported_names(node, path)
    }
    assert imported - declared - sys.stdlib_module_names - {"tipbench"} == set()


def test_every_step_of_the_package_is_in_the_order() -> None:
    known = set(LEVEL) | set(ENTRY) | {""}
    assert {_step(path) for path in module_sources()} <= known


def test_every_file_with_an_exception_still_needs_it() -> None:
    """Files that no longer need an exception are removed from the list."""
    modules = module_sources()
    for library, places in OUTSIDE.items():
        for place in places & set(modules):
            names = [name for node in ast.walk(ast.parse(modules[place])) for name in _imported_names(node, place)]
            assert library in {name.partition(".")[0] for name in names}, f"{place} no longer imports {library}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("plan/grid.py", "import tipbench.record.run"),
        ("plan/grid.py", "from tipbench.generate import engine"),
        ("plan/grid.py", "from tipbench import record"),
        ("plan/grid.py", "from ..record import run"),
        ("record/run.py", "def f():\n    from tipbench.cli.main import app"),
        ("record/run.py", "from tipbench.settings import Settings"),
        (
            "generate/engine.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tipbench.record import run",
        ),
        ("serve/policy.py", "from tipbench.simulate.world import World"),
        ("web/app.py", "from tipbench.cli.main import app"),
        ("errors.py", "from tipbench.plan.collect_config import CollectConfig"),
        ("files.py", "from tipbench.sqlite import Database"),
        ("__init__.py", "from tipbench.record import run"),
        ("plan/grid.py", "from tipbench.somewhere import x"),
        ("plan/suite.py", "import httpx"),
        ("web/auth.py", "import sqlite3"),
        ("record/collect.py", "def f():\n    import subprocess"),
        ("record/collect.py", "import importlib\nimportlib.import_module('sqlite3')"),
        ("serve/policy.py", "from fastapi import FastAPI"),
        ("record/mlflow.py", "def f():\n    import mlflow"),
        ("generate/llamacpp.py", "import xllamacpp"),
        ("generate/llamacpp.py", "try:\n    import xllamacpp\nexcept ImportError:\n    pass"),
        ("compare/statistics.py", "from scipy import stats"),
        ("record/utils.py", "x = 1"),
        ("common/texts.py", "x = 1"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert len(violations(path, f'"""A module."""\n{source}\n')) >= 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("record/collect.py", "from tipbench.plan.grid import Cell\nfrom tipbench.errors import TipbenchError"),
        ("plan/grid.py", "from tipbench.plan.collect_config import fingerprint\nfrom . import scenarios"),
        ("web/app.py", "from tipbench.settings import load_settings\nfrom fastapi import FastAPI"),
        ("generate/llamacpp.py", "def f():\n    import xllamacpp"),
        ("simulate/world.py", "from tipbench.serve.policy import Policy\nfrom tipbench.charts import line"),
        ("compare/statistics.py", "def f():\n    from scipy import stats"),
        ("__main__.py", "from tipbench.cli.main import main"),
        ("record/collect.py", "import tipbench"),
    ],
)
def test_an_allowed_import_is_not_found(path: str, source: str) -> None:
    assert violations(path, f'"""A module."""\n{source}\n') == []


def test_a_module_without_docstring_is_found() -> None:
    assert violations("plan/new.py", "x = 1\n") == ["plan/new.py: has no docstring"]


PLACES = re.compile(
    r"(?<![\w.$~-])/(?:work|root|tmp/w|home/[a-z]+)/[\w.]"  # a local path of the machine of an author
    r"|https?://[^\s\"'`)>]*\b(?:pypi|pythonhosted|npmjs|registry|artifactory|nexus|devpi)\b[^\s\"'`)>]*"
    r"|\b(?:files\.pythonhosted|pypi|registry\.npmjs|registry\.ollama)\.(?:org|com|ai)\b"
)
ALLOWED = {"registry.ollama.ai"}  # part of a message that Ollama itself prints, which the scripted server repeats


def named_places(text: str) -> list[str]:
    return [found for found in (match.group() for match in PLACES.finditer(text)) if found not in ALLOWED]


def test_no_file_names_a_registry_or_a_local_path() -> None:
    """Users have other package indexes and other folders."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: which files belong to the project is not known")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        assert named_places(path.read_text("utf-8", "replace")) == [], name


@pytest.mark.parametrize(
    "text",
    ["cd /wor~k/main", "open('/roo~t/.cache')", "https://py~pi.org/simple", "index-url = https://nexus.corp.example/x"],
)
def test_a_registry_or_local_path_is_found(text: str) -> None:
    assert named_places(text.replace("~", ""))  # written with ~, so that this file has no such text either


@pytest.mark.parametrize("text", ["src/work/x", "https://mlflow.org/docs", "pip install tipbench", "/proc/meminfo"])
def test_an_ordinary_path_or_url_is_not_found(text: str) -> None:
    assert not named_places(text)
