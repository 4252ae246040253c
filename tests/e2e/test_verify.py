"""`evenstep verify` on whole scripts, as users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from evenstep.cli.main import main

SCRIPT = Path(__file__).parent / "verified_script.py"


def verify(fault: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenstep", "verify", *options, str(SCRIPT), fault]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )


@pytest.mark.long
def test_a_correct_script_agrees_and_ends_after_the_given_steps() -> None:
    done = verify("none")
    assert done.returncode == 0, done.stdout + done.stderr
    title, *findings = done.stdout.splitlines()
    assert "3 steps" in title
    assert [line.split()[:2] for line in findings] == [
        ["data", "agree"],
        ["gradients", "agree"],
        ["parameters", "agree"],
    ]
    assert "192 samples" in findings[0]
    assert "shares in step 1: 40, 16, 8" in findings[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fixed batch", "gradients   DIFFER"),
        ("own sampler", "data        DIFFER"),
        ("even shares only", "ValueError: cannot train on 8 samples"),
    ],
)
def test_a_fault_is_reported(fault: str, message: str) -> None:
    done = verify(fault, "--steps", "1", "--shares", "7,1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert message in done.stdout


@pytest.mark.parametrize("shares", ["5", "5,x", "0,0", ""])
def test_invalid_shares_are_refused(shares: str) -> None:
    done = CliRunner().invoke(main, ["verify", "--shares", shares, str(SCRIPT)])
    assert done.exit_code == 2
    assert "--shares" in done.output
