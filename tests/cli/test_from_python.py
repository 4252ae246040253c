"""`evenstep.run` is the command."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import evenstep
from evenstep.cli.from_python import as_flags
from evenstep.errors import ConfigError

SCRIPT = Path(__file__).with_name("fake_train.py")


def call(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since it handles signals."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


def test_options_are_those_of_the_command() -> None:
    assert as_flags({"workers": "2:8", "kind": ["cpu=8", "gpu=1"], "hand_over": True}) == [
        "--workers=2:8",
        "--kind=cpu=8",
        "--kind=gpu=1",
        "--hand-over",
    ]
    assert as_flags({"page": False, "lease": 60.0, "set_": ["a=1"]}) == [
        "--lease=60.0",
        "--set=a=1",
    ]


def test_a_failed_script_raises(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    done = call(tmp_path, "import evenstep; evenstep.run('fails.py', run='r')")
    assert "RunFailedError: the run ended with exit code 1" in done.stderr


def test_a_script_that_is_stopped_in_order_does_not_raise(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getppid(), signal.SIGINT); import time; time.sleep(60)"
    (tmp_path / "stops.py").write_text(script)
    done = call(tmp_path, "import evenstep; evenstep.run('stops.py', run='r'); print('went on')")
    assert "went on" in done.stdout, done.stderr


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigError, match="No such option"):
        evenstep.run(SCRIPT, wrong="1")


def test_it_refuses_threads_and_event_loops() -> None:
    async def inside() -> None:
        evenstep.run(SCRIPT)

    with pytest.raises(ConfigError, match="main thread"):
        asyncio.run(inside())
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="main thread"):
        pool.submit(evenstep.run, SCRIPT).result()
