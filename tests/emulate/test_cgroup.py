"""Both cgroup versions, on folders with the same files."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.emulate import Hierarchy, NoQuotaError, Quota, sweep
from evenstep.emulate.cgroup import bandwidth_us


@given(st.floats(0.001, 512))
def test_quota_over_period_equals_the_cores_within_the_kernels_limits(cores: float) -> None:
    quota_us, period_us = bandwidth_us(cores)
    assert quota_us >= 1_000
    assert 1_000 <= period_us <= 1_000_000
    assert quota_us / period_us == pytest.approx(cores, rel=1e-3)


@pytest.mark.parametrize("cores", [0.0, -1.0, 0.0009, math.nan, -math.inf])
def test_impossible_cores_are_refused(cores: float) -> None:
    with pytest.raises(ValueError, match=r"0\.001 or more"):
        bandwidth_us(cores)


def test_version_1_is_found_by_its_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "proc /proc proc rw 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n"
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0\n"
    )
    found = Hierarchy.find(mounts)
    assert found == Hierarchy(root=Path("/sys/fs/cgroup/cpu,cpuacct"), version=1)


def test_version_2_is_found_where_it_has_the_cpu_controller(tmp_path: Path) -> None:
    root = tmp_path / "control groups"
    root.mkdir()
    mounts = tmp_path / "mounts"
    mounts.write_text(f"cgroup2 {str(root).replace(' ', chr(92) + '040')} cgroup2 rw 0 0\n")
    (root / "cgroup.controllers").write_text("memory pids\n")
    with pytest.raises(NoQuotaError, match="no cgroup tree with the cpu controller"):
        Hierarchy.find(mounts)
    (root / "cgroup.controllers").write_text("cpuset cpu memory\n")
    assert Hierarchy.find(mounts) == Hierarchy(root=root, version=2)


def test_without_cgroups_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoQuotaError, match=r"cannot be read.*throttle in process"):
        Hierarchy.find(tmp_path / "nowhere")


def test_a_read_only_tree_raises_no_quota(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoQuotaError, match="cannot be created") as caught:
        Quota(1.0, hierarchy=Hierarchy(root=tmp_path / "file", version=1))
    assert isinstance(caught.value, OSError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_group_that_takes_no_limit_raises_no_quota_and_is_removed(tmp_path: Path) -> None:
    with pytest.raises(NoQuotaError, match="takes no limit"):
        Quota(1.0, hierarchy=Hierarchy(root=tmp_path, version=1))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hierarchy:
    """A folder with the files of version 2, where rmdir removes a group with its files."""

    def rmdir(group: Path) -> None:
        for file in group.iterdir():
            file.unlink()
        os.rmdir(group)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    return Hierarchy(root=tmp_path, version=2)


@pytest.fixture
def childless() -> Iterator[int]:
    """The pid of a process without children."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_version_2_has_quota_and_period_in_one_line(version_2: Hierarchy, childless: int) -> None:
    with Quota(0.25, firm=True, hierarchy=version_2) as quota:
        assert (quota.path / "cpu.weight").read_text() == "10000"
        assert (version_2.root / "cgroup.subtree_control").read_text() == "+cpu"
        assert (quota.path / "cpu.max").read_text() == "2000 8000"
        quota.set(0.05)
        assert (quota.path / "cpu.max").read_text() == "1000 20000"
        quota.set(math.inf)
        assert (quota.path / "cpu.max").read_text() == "max 8000"
        quota.add(childless)
        assert quota.pids() == [childless]
    assert (version_2.root / "cgroup.procs").read_text() == str(childless)
    assert not quota.path.exists()


def test_sweep_removes_only_groups_whose_owner_is_gone(version_2: Hierarchy) -> None:
    with Quota(1.0, hierarchy=version_2) as ours:
        started = int(ours.path.name.split("-")[2])
        reused = version_2.root / f"evenstep-{os.getpid()}-{started + 1}-0"
        strange = version_2.root / "evenstep-of-somebody-else"
        reused.mkdir()
        strange.mkdir()
        assert sweep(version_2) == [reused]
        assert ours.path.exists()
        assert strange.exists()
