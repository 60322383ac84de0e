"""Suite: what a benchmark asks about, in which words, and how the answers are scored; loaded from a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tipbench.errors import SuiteError
from tipbench.plan.fingerprint import fingerprint
from tipbench.plan.prompts import Prompt, parse_prompt
from tipbench.plan.rubric import Control, Rubric
from tipbench.plan.rubric_files import load_controls, load_rubric
from tipbench.plan.scenarios import Persona, Scenario, Slot, build_scenarios
from tipbench.plan.suite_files import TomlText, is_id, read_bounded
from tipbench.plan.suite_schema import SAMPLING, SuiteSchema

_BUILT_IN = Path(__file__).resolve().parent.parent / "suites"


@dataclass(frozen=True)
class Suite:
    """Everything a collect needs to know about its questions."""

    name: str
    title: str
    scenarios: tuple[Scenario, ...]
    prompts: Mapping[str, Prompt]
    rubric: Rubric
    controls: tuple[Control, ...]
    sampling: Mapping[str, float | int]  # top_k, top_p, min_p, repeat_penalty

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything in the suite but its title."""
        return fingerprint(
            {
                "name": self.name,
                "scenarios": [[scenario.id, scenario.content_hash] for scenario in self.scenarios],
                "prompts": {version: prompt.hash for version, prompt in self.prompts.items()},
                "rubric": self.rubric.tag,
                "controls": [vars(control) for control in self.controls],
                "sampling": dict(self.sampling),
            }
        )


def builtin_suites() -> list[str]:
    """Names of the suites that come with tipbench."""
    return sorted(folder.name for folder in _BUILT_IN.iterdir() if (folder / "suite.toml").is_file())


def load_suite(reference: str) -> Suite:
    """The suite of a built-in name or of a folder's path, fully checked; SuiteError says what is wrong and where."""
    layers = _layers(_folder(reference))
    personas, slots, day = _people_and_times(layers)
    scenarios = build_scenarios(personas, slots, day)
    scenario_ids = [scenario.id for scenario in scenarios]
    rubric_at = _layer_with_rubric(layers)
    rubric = load_rubric(layers[rubric_at].folder / "rubric.md", scenario_ids)
    # Controls were scored under the rubric beside or above them: a layer with a rubric of its own starts afresh.
    files = [layer.folder / "controls.toml" for layer in layers[rubric_at:]]
    controls = [load_controls(path, rubric, scenario_ids) for path in files if path.exists()]
    return Suite(
        name=layers[-1].content.name,
        title=layers[-1].content.title,
        scenarios=scenarios,
        prompts=_prompts(layers),
        rubric=rubric,
        controls=tuple(control for group in controls for control in group),
        sampling=_sampling(layers),
    )


@dataclass(frozen=True)
class _Layer:
    """One suite.toml of a chain of `extends`."""

    folder: Path
    source: TomlText
    content: SuiteSchema


def _folder(reference: str, beside: Path | None = None) -> Path:
    if reference in builtin_suites():
        return _BUILT_IN / reference
    return (beside or Path()) / Path(reference).expanduser()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name too long
        return False


def _layers(folder: Path) -> list[_Layer]:
    """The suite and what it extends, the most basic first."""
    chain: list[_Layer] = []
    while True:
        if not _is_folder(folder):
            raise _no_such_folder(folder, chain)
        if any(layer.folder.samefile(folder) for layer in chain):
            raise chain[-1].source.error(("extends",), "'extends' comes back to a suite it started from.")
        source = TomlText.read(folder / "suite.toml")
        chain.append(_Layer(folder, source, source.validated(SuiteSchema)))
        parent = chain[-1].content.extends
        if parent is None:
            return chain[::-1]
        folder = _folder(parent, beside=folder)


def _no_such_folder(folder: Path, chain: list[_Layer]) -> SuiteError:
    known = f"Built-in suites: {', '.join(builtin_suites())}; or give the path of a folder with a suite.toml."
    if chain:
        return chain[-1].source.error(("extends",), f"'extends' names no suite: {folder} is not a folder. {known}")
    return SuiteError(folder, None, f"there is no such suite: not a built-in name, and not a folder. {known}")


def _people_and_times(layers: Sequence[_Layer]) -> tuple[list[Persona], list[Slot], date]:
    personas: dict[str, Persona] = {}
    slots: dict[str, Slot] = {}
    days = []
    for layer in layers:
        _add_new(personas, [persona.build() for persona in layer.content.personas], layer, "personas")
        _add_new(slots, [slot.build() for slot in layer.content.slots], layer, "slots")
        days += [layer.content.date] if layer.content.date else []
    own = layers[-1].source
    if not days:
        raise own.error((), "'date' is missing: the calendar day on which all scenarios play.")
    if not personas or not slots:
        missing = "personas" if not personas else "slots"
        raise own.error((), f"the suite has no scenario: it needs one or more [[{missing}]].")
    return list(personas.values()), list(slots.values()), days[-1]


def _add_new(known: dict[str, Any], items: Sequence[Persona | Slot], layer: _Layer, table: str) -> None:
    for index, item in enumerate(items):
        if item.id in known:
            raise layer.source.error(
                (table, index, "id"), f"the id '{item.id}' is already taken in '{table}'. Ids must differ."
            )
        known[item.id] = item


def _sampling(layers: Sequence[_Layer]) -> dict[str, float | int]:
    merged: dict[str, float | int] = {}
    for layer in layers:
        if layer.content.sampling:
            merged |= layer.content.sampling.model_dump(exclude_none=True)
    for name in SAMPLING:
        if name not in merged:
            raise layers[-1].source.error(("sampling",), f"'{name}' is missing in [sampling].")
    return {name: merged[name] for name in SAMPLING}


def _prompts(layers: Sequence[_Layer]) -> dict[str, Prompt]:
    prompts: dict[str, Prompt] = {}
    for layer in layers:
        for path in sorted((layer.folder / "prompts").glob("*.md")):
            version = path.stem
            if not is_id(version):
                raise SuiteError(path, None, "a prompt's file name may hold only a-z, 0-9 and '-' before '.md'.")
            if version in prompts:
                raise SuiteError(path, None, f"the suite it extends has a prompt '{version}'. Choose another name.")
            prompts[version] = parse_prompt(version, read_bounded(path).decode(), path)
    if not prompts:
        raise SuiteError(layers[-1].folder / "prompts", None, "there is no prompt. Write one, such as prompts/v1.md.")
    return prompts


def _layer_with_rubric(layers: Sequence[_Layer]) -> int:
    """Where the rubric is: the suite's own wins. Without any, the most basic layer is asked, and says it is missing."""
    return max((at for at, layer in enumerate(layers) if (layer.folder / "rubric.md").exists()), default=0)
