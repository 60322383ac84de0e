"""Generates pages from the code: docs/cli.md, docs/api.md and the measured table of docs/rules-judge.md.

python docs/generate.py            write the pages (`make docs`)
python docs/generate.py --check    exit 1 if a page is not up to date
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
from tipbench.plan.collect_config import CollectConfig
from tipbench.plan.suite import load_suite
from tipbench.settings import CONFIG_FILE, SETTINGS
from tipbench.text import percent

DOCS = Path(__file__).parent
SAME_OPTIONS = {"tipbench plan": "tipbench collect"}  # their options are printed once

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
    """Return the page; its present text is not needed."""
    codes = table(("code", "meaning"), [(str(code), meaning) for code, meaning in EXIT_CODES.items()])
    return HEAD.format(codes=codes, settings=_settings(), commands="\n\n".join(_commands()))


def _settings() -> str:
    rows = [
        (
            _code(setting.key) if setting.in_file else "",
            _code(f"--{setting.key.replace('_', '-')}") if setting.key in CollectConfig.model_fields else "",
            " ".join(_code(variable) for variable in setting.variables),
            _code(setting.default) if setting.key in CollectConfig.model_fields else setting.default,
            setting.meaning,
        )
        for setting in SETTINGS
    ]
    return table((f"key in {CONFIG_FILE}", "flag", "variables", "default", "meaning"), rows)


def _commands() -> Iterator[str]:
    commands = dict(_subcommands(typer.main.get_command(app), "tipbench"))
    for name, command in commands.items():
        options = _options(command)
        if other := SAME_OPTIONS.get(name):
            if options != _options(commands[other]):
                raise SystemExit(f"{name} no longer takes the same options as {other}; see SAME_OPTIONS")
            options = f"Its options are those of `{other}`."
        yield "\n\n".join(filter(None, (f"### `{name}`", _help_text(command), options)))


def _subcommands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _subcommands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _help_text(command: Any) -> str:
    """Return the help text, with its examples as code."""
    text, _, examples = inspect.cleandoc(command.help or "").partition("\nExample")
    lines = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
    code = "\n".join(["```sh", *lines, "```"]) if lines else ""
    return "\n\n".join(part for part in (text.strip(), code) if part)


def _options(command: Any) -> str:
    rows = [(_code(_spelling(parameter)), _meaning(parameter)) for parameter in command.params]
    return table(("option", "meaning"), rows) if rows else ""


def _meaning(parameter: Any) -> str:
    """Return the help text of an option, with the default if --help shows it."""
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


PAGES: dict[str, Callable[[str], str]] = {  # page → function from its present text to the new one
    "cli.md": cli_page,
    "api.md": api_page,
    "rules-judge.md": rules_page,
}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with --check only report which are out of date."""
    stale = False
    for name, generate in PAGES.items():
        path = DOCS / name
        present = path.read_text("utf-8") if path.exists() else ""
        try:
            text = generate(present)
        except TipbenchError as exc:
            raise SystemExit(f"{name}: {exc}") from exc
        stale |= text != present
        if "--check" in arguments:
            state = "up to date" if text == present else "out of date; run `make docs`"
            print(f"{name} is {state}", file=sys.stderr)
        elif text != present:
            path.write_text(text, "utf-8")
    return int(stale and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
