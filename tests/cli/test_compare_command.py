"""`tipbench compare`: every form of the board, and the messages without one."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from invoke_command import CommandResult, invoke, usage_error

from support.boards import HOSTILE, PAIRS, board
from support.experiments import recorded_runs
from support.judged import judge_at
from support.judging import SheetDriver, fill, items_of, record_cells
from support.mlflow_server import free_port
from tipbench.cli.compare import show_board
from tipbench.compare.matrix import Pair
from tipbench.judge.sheet_store import ItemKind, find_sheet
from tipbench.plan.suite import load_suite
from tipbench.record.mlflow import MlflowStore
from tipbench.record.run import RunChange, StoredRun

JUDGED, LATER, FRESH, RULED, MIXED, EMPTY = (
    f"tip-bench-compare-{name}" for name in ("judged", "later", "fresh", "ruled", "mixed", "empty")
)
MODELS = ("good:1b", "bad:1b")
SCALES = ("relevance", "actionability", "tone")
BEST, SECOND, WORST, LAST = "good:1b/v1", "good:1b/v2-mentor", "bad:1b/v1", "bad:1b/v2-mentor"


def planted_level(run: StoredRun, number: int) -> int:
    """One point less on every scale from row to row: good v1, good v2, bad v1, bad v2; scores vary over scenarios."""
    wave = (sum(map(ord, run.params["scenario"])) + number) % 2
    level = 4 if run.params["model"] == "good:1b" else 2
    return level + wave - (run.params["prompt_version"] == "v2-mentor")


def later_level(run: StoredRun, number: int) -> int:
    """As `planted_level`, but the bad model has gained a point, or two in some scenarios."""
    wave = (sum(map(ord, run.params["scenario"])) + number * 2) % 3 == 0
    return planted_level(run, number) + (run.params["model"] == "bad:1b") + (wave and run.params["model"] == "bad:1b")


@pytest.fixture(scope="module")
def filled_mlflow(mlflow_url: str) -> str:
    with MlflowStore(mlflow_url) as store:
        for experiment, level in ((JUDGED, planted_level), (LATER, later_level)):
            driver = SheetDriver(
                store, record_cells(store, models=MODELS, experiment=experiment, prompts="v1,v2-mentor")
            )
            judge_at(driver, level)
        for experiment in (FRESH, RULED):
            record_cells(store, models=MODELS, experiment=experiment, prompts="v1,v2-mentor", n_scenarios=2)
        record_cells(store, models=MODELS, experiment=JUDGED, prompts="v1", temperature=0.2, n_scenarios=2, start_ms=1)
        driver = SheetDriver(store, record_cells(store, models=MODELS, experiment=MIXED, prompts="v1", n_scenarios=2))
        judge_at(driver, planted_level)
        other = RunChange(tags={"scores_rubric": f"tip-v2@{'cd' * 32}"}, at_ms=1)
        store.update(next(iter(driver.cells())), other)
        store.ensure_experiment(EMPTY)
    return mlflow_url


@pytest.fixture(autouse=True)
def use_filled_mlflow(filled_mlflow: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", filled_mlflow)
    monkeypatch.chdir(tmp_path)


def compare(*options: str) -> CommandResult:
    result = invoke("compare", *options)
    assert result.code == 0, result.stderr
    return result


def name_of(row: dict[str, str]) -> str:
    return f"{row['model']}/{row['prompt_version']}"


def test_the_planted_winner_leads_and_is_decided() -> None:
    found = compare(JUDGED, "--json").json
    verdict = found["verdict"]
    assert (name_of(verdict["leader"]), verdict["decided"], verdict["tied_with_leader"]) == (BEST, True, [])
    assert [name_of(row) for row in found["standings"]] == [BEST, SECOND, WORST, LAST]
    assert [row["rank"] for row in found["standings"]] == [1, 2, 3, 4]
    assert sum(row["p_best"] for row in found["standings"]) == pytest.approx(1)
    assert found["standings"][1]["diff_to_leader"]["mean"] == pytest.approx(-3), "a point on each of three scales"
    assert sum(found["attribution"].values()) == pytest.approx(1)
    assert (found["rubric"], found["judges"], found["provisional"]) == ("tip-v1", ["anna"], False)


def test_the_table_has_the_summary_card_above_and_the_attribution_below() -> None:
    result = compare(JUDGED)
    card, _, rest = result.stdout.partition("\n\n")
    lines = rest.splitlines()
    assert card.startswith(f"Use {BEST}\n{BEST}: 15.8 of 17, ")
    assert f"{BEST} leads over 8 scenarios" in card
    assert card.splitlines()[-1].startswith(f"Next: record it: tipbench decide --choose {BEST}")
    assert lines[0].split()[:5] == ["rank", "model", "prompt", "composite", "standing"]
    (leader,) = [line for line in lines if "leader " in line and "good:1b" in line]
    assert leader.split()[:3] == ["1", "good:1b", "v1"]
    assert lines[-2].startswith("What explains the differences: model ")
    assert "note: 4 runs under other conditions are excluded; --where conditions=" in result.stderr


def test_the_same_data_give_the_same_bytes_in_every_form() -> None:
    for form in ("table", "json", "csv", "md"):
        assert compare(JUDGED, "--format", form).stdout == compare(JUDGED, "--format", form).stdout
    assert compare(JUDGED, "--json").stdout == compare(JUDGED, "--format", "json").stdout


def test_csv_has_a_line_for_each_row_with_the_numbers_of_the_json() -> None:
    rows = list(csv.DictReader(io.StringIO(compare(JUDGED, "--format", "csv").stdout)))
    standings = compare(JUDGED, "--json").json["standings"]
    assert [float(row["composite"]) for row in rows] == [standing["composite"] for standing in standings]
    assert [row["standing"] for row in rows] == ["leader", "separated", "separated", "separated"]
    assert rows[0]["diff_to_leader_mean"] == ""
    assert float(rows[1]["diff_to_leader_p"]) == standings[1]["diff_to_leader"]["p"]


def test_markdown_is_ready_for_a_pull_request() -> None:
    text = compare(JUDGED, "--format", "md").stdout
    assert text.startswith(f"## {JUDGED}\n\n**{BEST} leads")
    assert text.count("\n| ") == 6
    assert "judged by anna." in text


def test_the_experiment_may_be_an_argument_an_option_or_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    text = compare(JUDGED, "--format", "csv").stdout
    assert compare("--experiment", JUDGED, "--format", "csv").stdout == text
    monkeypatch.setenv("TIPBENCH_EXPERIMENT", JUDGED)
    assert compare("--format", "csv").stdout == text


def test_a_board_is_kept_once_until_it_changes(filled_mlflow: str) -> None:
    def count_boards() -> int:
        return len(recorded_runs(filled_mlflow, LATER, "leaderboard"))

    compare(LATER)
    compare(LATER, "--format", "csv")
    assert count_boards() == 1
    compare(LATER, "--baseline", BEST)
    assert count_boards() == 2


def test_differences_to_a_baseline_are_shown_with_those_to_the_leader() -> None:
    found = compare(JUDGED, "--baseline", WORST, "--json").json
    assert name_of(found["baseline"]) == WORST
    rows = {name_of(row): row for row in found["standings"]}
    assert rows[WORST]["diff_to_baseline"] is None
    assert rows[BEST]["diff_to_baseline"]["mean"] == -rows[WORST]["diff_to_leader"]["mean"] > 0
    assert "to baseline" in compare(JUDGED, "--baseline", WORST).stdout


def test_models_or_prompts_can_be_ranked_separately() -> None:
    models = compare(JUDGED, "--by", "model", "--json").json
    assert [(row["model"], row["prompt_version"]) for row in models["standings"]] == [("good:1b", "*"), ("bad:1b", "*")]
    assert models["verdict"]["decided"]
    prompts = compare(JUDGED, "--by", "prompt", "--json").json
    assert [row["prompt_version"] for row in prompts["standings"]] == ["v1", "v2-mentor"]


def test_a_baseline_among_models_or_prompts_is_named_as_the_table_names_it() -> None:
    for by, name, full in [("model", "bad:1b", "bad:1b/*"), ("prompt", "v2-mentor", "*/v2-mentor")]:
        alone = compare(JUDGED, "--by", by, "--baseline", name, "--json")
        assert name_of(alone.json["baseline"]) == full
        assert compare(JUDGED, "--by", by, "--baseline", full, "--json").stdout == alone.stdout


def test_clustering_by_persona_needs_enough_personas() -> None:
    found = compare(JUDGED, "--cluster", "persona", "--json").json
    assert (found["cluster"], found["verdict"]["decided"]) == ("persona", False)
    assert "leads over 4 personas" in found["verdict"]["text"]
    assert "Too few personas" in found["verdict"]["text"]


def test_where_filters_the_board() -> None:
    found = compare(JUDGED, "--where", "model=good:1b", "--json").json
    assert {row["model"] for row in found["standings"]} == {"good:1b"}
    one = compare(JUDGED, "--where", "scenario=nurse@morning", "--where", "prompt=v1", "--json").json
    assert [(name_of(row), row["n_scenarios"]) for row in one["standings"]] == [(BEST, 1), (WORST, 1)]
    assert one["verdict"]["decided"] is False


def test_an_excluded_name_that_matches_no_row_is_a_warning() -> None:
    result = compare(JUDGED, "--exclude", "god:1b", "--exclude", WORST, "--json")
    assert WORST not in {name_of(row) for row in result.json["standings"]}
    assert [line for line in result.stderr.splitlines() if "warning" in line] == [
        f"warning: --exclude god:1b matches no row of {JUDGED}"
    ]


def test_excluded_conditions_can_be_shown_with_the_command_of_the_note() -> None:
    message = re.search(r"--where (conditions=\w+) to show them", compare(JUDGED).stderr)
    assert message is not None
    found = compare(JUDGED, "--where", message.group(1), "--json").json
    assert (found["conditions"]["temperature"], found["verdict"]["leader"]) == ("0.2", None)
    assert [(row["judged"], row["total"]) for row in found["standings"]] == [(0, 2), (0, 2)]


def test_the_board_of_one_judge_can_be_shown() -> None:
    assert compare(JUDGED, "--judge", "anna", "--json").json["judges"] == ["anna"]
    result = invoke("compare", JUDGED, "--judge", "ben")
    assert (result.code, result.stdout) == (3, "")
    assert "No score of ben counts here; scores of anna count." in result.stderr


def test_a_report_and_charts_are_written_in_addition_to_the_board(tmp_path: Path) -> None:
    page, svg, png = tmp_path / "report.html", tmp_path / "forest.svg", tmp_path / "forest.PNG"
    result = compare(JUDGED, "--html", str(page), "--plot", str(svg))
    assert f"report: {page}" in result.stderr
    assert f"chart: {svg}" in result.stderr
    assert BEST in page.read_text("utf-8")
    assert ET.fromstring(svg.read_text("utf-8")).tag.endswith("svg")  # noqa: S314 - our own
    compare(JUDGED, "--plot", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_judged_cells_the_board_has_nulls_and_the_next_step() -> None:
    result = compare(FRESH)
    assert result.stdout.startswith("Not judged yet\n8 answers of 4 pairs wait for a judge.\nNext: ")
    assert "note: Not judged yet. Create a sheet for a judge with `tipbench judge export`" in result.stderr
    found = compare(FRESH, "--json").json
    verdict = found["verdict"]
    assert (verdict["leader"], verdict["decided"], verdict["tied_with_leader"]) == (None, False, [])
    assert (found["rubric"], found["attribution"], found["judges"]) == (None, None, [])
    for row in found["standings"]:
        ranks, scores = ("rank", "rank_low", "rank_high", "p_best"), ("composite", "ci_low", *SCALES)
        assert {row[name] for name in (*ranks, *scores)} == {None}
        assert (row["judged"], row["total"], row["flags"]) == (0, 2, ["incomplete"])


def test_provisional_scores_are_marked_until_people_have_judged() -> None:
    result = invoke("judge", "run", "--experiment", RULED, "--with", "rules")
    assert result.code == 0, result.stderr
    assert "note: Provisional: scored by rules, not by people." in compare(RULED).stderr
    found = compare(RULED, "--json").json
    assert (found["provisional"], found["judges"]) == (True, ["rules"])
    assert found["verdict"]["leader"] is not None
    assert {row["judged"] for row in found["standings"]} == {2}
    assert compare(JUDGED, "--json").json["provisional"] is False


def test_two_experiments_are_compared_pair_by_pair() -> None:
    result = compare(JUDGED, LATER)
    assert result.stdout.startswith(f"Better in {LATER}: {WORST}, {LAST}; 2 of 4 pairs are not clearly different")
    found = compare(JUDGED, LATER, "--json").json
    assert found["experiments"] == [JUDGED, LATER]
    rows = {name_of(row): row for row in found["pairs"]}
    assert rows[BEST]["diff"]["mean"] == 0.0
    assert rows[WORST]["diff"]["mean"] >= 3
    assert rows[WORST]["second"] - rows[WORST]["first"] == pytest.approx(rows[WORST]["diff"]["mean"])
    assert {row["n_scenarios"] for row in found["pairs"]} == {8}
    table = list(csv.DictReader(io.StringIO(compare(JUDGED, "--experiment", LATER, "--format", "csv").stdout)))
    assert [float(row["diff"]) for row in table] == [row["diff"]["mean"] for row in found["pairs"]]
    assert compare(JUDGED, LATER, "--format", "md").stdout.count("\n| ") == 6


def test_pairs_of_other_names_are_compared_when_mapped() -> None:
    found = compare(JUDGED, LATER, "--map", f"{BEST}={SECOND}", "--json").json
    (row,) = [row for row in found["pairs"] if "mapped_to" in row]
    assert (name_of(row), name_of(row["mapped_to"])) == (BEST, SECOND)
    assert row["diff"]["mean"] == pytest.approx(-3)


def test_invalid_options_are_usage_errors_before_anything_is_printed() -> None:
    for options, message in [
        (("mine",), "starts with tip-bench- (got 'mine')"),
        (("--experiment", "mine"), "starts with tip-bench- (got 'mine')"),
        ((JUDGED, "--baseline", "good:1b"), "--baseline takes MODEL/PROMPT (got 'good:1b')"),
        ((JUDGED, "--baseline", ""), "--baseline takes MODEL/PROMPT"),
        ((JUDGED, "--baseline", "nosuch:1b/v1"), f"The pair nosuch:1b/v1 is not on this board. Available: {WORST}"),
        ((JUDGED, "--by", "model", "--baseline", "nosuch"), "Available: bad:1b/* and good:1b/*."),
        ((JUDGED, "--where", "model"), "--where takes key=value (got 'model')"),
        ((JUDGED, "--where", "kind=judging"), "excludes every cell"),
        (
            (JUDGED, "--where", "model=a", "--where", "model=b"),
            "--where has two values for params.model, a and b",
        ),
        ((JUDGED, "--plot", "forest.jpg"), "ends in .png or .svg (got 'forest.jpg')"),
        ((JUDGED, "--plot", "no/such/forest.png"), "the folder no/such does not exist"),
        ((JUDGED, "--html", "no/such/report.html"), "is in a folder that does not exist"),
        ((JUDGED, "--html", "."), "is a folder"),
        ((JUDGED, "--judge", "rules"), "--judge takes a name other than 'rules'"),
        ((JUDGED, "--judge", "anna", "--provisional"), "Choose one"),
        ((JUDGED, "--map", f"{BEST}={WORST}"), "--map needs two experiments"),
        ((JUDGED, JUDGED), "is given twice"),
        ((JUDGED, LATER, FRESH), "Name one experiment to rank or two to compare (got 3)"),
        ((JUDGED, LATER, "--baseline", BEST), "--baseline cannot be used with two experiments"),
        ((JUDGED, LATER, "--map", BEST), "--map must be PAIR1=PAIR2"),
        ((JUDGED, LATER, "--map", f"{BEST}=nosuch/v1"), "The pair nosuch/v1 is not on this board"),
        ((JUDGED, "--format", "xml"), "'xml' is not one of"),
        ((JUDGED, "--by", "persona"), "--by"),
        ((JUDGED, "--cluster", "slot"), "--cluster"),
        ((JUDGED, "--mlflow-url", "file:///runs"), "file:///runs"),
    ]:
        assert message in usage_error("compare", *options)


def test_too_little_data_is_exit_3() -> None:
    for options, message in [
        (("tip-bench-nosuch",), "Unknown experiment tip-bench-nosuch in MLflow at "),
        ((JUDGED, "tip-bench-nosuch"), "Unknown experiment tip-bench-nosuch"),
        ((EMPTY,), "No cells match"),
        ((JUDGED, "--where", "model=nosuch"), "No cells match"),
        ((JUDGED, "--where", "nosuch tag=`'\"\\"), "No cells match"),
        ((JUDGED, FRESH), f"Judge {FRESH} first, or pass --provisional"),
    ]:
        result = invoke("compare", *options)
        assert (result.code, result.stdout) == (3, "")
        assert message in result.stderr


def test_mixed_rubrics_are_refused_and_one_of_them_can_be_selected() -> None:
    result = invoke("compare", MIXED)
    assert (result.code, result.stdout) == (1, "")
    assert "different rubrics" in result.stderr
    assert "judge export --rejudge" in result.stderr
    tag = load_suite("tips").rubric.tag
    assert compare(MIXED, "--where", f"scores_rubric={tag}", "--json").json["rubric"] == "tip-v1"


def test_an_unavailable_server_is_exit_1() -> None:
    result = invoke("compare", JUDGED, "--mlflow-url", f"http://127.0.0.1:{free_port()}")
    assert (result.code, result.stdout) == (1, "")
    assert "cannot be reached" in result.stderr


@pytest.mark.parametrize(("option", "missing"), [("--html", "altair"), ("--plot", "vl_convert")])
def test_without_the_charts_extra_the_error_has_the_install_command(
    option: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    message = usage_error("compare", JUDGED, option, "report.svg")
    assert f"({missing} is missing)" in message
    assert 'pip install "tipbench[charts]"' in message
    assert not Path("report.svg").exists()
    assert compare(JUDGED).stdout, "the board itself needs no charts"


def use_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)


def strip_ansi(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_narrow_terminal_keeps_the_columns_that_matter_and_folds_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_terminal(monkeypatch, 80)
    show_board(board())
    printed = capsys.readouterr()
    table = strip_ansi(printed.out).split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 80
    assert len(table) == 2 + 12, "no row takes two lines"
    assert re.split(r"\s{2,}", table[0].strip())[:5] == ["rank", "model", "prompt", "composite", "standing"]
    for pair in PAIRS:
        assert any(f" {pair.model} " in line and f" {pair.prompt} " in line for line in table)
    assert re.search("too narrow for .*to leader, p, usable", printed.err)
    assert "--format csv has all columns" in printed.err


def test_a_wide_terminal_shows_every_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_terminal(monkeypatch, 300)
    show_board(board())
    printed = capsys.readouterr()
    assert "tokens/s" in printed.out
    assert "too narrow" not in printed.err


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_in_names_are_not_printed(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if terminal:
        use_terminal(monkeypatch, 300)
    pairs = [Pair(f"{name[:200]}{at}", prompt) for at, name in enumerate(HOSTILE) for prompt in ("v1", "\x1b[2Jv2")]
    show_board(board(pairs, lead=0.2))
    printed = capsys.readouterr()
    for text in (strip_ansi(printed.out), printed.err):
        assert [char for char in text if not char.isprintable() and char != "\n"] == []


def two_lead(run: StoredRun, at: int) -> int:
    """The first two models lead in turn; the other three are much worse."""
    return 3 + (at % 3 == int(run.params["model"][1])) if run.params["model"] in ("m0:1b", "m1:1b") else 1


def test_focus_exports_the_most_informative_cells_of_the_tied_rows(filled_mlflow: str, tmp_path: Path) -> None:
    """Two of five rows tie and two scenarios are pending: only the answers of the two rows to them are exported."""
    experiment, models, out = "tip-bench-compare-focus", [f"m{at}:1b" for at in range(5)], tmp_path / "sheet.json"
    with MlflowStore(filled_mlflow) as store:
        driver = SheetDriver(store, record_cells(store, models=models, experiment=experiment, prompts="v1"))
        cells = driver.cells()
        scenarios = sorted({run.params["scenario"] for run in cells.values()})
        judging = driver.export("anna", everything=True).stored
        raw = fill(judging)
        for run_id, item in items_of(raw, judging).items():
            at = scenarios.index(cells[run_id].params["scenario"])
            for tip in item["tips"]:
                tip["scores"] = dict.fromkeys(tip["scores"], two_lead(cells[run_id], at) if at < 6 else None)
        assert driver.apply(raw).status == "applied"
        where = ("--experiment", experiment, "--judge", "anna", "--out", str(out))
        result = invoke("judge", "export", "--focus", "--seed", "1", *where)
        assert result.code == 0, result.stderr
        assert "in focus: 2 pairs in 2 scenarios" in result.stderr
        assert not any(model in result.stderr for model in models), "the sheet and the message about it are blind"
        sheet = json.loads(out.read_text("utf-8"))["sheet"]
        found = find_sheet(store, driver.experiment, sheet)
    assert found is not None
    runs = [cells[entry.run_id] for entry in found.entries if entry.kind is ItemKind.CELL and entry.run_id]
    assert sorted((run.params["model"], run.params["scenario"]) for run in runs) == [
        (model, scenario) for model in ("m0:1b", "m1:1b") for scenario in scenarios[6:]
    ]


def test_focus_without_a_tie_reports_what_it_needs(tmp_path: Path) -> None:
    for experiment in [JUDGED, FRESH]:
        out = tmp_path / "sheet.json"
        result = invoke("judge", "export", "--focus", "--experiment", experiment, "--out", str(out))
        assert (result.code, result.stdout, out.exists()) == (3, "", False)
        assert "focus needs judged cells, a leader with tied pairs, and unjudged cells of these" in result.stderr
