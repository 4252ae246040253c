"""A run folder shared by several hosts, and a coordinator that listens on all addresses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.testbed.hosts import Host, make_hosts
from bench.testbed.source_tree import PYTHONPATH, ROOT

SCRIPT = Path(__file__).with_name("fake_train.py")
BOUND_S = 600.0


def evenstep(host: Host, *args: str | Path, **options: Any) -> subprocess.Popen[Any]:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-m", "evenstep", *map(str, args)]
    return host.popen(command, env=env, cwd=ROOT, **options)


def test_a_run_is_found_by_its_folder_from_any_host(tmp_path: Path) -> None:
    """The hosts have no route to the outside, and all have the same name."""
    run = tmp_path / "run"
    with make_hosts(2) as hosts:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        evenstep(hosts[0], "run", "--host", "0.0.0.0", "--run", run, SCRIPT, "1000000", **quiet)
        deadline_s = time.monotonic() + BOUND_S
        while not (run / "steps").exists():
            assert time.monotonic() < deadline_s, "timeout"
            time.sleep(0.05)
        for host in hosts:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            out, err = evenstep(host, "status", run, **pipes).communicate(timeout=BOUND_S)
            assert out.startswith("training: generation 1"), err
