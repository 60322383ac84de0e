"""Entry point of `tipbench` and `python -m tipbench`."""

import gc
import sys


def main() -> None:
    """Run the command-line interface."""
    gc.set_threshold(50_000)  # garbage collection at start-up frees nothing, but takes a sixth of the time
    # httpx imports its own command line (click, rich, pygments: 50 ms) unless that import fails.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    from tipbench.cli.main import main as run_cli

    run_cli()


if __name__ == "__main__":
    main()
