"""What an address says about where it leads."""

from __future__ import annotations

import pytest

from tipbench.addresses import identity_of, is_loopback, is_web_address, without_login


@pytest.mark.parametrize("url", ["http://localhost:1", "http://127.0.0.2", "http://[::1]:1", "https://a.localhost."])
def test_this_machine_is_known_by_all_its_names(url: str) -> None:
    assert is_loopback(url)


@pytest.mark.parametrize("url", ["http://localhost.example", "http://10.0.0.1", "http://box", "nonsense", ""])
def test_another_machine_is_not_this_one(url: str) -> None:
    assert not is_loopback(url)


@pytest.mark.parametrize("url", ["http://[::1", "http://a:99999", "http://a:0", "http:// a", "ftp://a", "http://", "a"])
def test_what_is_no_web_address_is_told_apart(url: str) -> None:
    assert not is_web_address(url)


def test_a_login_is_never_shown() -> None:
    assert without_login("http://ann:se@cret@box:1/x") == "http://box:1/x"
    assert identity_of("https://ann:secret@Box/") == "https://box:443"
