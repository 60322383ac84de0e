"""A small valid suite to modify: the example of docs/suites.md, read from that page."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "suites.md"
_FILE_IN_DOCS = re.compile(r"^`my-suite/(\S+)`\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class SuiteFolder:
    """The example suite on disk, and a method to change a file of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name, text in _FILE_IN_DOCS.findall(DOCS.read_text()):
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def replace(self, name: str, old: str, new: str) -> int:
        """Replaces the first occurrence and returns its line."""
        text = (self.path / name).read_text()
        assert old in text, f"{name} does not contain {old!r}"
        self.write(name, text.replace(old, new, 1))
        return text[: text.index(old)].count("\n") + 1

    def __str__(self) -> str:
        return str(self.path)
