"""Claims with their measured values, and the table and JSON that show them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class NotMeasured(Exception):
    """The measurement itself failed, so there is no value."""


@dataclass(frozen=True)
class Size:
    """How much to measure. The claims are about the defaults."""

    rounds: int = 3
    cells: int = 2400
    quick: bool = False

    @property
    def note(self) -> str:
        if self.quick:
            return "quick: the claims do not apply"
        return f"median of {self.rounds} rounds" + ("" if self == Size() else "; not the size of the claims")


@dataclass(frozen=True)
class Claim:
    """A limit and one measured value per round, of which the median counts. No values: not measured."""

    name: str
    limit: float
    unit: str  # of the limit and the values; "×" is a multiple of the comparison's time
    values: tuple[float, ...]
    measured: str  # the medians behind the values, as text
    exact: bool = False  # whether each value must equal the limit, instead of the median staying below

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
    """The claims of one benchmark, and every measured value by round."""

    benchmark: str
    claims: tuple[Claim, ...]
    rounds: Sequence[Mapping[str, Any]]

    @property
    def failed(self) -> bool:
        return any(claim.passed is False for claim in self.claims)


def count_rounds(benchmark: str, rounds: int) -> Iterator[int]:
    """Yield the numbers of the rounds, from 1, and print the progress on stderr."""
    began = time.monotonic()
    for number in range(1, rounds + 1):
        say(f"{benchmark}: round {number} of {rounds}")
        yield number
        took_s = time.monotonic() - began
        say(f"  {took_s:.0f} s; about {took_s / number * (rounds - number):.0f} s left")


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def median_s(values: Iterable[float]) -> str:
    """The median of times as text."""
    return f"{statistics.median(values):.2f} s"


def machine() -> dict[str, str]:
    """The machine, system and date of the measurement."""
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


def show(result: Result, note: str) -> None:
    """Print the claims as a table."""
    rows = [("claim", "limit", "measured (medians)", "ratio or value", ""), *(claim.row() for claim in result.claims)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print(f"\n{result.benchmark}: {note}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    sys.stdout.flush()


def write_json(path: Path, results: Sequence[Result], note: str) -> None:
    """Write every measured value, with the machine."""
    content = [
        {
            "benchmark": result.benchmark,
            "note": note,
            "claims": [asdict(c) | {"median": c.median, "verdict": c.verdict} for c in result.claims],
            "rounds": list(result.rounds),
        }
        for result in results
    ]
    text = json.dumps({"machine": machine(), "results": content}, indent=1, ensure_ascii=False, default=asdict)
    path.write_text(text + "\n", encoding="utf-8")


def _number(value: float, unit: str) -> str:
    if unit == "×":
        return f"{value:.3f} ×"
    return f"{value:.2f} {unit}" if unit == "s" else f"{value:.3g} {unit}".rstrip()
