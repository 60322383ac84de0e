"""`tipbench` and `python -m tipbench`."""

import gc
import sys


def main() -> None:
    """Run the command line."""
    gc.set_threshold(50_000)  # a sixth of the start-up is collections that find nothing
    # httpx loads a command line of its own (click, rich, pygments: 50 ms) unless that cannot be imported.
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    from tipbench.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
