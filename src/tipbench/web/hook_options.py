"""Where the webhook leads, checked once: a host the operator has listed, or this machine; never anywhere else."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tipbench.addresses import is_loopback, is_web_address
from tipbench.errors import UsageError
from tipbench.settings import Settings
from tipbench.web.hosts import host_name
from tipbench.web.signing import SHORTEST_SECRET

DEFAULT_WATCH_S = 30.0
_LONGEST_WATCH_S = 86_400.0
_LONGEST_URL = 2000
_LONGEST_SECRET = 200
_PLAIN = "http://"


@dataclass(frozen=True)
class HookOptions:
    """The receiver. `hosts` are as the operator spelt them: `http://name` allows plain HTTP there, `name` does not."""

    url: str = field(repr=False)  # its path or query may be a secret of the receiver's
    secret: str = field(repr=False)
    hosts: frozenset[str] = frozenset()
    watch_s: float = DEFAULT_WATCH_S

    @property
    def receiver(self) -> str:
        """Who is told, in one word: another address is another receiver, which has been told nothing yet."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def check(self) -> None:
        """UsageError unless the address is one that may be called."""
        name = host_name(urlsplit(self.url).netloc)
        if name is None:
            raise UsageError("hook_url has no host that can be called. For example: https://judge.example.org/tipbench")
        if is_loopback(self.url) or f"{_PLAIN}{name}" in self.hosts:
            return
        if name not in self.hosts:
            raise UsageError(
                f"hook_url leads to {name}, which hook_hosts does not name; the panel calls no other host. "
                f"If it is right, set TIPBENCH_HOOK_HOSTS={name}"
            )
        if urlsplit(self.url).scheme != "https":
            raise UsageError(
                f"hook_url is plain http to {name}. Use https, or allow it with TIPBENCH_HOOK_HOSTS={_PLAIN}{name}"
            )


def hook_options(settings: Settings) -> HookOptions | None:
    """The webhook of the settings; None when there is none. UsageError names the setting that is wrong."""
    url = settings.get("hook_url")
    if not url:
        return None
    hosts = frozenset(_host(each) for each in settings.listed("hook_hosts"))
    options = HookOptions(_url(url), _secret(settings.get("hook_secret")), hosts, _watch_s(settings))
    options.check()
    return options


def shown_address(url: str) -> str:
    """The address as it may be shown: no login, and of what follows the host nothing, as it may be the secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "not an address"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}/…" if parts.scheme and host else "not an address"


def _url(text: str) -> str:
    """The message must not repeat what may be secret."""
    url = text.strip()
    if len(url) > _LONGEST_URL or not url.isascii() or not is_web_address(url):
        raise UsageError(
            f"hook_url is a web address of at most {_LONGEST_URL} ASCII characters (got {shown_address(text)[:80]!r}); "
            "for example https://judge.example.org/tipbench"
        )
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.fragment:
        raise UsageError(
            f"hook_url has neither a login nor a fragment (got {shown_address(url)[:80]!r} with one). "
            "The receiver knows us by the signature."
        )
    return url


def _host(text: str) -> str:
    plain = _PLAIN if text.lower().startswith(_PLAIN) else ""
    bare = text[len(plain) :].removeprefix("https://").strip("/")
    name = host_name(f"[{bare}]" if bare.count(":") > 1 and not bare.startswith("[") else bare)
    if name is None or (":" in bare and ":" not in name):
        raise UsageError(
            f"hook_hosts takes names without ports, separated by commas, with http:// in front where plain HTTP is "
            f"allowed (got {text[:80]!r}); for example judge.example.org,http://judge"
        )
    return plain + name


def _secret(text: str | None) -> str:
    """It is for the environment only, and the message must not repeat it."""
    if text is None:
        raise UsageError(
            "hook_url is set, and TIPBENCH_HOOK_SECRET is not: the receiver could not tell us from anybody else. "
            "`openssl rand -hex 32` makes a good one; give it to the receiver too."
        )
    if not SHORTEST_SECRET <= len(text) <= _LONGEST_SECRET or not text.isascii() or not text.isprintable():
        raise UsageError(
            f"TIPBENCH_HOOK_SECRET has {SHORTEST_SECRET} to {_LONGEST_SECRET} printable ASCII characters "
            f"(got {len(text)}). `openssl rand -hex 32` makes a good one."
        )
    return text


def _watch_s(settings: Settings) -> float:
    text = settings.get("hook_watch_s") or str(DEFAULT_WATCH_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= _LONGEST_WATCH_S:
        raise UsageError(f"hook_watch_s is a number of seconds from 1 to {_LONGEST_WATCH_S:g} (got {text[:40]!r}).")
    return seconds
