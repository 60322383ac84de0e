"""The slow-down: each client by itself, all together, and in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tipbench.web.security import BURST, CLIENTS, FREE, LONGEST_WAIT_S, PER_SECOND, LoginLimiter, client_key
from web.test_tokens import Clock


def fail(attempts: LoginLimiter, clock: Clock, times: int, client: str = "a") -> list[float]:
    """Failed tries of one client, each as soon as it is allowed; how long each had to wait for."""
    waits = []
    for _ in range(times):
        waited = attempts.admit(client)
        waits.append(waited)
        if waited:
            clock.now += waited
            assert attempts.admit(client) == 0
    return waits


def test_the_first_tries_are_free_and_then_each_waits_twice_as_long() -> None:
    clock = Clock()
    waits = fail(LoginLimiter(clock), clock, FREE + 5)
    assert waits == [0.0] * FREE + [1, 2, 4, 8, 16]


def test_a_wait_has_an_upper_bound() -> None:
    clock = Clock()
    assert max(fail(LoginLimiter(clock), clock, FREE + 40)) == LONGEST_WAIT_S


def test_tries_made_at_the_same_moment_do_not_slip_through() -> None:
    attempts = LoginLimiter(Clock())
    assert sum(attempts.admit("a") == 0 for _ in range(100)) == FREE


def test_a_right_try_forgives_the_wrong_ones() -> None:
    clock = Clock()
    attempts = LoginLimiter(clock)
    fail(attempts, clock, FREE - 1)
    attempts.admit("a")
    attempts.forgive("a")
    assert [attempts.admit("a") for _ in range(FREE)] == [0.0] * FREE


def test_one_clients_mistakes_do_not_count_for_another() -> None:
    clock = Clock()
    attempts = LoginLimiter(clock)
    fail(attempts, clock, FREE + 3, "a")
    assert attempts.admit("b") == 0


def test_many_clients_that_fail_together_have_to_wait_too() -> None:
    attempts = LoginLimiter(Clock())
    waits = [attempts.admit(f"client {n}") for n in range(BURST + 10)]
    assert waits[:BURST] == [0.0] * BURST
    assert all(wait == 1 / PER_SECOND for wait in waits[BURST:])


def test_after_a_quiet_time_everything_is_forgotten() -> None:
    clock = Clock()
    attempts = LoginLimiter(clock)
    fail(attempts, clock, FREE + 3)
    clock.now += 2 * LONGEST_WAIT_S + 10
    assert [attempts.admit("a") for _ in range(FREE)] == [0.0] * FREE


def test_memory_is_bounded_however_many_clients_come() -> None:
    clock = Clock()
    attempts = LoginLimiter(clock)
    for number in range(CLIENTS + 500):
        clock.now += 1 / PER_SECOND
        attempts.admit(f"client {number}")
    assert len(attempts) == CLIENTS


def test_addresses_that_one_client_can_take_at_will_count_as_one() -> None:
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
def test_any_peer_has_a_short_name(host: str) -> None:
    assert 0 < len(client_key(host)) < 60
