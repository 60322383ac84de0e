"""Writes half of a filled sheet and exits in the middle of an item."""

import json
import sys

from sheet_io import count_call, fill, read

sheet = fill(read())
count_call(sys.argv[1], sheet)
text = json.dumps(sheet, indent=1)
middle = text.index(sheet["items"][len(sheet["items"]) // 2]["item"]) + 40
sys.stdout.write(text[:middle])
sys.stdout.flush()
sys.stderr.write("Working…\nOut of credit \x1b[31mtoday\x1b[0m\n")
sys.exit(3)
