"""Signatures: what the panel signs is accepted once and in time; anything else is refused."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tipbench.web.signing import (
    DELIVERY,
    SIGNATURE,
    TIME,
    TOLERANCE_S,
    DeliveryRefused,
    Seen,
    sign,
    signed_headers,
    verify,
)

SECRET = "a-secret-of-20-letters-or-more"
BODY = b'{"event": "cells.pending"}'
NOW = 1_800_000_000.25


def headers(body: bytes = BODY, now: float = NOW, secret: str = SECRET) -> dict[str, str]:
    return signed_headers(secret, "0f6a", "cells.pending", body, now)


def refusal_of(given_headers: Mapping[str, str], body: bytes = BODY, now: float = NOW, seen: Seen | None = None) -> str:
    with pytest.raises(DeliveryRefused) as caught:
        verify(SECRET, given_headers, body, now, seen or Seen())
    return caught.value.why


def test_a_signed_request_is_accepted() -> None:
    verify(SECRET, headers(), BODY, NOW, Seen())


def test_the_signature_is_the_documented_hmac() -> None:
    digest = hmac.new(SECRET.encode(), b"1800000000." + BODY, hashlib.sha256).hexdigest()
    assert headers()[SIGNATURE] == f"v1={digest}"
    assert (headers()[TIME], headers()[DELIVERY]) == ("1800000000", "0f6a")


def test_header_names_are_case_insensitive() -> None:
    verify(SECRET, {name.upper(): value for name, value in headers().items()}, BODY, NOW, Seen())


@given(body=st.binary(max_size=200), at=st.integers(0, 199), flip=st.integers(1, 255))
def test_a_body_with_one_other_byte_is_forged(body: bytes, at: int, flip: int) -> None:
    other = bytearray(body or b"x")
    other[at % len(other)] ^= flip
    assert refusal_of(headers(body), bytes(other)) == "forged"


def test_another_secret_is_forged() -> None:
    assert refusal_of(headers(secret=SECRET + "x")) == "forged"


def test_another_timestamp_is_forged_even_if_recent() -> None:
    assert refusal_of({**headers(), TIME: "1800000001"}) == "forged"


def test_a_signature_of_another_kind_is_forged() -> None:
    for signature in ["v1=", "v1=00", "v2=" + "0" * 64, "\udcff", "é" * 64]:
        assert refusal_of({**headers(), SIGNATURE: signature}) == "forged"


def test_an_invalid_timestamp_is_refused_before_anything_is_computed() -> None:
    for time_text in ["", "-1", "1e9", "٣", "1" * 13, "1800000000.5"]:
        assert refusal_of({**headers(), TIME: time_text}) == "unsigned"


def test_without_a_signature_it_is_refused() -> None:
    assert refusal_of({TIME: "1800000000"}) == "unsigned"


def test_a_timestamp_too_old_or_in_the_future_is_late() -> None:
    for offset in [-TOLERANCE_S - 1, TOLERANCE_S + 1]:
        assert refusal_of(headers(now=NOW + offset)) == "late"


def test_clocks_may_differ_by_five_minutes() -> None:
    for offset in [1 - TOLERANCE_S, TOLERANCE_S]:
        verify(SECRET, headers(now=NOW + offset), BODY, NOW, Seen())


def test_the_same_request_again_is_a_replay() -> None:
    seen = Seen()
    verify(SECRET, headers(), BODY, NOW, seen)
    assert refusal_of(headers(), now=NOW + 60, seen=seen) == "replayed"


def test_the_senders_next_attempt_is_not_a_replay() -> None:
    seen = Seen()
    verify(SECRET, headers(), BODY, NOW, seen)
    verify(SECRET, headers(now=NOW + 1), BODY, NOW + 1, seen)


def test_a_forged_request_does_not_invalidate_the_real_one() -> None:
    seen = Seen()
    assert refusal_of({**headers(), TIME: "1800000001"}, seen=seen) == "forged"
    verify(SECRET, headers(), BODY, NOW, seen)


def test_a_signature_is_remembered_for_as_long_as_it_is_valid_and_no_longer() -> None:
    seen = Seen()
    ahead = headers(now=NOW + TOLERANCE_S)
    verify(SECRET, ahead, BODY, NOW, seen)
    assert refusal_of(ahead, now=NOW + 2 * TOLERANCE_S - 1, seen=seen) == "replayed"
    seen.first_time("another", NOW + 10 * TOLERANCE_S)
    assert len(vars(seen)["_expires_at"]) == 1


def test_two_bodies_at_one_time_have_two_signatures() -> None:
    assert sign(SECRET, 1, b"a") != sign(SECRET, 1, b"b")
