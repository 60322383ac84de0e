"""`python -m tipbench`."""

from tipbench.cli.main import main

main()
