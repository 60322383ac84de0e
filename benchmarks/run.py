"""Run the benchmarks, print each claim as a row, and exit with 1 if one does not hold.

python benchmarks/run.py [--quick] [--rounds N] [--cells N] [--json FILE] [NAME …]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import collect
import compare
import panel_pages
import real_ollama
import report
import serving
import simulation
from report import Size
from work import Work

BENCHMARKS: dict[str, Callable[[Size], report.Result]] = {
    "collect": collect.measure,
    "real-ollama": real_ollama.measure,
    "compare": compare.measure,
    "panel": panel_pages.measure,
    "serving": serving.measure,
    "simulation": simulation.measure,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmarks given by name, or all."""
    args = _parser().parse_args(arguments)
    default = Size(rounds=1, cells=240, quick=True) if args.quick else Size()
    size = Size(args.rounds or default.rounds, args.cells or default.cells, args.quick)
    try:
        results = [BENCHMARKS[name](size) for name in args.names or BENCHMARKS]
    except report.NotMeasured as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("  ".join(f"{key}: {value}" for key, value in report.machine().items()))
    for result in results:
        report.show(result, size.note)
    if args.json:
        report.write_json(args.json, results, size.note)
    return int(any(result.failed for result in results) and not size.quick)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description="Measure tipbench against raw loops.")
    parser.add_argument("names", nargs="*", type=_benchmark, metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (all)")
    parser.add_argument("--quick", action="store_true", help="one small round, a few minutes; the claims do not apply")
    parser.add_argument("--rounds", type=_positive, help=f"rounds, of which the median counts ({Size.rounds})")
    parser.add_argument("--cells", type=_cells, help=f"cells in the large grid ({Size.cells})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measured value")
    return parser


def _benchmark(text: str) -> str:
    if text not in BENCHMARKS:
        raise argparse.ArgumentTypeError(f"there is no benchmark {text!r}; there are {', '.join(BENCHMARKS)}")
    return text


def _cells(text: str) -> int:
    try:
        return Work(_positive(text)).cells  # a ValueError if no grid has this number of cells
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {text})")
    return number


if __name__ == "__main__":
    sys.exit(main())
