"""Options of the webhook: allowed hosts, and a secret that is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tipbench.errors import UsageError
from tipbench.settings import load_settings
from tipbench.web.webhook import WebhookOptions, read_webhook_options, shown_address
from web.hook_receiver import SECRET


def options_of(tmp_path: Path, **variables: str) -> WebhookOptions | None:
    known = {"TIPBENCH_HOOK_SECRET": SECRET} | {
        f"TIPBENCH_HOOK_{key.upper()}": value for key, value in variables.items()
    }
    return read_webhook_options(load_settings({"TIPBENCH_HOME": str(tmp_path), **known}, tmp_path))


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("http://127.0.0.1:9000/hook", ""),
        ("http://localhost/hook", ""),
        ("http://[::1]:9000/hook", ""),
        ("https://judge.example.org/hook?key=1", "other.example.org,judge.example.org"),
        ("https://JUDGE.example.org.:8443/hook", "Judge.Example.org"),
        ("http://judge:8080/hook", "http://judge"),
        ("https://[fd00::7]/hook", "fd00::7"),
        ("https://[fd00::7]:8443/hook", "[fd00::7]"),
        ("https://judge.example.org/hook", "HTTPS://Judge.example.org"),
        ("http://judge:8080/hook", "HTTP://Judge"),
    ],
)
def test_loopback_and_listed_hosts_are_allowed(tmp_path: Path, url: str, hosts: str) -> None:
    options = options_of(tmp_path, url=url, hosts=hosts)
    assert options is not None
    assert (options.url, options.watch_s) == (url, 30.0)


@pytest.mark.parametrize(
    ("url", "hosts", "word"),
    [
        ("https://judge.example.org/hook", "", "TIPBENCH_HOOK_HOSTS=judge.example.org"),
        ("https://judge.example.org/hook", "example.org", "hook_hosts"),
        ("https://judge.example.org.evil.example/hook", "judge.example.org", "hook_hosts"),
        ("https://judge.example.org:443@evil.example/hook", "judge.example.org", "credentials"),
        ("http://judge.example.org/hook", "judge.example.org", "plain HTTP"),
        ("http://169.254.169.254/latest", "judge.example.org", "hook_hosts"),
        ("http://127.0.0.1.evil.example/", "", "hook_hosts"),
        ("https://me:s3cret@judge.example.org/", "judge.example.org", "credentials"),
        ("ftp://127.0.0.1/", "", "HTTP URL"),
        ("judge", "", "HTTP URL"),
        ("https://judge.example.org/", "judge.example.org:443", "without ports"),
        ("https://judge.example.org/", "https://judge.example.org/x", "without ports"),
        ("https://[fd00::7]:8443/", "[fd00::7]:8443", "without ports"),
    ],
)
def test_a_webhook_url_that_is_not_allowed_is_rejected_at_startup(
    tmp_path: Path, url: str, hosts: str, word: str
) -> None:
    with pytest.raises(UsageError) as caught:
        options_of(tmp_path, url=url, hosts=hosts)
    assert word in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_without_an_address_there_is_no_webhook(tmp_path: Path) -> None:
    assert options_of(tmp_path) is None


@pytest.mark.parametrize("secret", ["", "short", "é" * 30, "a" * 201])
def test_a_missing_or_short_webhook_secret_is_rejected_and_not_shown(tmp_path: Path, secret: str) -> None:
    with pytest.raises(UsageError) as caught:
        options_of(tmp_path, url="http://localhost/", secret=secret)
    assert "TIPBENCH_HOOK_SECRET" in str(caught.value)
    assert not secret or secret not in str(caught.value)


def test_the_webhook_secret_is_not_read_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "tipbench.toml").write_text(f'hook_secret = "{SECRET}"\n')
    with pytest.raises(UsageError, match="unknown key 'hook_secret'"):
        options_of(tmp_path, url="http://localhost/")


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "1e9"])
def test_an_invalid_interval_between_checks_is_refused(tmp_path: Path, seconds: str) -> None:
    with pytest.raises(UsageError, match="TIPBENCH_HOOK_WATCH_S"):
        options_of(tmp_path, url="http://localhost/", watch_s=seconds)


def test_printed_options_contain_neither_secret_nor_path_nor_query(tmp_path: Path) -> None:
    options = options_of(tmp_path, url="http://localhost/hook?key=s3cret")
    assert "s3cret" not in repr(options)
    assert SECRET not in repr(options)
    assert shown_address("http://me:p@ss@localhost:99/s3cret?key=s3cret#s3cret") == "http://localhost:99/…"
    assert shown_address("s3cret") == "not an address"
