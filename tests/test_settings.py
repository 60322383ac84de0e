"""Settings: flags over variables over files over defaults, each value with its source, and one complete table."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tipbench.errors import UsageError
from tipbench.plan.collect_config import CollectConfig
from tipbench.settings import SETTINGS, OperatorConfig, find_home, load_settings, parse_ollama_host

BY_KEY = {setting.key: setting for setting in SETTINGS}


def load_config(tmp_path: Path, in_folder: str = "", in_home: str = "", **variables: str) -> CollectConfig:
    """Load the configuration from files in the working folder and the home, and from variables."""
    home = tmp_path / "home"
    for folder, text in ((tmp_path, in_folder), (home, in_home)):
        folder.mkdir(exist_ok=True)
        if text:
            (folder / "tipbench.toml").write_text(text)
    return load_settings({"TIPBENCH_HOME": str(home), **variables}, tmp_path).collect_config({})


def test_the_table_has_every_option_of_collect_with_its_meaning() -> None:
    assert set(CollectConfig.model_fields) <= set(BY_KEY)
    assert all(setting.meaning.endswith(".") for setting in SETTINGS)
    assert all(f"TIPBENCH_{key.upper()}" == BY_KEY[key].variables[0] for key in CollectConfig.model_fields)
    assert len(BY_KEY) == len(SETTINGS)


def test_every_setting_is_typed_and_no_secret_is_shown_or_read_from_a_file() -> None:
    typed = {*CollectConfig.model_fields, *OperatorConfig.model_fields}
    assert set(BY_KEY) - typed == {"home", "events", "no_color"}
    secrets = [key for key in BY_KEY if key.endswith(("password", "token", "secret"))]
    assert len(secrets) == 6
    assert not any(BY_KEY[key].in_file for key in secrets)
    assert "hidden" not in repr(OperatorConfig(**dict.fromkeys(secrets, "hidden")))


def test_the_usual_variables_are_in_the_table() -> None:
    named = {variable for setting in SETTINGS for variable in setting.variables}
    assert {"OLLAMA_HOST", "MLFLOW_TRACKING_URI", "NO_COLOR", "TIPBENCH_HOME"} <= named


def test_the_defaults_of_the_table_are_those_of_collect() -> None:
    given_by_table = {key: BY_KEY[key].default for key in CollectConfig.model_fields if BY_KEY[key].default}
    assert CollectConfig.model_validate(given_by_table) == CollectConfig()


def test_defaults_apply_when_nothing_is_set(tmp_path: Path) -> None:
    assert load_config(tmp_path) == CollectConfig()


def test_the_working_folder_comes_before_the_home_folder(tmp_path: Path) -> None:
    config = load_config(tmp_path, in_folder="n_tips = 4", in_home="n_tips = 3\nseed = 7")
    assert (config.n_tips, config.seed) == (4, 7)


def test_a_variable_comes_before_the_files(tmp_path: Path) -> None:
    assert load_config(tmp_path, in_folder="n_tips = 4", TIPBENCH_N_TIPS="6").n_tips == 6


def test_a_flag_comes_before_everything(tmp_path: Path) -> None:
    settings = load_settings({"TIPBENCH_HOME": str(tmp_path), "TIPBENCH_N_TIPS": "6"}, tmp_path)
    assert settings.collect_config({"n_tips": "8", "seed": None}).n_tips == 8


def test_our_own_variable_comes_before_the_usual_one(tmp_path: Path) -> None:
    config = load_config(tmp_path, TIPBENCH_OLLAMA_URL="http://ours:1", OLLAMA_HOST="theirs:2")
    assert config.ollama_url == "http://ours:1"
    assert load_config(tmp_path, OLLAMA_HOST="theirs:2").ollama_url == "http://theirs:2"


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert load_config(tmp_path, TIPBENCH_N_TIPS="", OLLAMA_HOST="") == CollectConfig()


def test_lists_and_truth_values_are_read_from_every_source(tmp_path: Path) -> None:
    from_file = load_config(tmp_path, in_folder='models = ["a:1b", "b:1b"]\ndiversity = true')
    from_variables = load_config(tmp_path, TIPBENCH_MODELS="a:1b, b:1b", TIPBENCH_DIVERSITY="true")
    assert from_file.model_names == from_variables.model_names == ("a:1b", "b:1b")
    assert from_file.diversity is from_variables.diversity is True


def test_an_unknown_key_is_refused_with_the_file_and_the_known_keys(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tipbench\.toml has an unknown key 'n_tipps'; known are .*n_tips"):
        load_config(tmp_path, in_folder="n_tipps = 3")


@pytest.mark.parametrize("key", ["mlflow_password", "home"])
def test_a_secret_or_the_home_is_not_read_from_a_file(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match="unknown key"):
        load_config(tmp_path, in_folder=f'{key} = "x"')


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tipbench\.toml cannot be read: .*line 1"):
        load_config(tmp_path, in_folder="n_tips 3")


def test_an_invalid_value_is_refused_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tipbench\.toml: n_tips: .*'0'.*TIPBENCH_SEED: .*'x'"):
        load_config(tmp_path, in_folder="n_tips = 0", TIPBENCH_SEED="x")


def test_home_is_the_variable_else_a_local_folder_else_the_users_data(tmp_path: Path) -> None:
    data = {"XDG_DATA_HOME": str(tmp_path / "data")}
    assert find_home(data, tmp_path) == tmp_path / "data" / "tipbench"
    (tmp_path / ".tipbench").mkdir()
    assert find_home(data, tmp_path) == tmp_path / ".tipbench"
    assert find_home({**data, "TIPBENCH_HOME": str(tmp_path / "own")}, tmp_path) == tmp_path / "own"
    assert find_home({}, tmp_path / "elsewhere") == Path.home() / ".local" / "share" / "tipbench"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("box", "http://box:11434"),
        (":8080", "http://127.0.0.1:8080"),
        ("0.0.0.0:1234", "http://127.0.0.1:1234"),
        ("[::1]:1234", "http://[::1]:1234"),
        ("http://box", "http://box:80"),
        ("https://box/ollama/", "https://box:443/ollama"),
    ],
)
def test_ollama_host_is_parsed_as_ollama_does(host: str, url: str) -> None:
    assert parse_ollama_host(host) == url


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_any_ollama_host_is_parsed_or_refused(host: str) -> None:
    with contextlib.suppress(UsageError):
        assert "://" in parse_ollama_host(host)


INSIDE, OUTSIDE = "http://mlflow:5000", "https://mlflow.example/"


def public_url_of(tmp_path: Path, url: str, public: str) -> str | None:
    """Return the address for links to a server when MLflow has a public address."""
    variables = {"MLFLOW_TRACKING_URI": INSIDE, "TIPBENCH_MLFLOW_PUBLIC_URL": public}
    return load_settings(variables, tmp_path).mlflow.public_url_of(url)


def test_an_error_about_a_setting_names_the_file_of_its_value(tmp_path: Path) -> None:
    (tmp_path / "tipbench.toml").write_text('airflow_url = "airflow"\n')
    found = load_settings({"TIPBENCH_HOME": str(tmp_path)}, tmp_path)
    with pytest.raises(UsageError) as error, found.add_source_to_errors():
        raise UsageError("airflow_url takes a web address.")
    assert str(error.value) == f"{tmp_path}/tipbench.toml: airflow_url takes a web address."


def test_links_use_the_public_address_of_the_configured_mlflow_only(tmp_path: Path) -> None:
    assert public_url_of(tmp_path, f"{INSIDE}/", OUTSIDE) == OUTSIDE
    assert public_url_of(tmp_path, "http://another:5000", OUTSIDE) is None
    assert public_url_of(tmp_path, INSIDE, "") is None


@pytest.mark.parametrize("public", ["javascript:alert(1)", "mlflow.example", "https://anna:secret@mlflow.example"])
def test_an_invalid_public_address_is_refused_without_its_login(tmp_path: Path, public: str) -> None:
    with pytest.raises(UsageError, match="mlflow_public_url takes a web address without a login") as caught:
        public_url_of(tmp_path, INSIDE, public)
    assert "secret" not in str(caught.value)


# Files of other users


@pytest.mark.parametrize("key", ["judge_command", "hook_url"])
def test_a_command_or_webhook_is_never_read_from_the_working_folder(tmp_path: Path, key: str) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    for each in (home, folder):
        each.mkdir()
    (folder / "tipbench.toml").write_text(f'{key} = "http://127.0.0.1/planted"\nn_tips = 4\n')
    found = load_settings({"TIPBENCH_HOME": str(home)}, folder)
    assert (found.get(key), found.get("n_tips")) == (None, "4")
    assert found.sources[key].startswith("ignored in ")
    (home / "tipbench.toml").write_text(f'{key} = "http://127.0.0.1/own"\n')
    assert load_settings({"TIPBENCH_HOME": str(home)}, folder).get(key) == "http://127.0.0.1/own"


@pytest.mark.parametrize("place", ["home", "home/tipbench.toml", "tipbench.toml"])
def test_a_home_or_file_of_another_user_is_refused(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / place).is_dir() or (tmp_path / place).write_text("n_tips = 4")
    stat, owner = Path.stat, os.geteuid()

    def stat_as_foreign(path: Path) -> os.stat_result:
        found = stat(path)
        fields = list(found)
        fields[4] = owner + 1 if path == tmp_path / place else found.st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", lambda path, **_: stat_as_foreign(path))
    with pytest.raises(UsageError, match=f"{place} belongs to another user"):
        load_settings({"TIPBENCH_HOME": str(tmp_path / "home")}, tmp_path)


def test_a_file_exchanged_after_its_check_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shared folder another user may exchange a link between the check and the reading."""
    own, foreign, link = tmp_path / "own.toml", tmp_path / "foreign.toml", tmp_path / "tipbench.toml"
    own.write_text("n_tips = 4")
    foreign.write_text("mlflow_url = 'http://elsewhere:5000'")
    foreign.chmod(0o666)
    link.symlink_to(own)
    opened = Path.open

    def open_after_exchange(path: Path, mode: str) -> object:
        if path == link:
            link.unlink()
            link.symlink_to(foreign)
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", open_after_exchange)
    with pytest.raises(UsageError, match="may be changed by other users"):
        load_settings({"TIPBENCH_HOME": str(tmp_path / "home")}, tmp_path)


@pytest.mark.parametrize(("members", "is_accepted"), [([], True), (["me"], True), (["me", "www-data"], False)])
def test_a_group_writable_file_is_accepted_unless_the_group_has_other_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], is_accepted: bool
) -> None:
    path = tmp_path / "tipbench.toml"
    path.write_text("n_tips = 4")
    path.chmod(0o660)
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(grp, "getgrgid", lambda _gid: SimpleNamespace(gr_name="me", gr_mem=members))
    with contextlib.nullcontext() if is_accepted else pytest.raises(UsageError, match="may be changed by other users"):
        assert load_settings({"TIPBENCH_HOME": str(tmp_path / "home")}, tmp_path).collect_config({}).n_tips == 4


@pytest.mark.parametrize("place", ["home", "home/tipbench.toml", "tipbench.toml"])
def test_a_home_or_file_writable_by_others_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "home").mkdir()
    path = tmp_path / place
    path.is_dir() or path.write_text("n_tips = 4")
    path.chmod(0o777 if path.is_dir() else 0o666)
    with pytest.raises(UsageError, match=f"{place} may be changed by other users .* chmod go-w"):
        load_settings({"TIPBENCH_HOME": str(tmp_path / "home")}, tmp_path)
