"""Exceptions that tipbench raises.

    TipbenchError                 exit 1: the operation failed
    ├── UsageError                exit 2: invalid command, options or files
    │   ├── InvalidOption         invalid value of an option; `key` names it
    │   ├── SuiteError            invalid suite file; has file, line and reason
    │   ├── ModelRefused          too large, unknown size, not local, missing, or no text completion
    │   ├── JobNotFound           unknown job id
    │   └── EventNotFound         unknown event id
    ├── NotEnoughData             exit 3: too little data for a result
    ├── ServerUnavailable         a required server is unreachable or timed out
    │   ├── OllamaUnavailable
    │   ├── MlflowUnavailable
    │   └── AirflowUnavailable    also if it denies access, or if its DAG is paused
    ├── MlflowError               MLflow returned an error
    ├── OllamaError               Ollama returned an error or an unusable response
    ├── AirflowError              Airflow returned an error
    ├── ResidencyError            unexpected weights are in memory
    ├── LockHeld                  another process uses the server or the experiment
    ├── JournalError              a result could not be saved to disk; the collect stops at once
    ├── CorruptText               a stored text or score is damaged
    ├── MixedRubrics              scores of different rubrics cannot be compared
    ├── SheetsClosed              the judge may not use sheets after a duel, or open a duel during a sheet
    ├── SheetRefused              invalid sheet; each problem has item, tip and field
    ├── WeightsError              the embedded model's file is missing or invalid
    ├── LocalMlflowError          the local MLflow could not be started or stopped
    ├── JobConflict               the idempotency key belongs to another request, or the job's state forbids the request
    ├── JobStartError             a runner cannot start a job, and a retry would not help
    ├── QueueFull                 too many entries wait to be written to disk; retry shortly
    ├── EventConflict             the request contradicts the recorded event
    └── StateError                stored policy state is corrupt, or its schema is not supported

A message states the rule, the value found and the next step; the command line prints it without a traceback.
Any other exception is a bug. An engine returns the failure of a cell as `tipbench.generate.engine.EngineFailure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class TipbenchError(Exception):
    """Base class of errors that the user can understand and act on."""

    exit_code = 1


class UsageError(TipbenchError):
    exit_code = 2


class InvalidOption(UsageError):
    """An option has an invalid value. The command line shows its flag, the web API its place, such as `body.n_tips`."""

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        self.problem = problem
        super().__init__(f"--{key.replace('_', '-')} {problem}")


class SuiteError(UsageError):
    def __init__(self, path: Path | str, line: int | None, reason: str) -> None:
        self.path = Path(path)
        self.line = line
        self.reason = reason
        place = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{place}: {reason}")


class ModelRefused(UsageError):
    """One or more models cannot be used. The message lists each model with its reason."""


class JobNotFound(UsageError):
    pass


class EventNotFound(UsageError):
    """The user has no event with this id."""


class NotEnoughData(TipbenchError):
    exit_code = 3


class ServerUnavailable(TipbenchError):
    pass


class OllamaUnavailable(ServerUnavailable):
    pass


class MlflowUnavailable(ServerUnavailable):
    pass


class AirflowUnavailable(ServerUnavailable):
    pass


class MlflowError(TipbenchError):
    """MLflow returned an error that a retry will not fix."""

    def __init__(self, message: str, *, code: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class OllamaError(TipbenchError):
    pass


class AirflowError(TipbenchError):
    """Airflow returned an error that a retry will not fix."""

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
    """A sheet is invalid and was not applied. `problems` are of the class `tipbench.judge.check.Problem`."""

    def __init__(self, message: str, problems: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class SheetsClosed(TipbenchError):
    """A judge who has opened a duel may not use sheets, and one with an open sheet may not open a duel.

    Otherwise a judge could guess the controls of a sheet: a tip that is also in a duel is not a control.
    """


class WeightsError(TipbenchError):
    pass


class LocalMlflowError(TipbenchError):
    pass


class JobConflict(TipbenchError):
    pass


class JobStartError(TipbenchError):
    pass


class QueueFull(TipbenchError):
    pass


class EventConflict(TipbenchError):
    """The request contradicts the recorded event (another policy, body or reward), or the policy was reset since."""


class StateError(TipbenchError):
    pass
