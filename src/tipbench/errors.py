"""Every exception tipbench raises on purpose.

    TipbenchError                 exit 1: it could not be done
    ├── UsageError                exit 2: the command, its options or its files are wrong
    │   ├── SuiteError            a suite file: names file, line and reason
    │   ├── ModelRefused          too large, unknown size, not local, missing, no completion
    │   └── JobMissing            there is no job of that id
    ├── NotEnoughData             exit 3: nothing can be said yet
    ├── ServerAway                no answer in time from a server we need
    │   ├── OllamaAway
    │   ├── MlflowAway
    │   └── AirflowAway           also when it does not let us in, or its DAG is paused: it may be put right there
    ├── MlflowRefused             MLflow answered, and said no
    ├── OllamaRefused             Ollama answered something we cannot work with
    ├── AirflowRefused            Airflow answered, and said no
    ├── ResidencyError            weights are in memory that should not be
    ├── LockHeld                  another collect uses the server or the experiment
    ├── JournalError              a result could not be written down; the run stops at once
    ├── CorruptText               a text read back does not match its hash
    ├── MixedRubrics              scores of different rubrics do not compare
    ├── SheetRefused              a filled sheet has mistakes; each names item, tip and field
    ├── WeightsError              the embedded model's file is missing or wrong
    ├── LocalServerError          the local MLflow could not be started or stopped
    ├── JobConflict               a used key, a job that has ended or still runs
    └── NotStarted                a runner cannot start a job, and trying again would not help

A message gives the rule, the value seen and the next step; the command line prints it without a traceback.
Anything that is not a `TipbenchError` is a bug and keeps its traceback. An expected failure of one cell is
not an exception but a value: `tipbench.generate.engine.EngineFailure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class TipbenchError(Exception):
    """Something the user can understand and act on."""

    exit_code = 1


class UsageError(TipbenchError):
    exit_code = 2


class SuiteError(UsageError):
    """A broken suite file, with the place."""

    def __init__(self, path: Path | str, line: int | None, reason: str) -> None:
        self.path = Path(path)
        self.line = line
        self.reason = reason
        place = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{place}: {reason}")


class ModelRefused(UsageError):
    """One or more models may not run; the message lists each with its reason."""


class JobMissing(UsageError):
    """There is no such job."""


class NotEnoughData(TipbenchError):
    exit_code = 3


class ServerAway(TipbenchError):
    pass


class OllamaAway(ServerAway):
    pass


class MlflowAway(ServerAway):
    pass


class AirflowAway(ServerAway):
    pass


class MlflowRefused(TipbenchError):
    """MLflow answered with an error that trying again will not cure."""

    def __init__(self, message: str, *, code: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class OllamaRefused(TipbenchError):
    pass


class AirflowRefused(TipbenchError):
    """Airflow answered with an error that trying again will not cure."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ResidencyError(TipbenchError):
    pass


class LockHeld(TipbenchError):
    pass


class JournalError(TipbenchError):
    pass


class CorruptText(TipbenchError):
    pass


class MixedRubrics(TipbenchError):
    pass


class SheetRefused(TipbenchError):
    """A sheet that may not be applied. `problems` has every mistake found, as `tipbench.judge.checking.Problem`."""

    def __init__(self, message: str, problems: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class WeightsError(TipbenchError):
    pass


class LocalServerError(TipbenchError):
    pass


class JobConflict(TipbenchError):
    """What was asked does not go with what is there: a used key, a job that has ended or still runs."""


class NotStarted(TipbenchError):
    """A runner could not start a job, and trying again would not help."""
