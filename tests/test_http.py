"""URLs: validation, the server they refer to, and how they are shown."""

from __future__ import annotations

import pytest

from tipbench.errors import UsageError
from tipbench.http import canonical_url, http_client, is_http_url, is_loopback, strip_login


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.2", "http://[::1]:1", "https://a.localhost."])
def test_this_machine_is_recognised_by_all_its_names(url: str) -> None:
    assert is_loopback(url)


@pytest.mark.parametrize("url", ["http://localhost.example", "http://10.0.0.1", "http://box", "nonsense", ""])
def test_another_machine_is_not_this_one(url: str) -> None:
    assert not is_loopback(url)


@pytest.mark.parametrize("url", ["http://[::1", "http://a:99999", "http://a:0", "http:// a", "ftp://a", "http://", "a"])
def test_invalid_web_addresses_are_recognised(url: str) -> None:
    assert not is_http_url(url)


def test_a_login_is_never_shown() -> None:
    assert strip_login("http://ann:se@cret@box:1/x") == "http://box:1/x"
    assert canonical_url("https://ann:secret@Box/") == "https://box:443"


def test_an_invalid_proxy_is_reported_without_logins_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "foo://ann:login@proxy.example")
    with pytest.raises(UsageError, match=r"ALL_PROXY=foo://proxy\.example\b.*reach http://hook\.example\.") as caught:
        http_client("http://bob:login@hook.example/login")
    assert "login" not in str(caught.value)
