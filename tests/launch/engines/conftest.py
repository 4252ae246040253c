"""Real engines on this machine, one of each for all tests of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from bench.testbed.cli_run import ENVIRONMENT
from bench.testbed.ray_cluster import RayCluster, ray_cluster
from bench.testbed.ray_cluster import missing as missing_ray
from bench.testbed.slurm import PATH, Slurm, missing, slurm


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm, which takes a second to start."""
    if problem := missing():
        pytest.skip(problem)
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def on_slurm(slurm_cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The same, where this process submits jobs. Earlier tests have left none."""
    monkeypatch.setenv("SLURM_CONF", slurm_cluster.variables["SLURM_CONF"])
    monkeypatch.setenv("PATH", PATH)
    assert os.environ["PATH"]
    return slurm_cluster


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayCluster]:
    """A Ray cluster with the nodes of `test_ray`, which takes some seconds to start."""
    if problem := missing_ray():
        pytest.skip(problem)
    with ray_cluster(ENVIRONMENT) as cluster:
        cluster.add(num_cpus=8, labels={"tier": "spot"})
        cluster.add(num_cpus=4, resources={"big": 2})
        yield cluster
