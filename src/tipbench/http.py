"""URLs and HTTP clients: the rules for proxies, TLS and loopback addresses of all requests that tipbench sends.

httpx, ssl and urllib.request are imported lazily: importing them here would slow down the start of every command.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tipbench.errors import UsageError

if TYPE_CHECKING:
    import ssl

    import httpx

TOO_MANY_FILES_ADVICE = (
    "this process has reached its limit of open files and connections. Raise it, as with `ulimit -n 4096`, "
    "or lower --concurrency"
)
_UNREACHABLE_ERRNOS = (
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ENETDOWN, errno.ENETUNREACH,
)  # fmt: skip
_TOO_MANY_FILES_ERRNOS = (errno.EMFILE, errno.ENFILE)
_Client = TypeVar("_Client")

# Addresses


def is_loopback(url: str) -> bool:
    """Return whether a URL points at this machine. Such URLs are requested without a proxy."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_http_url(url: str) -> bool:
    """Return whether a URL is http or https, has a host, and its port is valid or missing."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return False
    return url.isprintable() and " " not in url  # a space is printable


def strip_login(url: str) -> str:
    """Return the URL without user name and password, safe to show and store."""
    parts = urlsplit(url)
    _, _, host_and_port = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=host_and_port))


def canonical_url(url: str) -> str:
    """Return a URL that is equal for all spellings of a server's address: with a port, without a user name."""
    parts = urlsplit(url)
    host = "localhost" if is_loopback(url) else (parts.hostname or "").rstrip(".")
    if ":" in host:  # IPv6
        host = f"[{host}]"
    default_port = 443 if parts.scheme == "https" else 80
    port = parts.port or default_port
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


def matching_server(url: str, servers: Iterable[str]) -> str | None:
    """Return the URL in `servers` that points at the same server as `url`, or None."""
    by_canonical_url = {canonical_url(server): server for server in servers}
    return by_canonical_url.get(canonical_url(url))


# Clients


def http_client(url: str, tls: ssl.SSLContext | None = None, **options: Any) -> httpx.Client:
    """Return a client for `url`; raises UsageError if the environment has an invalid proxy or certificate file."""
    import httpx

    return _create_client(httpx.Client, url, tls=tls, options=options)


def async_http_client(url: str, **options: Any) -> httpx.AsyncClient:
    """Like `http_client`, for asyncio."""
    import httpx

    return _create_client(httpx.AsyncClient, url, tls=None, options=options)


def tls_for(url: str) -> ssl.SSLContext:
    """Return the TLS context for `url`. Loads certificates for https only: loading takes 20 ms and some MB."""
    import ssl

    import httpx

    if urlsplit(url).scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as exc:
        raise UsageError(
            f"The certificates for verifying {_origin(url)} cannot be read: {exc}. "
            "Correct SSL_CERT_FILE and SSL_CERT_DIR, or unset them."
        ) from exc


def read_body(response: httpx.Response, *, limit: int, deadline: float) -> bytearray | None:
    """Return the body of a streamed response, or None if it exceeds `limit` bytes.

    Raises httpx.ReadTimeout after `deadline` (time.monotonic()): httpx's timeout limits each chunk, not the total time.
    """
    import httpx

    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > limit:
            return None
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout("the response is too slow", request=response.request)
    return body


def _create_client(
    client_class: Callable[..., _Client], url: str, tls: ssl.SSLContext | None, options: dict[str, Any]
) -> _Client:
    import httpx

    try:
        return client_class(trust_env=not is_loopback(url), verify=tls or tls_for(url), **options)
    except (ImportError, ValueError, httpx.InvalidURL) as exc:  # ImportError: a SOCKS proxy without its package
        raise UsageError(
            f"A proxy must have an http:// or https:// address; the environment has {_describe_proxies()}. "
            f"Correct or unset it to reach {_origin(url)}. (socks5:// needs pip install 'httpx[socks]'.)"
        ) from exc


def _origin(url: str) -> str:
    """Return only scheme, host and port of a URL, because its path may be secret, as in a webhook URL."""
    parts = urlsplit(strip_login(url))
    return f"{parts.scheme}://{parts.netloc}"


def _describe_proxies() -> str:
    from urllib.request import getproxies

    settings = []
    for key, proxy in sorted(getproxies().items()):
        if key in ("http", "https", "all") and proxy:
            try:
                shown = strip_login(proxy)
            except ValueError:
                shown = "an invalid address"
            settings.append(f"{key.upper()}_PROXY={shown}")
    return ", ".join(settings)


# Errors


def is_unreachable(exc: httpx.ConnectError) -> bool:
    """Return whether a connection failed because the server is unreachable, not because of a local problem."""
    return any(isinstance(error, socket.gaierror) or error.errno in _UNREACHABLE_ERRNOS for error in _os_errors(exc))


def is_too_many_files(exc: BaseException) -> bool:
    """Return whether a request failed because this process or machine has too many open files."""
    os_errors = list(_os_errors(exc))
    if any(isinstance(error, socket.gaierror) for error in os_errors):
        return _no_file_can_be_opened()  # a failed name lookup does not report its reason
    return any(error.errno in _TOO_MANY_FILES_ERRNOS for error in os_errors)


def _os_errors(exc: BaseException) -> Iterator[OSError]:
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, OSError):
            yield cause
        cause = cause.__cause__ or cause.__context__


def _no_file_can_be_opened() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        return exc.errno in _TOO_MANY_FILES_ERRNOS
    return False
