"""Static files: only the package's own, cached permanently, no path outside their folder."""

from __future__ import annotations

import re

import pytest

from tipbench.web.panel.pages import MEDIA_TYPES, assets
from web.panels import ServedPanel


def test_a_static_file_is_public_and_cached_permanently(served: ServedPanel) -> None:
    for name in ["base.css", "site.js", "favicon.svg"]:
        response = served.get(assets().url(name), token=None)
        assert response.status_code == 200
        assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert response.headers["content-type"].startswith(MEDIA_TYPES["." + name.rsplit(".", 1)[1]])
        assert response.headers["x-content-type-options"] == "nosniff"


def test_a_url_of_another_release_gives_the_current_file_uncached(served: ServedPanel) -> None:
    response = served.get("/static/0123456789abcdef/base.css", token=None)
    assert (response.status_code, response.headers["cache-control"]) == (200, "no-cache")
    assert response.content == assets().content["base.css"]


def test_the_address_has_a_hash_of_the_content() -> None:
    assert re.fullmatch(r"/static/[0-9a-f]{16}/base\.css", assets().url("base.css"))


def test_a_page_that_names_a_missing_file_fails() -> None:
    with pytest.raises(KeyError, match=r"nowhere\.css"):
        assets().url("nowhere.css")


def test_no_other_file_is_served(served: ServedPanel) -> None:
    for path in [
        "../pages.py",
        "..%2Fpages.py",
        "%2e%2e/pages.py",
        "..%5Cpages.py",
        "....//pages.py",
        "%2Fetc%2Fpasswd",
        "/etc/passwd",
        "base.css/../../pages.py",
        "base.css%00.py",
        "../templates/base.html",
        "BASE.CSS",
        "",
        ".",
    ]:
        response = served.get(f"/static/{assets().version}/{path}", token=None)
        assert response.status_code in (401, 404)
        assert b"root:" not in response.content
        assert b"import" not in response.content


def test_style_sheets_and_scripts_load_nothing_from_other_hosts() -> None:
    for name, content in assets().content.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z0-9-]+\.[a-z]{2,}/|@import|url\(", text), name


def test_scripts_make_no_markup_out_of_text() -> None:
    making = rb"(?:inner|outer)HTML\s*\+?=(?!=)|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for name, content in assets().content.items():
        assert not re.search(making, content), name
