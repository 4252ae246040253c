"""What an engine's process adds before it becomes the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from evenstep.launch.worker import address_towards, worker_variables

BASE = {"EVENSTEP_COORDINATOR": "127.0.0.1:5000", "EVENSTEP_WORKER": "w3"}


def test_threads_are_as_many_as_the_kind_has_cores_and_the_host_allows() -> None:
    assert worker_variables(BASE, 6)["OMP_NUM_THREADS"] == "6"
    assert worker_variables({**BASE, "EVENSTEP_CORES": "4"}, 6)["OMP_NUM_THREADS"] == "4"
    assert worker_variables({**BASE, "EVENSTEP_CORES": "8"}, 6)["OMP_NUM_THREADS"] == "6"
    assert worker_variables({**BASE, "OMP_NUM_THREADS": "1"}, 6)["OMP_NUM_THREADS"] == "1"


def test_a_worker_is_no_rank_of_the_engine() -> None:
    slurm = {**BASE, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "RANK": "1"}
    assert not {"SLURM_STEP_NUM_TASKS", "RANK"} & worker_variables(slurm, 1).keys()


def test_the_token_file_is_used_where_it_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    env = {**BASE, "EVENSTEP_TOKEN": "t", "EVENSTEP_TOKEN_FILE": str(file)}
    assert worker_variables(env, 1)["EVENSTEP_TOKEN"] == "t"
    file.write_text("t")
    assert "EVENSTEP_TOKEN" not in worker_variables(env, 1)


def test_a_coordinator_on_this_host_is_reached_by_loopback() -> None:
    assert address_towards("127.0.0.1", 5000) == "127.0.0.1"
    assert address_towards("no-such-host.invalid", 5000) == "127.0.0.1"


def test_it_becomes_the_script(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    prints = "print(os.getpid(), os.environ['EVENSTEP_ADDRESS'], sys.argv[1])"
    script.write_text(f"import os, sys; {prints}")
    command = [sys.executable, "-m", "evenstep.launch.worker", str(script), "two words"]
    process = subprocess.Popen(
        command, env={**os.environ, **BASE}, stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate()
    assert out == f"{process.pid} 127.0.0.1 two words\n"
