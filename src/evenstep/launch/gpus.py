"""GPUs of this machine: each worker that is started here gets its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenstep.types import WorkerId

log = logging.getLogger("evenstep")

VISIBLE = "CUDA_VISIBLE_DEVICES"


class GpuPool:
    """Assigns each worker the GPU that the fewest others use."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._users: dict[str, set[WorkerId]] = {gpu: set() for gpu in gpus}

    @classmethod
    def find(cls, environment: Mapping[str, str], devices: Path = Path("/dev")) -> GpuPool:
        """The GPUs in CUDA_VISIBLE_DEVICES, or all of this machine if it is not set."""
        visible = environment.get(VISIBLE)
        if visible is None:
            names = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia*"))
            return cls([str(number) for number in range(sum(map(str.isdecimal, names)))])
        gpus = [gpu.strip() for gpu in visible.split(",")]
        return cls([gpu for gpu in gpus if gpu and not gpu.startswith("-")])

    def assign(self, worker: WorkerId) -> dict[str, str]:
        """The environment variable that gives a worker its GPU; empty without GPUs."""
        if not self._users:
            return {}
        gpu = min(self._users, key=lambda gpu: len(self._users[gpu]))
        if users := self._users[gpu]:
            text = "%s shares GPU %s with %s: less memory, less compute time, no NCCL"
            log.warning(text, worker, gpu, ", ".join(sorted(users)))
        users.add(worker)
        return {VISIBLE: gpu}

    def adopt(self, worker: WorkerId, environment: Mapping[str, str]) -> None:
        """Note the GPU of a worker that already runs with this environment."""
        if (gpu := environment.get(VISIBLE, "")) in self._users:
            self._users[gpu].add(worker)

    def release(self, worker: WorkerId) -> None:
        """Free the GPU of a worker that has ended."""
        for users in self._users.values():
            users.discard(worker)
