"""What `make bench` runs: every benchmark, its claims as rows, exit 1 when one does not hold.

python benchmarks/run.py [--quick] [--rounds N] [--cells N] [--json FILE] [NAME …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import collect
import compare
import panel_pages
import real_ollama
import report
import serving
import simulation
from work import Work


@dataclass(frozen=True)
class Size:
    """How thoroughly to measure."""

    rounds: int = 5
    cells: int = 2400
    slow_cells: int = 24
    quick: bool = False

    @property
    def note(self) -> str:
        if self.quick:
            return "quick: not the claim"
        full = self == Size()
        return f"median of {self.rounds}, in turn" + ("" if full else "; smaller than the claim")


def run_collect(size: Size) -> report.Result:
    """tipbench collect against raw loops."""
    return collect.measure(collect.scenes(size.cells, size.slow_cells), size.rounds, size.note)


def run_real_ollama(size: Size) -> report.Result:
    """tipbench collect on a real Ollama against a bare sequential loop."""
    return real_ollama.measure(size.rounds, size.note)


def run_compare(size: Size) -> report.Result:
    """tipbench compare: its statistics, and against the bare reading of the same runs."""
    return compare.measure(size.rounds, size.cells, size.note)


def run_panel(size: Size) -> report.Result:
    """tipbench panel on a large experiment against MLflow's own search."""
    return panel_pages.measure(size.rounds, size.cells, size.note)


def run_serving(size: Size) -> report.Result:
    """The policies against VowpalWabbit and MABWiser, the policy server against the smallest ASGI application."""
    requests, users = (1000, 5000) if size.quick else (8000, 100_000)
    return serving.measure(size.rounds, requests, users, size.note)


def run_simulation(size: Size) -> report.Result:
    """Simulated decisions per CPU-second, and the CPU time of a promotion check."""
    return simulation.measure(size.rounds, 20_000 if size.quick else 200_000, size.note)


BENCHMARKS: dict[str, Callable[[Size], report.Result]] = {
    "collect": run_collect,
    "real-ollama": run_real_ollama,
    "compare": run_compare,
    "panel": run_panel,
    "serving": run_serving,
    "simulation": run_simulation,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the named benchmarks, or all."""
    args = _parser().parse_args(arguments)
    default = Size(rounds=1, cells=240, slow_cells=12, quick=True) if args.quick else Size()
    size = Size(args.rounds or default.rounds, args.cells or default.cells, default.slow_cells, args.quick)
    try:
        results = [BENCHMARKS[name](size) for name in args.names or BENCHMARKS]
    except report.NotMeasured as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("  ".join(f"{key}: {value}" for key, value in report.machine().items()))
    for result in results:
        report.show(result)
    if args.json:
        report.write_json(args.json, results)
    return int(any(result.failed for result in results) and not size.quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description="Measure tipbench against raw loops.")
    parser.add_argument("names", nargs="*", type=_benchmark, metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (all)")
    parser.add_argument("--quick", action="store_true", help="one small round, a few minutes at most; not the claim")
    parser.add_argument("--rounds", type=_positive, help="rounds, of which the median counts (5)")
    parser.add_argument("--cells", type=_cells, help="cells in the large grid (2400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return parser


def _benchmark(text: str) -> str:
    if text not in BENCHMARKS:
        raise argparse.ArgumentTypeError(f"there is no benchmark {text!r}; there are {', '.join(BENCHMARKS)}")
    return text


def _cells(text: str) -> int:
    try:
        return Work(_positive(text), 0.05, 8).cells
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return number


if __name__ == "__main__":
    sys.exit(main())
