"""The embedded model's weights, downloaded once into a cache that test runs share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.real_ollama import cache_dir
from tipbench.errors import WeightsError
from tipbench.generate.weights import fetch_weights


def shared_weights_home() -> Path:
    """A home folder with the embedded model's weights. Without a network the test is skipped, on CI it fails."""
    home = cache_dir() / "home"
    try:
        fetch_weights(home)
    except WeightsError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the embedded model's weights could not be fetched: {exc}")
    return home
