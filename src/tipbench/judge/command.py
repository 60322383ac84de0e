"""Command judge: sends the sheet to an external program and recovers the scores from its output."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from tipbench.errors import TipbenchError, UsageError
from tipbench.judge.check import MAX_NAME, check_item
from tipbench.judge.run import Unscored, safe_line
from tipbench.judge.sheet import ItemScore, TipItem, TipSheet, sheet_json, sheet_text
from tipbench.plan.rubric import Rubric
from tipbench.text import plural

MAX_OUTPUT = 64_000_000  # bytes of stdout or of an output file
_MAX_STDERR = 65_536  # bytes, from the end
_TERM_S = 3.0  # seconds between SIGTERM and SIGKILL
_POLL_S = 0.05
# Prefixes of environment variables that would give the program access to the hidden controls.
_REMOVED_PREFIXES = ("TIPBENCH_", "MLFLOW_TRACKING_")


def split_command(command: str) -> list[str]:
    """Split a command into its program and its arguments, as a shell does. Raises UsageError if that fails."""
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise UsageError(
            f"The judge's command cannot be parsed: {exc} in {command[:80]!r}. Check its quoting."
        ) from exc
    if not words or not words[0] or "\0" in command:
        raise UsageError(f'The judge\'s command has no program (got {command[:80]!r}). Write command:"program …".')
    return words


def default_name(command: str) -> str:
    """Return the default judge name: the program's base name."""
    program, *_ = split_command(command)
    return safe_line(os.path.basename(program), MAX_NAME) or "command"  # noqa: PTH119 - not always a path


