"""Reference results: the same script trained in a single process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.testbed.fork_server import fork_server
from bench.testbed.live_run import SCRIPT

Alone = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Train a script in a single process and return its result; cached by arguments."""
    known: dict[tuple[str | Path, ...], dict[str, Any]] = {}

    def train(*args: str, script: Path = SCRIPT) -> dict[str, Any]:
        if (script, *args) not in known:
            out: Path = tmp_path_factory.mktemp("alone")
            forked = fork_server().run([script, "--out", out, *args], {}, out / "log")
            assert forked.wait() == 0, (out / "log").read_text()
            known[script, *args] = torch.load(out / "alone.pt", weights_only=True)
        return known[script, *args]

    return train
