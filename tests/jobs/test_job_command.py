"""Job requests and the arguments of their commands: complete, safe, and without secrets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command_list import COMMANDS
from tipbench.errors import UsageError
from tipbench.jobs.command import collect_request, command_arguments, judge_request
from tipbench.jobs.job import JobKind, JobRequest
from tipbench.plan.collect_config import CollectConfig, make_config
from tipbench.workflows.judging import JUDGE_OPTIONS

OLLAMA = "http://localhost:11434"
LOCAL_SERVER = "Ollama at http://localhost:11434"
RULES = {"with": "rules", "experiment": "tip-bench-a"}


def parse_options(words: tuple[str, ...]) -> dict[str, Any]:
    """The parameters as the real command line parses them."""
    path = words[:2] if words[0] == "judge" else words[:1]
    command = COMMANDS[path]
    with command.make_context("tipbench", list(words[len(path) :]), resilient_parsing=False) as context:
        return dict(context.params)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "models": st.sampled_from(["-x", "--evict", "a:1b,b:1b", "embedded:smollm2:135m"]),
            "experiment": st.sampled_from(["tip-bench-a", "tip-bench- --evict", "tip-bench-'; rm -rf ~"]),
            "n_tips": st.integers(1, 50),
            "temperature": st.floats(0, 5),
            "evict": st.booleans(),
            "wait": st.booleans(),
            "unload": st.sampled_from(["model", "call"]),
            "mlflow_url": st.none() | st.just("http://box:5000"),
        },
    )
)
def test_the_command_line_accepts_exactly_the_configuration(values: dict[str, Any]) -> None:
    config = make_config(values)
    understood = parse_options(command_arguments(collect_request(config)))
    given_back = {key: understood[key] for key in CollectConfig.model_fields if understood[key] is not None}
    assert make_config(given_back) == config


def test_a_judges_options_are_those_of_the_command() -> None:
    params = COMMANDS["judge", "run"].params
    known = {name.removeprefix("--").replace("-", "_") for option in params for name in option.opts}
    assert known >= set(JUDGE_OPTIONS)
    assert known - set(JUDGE_OPTIONS) <= {"json", "help", "h"}


def test_a_judge_request_becomes_its_command() -> None:
    options = {
        **RULES,
        "with": "command:python judge.py --all",
        "judge": "ben",
        "limit": 40,
        "all": True,
        "rejudge": False,
    }
    request = judge_request(options, ollama_url=OLLAMA)
    understood = parse_options(command_arguments(request))
    assert (request.kind, request.experiment) == (JobKind.JUDGE, "tip-bench-a")
    assert (understood["with_"], understood["judge"], understood["limit"]) == (
        "command:python judge.py --all",
        "ben",
        40,
    )
    assert (understood["all_"], understood["rejudge"]) == (True, False)


def test_an_invalid_judge_request_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"with": ""}, "with takes"),
        ({"with": None}, "with takes"),
        ({"with": "judge"}, "with takes"),
        ({"batch": 3}, "batch applies only to command:"),
        ({"evict": True}, "evict applies only to ollama:"),
        ({"with": "command:x", "num_ctx": 512}, "num-ctx applies only to ollama:"),
    ]
    for change, message in cases:
        with pytest.raises(UsageError, match=message):
            judge_request({**RULES, **change}, ollama_url=OLLAMA)


def test_the_operators_program_goes_into_the_environment_and_nowhere_else() -> None:
    request = judge_request({**RULES, "with": "command"}, ollama_url=OLLAMA, program="scribe --key hidden")
    assert request.private == {"TIPBENCH_JUDGE_COMMAND": "scribe --key hidden"}
    assert parse_options(command_arguments(request))["with_"] == "command"
    assert "hidden" not in repr(request) + " ".join(command_arguments(request))
    with pytest.raises(UsageError, match="with takes"):
        judge_request({**RULES, "with": "command"}, ollama_url=OLLAMA)


def test_a_login_goes_into_the_environment_and_nowhere_else() -> None:
    config = make_config({"mlflow_url": "https://anna:pw@box/mlflow", "ollama_url": "http://tok@gpu:11434"})
    request = collect_request(config)
    words = " ".join(command_arguments(request))
    assert request.private == {
        "TIPBENCH_MLFLOW_URL": "https://anna:pw@box/mlflow",
        "TIPBENCH_OLLAMA_URL": "http://tok@gpu:11434",
    }
    assert "--mlflow-url" not in words, "a flag would be stronger than the variable"
    assert request.arguments["mlflow_url"] == "https://box/mlflow"
    assert not any(secret in words + repr(request) for secret in ("anna", "pw@", "tok"))


def resources_of(**values: object) -> tuple[str, ...]:
    return collect_request(make_config({"experiment": "tip-bench-a", **values})).resources


def test_a_collect_needs_its_server_and_its_models_in_the_experiment() -> None:
    assert resources_of(models="a:1b,b:1b") == (LOCAL_SERVER, "a:1b for tip-bench-a", "b:1b for tip-bench-a")


def test_one_server_has_one_resource_name_for_all_spellings() -> None:
    assert resources_of(models="a:1b", ollama_url="http://127.0.0.1:11434/")[0] == LOCAL_SERVER
    assert resources_of(models="a:1b", ollama_url="http://box")[0] == "Ollama at http://box:80"


def test_the_embedded_model_excludes_itself_and_the_ollama_of_this_machine() -> None:
    embedded = "the embedded model on this machine"
    mine = resources_of(models="embedded:smollm2:135m")
    assert {embedded, LOCAL_SERVER} <= set(mine)
    elsewhere = resources_of(models="embedded:smollm2:135m", ollama_url="http://box:1")
    assert embedded in elsewhere
    assert not any(name.startswith("Ollama") for name in elsewhere)


def test_the_template_needs_no_server() -> None:
    assert resources_of(models="baseline:template") == ("baseline:template for tip-bench-a",)


def test_a_judge_needs_itself_and_the_server_only_if_it_is_a_model() -> None:
    for with_, needed in [("rules", ()), ("ollama:a:1b", (LOCAL_SERVER,)), ("command:x", ())]:
        own = f"judge {with_} in tip-bench-a"
        assert judge_request({**RULES, "with": with_}, ollama_url=OLLAMA).resources == (*needed, own)


def test_an_embedded_model_that_judges_occupies_its_own_memory() -> None:
    embedded = "embedded:smollm2:135m"
    request = judge_request({**RULES, "with": f"ollama:{embedded}"}, ollama_url="http://box:1")
    assert set(request.resources) == {"the embedded model on this machine", f"judge ollama:{embedded} in tip-bench-a"}


def test_programs_of_one_judge_name_exclude_each_other() -> None:
    first, second = (
        judge_request({**RULES, "with": f"command:{program}", "judge": "ben"}, ollama_url=OLLAMA)
        for program in ("one", "two")
    )
    assert first.resources == second.resources


def test_a_request_shows_no_secret() -> None:
    request = JobRequest(JobKind.COLLECT, "tip-bench-a", {}, {"TIPBENCH_MLFLOW_URL": "secret"})
    assert "secret" not in repr(request)
