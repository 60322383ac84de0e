from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suite_folder import DOCS, SuiteFolder

from tipbench.errors import SuiteError, UsageError
from tipbench.plan.suite import builtin_suites, load_suite
from tipbench.plan.toml_file import find_line


@pytest.fixture
def folder(tmp_path: Path) -> SuiteFolder:
    return SuiteFolder(tmp_path / "my-suite")


def load_error(folder: SuiteFolder | Path) -> SuiteError:
    with pytest.raises(SuiteError) as refused:
        load_suite(str(folder))
    return refused.value


def test_tips_has_eight_scenarios_and_tips_32_thirty_two() -> None:
    assert builtin_suites() == ["tips", "tips-32"]
    assert len(load_suite("tips").scenarios) == 8
    assert len(load_suite("tips-32").scenarios) == 32


def test_tips_32_contains_tips_unchanged() -> None:
    small, large = load_suite("tips"), load_suite("tips-32")
    hashes = {scenario.id: scenario.content_hash for scenario in large.scenarios}
    assert all(hashes[scenario.id] == scenario.content_hash for scenario in small.scenarios)
    assert large.prompts == small.prompts
    assert large.rubric == small.rubric
    assert large.controls[: len(small.controls)] == small.controls
    assert large.sampling == small.sampling == {"top_k": 40, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.1}


def test_built_in_people_have_varied_plausible_tasks() -> None:
    scenarios = load_suite("tips-32").scenarios
    day = scenarios[0].day
    for persona in {scenario.persona for scenario in scenarios}:
        assert any(task.overdue_on(day) for task in persona.tasks), persona.id
        for task in persona.tasks:
            assert task.age_days <= 60
            assert task.due is None or task.due >= day - timedelta(days=task.age_days), "due before it was written down"
    tasks = [task for scenario in scenarios for task in scenario.persona.tasks]
    assert {task.priority for task in tasks} == {1, 2, 3, 4}
    assert any(task.due is None for task in tasks)


def test_example_in_the_docs_is_a_complete_suite(folder: SuiteFolder) -> None:
    """The fixture reads the example from docs/suites.md, so the page stays correct."""
    suite = load_suite(str(folder))
    assert suite.name == "my-suite"
    assert [scenario.id for scenario in suite.scenarios] == ["curator@opening"]
    assert list(suite.prompts) == ["v1"]
    assert len(suite.rubric.anchors) == 2
    assert len(suite.controls) == 1
    assert suite.scenarios[0].day == date(2026, 4, 27)


def test_message_quoted_in_the_docs_is_the_real_one(folder: SuiteFolder) -> None:
    folder.replace("suite.toml", "priority = 4 ", "priority = 5 ")
    message = str(load_error(folder)).replace(str(folder.path), "my-suite")
    assert f"    {message}\n" in DOCS.read_text()


def test_extending_suite_of_the_docs_loads(tmp_path: Path, folder: SuiteFolder) -> None:
    snippet = DOCS.read_text().split("# my-prompts/suite.toml\n")[1].split("```")[0]
    (tmp_path / "my-prompts" / "prompts").mkdir(parents=True)
    (tmp_path / "my-prompts" / "suite.toml").write_text(snippet)
    (folder.path / "prompts" / "v1.md").rename(tmp_path / "my-prompts" / "prompts" / "v4-terse.md")
    suite = load_suite(str(tmp_path / "my-prompts"))
    assert list(suite.prompts) == ["v1", "v2-mentor", "v3-few-shot", "v4-terse"]
    assert suite.scenarios == load_suite("tips").scenarios


def test_fingerprint_is_stable_and_changes_with_any_file(folder: SuiteFolder) -> None:
    fingerprints = {load_suite(str(folder)).fingerprint}
    assert fingerprints == {load_suite(str(folder)).fingerprint}
    for name, old, new in (
        ("suite.toml", "top_k = 40", "top_k = 41"),
        ("suite.toml", "age_days = 35", "age_days = 36"),
        ("prompts/v1.md", "You help", "You may help"),
        ("rubric.md", "take the lower", "take the higher"),
        ("controls.toml", "she knew that", "she knows that"),
    ):
        folder.replace(name, old, new)
        fingerprints.add(load_suite(str(folder)).fingerprint)
    assert len(fingerprints) == 6


