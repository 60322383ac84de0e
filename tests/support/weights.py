"""The real weights for tests, fetched once into a cache that test runs share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tipbench.errors import WeightsError
from tipbench.generate.weights import fetch_weights

ROOT = Path(__file__).resolve().parents[2]


def cache_folder() -> Path:
    """TIPBENCH_TEST_CACHE, or `.cache` in the repository."""
    return Path(os.environ.get("TIPBENCH_TEST_CACHE") or ROOT / ".cache").absolute()


def shared_weights_home() -> Path:
    """A home that holds the embedded model. Without a network the test is skipped, on CI it fails."""
    home = cache_folder() / "home"
    try:
        fetch_weights(home)
    except WeightsError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the embedded model's weights could not be fetched: {exc}")
    return home


@pytest.fixture(scope="session")
def embedded_home() -> Path:
    """The shared home with the real weights in it: to be read, not written."""
    return shared_weights_home()
