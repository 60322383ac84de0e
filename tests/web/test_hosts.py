"""Host: this machine's names and the operator's, whatever else the header says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import UsageError
from tipbench.web.security import Hosts, host_name, is_loopback_name

HOSTS = Hosts.of(["tips.example.org", "10.0.0.7", "2001:db8::7"])


def test_our_names_are_allowed_in_any_spelling() -> None:
    for header in [
        "localhost",
        "LOCALHOST:5180",
        "localhost.",
        "panel.localhost:80",
        "127.0.0.1",
        "127.0.0.1:5180",
        "127.8.8.8",
        "[::1]",
        "[::1]:5180",
        "[0:0:0:0:0:0:0:1]",
        "tips.example.org",
        "Tips.Example.Org:443",
        "10.0.0.7:5180",
        "[2001:db8::7]",
        "[2001:DB8:0::7]:80",
    ]:
        assert HOSTS.allow(header)


def test_everything_else_is_refused() -> None:
    for header in [
        "",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "tips.example.org.evil.example",
        "evil.example#localhost",
        "localhost@evil.example",
        "evil.example/localhost",
        "localhost:x",
        "localhost:99999",
        "localhost:80:80",
        "localhost, evil.example",
        "10.0.0.8",
        "[::2]",
        "[::1",
        "::1",
        "[::1]x",
        "[::1]:",
        "[fe80::1%eth0]",
        "xtips.example.org",
        " localhost",
        "localhost ",
        "local\thost",
        "lócalhost",
        "0.0.0.0",
        "0",
        "2130706433",
        "a" * 300,
    ]:
        assert not HOSTS.allow(header)


@given(st.text(max_size=80))
def test_whatever_is_allowed_is_a_name_of_ours(header: str) -> None:
    if HOSTS.allow(header):
        name = host_name(header)
        assert name is not None
        assert name in HOSTS.names or is_loopback_name(name)


@given(st.from_regex(r"[a-z0-9.\-:\[\]]{1,30}", fullmatch=True))
def test_a_name_that_was_read_reads_the_same_again(header: str) -> None:
    name = host_name(header)
    if name is not None:
        assert host_name(f"[{name}]" if ":" in name else name) == name


def test_our_own_pages_are_of_the_same_origin() -> None:
    for origin, host in [
        ("http://localhost:5180", "localhost:5180"),
        ("https://tips.example.org", "tips.example.org"),
        ("https://tips.example.org", "10.0.0.7:5180"),  # a proxy that does not pass its name on
        ("http://[::1]:5180", "[::1]:5180"),
    ]:
        assert HOSTS.same_origin(origin, host)


def test_other_pages_are_not() -> None:
    for origin, host in [
        ("null", "localhost:5180"),
        ("", "localhost:5180"),
        ("http://localhost:3000", "localhost:5180"),
        ("http://127.0.0.1:5180", "localhost:5180"),
        ("https://evil.example", "localhost:5180"),
        ("https://tips.example.org@evil.example", "tips.example.org"),
        ("ftp://localhost:5180", "localhost:5180"),
        ("http://[::1", "localhost:5180"),
    ]:
        assert not HOSTS.same_origin(origin, host)


def test_a_configured_name_that_is_none_is_refused() -> None:
    for name in ["https://tips.example.org", "tips.example.org:443", "a b", "", "*", "ä.example"]:
        with pytest.raises(UsageError, match="panel_hosts must be names"):
            Hosts.of([name])
