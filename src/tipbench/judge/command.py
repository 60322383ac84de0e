"""Command judge: sends the sheet to an external program and parses its output item by item."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from tipbench.errors import TipbenchError, UsageError
from tipbench.judge.run import Unscored, choose_answer, recover_items, safe_line
from tipbench.judge.sheet import ItemScore, Sheet, sheet_json, sheet_text
from tipbench.text import plural

MOST_OUTPUT = 64_000_000  # bytes of stdout or of an output file
_MOST_ERRORS = 65_536  # bytes of stderr kept, from the end
_TERM_S = 3.0  # seconds between SIGTERM and SIGKILL
_LINGER_S = 2.0  # seconds to wait for pipes that a child keeps open after the program has exited
_POLL_S = 0.05
_CHUNK = 65_536
_MOST_NAME = 60
_OURS = ("TIPBENCH_", "MLFLOW_TRACKING_")


def default_name(command: str) -> str:
    """Returns the default judge name: the program's base name."""
    return safe_line(os.path.basename(_words(command)[0]), _MOST_NAME) or "command"  # noqa: PTH119 - any text


class CommandJudge:
    """Runs `command` for each batch of items, and retries once with the items that have no valid answer.

    The command runs without a shell, in the current directory and environment (agents need both) minus tipbench's own
    variables. The sheet is sent on stdin. In the command, `{sheet}` is replaced by the path of a file with the sheet,
    sent instead of stdin, which the program may fill in place, and `{out}` by the path of a file to write. For each
    item, the first valid answer in `{out}`, stdout or `{sheet}` (in this order) is used.
    """

    provisional = False

    def __init__(self, command: str, name: str, *, timeout_s: float = 900.0, batch: int | None = None) -> None:
        self.name = name
        self._command = _words(command)
        self._timeout_s = timeout_s
        self._batch = batch
        program = self._command[0]
        if shutil.which(program) is None:
            found = Path(program).exists() and os.sep in program
            problem = "is not executable" if found else "was not found"
            raise UsageError(f"The judge's program {program[:200]!r} {problem}. Check its name, permissions and PATH.")
        if timeout_s <= 0 or (batch is not None and batch < 1):
            raise UsageError(
                f"The judge's time limit and batch size must be above 0 (got {timeout_s:g} s and {batch})."
            )

    def fill(self, sheet: Sheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        size = self._batch or max(1, len(sheet.items))
        for first in range(0, len(sheet.items), size):
            items = sheet.items[first : first + size]
            missing: dict[str, str] = {}
            for outcome in self._ask(replace(sheet, items=items), report):
                if isinstance(outcome, Unscored):
                    missing[outcome.item] = outcome.reason
                else:
                    yield outcome
            if missing:
                reason = next(iter(missing.values()))
                scored = len(items) - len(missing)
                report(f"{self.name}: {scored} of {len(items)} scored; retrying the others once ({reason})")
                again = tuple(item for item in items if item.id in missing)
                yield from self._ask(replace(sheet, items=again), report)

    def _ask(self, sheet: Sheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        """Runs the program once and yields a result for every item."""
        report(f"{self.name}: {plural(len(sheet.items), 'item')} to judge, at most {self._timeout_s:g} s")
        sheet = replace(sheet, judge=sheet.judge or self.name)
        with tempfile.TemporaryDirectory(prefix="tipbench-judge-", ignore_cleanup_errors=True) as folder:
            files = {"{sheet}": Path(folder, "sheet.json"), "{out}": Path(folder, "out.json")}
            used = {mark: path for mark, path in files.items() if any(mark in word for word in self._command[1:])}
            try:
                content = sheet_text(sheet).encode()
            except UnicodeEncodeError:  # a lone surrogate in a tip cannot be encoded
                content = json.dumps(sheet_json(sheet)).encode()
            if "{sheet}" in used:
                _write(used["{sheet}"], content)
            command = list(self._command)
            for mark, path in used.items():
                command[1:] = [word.replace(mark, str(path)) for word in command[1:]]
            ended = _run(command, b"" if "{sheet}" in used else content, self._timeout_s)
            out, filled = (_read(used[mark]) if mark in used else b"" for mark in ("{out}", "{sheet}"))
        places = (out, ended.output, filled if filled != content else b"")
        found = [recover_items(place, sheet) for place in places if place]
        for item in sheet.items:
            yield choose_answer(item, sheet.rubric, found, ended.failure)


@dataclass(frozen=True)
class _ProgramOutput:
    """The output and exit status of one run of the program."""

    output: bytes
    failure: str  # empty if it exited with code 0


# The command


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise UsageError(
            f"The judge's command cannot be parsed: {exc} in {command[:80]!r}. Check its quoting."
        ) from exc
    if not words or not words[0] or "\0" in command:
        raise UsageError(f'The judge\'s command has no program (got {command[:80]!r}). Write command:"program …".')
    return words


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as exc:
        raise TipbenchError(f"The sheet for the judge's program cannot be written to {path}: {exc.strerror}.") from exc


def _read(path: Path) -> bytes:
    """Reads an output file up to MOST_OUTPUT bytes; empty unless a regular file, since reading a pipe could block."""
    with suppress(OSError):
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                return file.read(MOST_OUTPUT)
    return b""


# The process


def _run(command: Sequence[str], content: bytes, timeout_s: float) -> _ProgramOutput:
    """Runs the program until it exits or exceeds the time or size limit; always terminates its process group."""
    # Without tipbench and MLflow settings, which would give access to the hidden controls.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environment,
        )
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise UsageError(f"The judge's program {command[0][:200]!r} could not be started: {why}.") from exc
    program_run = _ProgramRun(process, content, timeout_s)
    try:
        return program_run.run()
    finally:
        program_run.end()


class _ProgramRun:
    """Writes stdin and reads stdout and stderr concurrently with a selector, to avoid deadlocks."""

    def __init__(self, process: subprocess.Popen[bytes], content: bytes, timeout_s: float) -> None:
        self._process = process
        self._left = memoryview(content)
        self._timeout_s = timeout_s
        self._output = bytearray()
        self._errors = bytearray()
        self._stopped = ""  # why it was terminated; empty if it was not
        self._selector = selectors.DefaultSelector()

    def run(self) -> _ProgramOutput:
        self._watch(self._process.stdin, selectors.EVENT_WRITE, self._write)
        self._watch(self._process.stdout, selectors.EVENT_READ, self._read_output)
        self._watch(self._process.stderr, selectors.EVENT_READ, self._read_errors)
        self._transfer(time.monotonic() + self._timeout_s)
        return _ProgramOutput(bytes(self._output), self._failure())

    def end(self) -> None:
        """Terminates the program if it still runs, also after Ctrl-C: SIGTERM, then SIGKILL."""
        try:
            self._stop()
        finally:
            self._selector.close()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()

    def _stop(self) -> None:
        ended_well = self._process.poll() is not None and not self._stopped and not self._reading
        if ended_well:
            return
        try:
            if self._process.poll() is None:
                _signal(self._process, signal.SIGTERM)
                self._process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _signal(self._process, signal.SIGKILL)
            self._process.wait()

    def _watch(self, pipe: IO[bytes] | None, event: int, act: Callable[[IO[bytes]], None]) -> None:
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, event, act)

    def _transfer(self, deadline: float) -> None:
        """Transfers data until the program has exited and its output is read; enforces limits by SIGTERM, SIGKILL."""
        ended_at: float | None = None
        while True:
            for key, _ in self._selector.select(_POLL_S):
                key.data(key.fileobj)
            now = time.monotonic()
            if ended_at is None and self._process.poll() is not None:
                ended_at = now
            if ended_at is not None and (not self._reading or now > ended_at + _LINGER_S):
                return
            if self._stopped and now > deadline:
                _signal(self._process, signal.SIGKILL)
            elif not self._stopped and (now > deadline or len(self._output) > MOST_OUTPUT):
                too_long = len(self._output) > MOST_OUTPUT
                limit = f"{MOST_OUTPUT // 10**6} MB of output" if too_long else f"{self._timeout_s:g} s"
                self._stopped, deadline = f"the program exceeded {limit} and was stopped", now + _TERM_S
                _signal(self._process, signal.SIGTERM)

    @property
    def _reading(self) -> bool:
        return any(key.events & selectors.EVENT_READ for key in self._selector.get_map().values())

    def _write(self, pipe: IO[bytes]) -> None:
        try:
            self._left = self._left[os.write(pipe.fileno(), self._left[:_CHUNK]) :] if self._left else self._left
        except BlockingIOError:
            return
        except OSError:  # the program has closed its stdin
            self._left = self._left[:0]
        if not self._left:
            self._selector.unregister(pipe)
            pipe.close()

    def _read_output(self, pipe: IO[bytes]) -> None:
        piece = self._piece(pipe)
        if len(self._output) <= MOST_OUTPUT:
            self._output += piece

    def _read_errors(self, pipe: IO[bytes]) -> None:
        self._errors += self._piece(pipe)
        del self._errors[:-_MOST_ERRORS]

    def _piece(self, pipe: IO[bytes]) -> bytes:
        try:
            piece = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return b""
        if not piece:
            self._selector.unregister(pipe)
        return piece

    def _failure(self) -> str:
        code = self._process.returncode
        if self._stopped:
            ended = self._stopped
        elif code < 0:
            known = {each.value for each in signal.Signals}
            name = signal.Signals(-code).name if -code in known else f"signal {-code}"
            ended = f"the program was ended by {name}"
        elif code > 0:
            ended = f"the program ended with exit code {code}"
        else:
            return ""
        lines = [line for line in self._errors.decode("utf-8", "replace").splitlines() if line.strip()]
        return f"{ended}: {safe_line(lines[-1], 160)}" if lines else ended


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to the whole process group; the program was started in a new session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