def test_comment_in_a_prompt_does_not_change_the_fingerprint(folder: SuiteFolder) -> None:
    before = load_suite(str(folder)).fingerprint
    folder.replace("prompts/v1.md", "is a comment", "is only a comment")
    assert load_suite(str(folder)).fingerprint == before


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('name = "my-suite"', "name = my-suite", "not valid TOML: Invalid value"),
        ('name = "my-suite"', 'name = "My suite"', "out of a-z, 0-9 and '-'; found 'My suite'"),
        ("date = 2026-04-27 ", "date = 2026-02-30 ", "not valid TOML: Invalid date or datetime"),
        ("date = 2026-04-27 ", 'date = "soon" ', "'date' must be a valid date; found 'soon'"),
        ("due = 2026-04-23 ", "due = 2026-04-23T10:00:00 ", "'due' must be a valid date"),
        ('time = "09:40"', 'time = "9.40"', "'time' must be a time of day such as \"07:30\"; found '9.40'"),
        ("priority = 4 ", "priority = 5 ", "'priority' must be at most 4; found 5"),
        ("priority = 3", "priority = 0", "'priority' must be at least 1; found 0"),
        ("priority = 3", "priority = true", "'priority' must be a valid integer; found True"),
        ("age_days = 35", "age_days = -1", "'age_days' must be at least 0; found -1"),
        ("age_days = 35", "age = 35", "'age_days' is missing. (1 more in this file)"),
        (
            "habits = [",
            "habit = [",
            "unknown key 'habit'. Known here: id, name, role, about, preferences, habits, tasks.",
        ),
        ("top_k = 40", "temperature = 0.7", "unknown key 'temperature'. Known here: top_k, top_p"),
        ("top_p = 0.9", "top_p = inf", "'top_p' must be a finite number; found inf"),
        (
            'preferences = ["steps',
            'preferences = [3, "steps',
            "'preferences', entry 1, must be a valid string; found 3",
        ),
        ('name = "Mei"', 'name = ""', "'name' must have at least 1 character; found ''"),
        ('name = "Mei"', 'name = "Mei\\nLin"', "must be one line"),
        (
            'id = "curator"',
            'id = "Mei Lin"',
            "'id' must be 1 to 64 characters out of a-z, 0-9 and '-'; found 'Mei Lin'",
        ),
        ('id = "curator"', 'id = "a/b"', "'id' must be 1 to 64 characters"),
    ],
)
def test_broken_suite_file_is_refused_with_line_and_reason(
    folder: SuiteFolder, old: str, new: str, reason: str
) -> None:
    line = folder.replace("suite.toml", old, new)
    error = load_error(folder)
    assert error.path == folder.path / "suite.toml"
    assert reason in error.reason
    if "is missing" not in reason:
        assert error.line == line


def test_missing_key_is_reported_at_its_table(folder: SuiteFolder) -> None:
    folder.replace("suite.toml", "age_days = 35", "")
    text = (folder.path / "suite.toml").read_text()
    last_task = text[: text.rindex("[[personas.tasks]]")].count("\n") + 1
    assert load_error(folder).line == last_task


@pytest.mark.parametrize("n_tasks", [2, 7])
def test_persona_has_three_to_six_tasks(folder: SuiteFolder, n_tasks: int) -> None:
    text = (folder.path / "suite.toml").read_text()
    head = text[: text.index("[[personas.tasks]]")]
    folder.write("suite.toml", head + '[[personas.tasks]]\ntitle = "T"\npriority = 1\nage_days = 1\n' * n_tasks)
    error = load_error(folder)
    assert f"entries; it has {n_tasks}" in error.reason
    assert error.line == head.count("\n") + 1


