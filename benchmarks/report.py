"""Claims and how they are shown: one row each with limit, measured value, ratio and verdict."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class NotMeasured(Exception):
    """The measurement itself went wrong, so there is no number."""


@dataclass(frozen=True)
class Claim:
    """A promise and what was measured: one value a round, of which the median counts. No values: not measured."""

    name: str
    limit: float
    unit: str  # of the limit and the values; "×" is a multiple of the rival's time
    values: tuple[float, ...]
    measured: str  # the medians behind it, for people
    exact: bool = False  # must equal the limit in every round, instead of staying below

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def passed(self) -> bool | None:
        if self.median is None:
            return None
        return all(value == self.limit for value in self.values) if self.exact else self.median <= self.limit

    @property
    def verdict(self) -> str:
        return {True: "PASS", False: "FAIL", None: "not measured"}[self.passed]

    def row(self) -> tuple[str, ...]:
        sign = "=" if self.exact else "≤"
        limit = f"{sign} {_number(self.limit, self.unit)}"
        if self.median is None:
            return self.name, limit, self.measured, "–", self.verdict
        low, high = min(self.values), max(self.values)
        spread = f" ({low:.2f} to {high:.2f})" if low < high else ""
        return self.name, limit, self.measured, f"{_number(self.median, self.unit)}{spread}", self.verdict


@dataclass(frozen=True)
class Result:
    """What one benchmark found: claims, and everything measured, for those who want to reckon for themselves."""

    benchmark: str
    note: str
    claims: tuple[Claim, ...]
    rounds: Sequence[Mapping[str, Any]]

    @property
    def failed(self) -> bool:
        return any(claim.passed is False for claim in self.claims)

    def to_json(self) -> dict[str, Any]:
        claims = [asdict(c) | {"median": c.median, "verdict": c.verdict} for c in self.claims]
        return {"benchmark": self.benchmark, "note": self.note, "claims": claims, "rounds": list(self.rounds)}


class Progress:
    """Lines on stderr: what is being measured, how long it took, and roughly how long the rest will take."""

    def __init__(self, expected_s: float) -> None:
        self._left_s = expected_s
        self._pace = 1.0

    def step(self, name: str, expected_s: float, took_s: float) -> None:
        """A step is done; the rest is expected to be as slow or fast as this one was."""
        self._left_s = max(0.0, self._left_s - expected_s)
        if expected_s > 1:
            self._pace += 0.3 * (took_s / expected_s - self._pace)
        say(f"  {name}: {took_s:.1f} s; about {minutes(self._left_s * self._pace)} left")


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def minutes(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def machine() -> dict[str, str]:
    """Where it was measured: a number without its machine says little."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
        memory = next(line for line in Path("/proc/meminfo").read_text("utf-8").splitlines() if "MemTotal" in line)
        gib = f"{int(memory.split()[1]) / 2**20:.1f} GiB"
    except (OSError, StopIteration):
        gib = "unknown"
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "memory": gib,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def show(result: Result) -> None:
    """The claims as a table on stdout."""
    rows = [("claim", "limit", "measured (medians)", "ratio or value", ""), *(claim.row() for claim in result.claims)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(f"\n{result.benchmark}: {result.note}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Everything measured, with the machine."""
    content = {"machine": machine(), "results": [result.to_json() for result in results]}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _number(value: float, unit: str) -> str:
    if unit == "×":
        return f"{value:.3f} ×"
    return f"{value:.2f} {unit}" if unit == "s" else f"{value:.3g} {unit}".rstrip()
