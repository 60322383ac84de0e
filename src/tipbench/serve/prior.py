"""Priors: initial weights θ₀ for new users, fitted to the rewards of many users and stored in a JSON file.

    {"format": "tipbench-prior/1", "policy": "egreedy/v3", "features": "features-v3/1", "names": […], "theta": […],
     "source": {…}}

`source` describes how the prior was fitted. A hash of all other fields identifies the prior.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, with_config

from tipbench.errors import UsageError
from tipbench.files import write_output
from tipbench.text import fingerprint

_FORMAT = "tipbench-prior/1"


@with_config(ConfigDict(allow_inf_nan=False, extra="forbid"))
@dataclass(frozen=True)
class Prior:
    """The prior of one policy."""

    policy: str
    features: str  # version of the policy's feature set
    names: tuple[str, ...]  # of the features
    theta: tuple[float, ...]  # θ₀, one weight per feature
    source: Mapping[str, object] = field(default_factory=dict, compare=False)

    @cached_property
    def hash(self) -> str:
        """16 hex digits that identify the prior, stored with state and events."""
        theta = [float(value) for value in self.theta]  # 1 and 1.0 get the same hash
        return fingerprint([_FORMAT, self.policy, self.features, self.names, theta], 16)

    def save(self, path: Path) -> None:
        """Write the file; raises UsageError if it cannot be written."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, allow_nan=False)
        write_output(path, f"{text}\n", flag="--out")


_PRIOR_ADAPTER = TypeAdapter(Prior)


def load_prior(path: Path) -> Prior:
    """Read a prior; raises UsageError if it is invalid. `Policy.check_prior` checks whether it fits a policy."""
    try:
        content = json.loads(path.read_bytes())
        file_format = content.pop("format", None) if isinstance(content, dict) else None
        if file_format != _FORMAT:
            raise UsageError(
                f"{path} is not a prior of format {_FORMAT} (its format is {file_format!r}). Fit it again."
            )
        prior = _PRIOR_ADAPTER.validate_python(content)
    except (OSError, ValueError) as exc:
        raise UsageError(f"The prior {path} cannot be read: {exc}. Create it with `tipbench prior fit`.") from exc
    if len(prior.theta) != len(prior.names):
        raise UsageError(f"The prior {path} has {len(prior.theta)} numbers for {len(prior.names)} features.")
    return prior
