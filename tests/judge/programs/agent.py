"""A coding agent that fills a sheet file: `agent.py INSTRUCTIONS SHEET OUT REFERENCES MISTAKE`.

It reads the instructions, and the right scores of the check items from a file, as a careful judge would find them.
"""

import json
import sys
from pathlib import Path

instructions, sheet, out, references, mistake = sys.argv[1:]
assert "whole number within the range" in Path(instructions).read_text(encoding="utf-8")
raw = json.loads(Path(sheet).read_text(encoding="utf-8"))
agreed = json.loads(Path(references).read_text(encoding="utf-8"))
for item in raw["items"]:
    for tip in item["tips"]:
        right = agreed.get(tip["tip"], {})
        tip["scores"] = {name: 5 if mistake == "too kind" else right.get(name, 3) for name in tip["scores"]}
if mistake == "wrong item":
    raw["items"][3]["item"] = "item-3"
if mistake == "out of range":
    raw["items"][2]["tips"][1]["scores"]["tone"] = 7
text = json.dumps(raw, ensure_ascii=False)
Path(out).write_text(text[: len(text) // 2] if mistake == "cut file" else text, encoding="utf-8")