@pytest.mark.parametrize("table", ["personas", "slots"])
def test_duplicate_ids_are_refused(folder: SuiteFolder, table: str) -> None:
    text = (folder.path / "suite.toml").read_text()
    start = text.index(f"[[{table}]]")
    block = text[start : text.index("[[personas]]")] if table == "slots" else text[start:]
    folder.write("suite.toml", text + "\n" + block)
    error = load_error(folder)
    assert f"is already taken in '{table}'" in error.reason
    assert error.line is not None
    assert error.line > text.count("\n")


@pytest.mark.parametrize("table", ["personas", "slots"])
def test_suite_without_a_scenario_is_refused(folder: SuiteFolder, table: str) -> None:
    text = (folder.path / "suite.toml").read_text()
    end = text.index("[[personas]]") if table == "slots" else len(text)
    folder.write("suite.toml", text[: text.index(f"[[{table}]]")] + text[end:])
    assert f"no scenario: it needs one or more [[{table}]]" in load_error(folder).reason


def test_suite_without_a_date_or_a_sampling_value_is_refused(folder: SuiteFolder) -> None:
    line = folder.replace("suite.toml", "[sampling]", "[sampling]")
    folder.replace("suite.toml", "min_p = 0.0\n", "")
    error = load_error(folder)
    assert (error.line, error.reason) == (line, "'min_p' is missing in [sampling].")
    folder.replace("suite.toml", "date = ", "# date = ")
    assert "'date' is missing" in load_error(folder).reason


@pytest.mark.parametrize("name", ["suite.toml", "rubric.md"])
def test_missing_file_is_named(folder: SuiteFolder, name: str) -> None:
    (folder.path / name).unlink()
    error = load_error(folder)
    assert error.path == folder.path / name
    assert "the file is missing" in error.reason


def test_controls_may_be_missing(folder: SuiteFolder) -> None:
    (folder.path / "controls.toml").unlink()
    assert load_suite(str(folder)).controls == ()


def test_suite_without_prompts_is_refused(folder: SuiteFolder) -> None:
    (folder.path / "prompts" / "v1.md").unlink()
    assert "the suite has no prompt" in load_error(folder).reason


def test_prompt_with_an_invalid_file_name_is_refused(folder: SuiteFolder) -> None:
    (folder.path / "prompts" / "v1.md").rename(folder.path / "prompts" / "V 1.md")
    assert "a-z, 0-9 and '-'" in load_error(folder).reason


def test_broken_prompt_of_a_suite_is_refused_with_its_line(folder: SuiteFolder) -> None:
    line = folder.replace("prompts/v1.md", "{{ slot }}", "{{ hour }}")
    error = load_error(folder)
    assert (error.path, error.line) == (folder.path / "prompts" / "v1.md", line)


@pytest.mark.parametrize("name", ["suite.toml", "prompts/v1.md"])
def test_files_over_a_megabyte_are_refused(folder: SuiteFolder, name: str) -> None:
    with (folder.path / name).open("a") as file:
        file.write("\n#" + "x" * 1_000_000)
    error = load_error(folder)
    assert error.path == folder.path / name
    assert "over 1 MB" in error.reason


@pytest.mark.parametrize("name", ["prompts/v1.md", "controls.toml"])
def test_files_that_are_not_utf_8_are_refused_at_the_line(folder: SuiteFolder, name: str) -> None:
    lines = (folder.path / name).read_bytes().count(b"\n")
    with (folder.path / name).open("ab") as file:
        file.write(b"# caf\xe9\n")
    error = load_error(folder)
    assert (error.path, error.line) == (folder.path / name, lines + 1)
    assert "not UTF-8" in error.reason


@pytest.mark.parametrize("name_or_path", ["no-such-suite", "tips\0"])
def test_unknown_suite_is_refused_and_the_built_in_ones_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name_or_path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"tips, tips-32|the file is missing"):
        load_suite(name_or_path)


def test_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    file.write_text("")
    assert "not a folder" in load_error(file).reason


def test_deeply_nested_toml_is_refused_without_a_crash(folder: SuiteFolder) -> None:
    folder.write("suite.toml", "name = " + "[" * 100_000)
    assert "not valid TOML" in load_error(folder).reason


