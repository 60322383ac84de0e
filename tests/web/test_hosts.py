"""Host: this machine's names and the operator's, whatever else the header says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.errors import UsageError
from tipbench.web.hosts import Hosts, host_name, is_this_machine

HOSTS = Hosts.of(["tips.example.org", "10.0.0.7", "2001:db8::7"])


@pytest.mark.parametrize(
    "header",
    [
        "localhost", "LOCALHOST:5180", "localhost.", "panel.localhost:80", "127.0.0.1", "127.0.0.1:5180", "127.8.8.8",
        "[::1]", "[::1]:5180", "[0:0:0:0:0:0:0:1]", "tips.example.org", "Tips.Example.Org:443", "10.0.0.7:5180",
        "[2001:db8::7]", "[2001:DB8:0::7]:80",
    ],
)  # fmt: skip
def test_our_names_are_allowed_in_any_spelling(header: str) -> None:
    assert HOSTS.allow(header)


@pytest.mark.parametrize(
    "header",
    [
        "", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "tips.example.org.evil.example",
        "evil.example#localhost", "localhost@evil.example", "evil.example/localhost", "localhost:x", "localhost:99999",
        "localhost:80:80", "localhost, evil.example", "10.0.0.8", "[::2]", "[::1", "::1", "[::1]x", "[::1]:",
        "[fe80::1%eth0]", "xtips.example.org", " localhost", "localhost ", "local\thost", "lócalhost", "0.0.0.0", "0",
        "2130706433", "a" * 300,
    ],
)  # fmt: skip
def test_everything_else_is_refused(header: str) -> None:
    assert not HOSTS.allow(header)


@given(st.text(max_size=80))
def test_whatever_is_allowed_is_a_name_of_ours(header: str) -> None:
    if HOSTS.allow(header):
        name = host_name(header)
        assert name is not None
        assert name in HOSTS.names or is_this_machine(name)


@given(st.from_regex(r"[a-z0-9.\-:\[\]]{1,30}", fullmatch=True))
def test_a_name_that_was_read_reads_the_same_again(header: str) -> None:
    name = host_name(header)
    if name is not None:
        assert host_name(f"[{name}]" if ":" in name else name) == name


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:5180", "localhost:5180"),
        ("https://tips.example.org", "tips.example.org"),
        ("https://tips.example.org", "10.0.0.7:5180"),  # a proxy that does not pass its name on
        ("http://[::1]:5180", "[::1]:5180"),
    ],
)
def test_our_own_pages_are_of_the_same_origin(origin: str, host: str) -> None:
    assert HOSTS.same_origin(origin, host)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("null", "localhost:5180"),
        ("", "localhost:5180"),
        ("http://localhost:3000", "localhost:5180"),
        ("http://127.0.0.1:5180", "localhost:5180"),
        ("https://evil.example", "localhost:5180"),
        ("https://tips.example.org@evil.example", "tips.example.org"),
        ("ftp://localhost:5180", "localhost:5180"),
        ("http://[::1", "localhost:5180"),
    ],
)
def test_other_pages_are_not(origin: str, host: str) -> None:
    assert not HOSTS.same_origin(origin, host)


@pytest.mark.parametrize("name", ["https://tips.example.org", "tips.example.org:443", "a b", "", "*", "ä.example"])
def test_a_configured_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="panel_hosts takes names"):
        Hosts.of([name])
