"""Fills the sheet in a file, in place or into a second file, and prints a text on stdout."""

import json
import sys
from pathlib import Path

from sheet_io import fill

sheet = fill(json.loads(Path(sys.argv[1].removeprefix("--sheet=")).read_text()), 2)
Path(sys.argv[-1].removeprefix("--sheet=")).write_text(json.dumps(sheet))
print("Done. I filled the file." if sys.stdin.read() == "" else "There was something on stdin.")
