"""The parts of the tests' support code that the benchmarks use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.judging import SheetDriver, fill, record_cells
from support.mlflow_server import RealMlflow
from support.real_ollama import PsWatcher, RealOllama
from support.scripted_ollama import ScriptedProcess, messages_hash
from support.weights import shared_weights_home

__all__ = [
    "PsWatcher",
    "RealMlflow",
    "RealOllama",
    "ScriptedProcess",
    "SheetDriver",
    "fill",
    "messages_hash",
    "record_cells",
    "shared_weights_home",
]
