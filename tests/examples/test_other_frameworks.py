"""`Balancer` in JAX and in TensorFlow: real processes, and their own collectives."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EQUAL_SHARE = 32


@pytest.mark.long
@pytest.mark.parametrize("package", ["jax", "tensorflow"])
def test_uneven_processes_train_as_one_and_the_slow_one_gets_less(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    command = [sys.executable, str(EXAMPLES / f"{package}_balancer.py"), "--steps", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    error = re.search(r"relative error against one process (\S+);", done.stdout)
    assert error is not None, done.stdout
    assert float(error[1]) <= 1e-6
    slow = [int(share) for share in re.findall(r"'process 2': (\d+)", done.stdout)]
    assert slow[0] == EQUAL_SHARE
    assert fmean(slow[1:]) < EQUAL_SHARE
