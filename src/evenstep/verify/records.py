"""What `evenstep verify` asks of a training process, and what the process leaves for the verdict.

Everything is a file in one folder. There is no torch here: who judges needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evenstep.types import FloatArray

VARIABLE = "EVENSTEP_VERIFY"
"""The environment variable that holds the task; without it nobody is watched."""

ALONE, AGAIN, TOGETHER = "alone", "again", "together"
"""One process; the same with other random numbers; several uneven processes."""

PREFIX = "of "
"""Before a parameter's name: `savez` keeps some names to itself."""

Gradients = Mapping[str, FloatArray]


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asked of one process: run so many steps with these shares, and leave word."""

    folder: str
    run: str
    num_steps: int
    shares: tuple[int, ...]  # by rank, as proportions of the batch

    def path(self, name: str, run: str = "") -> Path:
        """A file of a run, this one unless another is named."""
        return Path(self.folder, f"{run or self.run}-{name}")


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank did in one step."""

    samples: tuple[tuple[int, str], ...]  # indices that counted, and what was read for each
    parameters: str  # as they were after the step


class Record(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one rank has to tell of a run."""

    dtypes: tuple[str, ...] = ()  # of parameters and of autocast
    local_norms: tuple[str, ...] = ()  # BatchNorm layers that see their own share alone
    dropouts: tuple[str, ...] = ()  # layers whose dropout was turned off
    steps: tuple[Step, ...] = ()

    def save(self, task: Task, rank: int) -> None:
        """Leave it, in place of what was left before."""
        task.path(f"{rank}.json").write_bytes(msgspec.json.encode(self))


def load_records(task: Task, world: int) -> list[Record]:
    """What all ranks of a run left; a rank that took no step left nothing."""
    paths = [task.path(f"{rank}.json") for rank in range(world)]
    return [
        msgspec.json.decode(path.read_bytes(), type=Record) if path.exists() else Record()
        for path in paths
    ]


def save_gradients(task: Task, step: int, gradients: Gradients) -> None:
    """Leave the reduced gradients of a step, counted from 0."""
    arrays: dict[str, Any] = {PREFIX + name: array for name, array in gradients.items()}
    np.savez(task.path(f"{step}.npz"), **arrays)


def load_gradients(task: Task, step: int) -> Gradients:
    """The reduced gradients of a step."""
    with np.load(task.path(f"{step}.npz"), allow_pickle=False) as kept:
        return {name.removeprefix(PREFIX): kept[name] for name in kept.files}
