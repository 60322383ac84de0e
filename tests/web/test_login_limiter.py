"""Rate limits: per client, for all together, and in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from support.clock import Clock
from tipbench.web.login_limiter import (
    FAILURE_BURST,
    FAILURES_PER_SECOND,
    FREE_FAILURES,
    MAX_CLIENTS,
    MAX_WAIT_S,
    LoginLimiter,
)
from tipbench.web.security import client_key


def fail(attempts: LoginLimiter, clock: Clock, times: int, client: str = "a") -> list[float]:
    """Fail as one client, each time as soon as it is allowed; return how long each attempt had to wait."""
    waits = []
    for _ in range(times):
        waited = attempts.count_failure(client)
        waits.append(waited)
        if waited:
            clock.now += waited
            assert attempts.count_failure(client) == 0
    return waits


def test_after_the_free_attempts_the_wait_doubles() -> None:
    clock = Clock()
    waits = fail(LoginLimiter(clock), clock, FREE_FAILURES + 5)
    assert waits == [0.0] * FREE_FAILURES + [1, 2, 4, 8, 16]


def test_the_wait_has_an_upper_bound() -> None:
    clock = Clock()
    assert max(fail(LoginLimiter(clock), clock, FREE_FAILURES + 40)) == MAX_WAIT_S


def test_concurrent_attempts_are_limited_too() -> None:
    attempts = LoginLimiter(Clock())
    assert sum(attempts.count_failure("a") == 0 for _ in range(100)) == FREE_FAILURES


def test_failures_of_one_client_do_not_affect_another() -> None:
    clock = Clock()
    attempts = LoginLimiter(clock)
    fail(attempts, clock, FREE_FAILURES + 3, "a")
    assert attempts.count_failure("b") == 0


def test_failures_of_many_clients_reach_the_global_limit() -> None:
    attempts = LoginLimiter(Clock())
    waits = [attempts.count_failure(f"client {n}") for n in range(FAILURE_BURST + 10)]
    assert waits[:FAILURE_BURST] == [0.0] * FAILURE_BURST
    assert all(wait == 1 / FAILURES_PER_SECOND for wait in waits[FAILURE_BURST:])


def test_failures_expire() -> None:
    clock = Clock()
    attempts = LoginLimiter(clock)
    fail(attempts, clock, FREE_FAILURES + 3)
    clock.now += 2 * MAX_WAIT_S + 10
    assert [attempts.count_failure("a") for _ in range(FREE_FAILURES)] == [0.0] * FREE_FAILURES


def test_the_number_of_tracked_clients_is_bounded() -> None:
    clock = Clock()
    attempts = LoginLimiter(clock)
    for number in range(MAX_CLIENTS + 500):
        clock.now += 1 / FAILURES_PER_SECOND
        attempts.count_failure(f"client {number}")
    assert len(attempts) == MAX_CLIENTS


def test_ipv6_addresses_of_one_network_count_as_one_client() -> None:
    cases: list[tuple[str | None, str | None]] = [
        ("2001:db8::1", "2001:db8::ffff:1"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        (None, "no address"),
    ]
    for one, other in cases:
        assert client_key(one) == client_key(other)


def test_different_networks_are_different_clients() -> None:
    assert len({client_key(host) for host in ("10.0.0.7", "10.0.0.8", "2001:db8:0:1::1", "2001:db8:0:2::1")}) == 4


@given(st.text(max_size=60))
def test_every_address_has_a_short_key(host: str) -> None:
    assert 0 < len(client_key(host)) < 60
