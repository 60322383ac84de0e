"""Fills the sheet, then writes until it is stopped, for 100 MB at most."""

import sys

from sheet_io import fill, read, write

write(fill(read()))
for _ in range(100):
    sys.stdout.write("x" * 1_000_000)
