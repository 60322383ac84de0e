"""Fills every second item wrongly the first time, and everything correctly on a retry."""

import sys

from sheet_io import count_call, fill, read, write

sheet = fill(read())
if count_call(sys.argv[1], sheet) == 1:
    for item in sheet["items"][::2]:
        item["tips"][0]["scores"] = "very good"
write(sheet)
