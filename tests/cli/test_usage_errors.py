"""A user's mistake gives exit code 2 and one or two sentences that name the place, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from invoke_command import invoke, usage_error

from support.command import tipbench


def test_an_experiment_of_another_name_is_refused() -> None:
    for command in [("collect",), ("plan",), ("runs", "list"), ("runs", "show", "abc")]:
        message = usage_error(*command, "--experiment", "my-bench")
        assert message.startswith("error: --experiment: ")
        assert "tip-bench-" in message
        assert "'my-bench'" in message


def test_an_unknown_option_is_refused() -> None:
    assert "--bogus" in usage_error("collect", "--bogus")


def test_an_unknown_command_is_refused() -> None:
    assert "bogus" in usage_error("bogus")


def test_a_bad_value_is_named_by_its_flag() -> None:
    for flag, value in [
        ("--n-tips", "many"),
        ("--n-tips", "99"),
        ("--temperature", "hot"),
        ("--temperature", "nan"),
        ("--unload", "never"),
        ("--models", " , "),
        ("--models", "two words"),
        ("--concurrency", "0"),
        ("--ollama-url", "localhost:11434"),
        ("--mlflow-url", "file:///runs"),
        ("--max-model-b", "-1"),
    ]:
        assert usage_error("collect", flag, value).startswith(f"error: {flag}: ")


def test_a_bad_value_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIPBENCH_N_TIPS", "99")
    message = usage_error("plan")
    assert message.startswith("error: TIPBENCH_N_TIPS: ")
    assert "'99'" in message


def test_a_bad_value_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tipbench.toml").write_text("n_tips = 99\n")
    assert f"error: {tmp_path}/tipbench.toml: n_tips: " in usage_error("plan")


def test_two_bad_values_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIPBENCH_SEED", "-1")
    message = usage_error("collect", "--n-tips", "0")
    assert "--n-tips: " in message
    assert "TIPBENCH_SEED: " in message


def test_a_broken_toml_file_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tipbench.toml").write_text("n_tips = 3\nn_tips = = 4\n")
    message = usage_error("plan")
    assert "tipbench.toml" in message
    assert "line 2" in message


def test_an_answer_longer_than_the_context_is_refused() -> None:
    message = usage_error("collect", "--num-ctx", "512", "--num-predict", "512")
    assert "num_predict (512) must be smaller than num_ctx (512)" in message


def test_an_unknown_suite_is_refused() -> None:
    assert "unknown suite" in usage_error("collect", "--suite", "nosuch")


def test_a_broken_suite_is_refused_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "suite.toml").write_text('name = "broken"\ntitle = "Broken"\nextends = "tips"\nbogus = 1\n')
    assert f"{tmp_path}/suite.toml:4: " in usage_error("plan", "--suite", str(tmp_path))


def test_an_unknown_prompt_is_refused_with_the_known_ones() -> None:
    message = usage_error("collect", "--prompts", "v9")
    assert "v9" in message
    assert "v2-mentor" in message


def test_a_filter_without_key_and_value_is_refused() -> None:
    for where in ["model", "=x", "", """it's "quoted" \\ 100%"""]:
        assert "--where takes key=value" in usage_error("runs", "list", "--where", where)


def test_an_unknown_judge_is_refused_before_mlflow_is_opened() -> None:
    for judge in ("nonsense", "rules:strict", "ollama:", "command:", "command: "):
        assert f"--with takes rules, command:PROGRAM or ollama:MODEL (got '{judge}')" in usage_error(
            "judge", "run", "--with", judge, "--mlflow-url", "http://127.0.0.1:9"
        )


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    for command in (("serve", "--port", "0", "--active"), ("simulate", "--no-record", "--policies")):
        message = usage_error(*command, "egreedy/v9")
        assert "no policy 'egreedy/v9'" in message
        assert "egreedy/v1" in message


def test_a_reason_without_the_policy_that_it_is_for_is_refused() -> None:
    message = usage_error("serve", "--unchecked", "first start")
    assert message.startswith("error: --unchecked needs --active")


def test_an_unknown_state_is_refused() -> None:
    assert "pending, judged, failed" in usage_error("runs", "list", "--state", "done")


def test_an_invalid_mlflow_address_is_refused() -> None:
    for url in ["localhost:5000", "sqlite:///mlflow.db", "http://"]:
        assert "URL" in usage_error("runs", "list", "--mlflow-url", url)


def test_a_port_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "box:eleven")
    assert "OLLAMA_HOST is 'box:eleven'" in usage_error("models", "list")


def test_a_home_that_cannot_be_created_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIPBENCH_HOME", str(tmp_path / "file" / "home"))
    assert "Set TIPBENCH_HOME" in usage_error("collect", "--models", "baseline:template")
    assert "Set TIPBENCH_HOME" in usage_error("mlflow", "up")


@pytest.mark.process
def test_the_real_command_exits_with_the_same_error(home: Path) -> None:
    done = tipbench("collect", "--n-tips", "99", home=home, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: --n-tips: ")
    assert done.stderr.count("\n") == 1


def test_a_usage_error_writes_no_file(home: Path) -> None:
    invoke("collect", "--n-tips", "99")
    assert not home.exists()


def test_a_file_where_a_folder_of_the_home_should_be_is_named(home: Path) -> None:
    home.mkdir()
    for name in ["locks", "mlflow"]:
        (home / name).touch()
        command = ("mlflow", "up") if name == "mlflow" else ("collect", "--mlflow-url", "http://127.0.0.1:9")
        message = usage_error(*command, *(("--models", "baseline:template") if name == "locks" else ()))
        assert f"{home / name} cannot be created: File exists. Set TIPBENCH_HOME" in message


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1080", "foo://ann:secret@proxy.example"])
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--models", "alpha:135m", "--ollama-url", "http://ollama.example:11434"),
        ("experiments", "--mlflow-url", "http://mlflow.example:5000"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(
    proxy: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    message = usage_error(*command)
    assert f"ALL_PROXY={proxy.replace('ann:secret@', '')}" in message
    assert "secret" not in message
