"""Checkpoints: a copy in memory while training stands still, the file beside training.

A file appears under its name only when all of it is on the disk, so the newest one is whole unless
the disk itself lost something; its check sum tells. What is in it loads with `weights_only=True`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from evenstep import __version__
from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.failpoint import failpoint
from evenstep.train.recover.flatten import bytes_of, places, put_together, take_apart
from evenstep.train.recover.state import TrainingState

log = logging.getLogger("evenstep")

FORMAT = 1
NAME = re.compile(r"step-(\d+)\.pt")
CLOSE_S = 600.0


class CheckpointError(EvenstepError, ValueError):
    """A checkpoint cannot be read."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class Checkpoint(NamedTuple):
    """What was saved: `state.apply(checkpoint.tree)` goes on from it."""

    path: Path
    step: int
    tree: dict[str, Any]


class Snapshot(NamedTuple):
    """A state in host memory, ours alone."""

    step: int
    plan: bytes
    tensors: list[torch.Tensor]


class Checkpoints:
    """The newest checkpoints of a run, in a folder. One worker saves, anyone may read."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError("checkpoints", f"at least 1 must be kept, got {keep}")
        self.folder, self.keep = folder, keep
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._waiting: Snapshot | None = None
        self._spare: list[torch.Tensor] = []  # of the last snapshot, to be written over
        self._told = ""  # what was logged last, so that a full disk is not logged at every save

    def save(self, step: int, state: TrainingState) -> None:
        """Copy the state, and write it while training goes on.

        One that still waits for an earlier one to be written is replaced.
        """
        plan, tensors = state.take_apart()
        with self._lock:
            spare = self._waiting.tensors if self._waiting is not None else self._spare
            self._waiting, self._spare = None, []
        snapshot = Snapshot(step, plan, _copy(tensors, spare))
        with self._lock:
            self._waiting = snapshot
            if self._writer is None:
                # Not a daemon: a process that ends lets it finish.
                self._writer = threading.Thread(target=self._write_all, name="evenstep-checkpoint")
                self._writer.start()

    def close(self) -> None:
        """Wait until the last one is written."""
        with self._lock:
            writer = self._writer
        if writer is not None:
            writer.join(CLOSE_S)
            if writer.is_alive():
                log.warning("the last checkpoint is not written after %.0f s", CLOSE_S)
        self._spare = []

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None if there is none."""
        for path in reversed(self._files()):
            try:
                return load(path)
            except CheckpointError as e:
                log.warning("%s; an older one is looked for", e)
        return None

    def age_s(self) -> float:
        """How long ago the newest one was written, whoever did; inf: there is none."""
        try:
            written_s = self._files()[-1].stat().st_mtime
            return max(0.0, time.time() - written_s)  # noqa: TID251 - files go by the wall clock
        except (IndexError, OSError):
            return math.inf

    def _files(self) -> list[Path]:
        """Whole checkpoints by their names, oldest first."""
        try:
            found = [p for p in self.folder.iterdir() if NAME.fullmatch(p.name)]
        except OSError:
            return []
        return sorted(found, key=_step)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                snapshot, self._waiting = self._waiting, None
                if snapshot is None:
                    self._writer = None
                    return
            try:
                self._write(snapshot)
                self._told = ""
            except Exception as e:  # a full disk must not end training, nor anything else in here
                told = _cause(e)
                if told != self._told:
                    log.warning("checkpoint of step %d not written: %s", snapshot.step, told)
                self._told = told
            with self._lock:
                self._spare = snapshot.tensors

    def _write(self, snapshot: Snapshot) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*.part"):  # of a process that was killed while writing
            leftover.unlink(missing_ok=True)
        failpoint("checkpoint")
        content = {
            "format": FORMAT,
            "evenstep": __version__,
            "step": snapshot.step,
            "check": _check_sum(snapshot.plan, snapshot.tensors),
            "state": put_together(snapshot.plan, snapshot.tensors),
        }
        part = self.folder / f"step-{snapshot.step:08}.{os.getpid()}.part"
        try:
            with part.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(self.folder / f"step-{snapshot.step:08}.pt")
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync(self.folder)
        # Later ones are there if they could not be read and the run went back: they do not count.
        files = [path for path in self._files() if _step(path) <= snapshot.step]
        for old in files[: -self.keep]:
            old.unlink(missing_ok=True)


def load(path: Path) -> Checkpoint:
    """One checkpoint, checked whole. Raises CheckpointError if it is not."""
    with _naming(path):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        kind = content["format"]
    if kind != FORMAT:  # not damage: to pass it over would be to begin anew
        raise ConfigError(str(path), f"is of format {kind}; this evenstep reads {FORMAT}")
    with _naming(path):
        step, check = content["step"], content["check"]
        plan, tensors = take_apart(content["state"])
        whole = check == _check_sum(plan, tensors)
    if not whole:
        raise CheckpointError(str(path), "is damaged: its check sum is wrong")
    # Models are copied from the file; what things keep must not hang on it.
    ours = [
        tensor if place[0] == "models" else tensor.clone()
        for place, tensor in zip(places(plan), tensors, strict=True)
    ]
    return Checkpoint(path, step, put_together(plan, ours))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # zip, pickle, end of file, missing names: whatever damage brings
        first = str(e).partition("\n")[0]
        raise CheckpointError(str(path), f"cannot be read: {type(e).__name__}: {first}") from e


def _copy(tensors: Sequence[torch.Tensor], spare: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the host, in memory that was used before where it fits: new memory is slower."""
    rooms = dict(enumerate(spare))
    copies = []
    for i, tensor in enumerate(tensors):
        room = rooms.pop(i, None)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        copies.append(room.copy_(tensor, non_blocking=tensor.is_cuda))
    _synchronise(tensor.device for tensor in tensors)
    return copies


def _synchronise(devices: Iterable[torch.device]) -> None:
    """Wait until copies from these devices are there; those from a CPU are already."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _check_sum(plan: bytes, tensors: Sequence[torch.Tensor]) -> int:
    total = zlib.crc32(plan)
    for tensor in tensors:
        total = zlib.crc32(bytes_of(tensor.contiguous()).numpy().data, total)
    return total


def _cause(error: BaseException) -> str:
    """What went wrong first: torch raises errors of its own on top of a full disk."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def _step(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _sync(folder: Path) -> None:
    """Make a rename last."""
    file = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can
            os.fsync(file)
    finally:
        os.close(file)
