"""The panel's settings: read from flags, variables and the file, and checked before anything listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tipbench.errors import UsageError
from tipbench.settings import SETTINGS, load_settings
from tipbench.web.options import PanelOptions, panel_options


def options_of(tmp_path: Path, text: str = "", **variables: str) -> PanelOptions:
    (tmp_path / "tipbench.toml").write_text(text)
    return panel_options(load_settings({"TIPBENCH_HOME": str(tmp_path / "home"), **variables}, tmp_path))


def test_the_defaults_of_the_table_are_the_ones_that_apply(tmp_path: Path) -> None:
    options, table = options_of(tmp_path), {setting.key: setting for setting in SETTINGS}
    assert options.host == table["panel_host"].default
    assert str(options.port) == table["panel_port"].default
    assert options.session_s == int(table["panel_session_hours"].default) * 3600
    assert (options.proxies, options.ollama_urls, options.mlflow_urls, options.suites) == ((), (), (), ())
    assert options.admin_token is None


def test_every_option_of_the_panel_has_a_variable_of_its_name() -> None:
    ours = [setting for setting in SETTINGS if setting.key.startswith("panel_")]
    assert len(ours) == 8
    assert all(setting.variables == (f"TIPBENCH_{setting.key.upper()}",) for setting in ours)


def test_lists_are_read_from_the_file_and_from_variables(tmp_path: Path) -> None:
    text = 'panel_hosts = ["a.example", "b.example"]\npanel_urls = "http://x:1, http://y:2"\npanel_port = 8080\n'
    options = options_of(tmp_path, text, TIPBENCH_PANEL_PROXIES="127.0.0.1, 10.0.0.0/8,")
    assert {"a.example", "b.example"} <= options.hosts.names
    assert options.ollama_urls == ("http://x:1", "http://y:2")
    assert options.proxies == ("127.0.0.1", "10.0.0.0/8")
    assert options.port == 8080


def test_a_flag_comes_before_the_settings(tmp_path: Path) -> None:
    settings = load_settings({"TIPBENCH_HOME": str(tmp_path), "TIPBENCH_PANEL_PORT": "1"}, tmp_path)
    assert panel_options(settings, host="::1", port=2) == panel_options(settings, host="[::1]", port=2)
    assert panel_options(settings, port=2).port == 2


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("gpu-box", False)],
)
def test_listening_beyond_loopback_is_detected(tmp_path: Path, host: str, loopback: bool) -> None:
    assert options_of(tmp_path, TIPBENCH_PANEL_HOST=host).on_loopback is loopback


def test_the_address_it_listens_on_is_a_name_for_it_but_every_address_is_not(tmp_path: Path) -> None:
    assert options_of(tmp_path, TIPBENCH_PANEL_HOST="10.0.0.7").hosts.allows("10.0.0.7:5180")
    assert options_of(tmp_path, TIPBENCH_PANEL_HOST="0.0.0.0").hosts.names == frozenset()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PANEL_HOST", "http://x", "--host must be"),
        ("PANEL_HOST", "localhost:80", "--host must be"),
        ("PANEL_PORT", "70000", "TIPBENCH_PANEL_PORT: "),
        ("PANEL_PORT", "x", "TIPBENCH_PANEL_PORT: "),
        ("PANEL_PORT", "٣", "TIPBENCH_PANEL_PORT: "),
        ("PANEL_HOSTS", "*.example", "panel_hosts must be"),
        ("PANEL_PROXIES", "*", "TIPBENCH_PANEL_PROXIES: "),
        ("PANEL_URLS", "gpu-box:11434", "TIPBENCH_PANEL_URLS: "),
        ("PANEL_SESSION_HOURS", "0", "TIPBENCH_PANEL_SESSION_HOURS: "),
        ("PANEL_SESSION_HOURS", "nan", "TIPBENCH_PANEL_SESSION_HOURS: "),
        ("PANEL_SESSION_HOURS", "inf", "TIPBENCH_PANEL_SESSION_HOURS: "),
    ],
)
def test_an_invalid_setting_is_named(tmp_path: Path, variable: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options_of(tmp_path, **{f"TIPBENCH_{variable}": value})


@pytest.mark.parametrize("token", ["x" * 31, "x" * 201, "with spaces in between them and more", "ünprintable" * 4])
def test_a_weak_operators_token_is_rejected_and_not_shown(tmp_path: Path, token: str) -> None:
    with pytest.raises(UsageError, match="TIPBENCH_ADMIN_TOKEN must") as caught:
        options_of(tmp_path, TIPBENCH_ADMIN_TOKEN=token)
    assert token not in str(caught.value)


def test_the_admin_token_is_not_read_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown key"):
        options_of(tmp_path, 'admin_token = "aaaaaaaaaaaaaaaaaaaaaaaaa"')
