"""The login page: what `web.login` shows, in the panel's clothes."""

from __future__ import annotations

from fastapi import Request

from tipbench.web.panel.pages import render


def render_login(request: Request, there: str, fault: str | None) -> str:
    """The form, and what was wrong with the last try."""
    return render(request, "login.html", there=there, fault=fault)
