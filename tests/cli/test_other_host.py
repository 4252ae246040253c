"""A run's folder that several hosts see, and a coordinator that listens at all its addresses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.hosts import Host, make_hosts
from tests.tree import PYTHONPATH, ROOT

SCRIPT = Path(__file__).with_name("fake_train.py")
BOUND_S = 600.0


def evenstep(host: Host, *args: str | Path, **options: Any) -> subprocess.Popen[Any]:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-m", "evenstep", *map(str, args)]
    return host.popen(command, env=env, cwd=ROOT, **options)


def test_by_its_folder_a_run_is_found_from_any_host(tmp_path: Path) -> None:
    """Their network has no way out of it, and their names are all the same."""
    run = tmp_path / "run"
    with make_hosts(2) as hosts:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        evenstep(hosts[0], "run", "--host", "0.0.0.0", "--run", run, SCRIPT, "1000000", **quiet)
        until_s = time.monotonic() + BOUND_S
        while not (run / "steps").exists():
            assert time.monotonic() < until_s, "too late"
            time.sleep(0.05)
        for host in hosts:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            out, err = evenstep(host, "status", run, **pipes).communicate(timeout=BOUND_S)
            assert out.startswith("training: generation 1"), err