class CommandJudge:
    """Runs a command for `batch` items at a time (None: all), and once more for the items without valid scores.

    The command runs without a shell, in the current directory and environment (coding agents need both), without the
    variables of `_REMOVED_PREFIXES`. `{sheet}` in its arguments is the path of the sheet's file, which the program may
    fill in. Without `{sheet}`, stdin is the sheet. `{out}` is the path of a file that the program may write. For each
    item, the first valid scores are used: from `{out}`, else from stdout, else from `{sheet}`.
    """

    provisional = False  # the scores count as those of the judge `name`, with the same limits on drift as for people

    def __init__(self, command: str, name: str, *, timeout_s: float = 900.0, batch: int | None = None) -> None:
        self.name = name
        self._command = split_command(command)
        self._timeout_s = timeout_s
        self._batch_size = batch
        program = self._command[0]
        if shutil.which(program) is None:
            found = Path(program).exists() and os.sep in program  # without a separator, only PATH is searched
            problem = "is not executable" if found else "was not found"
            raise UsageError(f"The judge's program {program[:200]!r} {problem}. Check its name, permissions and PATH.")

    def fill(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        batch_size = self._batch_size or max(1, len(sheet.items))
        for start in range(0, len(sheet.items), batch_size):
            items = sheet.items[start : start + batch_size]
            reasons: dict[str, str] = {}  # of the unscored items, by id
            for result in self._run_once(replace(sheet, items=items), report):
                if isinstance(result, Unscored):
                    reasons[result.item] = result.reason
                else:
                    yield result
            if reasons:
                first_reason = next(iter(reasons.values()))
                n_scored = len(items) - len(reasons)
                report(f"{self.name}: {n_scored} of {len(items)} scored; retrying the others once ({first_reason})")
                retried = tuple(item for item in items if item.id in reasons)
                yield from self._run_once(replace(sheet, items=retried), report)

    def _run_once(self, sheet: TipSheet, report: Callable[[str], None]) -> Iterator[ItemScore | Unscored]:
        report(f"{self.name}: {plural(len(sheet.items), 'item')} to judge, at most {self._timeout_s:g} s")
        sheet = replace(sheet, judge=sheet.judge or self.name)
        with TemporaryDirectory(prefix="tipbench-judge-", ignore_cleanup_errors=True) as folder:
            sheet_path, out_path = Path(folder, "sheet.json"), Path(folder, "out.json")
            try:
                sheet_bytes = sheet_text(sheet).encode()
            except UnicodeEncodeError:  # a lone surrogate in a tip cannot be encoded; here it is escaped
                sheet_bytes = json.dumps(sheet_json(sheet)).encode()
            try:
                sheet_path.write_bytes(sheet_bytes)
            except OSError as exc:
                raise TipbenchError(
                    f"The sheet for the judge's program cannot be written to {sheet_path}: {exc.strerror}."
                ) from exc
            program, *arguments = self._command
            stdin_path = os.devnull if any("{sheet}" in argument for argument in arguments) else sheet_path
            arguments = [
                argument.replace("{sheet}", str(sheet_path)).replace("{out}", str(out_path)) for argument in arguments
            ]
            with Path(stdin_path).open("rb") as stdin:
                stdout, failure = _run_program([program, *arguments], stdin, self._timeout_s)
            out, filled_sheet = _read_output(out_path), _read_output(sheet_path)
        if filled_sheet == sheet_bytes:
            filled_sheet = b""  # the program has not changed it
        sources = [recover_items(output, sheet) for output in (out, stdout, filled_sheet) if output]
        for item in sheet.items:
            yield choose_score(item, sheet.rubric, sources, failure)


def _read_output(path: Path) -> bytes:
    """Return at most MAX_OUTPUT bytes of a regular file. Other files are not read: a pipe could block."""
    with suppress(OSError):
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                return file.read(MAX_OUTPUT)
    return b""


def _run_program(command: Sequence[str], stdin: IO[bytes], timeout_s: float) -> tuple[bytes, str]:
    """Run the program; return its output and the reason why it failed, empty if it exited with code 0.

    Its streams are files: reading pipes would block while a child process keeps them open.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_REMOVED_PREFIXES)}
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, env=environment
            )
        except (OSError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise UsageError(f"The judge's program {command[0][:200]!r} could not be started: {reason}.") from exc
        exceeded = ""  # the limit that was exceeded, if any
        try:
            deadline = time.monotonic() + timeout_s
            while not exceeded and process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                if os.fstat(stdout.fileno()).st_size > MAX_OUTPUT:
                    exceeded = f"{MAX_OUTPUT // 10**6} MB of output"
                elif time.monotonic() > deadline:
                    exceeded = f"{timeout_s:g} s"
        finally:
            _stop(process)
        stdout.seek(0)
        stderr.seek(max(0, os.fstat(stderr.fileno()).st_size - _MAX_STDERR))
        return stdout.read(MAX_OUTPUT), _failure_reason(process.returncode, exceeded, stderr.read())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the program if it still runs, and any child processes it has left."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)  # its process group, because it was started in a new session


def _failure_reason(code: int, exceeded: str, stderr: bytes) -> str:
    if exceeded:
        reason = f"the program exceeded {exceeded} and was stopped"
    elif code < 0:  # the negative number of a signal
        known_signals = {each.value for each in signal.Signals}
        name = signal.Signals(-code).name if -code in known_signals else f"signal {-code}"
        reason = f"the program was ended by {name}"
    elif code > 0:
        reason = f"the program ended with exit code {code}"
    else:
        return ""
    lines = [line for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return f"{reason}: {safe_line(lines[-1], 160)}" if lines else reason


# A bracket or a string. A string without a closing quote ends with its line, because JSON strings do not span lines.
_TOKEN = re.compile(r'[\[\]{}]|"(?:[^"\\\n]|\\.)*+"?')
_KEYS = ('"item"', '"items"')
_MAX_DEPTH = 200  # nested brackets; beyond it, the outermost are ignored
# An object is parsed again as a part of each object around it, so the total number of parsed characters is limited to
# FACTOR * len(text) + EXTRA.
_MAX_PARSED_FACTOR, _MAX_PARSED_EXTRA = 8, 1_000_000
_MAX_VERSIONS = 8  # of one item
_MAX_VALUE_CHARS = 60  # of a value in a message
_MAX_REASON_CHARS = 300


@dataclass(frozen=True)
class RecoveredItems:
    """The items found in one output of the program."""

    versions: dict[str, list[dict[str, Any]]]  # of each item by its id: an item may be returned several times
    mismatch: str  # why a sheet in the output was ignored; empty if none was


def recover_items(output: bytes, sheet: TipSheet) -> RecoveredItems:
    """Extract the sheet's items from arbitrary output. Checks the sheet id and the rubric, but not the items."""
    expected_ids = {item.id for item in sheet.items}
    versions: dict[str, list[dict[str, Any]]] = {}
    mismatch = ""
    for found in _find_objects(output.decode("utf-8", "replace")):
        if reason := _mismatch(found, sheet):
            mismatch = mismatch or reason  # the first one is reported
            continue
        items = found.get("items")
        if not isinstance(items, list):  # a single item, for example of a truncated sheet
            items = [found]
        for item in items:
            item_id = item.get("item") if isinstance(item, dict) else None
            if isinstance(item_id, str) and item_id in expected_ids:
                item_versions = versions.setdefault(item_id, [])
                if len(item_versions) < _MAX_VERSIONS and item not in item_versions:
                    item_versions.append(item)
    return RecoveredItems(versions, mismatch)


def choose_score(
    item: TipItem, rubric: Rubric, sources: Sequence[RecoveredItems], failure: str
) -> ItemScore | Unscored:
    """Return the item's score from the first source with exactly one valid score. Without one, return the reason.

    `sources` are the outputs of the program. `failure` is why the program failed, or empty.
    """
    problem_text, is_unfinished = "", False
    for source in sources:
        scores: list[ItemScore] = []
        for version in source.versions.get(item.id, ()):
            checked = check_item(version, item, rubric)
            if isinstance(checked, ItemScore):
                if checked not in scores:
                    scores.append(checked)
            elif checked is None:
                is_unfinished = True
            else:
                problem_text = problem_text or "; ".join(problem.message for problem in checked[:2])
        if len(scores) == 1:
            return scores[0]
        if scores:
            problem_text = problem_text or "returned more than once, with different scores"
    if problem_text:
        reasons = [f"invalid answer: {problem_text}"]
    else:
        mismatch = next((source.mismatch for source in sources if source.mismatch), "")
        reasons = ["returned unfinished" if is_unfinished else "not returned", mismatch, failure]
    return Unscored(item.id, safe_line("; ".join(filter(None, reasons)), _MAX_REASON_CHARS))


def _mismatch(found: dict[str, Any], sheet: TipSheet) -> str:
    """Return why the found object is another sheet, or an empty string if it is this sheet or an item."""
    if "items" not in found:
        return ""
    # A missing sheet id or rubric is accepted, because each item has its own hash.
    if found.get("sheet", sheet.id) != sheet.id:
        return f"another sheet was returned: {safe_line(repr(found['sheet']), _MAX_VALUE_CHARS)} instead of {sheet.id}"
    rubric = found.get("rubric")
    if isinstance(rubric, dict) and rubric.get("sha256", sheet.rubric.sha256) != sheet.rubric.sha256:
        return f"the sheet was returned with another rubric: {safe_line(repr(rubric['sha256']), _MAX_VALUE_CHARS)}"
    return ""


def _find_objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects that have a key `items` or `item`, in order, without the objects inside them.

    An object that is never closed, such as a truncated sheet or a brace in prose, does not hide the objects inside it.
    """
    found: list[tuple[int, dict[str, Any]]] = []  # start and object
    starts: deque[int] = deque(maxlen=_MAX_DEPTH)  # position of each open bracket
    has_key: deque[bool] = deque(maxlen=_MAX_DEPTH)  # whether one of _KEYS occurs in it, outside nested brackets
    chars_left = _MAX_PARSED_FACTOR * len(text) + _MAX_PARSED_EXTRA
    for token in _TOKEN.finditer(text):
        word = token.group()  # a bracket or a string
        if word in ("[", "{"):
            starts.append(token.start())
            has_key.append(False)
        elif word in _KEYS and starts:
            has_key[-1] = True
        elif word in ("]", "}") and starts:
            start = starts.pop()
            if not has_key.pop() or chars_left <= 0:
                continue
            chars_left -= token.end() - start
            try:
                value = json.loads(text[start : token.end()])
            except (ValueError, RecursionError):  # ValueError also for very long integers
                continue
            if isinstance(value, dict):
                while found and found[-1][0] > start:  # objects inside this one
                    found.pop()
                found.append((start, value))
    return [value for _, value in found]
