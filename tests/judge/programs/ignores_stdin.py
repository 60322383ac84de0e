"""Does not read its input; writes more than a pipe holds, of nothing useful."""

import sys

sys.stdout.write("thinking… " * 200_000)
sys.stderr.write("thinking… " * 200_000)
