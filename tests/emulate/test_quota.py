"""CPU quotas on this machine's real cgroups, where there are any."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.emulate import Hierarchy, Quota, sweep
from tests.emulate.conftest import Busy

OWNER = """
import math, sys
from evenstep.emulate import Quota
quota = Quota(math.inf)
assert quota.path.exists()
print(quota.path, flush=True)
"""


def test_a_quarter_of_a_core_is_a_quarter_of_the_cpu_time_and_can_change(
    hierarchy: Hierarchy, busy: Busy
) -> None:
    with Quota(1.0, firm=True) as quota:
        quota.add(busy.process.pid)
        quota.set(0.25)
        quarter_s = busy.cpu_s(0.5)
        quota.set(math.inf)
        free_s = busy.cpu_s(0.5)
    # A quota is a ceiling: a busy machine may give less, never more.
    assert 0 < quarter_s < 1.4 * 0.25 * 0.5
    assert quarter_s < 0.8 * free_s
    assert quota.cores == math.inf


@pytest.mark.parametrize("cores", [0.001, 0.01, 0.1, 0.3, 1.0, 64.0])
def test_the_kernel_takes_every_quota_we_compute(hierarchy: Hierarchy, cores: float) -> None:
    with Quota(cores) as quota:
        quota.set(cores / 2 if cores > 0.001 else 1.0)
        quota.set(cores)


def test_a_quota_includes_children_started_before_and_after(hierarchy: Hierarchy) -> None:
    code = """
import subprocess, sys
born = lambda: subprocess.Popen(["sleep", "100"])
before = born(); print(before.pid, flush=True)
sys.stdin.readline()
after = born(); print(after.pid, flush=True)
sys.stdin.readline()
before.kill(); after.kill(); before.wait(); after.wait()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with Quota(1.0) as quota:
        before = int(parent.stdout.readline())
        quota.add(parent.pid)
        parent.stdin.write("\n")
        after = int(parent.stdout.readline())
        assert sorted(quota.pids()) == sorted([parent.pid, before, after])
        parent.communicate("\n")


def test_close_releases_the_process_and_removes_the_group(hierarchy: Hierarchy, busy: Busy) -> None:
    quota = Quota(0.5)
    quota.add(busy.process.pid)
    quota.close()
    quota.close()
    assert not quota.path.exists()
    assert quota.path.name not in Path(f"/proc/{busy.process.pid}/cgroup").read_text()
    assert busy.process.poll() is None


def test_an_unknown_process_is_named(hierarchy: Hierarchy) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with Quota(1.0) as quota, pytest.raises(ProcessLookupError, match=f"no process {gone.pid}"):
        quota.add(gone.pid)


def test_an_invalid_quota_leaves_no_group(hierarchy: Hierarchy) -> None:
    with pytest.raises(ValueError, match=r"0\.001 or more, got 0"):
        Quota(0.0)
    assert not list(hierarchy.root.glob(f"evenstep-{os.getpid()}-*"))


def test_an_owner_that_exits_leaves_no_group(hierarchy: Hierarchy) -> None:
    ran = subprocess.run([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, check=True)
    assert not Path(ran.stdout.decode().strip()).exists()


def test_a_forked_child_that_exits_does_not_remove_the_quota(hierarchy: Hierarchy) -> None:
    fork = "import os\nif (pid := os.fork()) == 0: sys.exit()\nos.waitpid(pid, 0)\n"
    said = "print(quota.path.exists())"
    ran = subprocess.run([sys.executable, "-c", OWNER + fork + said], capture_output=True)
    assert ran.stdout.decode().split()[1] == "True"


def test_sweep_removes_the_quota_of_a_killed_owner_and_frees_its_processes(
    hierarchy: Hierarchy, busy: Busy
) -> None:
    code = OWNER + f"quota.add({busy.process.pid}); print(flush=True); sys.stdin.read()"
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    group = Path(owner.stdout.readline().strip())
    owner.stdout.readline()
    sweep()
    assert group.exists()
    owner.kill()
    owner.communicate()
    sweep()
    assert not group.exists()
    assert busy.cpu_s(0.01) > 0
