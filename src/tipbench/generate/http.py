"""The HTTP client for one server: proxies only for other machines, certificates only where there is TLS."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from tipbench.addresses import is_loopback, without_login
from tipbench.errors import UsageError

TOO_MANY_FILES = (
    "this process has as many files and connections open as it may. Allow more, as with `ulimit -n 4096`, "
    "or lower --concurrency"
)
_UNREACHABLE = frozenset(
    {
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EHOSTDOWN),
        *(errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    }
)
_TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE})


def http_client(url: str, tls: ssl.SSLContext, **options: Any) -> httpx.Client:
    """A client for the server at `url`; UsageError when the environment names a proxy that cannot be used."""
    try:
        return httpx.Client(trust_env=not is_loopback(url), verify=tls, **options)
    except (ImportError, ValueError, httpx.InvalidURL) as exc:
        raise UsageError(
            f"A proxy must have an http:// or https:// address; the environment has {_proxies()}. "
            f"Correct or unset it to reach {without_login(url)}. (socks5:// needs pip install 'httpx[socks]'.)"
        ) from exc


def tls_for(url: str) -> ssl.SSLContext:
    """How the server's certificate is checked. Reading our own takes 20 ms and some MB: only for https."""
    if urlsplit(url).scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as exc:
        raise UsageError(
            f"The certificates that {without_login(url)} is checked against cannot be read: {exc}. "
            "Correct SSL_CERT_FILE and SSL_CERT_DIR, or unset them."
        ) from exc


def nobody_there(exc: httpx.ConnectError) -> bool:
    """Whether a failed connection means that no server is reachable, and not some trouble on this side."""
    return any(isinstance(cause, socket.gaierror) or cause.errno in _UNREACHABLE for cause in _os_errors(exc))


def too_many_files(exc: BaseException) -> bool:
    """Whether it failed because this process (or machine) may open nothing more."""
    causes = list(_os_errors(exc))
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return _none_left()  # looking up a name opens files, and says only that it did not work
    return any(cause.errno in _TOO_MANY for cause in causes)


def _os_errors(exc: BaseException) -> Iterator[OSError]:
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, OSError):
            yield cause
        cause = cause.__cause__ or cause.__context__


def _none_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        return exc.errno in _TOO_MANY
    return False


def _proxies() -> str:
    named = {key: value for key, value in getproxies().items() if key in ("http", "https", "all") and value}
    return ", ".join(f"{key.upper()}_PROXY={_shown(value)}" for key, value in sorted(named.items()))


def _shown(proxy: str) -> str:
    try:
        return without_login(proxy)
    except ValueError:
        return "no address"
