"""A scheduled collect of one model: `tipbench collect` as a child, whose words and events go into the task's log.

The child has a session of its own: a scheduler that kills a task kills its group within seconds, and a model needs
longer to be seen leaving memory. A pipe tells it, once, that we were told to end or are gone without a word: a second
signal would cut its unloading short.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

from tipbench.cli import scheduled_child
from tipbench.cli.events import VARIABLE
from tipbench.cli.scheduled import Conf, print_event, read_conf
from tipbench.errors import TipbenchError, UsageError
from tipbench.jobs.command import collect_order, command_words
from tipbench.jobs.events import Failure, parse_line
from tipbench.settings import load_settings

_MISUSED = 2
_INTERRUPTED = 130
_MOST_JSON = 16_000_000
_TOLD = ("experiment", "cells", "generated", "recorded_before", "failed", "seconds")


def collect_model(conf: Conf, model: str, ollama_url: str | None) -> dict[str, Any]:
    """Collect what is missing of one model. UsageError when trying again would not help, TipbenchError otherwise."""
    settings = load_settings()
    config = read_conf(conf, settings)
    changed = {"models": model, "skip_refused": False} | ({"ollama_url": ollama_url} if ollama_url else {})
    order = collect_order(config.model_copy(update=changed))
    child = Child([*command_words(order), "--json"], order.private)
    code = child.run()
    summary = _summary(child.printed)
    if code == 0 and summary is not None:
        return {"model": model} | {key: summary.get(key) for key in _TOLD}
    reason = _reason(child, code, summary)
    if not child.failure:
        print_event(Failure(reason))
    raise (UsageError if code == _MISUSED else TipbenchError)(reason)


def _summary(printed: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        found = json.loads(printed)
        return found if isinstance(found, dict) else None
    return None


def _reason(child: Child, code: int, summary: dict[str, Any] | None) -> str:
    if child.failure:
        return child.failure
    if summary and summary.get("failed"):
        first = next(iter(summary.get("failures") or ()), "")
        return f"{summary['failed']} of {summary.get('cells')} cells failed; the first: {first}"
    if code in (_INTERRUPTED, -signal.SIGTERM):
        return "The collect was told to end; what was finished is kept, and the next try continues."
    if code < 0:
        return f"The collect was ended by signal {-code}; what was finished is kept, and the next try continues."
    return f"The collect ended with {code}: {child.last_word or 'without a word'}"


class Child:
    """One run of the command. Its stderr and events are printed line by line, its stdout is kept."""

    def __init__(self, words: list[str], private: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-P", "-m", scheduled_child.__name__, *words]
        self._private = dict(private)
        self.printed = b""
        self.failure = ""
        self.last_word = ""

    def run(self) -> int:
        """Its exit code; negative for a signal."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as events:
            try:
                process = subprocess.Popen(
                    self._command,
                    env=os.environ | self._private | {VARIABLE: f"/dev/fd/{writing}", "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(writing,),
                    start_new_session=True,
                )
            finally:
                os.close(writing)
            assert process.stdin is not None  # noqa: S101 - asked for above
            with process, _closed_with_us(process.stdin):
                return self._listen(process, events)

    def _listen(self, process: subprocess.Popen[bytes], events: IO[bytes]) -> int:
        assert process.stdout is not None  # noqa: S101 - asked for above
        assert process.stderr is not None  # noqa: S101
        readers = [
            threading.Thread(target=_each_line, args=(stream, take), daemon=True)
            for stream, take in ((process.stderr, self._word), (events, self._event))
        ]
        for reader in readers:
            reader.start()
        self.printed = process.stdout.read(_MOST_JSON)
        code = process.wait()
        for reader in readers:
            reader.join(timeout=5.0)  # a grandchild that keeps the pipe open is not waited for
        return code

    def _word(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self.last_word = text or self.last_word
        _log(f"| {text}" if parse_line(line) is not None else text)  # only events may look like events

    def _event(self, line: bytes) -> None:
        _log(line.decode("ascii", "replace").rstrip())
        known = parse_line(line)
        if known is not None and isinstance(known[1], Failure):
            self.failure = known[1].text


def _log(line: str) -> None:
    """In one piece: two threads write, and `print` writes the end of a line by itself."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _each_line(stream: IO[bytes], take: Callable[[bytes], None]) -> None:
    with suppress(ValueError, OSError):  # closed by the one who stopped waiting
        for line in stream:
            take(line)


@contextmanager
def _closed_with_us(pipe: IO[bytes]) -> Iterator[None]:
    """A SIGTERM of ours closes the pipe, and the child's end is waited for; so does whatever else breaks us off."""
    if threading.current_thread() is not threading.main_thread():
        with pipe:
            yield
        return
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: pipe.close())
    try:
        with pipe:
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
