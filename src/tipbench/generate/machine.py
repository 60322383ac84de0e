"""This machine's free memory, as its system tells it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tipbench.generate.sizing import Memory

_MEMINFO = Path("/proc/meminfo")


def free_memory() -> Memory:
    """Free RAM and VRAM here; None where the system does not tell."""
    return Memory(ram=_free_ram(), vram=_free_vram())


def _free_ram() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_vram() -> int | None:
    """The largest free memory of one NVIDIA card; other makers' tools differ too much to rely on."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        return max(int(line) for line in output.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
