"""Several hosts: workers that join from elsewhere, a host that is cut off and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.faults.conftest import Alone
from tests.faults.running import BOUND_S, EVENSTEP, SCRIPT, same
from tests.hosts import make_hosts

LONG = ["--epochs", "60", "--pause", "0.01"]


def test_a_host_is_cut_off_and_the_others_end_the_run(tmp_path: Path, alone: Alone) -> None:
    out, folder = tmp_path / "out", tmp_path / "run"
    out.mkdir()
    script = [str(SCRIPT), "--out", str(out), *LONG]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with make_hosts(3) as hosts, (tmp_path / "log").open("w") as log:
        first, second, third = hosts
        where = ["--host", first.address, "--run", str(folder)]
        run = first.popen(
            [str(EVENSTEP), "run", "--workers", "1:3", "--restarts", "0", *where, *script],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        until(lambda: (folder / "address").exists())
        address = (folder / "address").read_text().strip()
        joined = [
            host.popen(
                [str(EVENSTEP), "join", "--token-file", str(folder / "token"), address, *script],
                env={**env, "EVENSTEP_ADDRESS": host.address},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for host in (second, third)
        ]
        said = tmp_path / "log"
        until(lambda: "of 3, after" in said.read_text())
        hosts.cut(2)
        until(lambda: "of 2, after" in said.read_text())
        hosts.restore(2)
        try:
            assert run.wait(BOUND_S) == 0
            assert joined[0].wait(BOUND_S) == 0
            assert joined[1].wait(BOUND_S) != 0  # it finds its generation gone
        finally:
            sys.stdout.write(said.read_text())
            for process in (run, *joined):
                process.kill()
    ends = [torch.load(path, weights_only=True) for path in out.glob("*.pt")]
    assert len(ends) == 2
    assert all(same(end, alone(*LONG)) for end in ends)


def until(holds: Callable[[], bool]) -> None:
    """Wait for something to be so, within the bound."""
    until_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < until_s, "too late"
        time.sleep(0.05)
