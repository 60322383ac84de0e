"""Keyed hashes: users without their ids, and draws that a retry or a replay repeats.

The secret is `serve.secret` in the home folder. Without it the state of a user cannot be found again.
"""

from __future__ import annotations

import re
import secrets
from hashlib import blake2b
from pathlib import Path

from tipbench.errors import UsageError
from tipbench.files import create_private, home_errors, make_folder
from tipbench.serve.request import check_user_id

SECRET_FILE = "serve.secret"  # noqa: S105


class Keys:
    """Hashes under one secret."""

    def __init__(self, secret: bytes) -> None:
        self._user = blake2b(key=secret, digest_size=16, person=b"tipbench-user")
        self._draw = blake2b(key=secret, digest_size=8, person=b"tipbench-draw")

    def user(self, user_id: str) -> str:
        """Return the key of a user, 32 hex digits; raises UsageError if the id is invalid."""
        hashed = self._user.copy()
        hashed.update(check_user_id(user_id).encode())
        return hashed.hexdigest()

    def uniform(self, policy: str, user: str, event: str) -> float:
        """Return the number in [0, 1) that decides an event under a policy."""
        hashed = self._draw.copy()
        hashed.update(f"{policy}\0{user}\0{event}".encode())
        return (int.from_bytes(hashed.digest()) >> 11) * 2.0**-53


def load_keys(home: Path) -> Keys:
    """Return the keys of a home folder; creates its secret if it is missing."""
    path = make_folder(home) / SECRET_FILE
    with home_errors(path, "cannot be read"):
        if not path.exists():
            create_private(path, secrets.token_hex(32).encode() + b"\n")
        text = path.read_text("ascii", "replace").strip()
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise UsageError(
            f"{path} must have 64 hex digits; it has {len(text)} other characters. Restore it from a backup: without "
            "it the stored state belongs to unknown users."
        )
    return Keys(bytes.fromhex(text))
