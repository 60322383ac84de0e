"""Answers as coding agents do: the sheet in a fence, with prose and braces around it."""

import json

from sheet_io import fill, read

sheet = fill(read(), 4)
print('I have {carefully} read the sheet, {"as": "asked"}. Here it is:\n\n```json')
print(json.dumps(sheet, indent=2))
print("```\n\nLet me know if {anything} else is needed!")
