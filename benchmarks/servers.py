"""The parts of the tests' support code that the benchmarks use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.judging import SheetDriver, fill, record_cells
from support.mlflow_server import start_mlflow
from support.real_ollama import PsWatcher, RealOllama
from support.scripted_ollama import ScriptedProcess, messages_hash
from support.weights import shared_weights_home

CELLS_PER_MODEL = 24  # of `record_cells`: 3 prompts × 8 scenarios

__all__ = [
    "CELLS_PER_MODEL",
    "PsWatcher",
    "RealOllama",
    "ScriptedProcess",
    "SheetDriver",
    "fill",
    "messages_hash",
    "record_cells",
    "shared_weights_home",
    "start_mlflow",
]
