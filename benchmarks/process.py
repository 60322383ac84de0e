"""One `tipbench collect` as a process of its own, watched from outside: journal, memory, CPU, wall time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import NotMeasured

_POLL_S = 0.01
_CELL = b'{"put":{"kind":"cell"'


@dataclass(frozen=True)
class Ended:
    """What was seen of a collect. Times are seconds since the epoch."""

    started: float
    last_entry: float
    ended: float
    entries: int
    cpu_s: float
    peak_bytes: int | None  # None where there is no /proc

    @property
    def total_s(self) -> float:
        return self.ended - self.started


def run_collect(options: Mapping[str, str], folder: Path, bytecode: Path) -> Ended:
    """Run a collect in `folder` with these options and watch it until it has ended.

    Python keeps its bytecode in `bytecode`, filled by the first run: as after an installation, nothing is compiled.
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
            ended = watch.until_end(process, started)
        except BaseException:
            process.kill()
            process.wait()
            raise
    if process.returncode != 0:
        raise NotMeasured(_report(command, process.returncode, folder / "output.txt"))
    return ended


class _Watch:
    """Looks every 10 ms: new entries of the journal, the process's peak memory, its end."""

    def __init__(self, journals: Path) -> None:
        self._journals = journals
        self._fd: int | None = None
        self._offset = 0
        self._rest = b""
        self._last_entry = 0.0
        self._entries = 0
        self._peak: int | None = None

    def until_end(self, process: subprocess.Popen[bytes], started: float) -> Ended:
        status = Path(f"/proc/{process.pid}/status")
        try:
            while True:
                pid, code, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    ended = time.time()
                    process.returncode = os.waitstatus_to_exitcode(code)
                    cpu_s = usage.ru_utime + usage.ru_stime
                    return Ended(started, self._last_entry, ended, self._entries, cpu_s, self._peak)
                self._look_at_journal()
                self._peak = _peak_bytes(status) or self._peak
                time.sleep(_POLL_S)
        finally:
            if self._fd is not None:
                os.close(self._fd)

    def _look_at_journal(self) -> None:
        if self._fd is None:
            found = next(self._journals.glob("*/*.jsonl"), None)
            if found is None:
                return
            self._fd = os.open(found, os.O_RDONLY)
        size = os.fstat(self._fd).st_size
        if size < self._offset:  # emptied, since everything in it was kept
            self._offset, self._rest = 0, b""
        data = os.pread(self._fd, size - self._offset, self._offset)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        fresh = sum(line.startswith(_CELL) for line in lines)
        if fresh:
            self._entries += fresh
            self._last_entry = time.time()


def _peak_bytes(status: Path) -> int | None:
    # Not ru_maxrss: Linux counts the memory of the parent in it, from before the exec.
    try:
        for line in status.read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _environment(home: Path, bytecode: Path) -> dict[str, str]:
    settings = ("TIPBENCH_", "MLFLOW_", "OLLAMA_", "PYTHONDONTWRITEBYTECODE")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(settings)}
    return inherited | {"TIPBENCH_HOME": str(home), "PYTHONPYCACHEPREFIX": str(bytecode)}


def _report(command: Sequence[str], code: int, output: Path) -> str:
    tail = output.read_text("utf-8", "replace")[-2000:]
    return f"`{' '.join(command)}` ended with {code}. It said:\n{tail}"
