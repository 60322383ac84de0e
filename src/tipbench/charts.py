"""Renders Altair charts as SVG in light or dark colours, or as a PNG file, without a browser or JavaScript.

Altair and vl-convert come with the extra `charts`. The charts themselves are in `charts.py` of `compare`, `judge`
and `simulate`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tipbench.errors import UsageError

if TYPE_CHECKING:
    import altair as alt

FONT = "Helvetica, Arial, sans-serif"
PNG_SCALE = 2.0


@dataclass(frozen=True)
class Theme:
    """Colours of a chart."""

    name: str
    background: str
    ink: str  # of text
    muted: str  # of secondary text
    grid: str
    accent: str
    warning: str
    palette: tuple[str, ...]


# The palettes have the same order of hues, so that a series has the same hue in both themes.
LIGHT = Theme(
    "light", background="#ffffff", ink="#1b1f24", muted="#57606a", grid="#d8dee4", accent="#0a5dc2", warning="#b3261e",
    palette=("#0a5dc2", "#b45309", "#1a7f37", "#8250df", "#bf3989", "#4d5560"),
)  # fmt: skip
DARK = Theme(
    "dark", background="#14171c", ink="#e6edf3", muted="#9aa4af", grid="#30363d", accent="#6cb0ff", warning="#ff8a80",
    palette=("#6cb0ff", "#f0a44b", "#63d17e", "#c09bff", "#ff8fc4", "#aab4bf"),
)  # fmt: skip
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}


def import_altair() -> Any:
    """Import and return Altair; raises UsageError with install instructions if it is missing."""
    try:
        import altair as alt
        import vl_convert  # noqa: F401 - to fail here, not when the chart is rendered
    except ImportError as exc:
        raise UsageError(
            f"Charts need the extra 'charts', which is not installed ({exc.name} is missing). "
            'Install it with: pip install "tipbench[charts]"'
        ) from exc
    return alt


def _themed_spec(chart: alt.TopLevelMixin, theme: Theme) -> Any:
    axis = {
        "labelColor": theme.ink, "titleColor": theme.muted, "gridColor": theme.grid, "domainColor": theme.grid,
        "tickColor": theme.grid, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal",
        "labelLimit": 260,
    }  # fmt: skip
    config = {
        "background": theme.background,
        "font": FONT,
        "view": {"stroke": None},
        "axis": axis,
        "header": {"labelColor": theme.ink, "titleColor": theme.muted, "labelFontSize": 12},
        "legend": {
            "labelColor": theme.ink,
            "titleColor": theme.muted,
            "labelFontSize": 12,
            "titleFontWeight": "normal",
        },
        "title": {"color": theme.ink, "subtitleColor": theme.muted, "anchor": "start", "fontSize": 15},
        "range": {"category": list(theme.palette)},
    }
    spec = chart.to_dict()
    spec["config"] = {**spec.get("config", {}), **config}
    return spec


def to_svg(chart: alt.TopLevelMixin, theme: Theme = LIGHT) -> str:
    """Return the chart as SVG text."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(_themed_spec(chart, theme)))


def check_chart_file(path: Path) -> None:
    """Raise UsageError if a --plot file has a wrong suffix or a missing folder, or if the extra `charts` is missing."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--plot takes a file that ends in .png or .svg (got {path.name!r}).")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: the folder {path.parent} does not exist.")
    import_altair()


def save_chart(chart: alt.TopLevelMixin, path: Path) -> None:
    """Write the chart in light colours and in the format of the file's suffix; raises UsageError if that fails."""
    import vl_convert

    if path.suffix.lower() == ".svg":
        content = to_svg(chart).encode()
    else:
        content = vl_convert.vegalite_to_png(_themed_spec(chart, LIGHT), scale=PNG_SCALE)
    try:
        path.write_bytes(content)
    except OSError as exc:
        raise UsageError(f"{path} could not be written: {exc.strerror}. Choose another file.") from exc
