"""What a run under faults is compared with: the same script, trained alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.running import ENVIRONMENT, SCRIPT

Alone = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Parameters and the rest after training alone with some arguments."""
    known: dict[tuple[str | Path, ...], dict[str, Any]] = {}

    def train(*args: str, script: Path = SCRIPT) -> dict[str, Any]:
        if (script, *args) not in known:
            out: Path = tmp_path_factory.mktemp("alone")
            command = [sys.executable, str(script), "--out", str(out), *args]
            subprocess.run(command, check=True, timeout=90, env=ENVIRONMENT)
            known[script, *args] = torch.load(out / "alone.pt", weights_only=True)
        return known[script, *args]

    return train
