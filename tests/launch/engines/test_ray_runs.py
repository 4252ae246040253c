"""`evenstep run --on ray` on a real cluster: nodes come, go and drain, and the run is the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.testbed.cli_run import ENVIRONMENT
from bench.testbed.live_run import until
from bench.testbed.ray_cluster import RayCluster, missing, ray_cluster

from tests.faults.conftest import Alone, alone
from tests.launch.engines.stories import EngineRun

__all__ = ["alone"]

KINDS = ["--kind", "cpu=2,label.tier=spot", "--kind", "cpu=3,resource.big=1"]

pytestmark = pytest.mark.long


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """A cluster of the test's own, whose nodes have room for two workers."""
    if problem := missing():
        pytest.skip(problem)
    with ray_cluster(ENVIRONMENT) as cluster:
        cluster.add(num_cpus=2, labels={"tier": "spot"})
        cluster.add(num_cpus=3, resources={"big": 1})
        yield cluster


def on(cluster: RayCluster, folder: Path, *more: str, workers: str = "2:8") -> EngineRun:
    engine = ["ray", "--address", cluster.address, *KINDS, *more]
    return EngineRun(folder, engine, workers=workers)


def test_a_run_grows_onto_a_node_added_later_loses_one_and_its_coordinator(
    cluster: RayCluster, tmp_path: Path, alone: Alone
) -> None:
    with on(cluster, tmp_path) as run:
        run.until_training(2)
        assert run.kinds() == {"w0": "cpux2", "w1": "cpux3"}
        run.scale(3)
        run.until_worker("w2", "queued")
        run.until_trains_on()
        node = cluster.add(num_cpus=6, labels={"tier": "spot"})
        run.until_training(3)
        cluster.remove(node)
        run.until(lambda status: "w2" not in run.pids())
        assert "w2 is lost" in run.output()
        run.until_trains_on()
        cluster.add(num_cpus=4, labels={"tier": "spot"})
        run.until_training(3)  # in place of w2
        run.process.kill()
        run.process.wait()
        with on(cluster, tmp_path, workers="3") as again:
            before = again.until_training(3)
            again.scale(2)
            again.until_training(2, after=before["generation"])
            assert again.finish() == 0
            assert again.is_same_as(alone)


def test_a_node_that_ray_drains_is_left_before_it_goes(
    cluster: RayCluster, tmp_path: Path, alone: Alone
) -> None:
    with on(cluster, tmp_path) as run:
        run.until_training(2)
        node = cluster.add(num_cpus=3, resources={"big": 1}, labels={"tier": "spot"})
        run.scale(3)
        run.until_training(3)
        cluster.drain(node, deadline_s=120.0)
        run.until(lambda status: "w2" not in run.pids())
        run.until_trains_on()
        assert "Ray drains its node" in run.output()
        assert "is lost" not in run.output()
        cluster.add(num_cpus=6, resources={"big": 1}, labels={"tier": "spot"})
        run.until_training(3)
        assert run.finish() == 0
        assert run.is_same_as(alone)


def test_training_goes_on_while_ray_s_head_does_not_answer(
    cluster: RayCluster, tmp_path: Path, alone: Alone
) -> None:
    with on(cluster, tmp_path) as run:
        run.until_training(2)
        head = cluster.head_process()
        head.send_signal(signal.SIGSTOP)
        try:
            run.scale(3)
            run.until_trains_on()
            run.until(lambda status: any("ray" in problem for problem in status["problems"]))
            run.until_trains_on()
        finally:
            head.send_signal(signal.SIGCONT)
        run.until(lambda status: not status["problems"])
        cluster.add(num_cpus=6, resources={"big": 1}, labels={"tier": "spot"})
        run.until_training(3)
        assert run.finish() == 0
        assert run.is_same_as(alone)


def test_an_actor_that_never_starts_is_given_up(
    cluster: RayCluster, tmp_path: Path, alone: Alone
) -> None:
    with on(cluster, tmp_path, "--pending", "5s") as run:
        run.until_training(2)
        run.scale(3)
        until(lambda: bool(run.failures()))
        assert run.failures()[0].cause == (
            "given up after 5 s: pending: Ray has no node with room for it yet"
        )
        run.until_trains_on()
        assert run.finish() == 0
        assert run.is_same_as(alone)
