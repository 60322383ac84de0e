"""Charts as SVG and PNG files, light and dark, without a browser; and the message without the extra."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tipbench.charts import DARK, LIGHT, THEMES, check_chart_file, import_altair, save_chart, to_svg
from tipbench.errors import UsageError


@pytest.fixture(scope="module")
def chart() -> Any:
    alt = pytest.importorskip("altair")
    values = [{"judge": "a<b> & “c”", "bias": 0.5}, {"judge": "ben", "bias": -1.25}]
    return alt.Chart(alt.Data(values=values)).mark_bar().encode(x="bias:Q", y="judge:N", color="judge:N")


def test_the_file_suffix_selects_svg_or_png(chart: Any, tmp_path: Path) -> None:
    for name, start in (("a.svg", b"<svg"), ("C.PNG", b"\x89PNG")):
        save_chart(chart, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_texts_in_an_svg_are_escaped(chart: Any) -> None:
    svg = to_svg(chart)
    assert "a&lt;b&gt; &amp; “c”" in svg
    assert "<script" not in svg


def test_light_and_dark_differ_in_every_colour(chart: Any) -> None:
    light, dark = to_svg(chart, LIGHT), to_svg(chart, DARK)
    assert LIGHT.background in light
    assert DARK.background in dark
    assert LIGHT.background not in dark
    assert not set(LIGHT.palette) & set(DARK.palette)


def test_the_same_chart_gives_the_same_bytes(chart: Any) -> None:
    assert to_svg(chart) == to_svg(chart)


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2: 4.5 for text, 3 for graphics."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", THEMES.values(), ids=lambda theme: theme.name)
def test_colours_can_be_read_on_their_background(theme: Any) -> None:
    assert min(contrast(colour, theme.background) for colour in (theme.ink, theme.muted)) >= 4.5
    assert min(contrast(colour, theme.background) for colour in (*theme.palette, theme.accent, theme.warning)) >= 3


@pytest.mark.parametrize("name", ["chart.pdf", "png"])
def test_a_file_of_another_kind_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--plot takes a file that ends in \.png or \.svg"):
        check_chart_file(tmp_path / name)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .* does not exist"):
        check_chart_file(tmp_path / "no" / "chart.png")


def test_a_file_that_cannot_be_written_is_reported(chart: Any, tmp_path: Path) -> None:
    (tmp_path / "chart.svg").mkdir()
    with pytest.raises(UsageError, match=r"could not be written: Is a directory\. Choose another file"):
        save_chart(chart, tmp_path / "chart.svg")


@pytest.mark.parametrize("missing", ["altair", "vl_convert"])
def test_without_the_extra_the_error_has_the_install_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=rf"{missing} is missing.*\n?.*tipbench\[charts\]"):
        import_altair()
