"""The Ray launcher on a real cluster of several nodes, and what it asks of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.testbed.ray_cluster import RayCluster

from evenstep.errors import ConfigError
from evenstep.launch.engines.ray import RayLauncher, actor_options
from evenstep.launch.kinds import parse_kind
from evenstep.ports import EngineJob, Stage, WorkerKind
from evenstep.testing import LauncherContract


@pytest.fixture(scope="module")
def _connected(ray_nodes: RayCluster) -> Iterator[None]:
    import ray

    ray.init(address=ray_nodes.address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.long
@pytest.mark.usefixtures("_connected")
class TestRay(LauncherContract):
    kind = WorkerKind(name="cpux2", cpus=2)

    def made(self, job: EngineJob) -> RayLauncher:
        return RayLauncher(job)

    def test_a_worker_that_no_node_has_room_for_is_pending_until_it_is_withdrawn(
        self, tmp_path: Path
    ) -> None:
        with self.opened(tmp_path) as launcher:
            launcher.start(self.kind.name, [f"w{n}" for n in range(7)])
            shown = self.until(
                launcher,
                lambda shown: sum(o.stage is Stage.RUNNING for o in shown.values()) == 6,
            )
            (waiting,) = [w for w, o in shown.items() if o.stage is Stage.PENDING]
            assert shown[waiting].why == "Ray has no node with room for it yet"
            launcher.stop([waiting])
            self.until(launcher, lambda shown: shown[waiting].stage is Stage.ENDED)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("cpu=8", {"num_cpus": 8, "num_gpus": 0}),
        ("gpu=A100:4", {"num_cpus": 1, "num_gpus": 4, "accelerator_type": "A100"}),
        (
            "cpu=2,memory=1G,resource.big=0.5,label.tier=spot",
            {
                "num_cpus": 2,
                "num_gpus": 0,
                "memory": 2**30,
                "resources": {"big": 0.5},
                "label_selector": {"tier": "spot"},
            },
        ),
    ],
)
def test_a_kind_is_resources_and_labels(text: str, options: dict[str, Any]) -> None:
    assert actor_options(parse_kind(text)) == options


@pytest.mark.parametrize("text", ["cpu=2,partition=p", "cpu=2,resource.big=some"])
def test_what_ray_does_not_know_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kind"):
        actor_options(parse_kind(text))