def extend(folder: SuiteFolder, parent: str, more: str = "") -> Path:
    child = folder.path.parent / "child"
    child.mkdir(exist_ok=True)
    (child / "suite.toml").write_text(f'name = "child"\ntitle = "Child"\nextends = "{parent}"\n{more}')
    return child


def test_extending_suite_inherits_everything(folder: SuiteFolder) -> None:
    suite, parent = load_suite(str(extend(folder, "../my-suite"))), load_suite(str(folder))
    assert suite.name == "child"
    assert (suite.scenarios, suite.prompts, suite.rubric) == (parent.scenarios, parent.prompts, parent.rubric)
    assert (suite.controls, suite.sampling) == (parent.controls, parent.sampling)


def test_extending_suite_adds_slots_and_replaces_sampling_values(folder: SuiteFolder) -> None:
    more = '[sampling]\ntop_k = 5\n[[slots]]\nid = "closing"\nlabel = "closing"\ntime = "17:00"\n'
    suite = load_suite(str(extend(folder, "../my-suite", more)))
    assert [scenario.id for scenario in suite.scenarios] == ["curator@opening", "curator@closing"]
    assert suite.sampling == {"top_k": 5, "top_p": 0.9, "min_p": 0.0, "repeat_penalty": 1.1}


def test_suite_that_replaces_the_rubric_does_not_inherit_controls(folder: SuiteFolder) -> None:
    child = extend(folder, "../my-suite")
    (child / "rubric.md").write_bytes((folder.path / "rubric.md").read_bytes())
    assert load_suite(str(child)).controls == ()


def test_inherited_id_cannot_be_taken_again(folder: SuiteFolder) -> None:
    child = extend(folder, "../my-suite", '[[slots]]\nid = "opening"\nlabel = "again"\ntime = "10:00"\n')
    error = load_error(child)
    assert (error.path, error.line) == (child / "suite.toml", 5)
    assert "'opening' is already taken" in error.reason


def test_inherited_prompt_version_cannot_be_taken_again(folder: SuiteFolder) -> None:
    child = extend(folder, "../my-suite")
    (child / "prompts").mkdir()
    (child / "prompts" / "v1.md").write_bytes((folder.path / "prompts" / "v1.md").read_bytes())
    assert "has a prompt 'v1'" in load_error(child).reason


def test_unknown_extends_is_reported_at_its_line(folder: SuiteFolder) -> None:
    error = load_error(extend(folder, "../nowhere"))
    assert error.line == 3
    assert "Built-in suites: tips, tips-32" in error.reason


@pytest.mark.parametrize("parent", ["../child", "../my-suite"])
def test_suites_that_extend_each_other_in_a_circle_are_refused(folder: SuiteFolder, parent: str) -> None:
    folder.replace("suite.toml", "title = ", 'extends = "../child"\ntitle = ')
    assert "leads back" in load_error(extend(folder, parent)).reason


TRICKY_TOML = '''# a = 1
a = "x = 1"  # [not.a.table]
b = [
    "[[c]]",
    ["c = 2"],
]
"quoted key" = 1
d = """
[[c]]
e = 1
"""
[t]
k.l = 1
[[c]]
x = 1
[[c.inner]]
y = { z = 1 }
[[c]]
x = 2
[c.sub]
w = 3
'''


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (("a",), 2),
        (("b", 1), 3),
        (("quoted key",), 7),
        (("d",), 8),
        (("t",), 12),
        (("t", "k", "l"), 13),
        (("c",), 14),
        (("c", 0, "x"), 15),
        (("c", 0, "inner"), 16),
        (("c", 0, "inner", 0, "y", "z"), 17),
        (("c", 1, "x"), 19),
        (("c", 1, "sub", "w"), 21),
        (("c", 1, "missing"), 18),
        (("missing",), 1),
        ((), 1),
    ],
)
def test_line_of_a_key_is_found(place: tuple[str | int, ...], line: int) -> None:
    assert find_line(TRICKY_TOML, place) == line


@given(st.text(), st.lists(st.text() | st.integers(0, 9)))
def test_line_is_found_in_any_text_without_failing(text: str, place: list[str | int]) -> None:
    assert 1 <= find_line(text, tuple(place)) <= text.count("\n") + 1
