"""What a web address says about where it leads, before anything is sent. Any step may import it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit, urlunsplit


def is_loopback(url: str) -> bool:
    """Whether a URL points at this machine, where no proxy has any business."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_web_address(url: str) -> bool:
    """Whether it is http or https, with a host and, if any, a possible port."""
    try:
        parts = urlsplit(url)
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and port_fits
        and url.isprintable()
        and " " not in url
    )


def without_login(url: str) -> str:
    """The address as it may be shown and kept: user name and password left out."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def identity_of(url: str) -> str:
    """One spelling for one server: no user name, no default port, one name for this machine."""
    parts = urlsplit(url)
    host = "localhost" if is_loopback(url) else (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}{parts.path.rstrip('/')}"
