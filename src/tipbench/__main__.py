"""Entry point of `tipbench` and `python -m tipbench`."""

import atexit
import gc
import sys


def main() -> None:
    """Run the command-line interface."""
    gc.set_threshold(50_000)  # garbage collection frees nothing at start-up, but takes a sixth of its time
    atexit.register(gc.freeze)  # the system frees all memory anyway: the last garbage collection would take 25 ms
    # httpx imports its own command line (click, rich, pygments: 50 ms) unless that import fails.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    from tipbench.cli.main import main as run_cli

    run_cli()


if __name__ == "__main__":
    main()
