"""What `evenstep verify` asks of a training process, and the records that the process writes.

All records are files in one folder. Nothing here imports torch, since comparing needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evenstep.types import FloatArray

ENV_VARIABLE = "EVENSTEP_VERIFY"  # holds a VerifiedRun as JSON; unset: the process is not verified

REFERENCE, RESEEDED, DISTRIBUTED = "reference", "reseeded", "distributed"
"""Names of runs: one process; one process with other random seeds; several uneven workers."""

PREFIX = "of "  # before a parameter's name, since `savez` reserves some names

Gradients = Mapping[str, FloatArray]


class VerifiedRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the script: so many steps with these shares, recorded in a folder."""

    folder: str
    name: str
    num_steps: int
    shares: tuple[int, ...]  # by rank, as proportions of the batch

    def path(self, file: str) -> Path:
        """The path of one of this run's files."""
        return Path(self.folder, f"{self.name}-{file}")

    def named(self, name: str) -> VerifiedRun:
        """Another run of the same script."""
        return msgspec.structs.replace(self, name=name)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank did in one step."""

    samples: tuple[tuple[int, str], ...]  # the index and content digest of each sample that counts
    parameters: str  # digest of all parameters after the step


class RankRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one rank did in a run."""

    dtypes: tuple[str, ...] = ()  # of parameters and of autocast
    local_norms: tuple[str, ...] = ()  # BatchNorm layers that are not synchronised
    dropouts: tuple[str, ...] = ()  # layers whose dropout was turned off
    draws: tuple[str, ...] = ()  # global generators that the loop drew random numbers from
    steps: tuple[StepRecord, ...] = ()

    def save(self, run: VerifiedRun, rank: int) -> None:
        """Write the record, replacing an earlier one."""
        run.path(f"{rank}.json").write_bytes(msgspec.json.encode(self))


def load_records(run: VerifiedRun, world: int) -> list[RankRecord]:
    """The records of all ranks; empty for a rank that took no step."""
    paths = [run.path(f"{rank}.json") for rank in range(world)]
    return [
        msgspec.json.decode(path.read_bytes(), type=RankRecord) if path.exists() else RankRecord()
        for path in paths
    ]


def save_gradients(run: VerifiedRun, step: int, gradients: Gradients) -> None:
    """Write the reduced gradients of a step, counted from 0."""
    arrays: dict[str, Any] = {PREFIX + name: array for name, array in gradients.items()}
    np.savez(run.path(f"{step}.npz"), **arrays)


def load_gradients(run: VerifiedRun, step: int) -> Gradients:
    """The reduced gradients of a step."""
    with np.load(run.path(f"{step}.npz"), allow_pickle=False) as arrays:
        return {name.removeprefix(PREFIX): arrays[name] for name in arrays.files}
