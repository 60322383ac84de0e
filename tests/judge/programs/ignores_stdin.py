"""Does not read its input, and writes more than a pipe holds without any score."""

import sys

sys.stdout.write("thinking… " * 200_000)
sys.stderr.write("thinking… " * 200_000)
