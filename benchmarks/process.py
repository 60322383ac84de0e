"""Runs `tipbench collect` as a process and measures it from outside: journal, memory, CPU and wall time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from report import NotMeasured

_POLL_S = 0.01
_CELL = b'{"put":{"kind":"cell"'


@dataclass(frozen=True)
class CollectProcess:
    """The measured values of an ended collect. Times are seconds since the epoch."""

    started: float
    last_entry: float
    ended: float
    entries: int
    cpu_s: float
    peak_bytes: int | None  # None where there is no /proc

    @property
    def total_s(self) -> float:
        return self.ended - self.started


def run_collect(options: Mapping[str, str], folder: Path, bytecode: Path) -> CollectProcess:
    """Run a collect in `folder` with these options.

    The first run writes Python's bytecode into `bytecode`; later runs compile nothing, as after an installation.
    """
    home = folder / "home"
    command = [sys.executable, "-m", "tipbench", "collect"]
    for key, value in options.items():
        command += [f"--{key.replace('_', '-')}", value]
    with (folder / "output.txt").open("ab") as output:
        watch = _Watch(home / "journal")
        started = time.time()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(home, bytecode),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            measured = watch.until_end(process, started)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode != 0:
        tail = (folder / "output.txt").read_text("utf-8", "replace")[-2000:]
        raise NotMeasured(f"`{' '.join(command)}` exited with {process.returncode}:\n{tail}")
    return measured


class _Watch:
    """Polls every 10 ms for new journal entries, the process's peak memory and its end."""

    def __init__(self, journals: Path) -> None:
        self._journals = journals
        self._fd: int | None = None
        self._offset = 0
        self._rest = b""
        self._last_entry = 0.0
        self._entries = 0
        self._peak: int | None = None

    def until_end(self, process: subprocess.Popen[bytes], started: float) -> CollectProcess:
        status = Path(f"/proc/{process.pid}/status")
        try:
            while True:
                pid, code, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    ended = time.time()
                    process.returncode = os.waitstatus_to_exitcode(code)
                    cpu_s = usage.ru_utime + usage.ru_stime
                    return CollectProcess(started, self._last_entry, ended, self._entries, cpu_s, self._peak)
                self._read_journal()
                self._peak = _peak_bytes(status) or self._peak
                time.sleep(_POLL_S)
        finally:
            if self._fd is not None:
                os.close(self._fd)

    def _read_journal(self) -> None:
        if self._fd is None:
            found = next(self._journals.glob("*/*.jsonl"), None)
            if found is None:
                return
            self._fd = os.open(found, os.O_RDONLY)
        size = os.fstat(self._fd).st_size
        if size < self._offset:  # emptied once everything in it was recorded
            self._offset, self._rest = 0, b""
        data = os.pread(self._fd, size - self._offset, self._offset)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        new_entries = sum(line.startswith(_CELL) for line in lines)
        if new_entries:
            self._entries += new_entries
            self._last_entry = time.time()


def _peak_bytes(status: Path) -> int | None:
    # ru_maxrss would include the parent's memory from before the exec.
    try:
        for line in status.read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _environment(home: Path, bytecode: Path) -> dict[str, str]:
    excluded = ("TIPBENCH_", "MLFLOW_", "OLLAMA_", "PYTHONDONTWRITEBYTECODE")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(excluded)}
    return inherited | {"TIPBENCH_HOME": str(home), "PYTHONPYCACHEPREFIX": str(bytecode)}
