"""Host header: this machine's names and the configured ones are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import UsageError
from tipbench.web.security import Hosts, host_name, is_loopback_name

HOSTS = Hosts.of(["tips.example.org", "10.0.0.7", "2001:db8::7"])


def test_allowed_hosts_are_accepted_in_any_spelling() -> None:
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
        assert HOSTS.allows(header)


def test_other_hosts_are_rejected() -> None:
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
        assert not HOSTS.allows(header)


@given(st.text(max_size=80))
def test_every_allowed_host_is_configured_or_loopback(header: str) -> None:
    if HOSTS.allows(header):
        name = host_name(header)
        assert name is not None
        assert name in HOSTS.names or is_loopback_name(name)


@given(st.from_regex(r"[a-z0-9.\-:\[\]]{1,30}", fullmatch=True))
def test_a_parsed_host_parses_to_itself(header: str) -> None:
    name = host_name(header)
    if name is not None:
        assert host_name(f"[{name}]" if ":" in name else name) == name


def test_the_panels_pages_have_the_same_origin() -> None:
    for origin, host in [
        ("http://localhost:5180", "localhost:5180"),
        ("https://tips.example.org", "tips.example.org"),
        ("https://tips.example.org", "10.0.0.7:5180"),  # a proxy that does not pass its name on
        ("http://[::1]:5180", "[::1]:5180"),
    ]:
        assert HOSTS.same_origin(origin, host)


def test_other_sites_have_another_origin() -> None:
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


def test_an_invalid_configured_host_is_rejected() -> None:
    for name in ["https://tips.example.org", "tips.example.org:443", "a b", "", "*", "ä.example"]:
        with pytest.raises(UsageError, match="panel_hosts must be names"):
            Hosts.of([name])
