"""Fills one item, then hangs with a child; both ignore SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sheet_io import fill_item, read, write

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
sheet = read()
fill_item(sheet["items"][0])
write(sheet)
sys.stdout.flush()
with Path(sys.argv[1]).open("a") as file:
    file.write(f"{os.getpid()} {child.pid}\n")
time.sleep(600)
