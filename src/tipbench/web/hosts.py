"""Host: by which names the panel may be called. A page elsewhere that points its own name at us gets no answer."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from tipbench.errors import UsageError

_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?", re.ASCII)
_LONGEST = 255


@dataclass(frozen=True)
class Hosts:
    """The names allowed beside those of this machine itself."""

    names: frozenset[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> Hosts:
        """From what the operator wrote: names or addresses, without ports. UsageError names the wrong one."""
        return cls(frozenset(_configured(name) for name in names))

    def allow(self, header: str) -> bool:
        """Whether a request with this Host header is meant for us."""
        name = host_name(header)
        return name is not None and (name in self.names or is_this_machine(name))

    def same_origin(self, origin: str, header: str) -> bool:
        """Whether a page of this Origin is ours: the very host and port it calls, or a name the operator gave us.

        Another port of this machine is somebody else.
        """
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            return False
        name = host_name(parts.netloc)
        named = name in self.names and not is_this_machine(name or "")
        return parts.netloc.lower() == header.lower() or named


def host_name(header: str) -> str | None:
    """The name in a Host header, in one spelling; None when it is no name with or without a port."""
    text = header.lower()
    if not text.isascii() or len(text) > _LONGEST:
        return None
    if text.startswith("["):
        inside, bracket, after = text[1:].partition("]")
        name, port = _address(inside), after.removeprefix(":") if after else "0"
        return name if bracket and (not after or after.startswith(":")) and _is_port(port) else None
    name, colon, port = text.partition(":")
    if colon and not _is_port(port):
        return None
    return name.rstrip(".") if _NAME.fullmatch(name) else None


def is_this_machine(name: str) -> bool:
    """Whether a name, as `host_name` spells it, always leads to the machine it is used on."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.IPv6Address(text)) if "%" not in text else None
    except ValueError:
        return None


def _is_port(text: str) -> bool:
    return bool(_PORT.fullmatch(text)) and int(text) <= 65535


def _configured(name: str) -> str:
    text = name.strip().lower()
    known = _address(text) or host_name(text)
    if known is None or (":" in text and _address(text.strip("[]")) is None):
        raise UsageError(
            f"panel_hosts takes names or addresses without scheme and port, separated by commas (got {name[:80]!r}); "
            "for example tips.example.org,10.0.0.7"
        )
    return known
