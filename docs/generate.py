"""Writes what the code knows better than we do: docs/cli.md, docs/api.md, the measured table of docs/rules-judge.md.

python docs/generate.py            write them (`make docs`)
python docs/generate.py --check    exit 1 if one is not up to date
"""  # noqa: INP001 - a script, not a package

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer.main
from api_page import api_page
from page_parts import table

from tipbench.cli.main import EXIT_CODES, app
from tipbench.errors import TipbenchError
from tipbench.judge.rules import rules_error
from tipbench.plan.config import CollectConfig
from tipbench.plan.suite import load_suite
from tipbench.settings import CONFIG_FILE, SETTINGS, Setting
from tipbench.text import percent

DOCS = Path(__file__).parent
SAME_OPTIONS = {"tipbench plan": "tipbench collect"}  # printed once

HEAD = f"""\
<!-- Written by docs/generate.py from the code; do not edit. `make docs` writes it again; a test compares. -->

# The command line

Results go to stdout, progress and messages to stderr, so `tipbench … --json > file` contains the result only.
Invalid input prints one or two sentences and no traceback.

## Exit codes

{{codes}}

## Settings

In order of precedence: a flag, an environment variable, `{CONFIG_FILE}` in the working folder, `{CONFIG_FILE}` in the
home folder, the default. If several variables are listed, the first one that is set is used. Keys in the file are at
the top level (`n_tips = 3`); an unknown key is rejected. Secrets are read from variables only.

{{settings}}

## Commands

{{commands}}
"""


def cli_page(_present: str) -> str:
    """Return the page; what it contains at present does not matter."""
    return HEAD.format(codes=_codes(), settings=_settings(), commands="\n\n".join(_commands()))


def _codes() -> str:
    return table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()])


def _settings() -> str:
    rows = [
        (
            _code(setting.key) if setting.in_file else "",
            _code(_flag(setting)),
            " ".join(_code(variable) for variable in setting.variables),
            _code(setting.default) if setting.key in CollectConfig.model_fields else setting.default,
            setting.meaning,
        )
        for setting in SETTINGS
    ]
    return table((f"key in {CONFIG_FILE}", "flag", "variables", "default", "meaning"), rows)


def _flag(setting: Setting) -> str:
    return f"--{setting.key.replace('_', '-')}" if setting.key in CollectConfig.model_fields else ""


def _commands() -> Iterator[str]:
    found = dict(_walk(typer.main.get_command(app), "tipbench"))
    for name, command in found.items():
        parts = [f"### `{name}`", _prose(command)]
        same = SAME_OPTIONS.get(name)
        if same is not None:
            if _options(command) != _options(found[same]):
                raise SystemExit(f"{name} no longer takes the same options as {same}; see SAME_OPTIONS")
            parts.append(f"Its options are those of `{same}`.")
        else:
            parts += [_options(command)]
        yield "\n\n".join(part for part in parts if part)


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for sub_name, sub in command.commands.items():
        if hasattr(sub, "commands"):
            yield from _walk(sub, f"{name} {sub_name}")
        else:
            yield f"{name} {sub_name}", sub


def _prose(command: Any) -> str:
    """The help text; its examples as code."""
    text, _, examples = inspect.cleandoc(command.help or "").partition("\nExample")
    lines = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
    code = "\n".join(["```sh", *lines, "```"]) if lines else ""
    return "\n\n".join(part for part in (text.strip(), code) if part)


def _options(command: Any) -> str:
    rows = [(_code(_spelling(parameter)), _meaning(parameter)) for parameter in command.params]
    return table(("option", "meaning"), rows) if rows else ""


def _meaning(parameter: Any) -> str:
    """The help text with the default, where --help shows it."""
    text, default = parameter.help or "", parameter.default
    if not getattr(parameter, "show_default", False) or default is None or "[default:" in text:
        return str(text)
    if getattr(parameter, "is_flag", False):
        names = parameter.opts if default else parameter.secondary_opts
        if not names:
            return str(text)
        default = names[0].removeprefix("--")
    return f"{text} [default: {default}]"


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar}"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def rules_page(present: str) -> str:
    """Return the page with a new table of the rules judge's error, on the anchors and controls of the suite `tips`."""
    suite = load_suite("tips")
    cards = {scenario.id: scenario.to_card() for scenario in suite.scenarios}
    anchors, controls = suite.rubric.anchors, suite.controls
    rows = []
    for name, examples in (("anchors", anchors), ("controls", controls), ("both", (*anchors, *controls))):
        for scale, error in rules_error(examples, cards).items():
            always_3 = sum(abs(3 - example.scores[scale]) for example in examples) / len(examples)
            numbers = (
                f"{error['bias']:+.2f}",
                f"{error['error']:.2f}",
                percent(error["within_one"]),
                f"{always_3:.2f}",
            )
            rows.append((name, scale, str(error["n"]), *numbers))
    head = ("measured on", "scale", "tips", "bias", "error", "within one step", "always 3")
    before, start, rest = present.partition("<!-- measured -->\n")
    _, end, after = rest.partition("\n<!-- /measured -->")
    return f"{before}{start}{table(head, rows)}{end}{after}"


# present text → wanted
PAGES: dict[str, Callable[[str], str]] = {
    "cli.md": cli_page,
    "api.md": api_page,
    "rules-judge.md": rules_page,
}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with --check only compare; every stale page is named."""
    stale = [name for name, wanted in PAGES.items() if not _is_fresh(DOCS / name, wanted)]
    if "--check" in arguments:
        for name in PAGES:
            state = "out of date; run `make docs`" if name in stale else "up to date"
            print(f"{name} is {state}", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(_made(DOCS / name, PAGES[name]), "utf-8")
    return 0


def _is_fresh(path: Path, wanted: Callable[[str], str]) -> bool:
    return path.exists() and path.read_text("utf-8") == _made(path, wanted)


def _made(path: Path, wanted: Callable[[str], str]) -> str:
    try:
        return wanted(path.read_text("utf-8") if path.exists() else "")
    except TipbenchError as exc:
        raise SystemExit(f"{path.name}: {exc}") from exc


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
