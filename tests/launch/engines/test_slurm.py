"""The Slurm launcher on a real Slurm, and what it says to sbatch."""

from __future__ import annotations

import pytest
from bench.testbed.slurm import Slurm

from evenstep.launch.engines.slurm import SlurmLauncher
from evenstep.ports import EngineJob, WorkerKind
from evenstep.testing import LauncherContract


@pytest.mark.long
class TestSlurm(LauncherContract):
    kind = WorkerKind(name="cpux2", cpus=2)

    @pytest.fixture(autouse=True)
    def _slurm(self, on_slurm: Slurm) -> None:
        pass

    def made(self, job: EngineJob) -> SlurmLauncher:
        return SlurmLauncher(job)
