"""`tipbench` and `python -m tipbench`."""

import gc


def main() -> None:
    """Run the command line."""
    gc.set_threshold(50_000)  # a sixth of the start-up is collections that find nothing
    from tipbench.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
