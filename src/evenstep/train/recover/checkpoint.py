"""Checkpoints: the state is copied between two steps, and written to disk while training goes on.

A file gets its final name only once all of it is on disk and was read back, so it is complete
unless the disk loses data later, which its checksum detects. It loads with `weights_only=True`.
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
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from evenstep import __version__
from evenstep.errors import ConfigError, EvenstepError
from evenstep.lines import sync_folder
from evenstep.train.comm.local_shards import whole
from evenstep.train.failpoint import failpoint
from evenstep.train.recover.flatten import bytes_of, flatten, tensor_paths, unflatten
from evenstep.train.recover.state import TrainingState

log = logging.getLogger("evenstep")

FORMAT = 1
NAME = re.compile(r"step-(\d+)\.pt")
CLOSE_S = 600.0  # for the last checkpoint to be written


class CheckpointError(EvenstepError, ValueError):
    """A checkpoint cannot be read."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class Checkpoint(NamedTuple):
    """A loaded checkpoint: `state.apply(checkpoint.tree)` continues from it."""

    path: Path
    step: int
    tree: dict[str, Any]
    run: str = ""  # the id of the run that wrote it; empty: an older evenstep


class Snapshot(NamedTuple):
    """A copy of the state in host memory."""

    step: int
    structure: bytes
    tensors: list[torch.Tensor]


class Fence(Protocol):
    """Whose checkpoints a folder holds, and whether this worker may write to it."""

    run: str

    def position(self) -> tuple[int, int]:
        """Term and generation, for the file."""

    def check(self) -> None:
        """Raise if this worker may not write."""


class Checkpoints:
    """A run's newest checkpoints, in a folder. One worker saves, any worker may load."""

    def __init__(self, folder: Path, keep: int = 3, fence: Fence | None = None) -> None:
        if keep < 1:
            raise ConfigError("checkpoints", f"must keep at least 1, got {keep}")
        self.folder, self.keep, self._fence = folder, keep, fence
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._pending: Snapshot | None = None
        self._reusable: list[torch.Tensor] = []  # buffers of a snapshot that is not needed any more
        self.problem = ""  # why the last one is not written: logged once, not at every save
        self._with_nan: list[Path] = []  # files of this worker with values that are no numbers

    def save(self, step: int, state: TrainingState) -> None:
        """Copy the state now, and write it in a thread.

        A snapshot that is still waiting for an earlier one to be written is replaced.
        """
        structure, tensors = state.flatten(take=whole)
        with self._lock:
            reusable = self._pending.tensors if self._pending is not None else self._reusable
            self._pending, self._reusable = None, []
        snapshot = Snapshot(step, structure, _copy(tensors, reusable))
        with self._lock:
            self._pending = snapshot
            if self._writer is None:
                # Not a daemon: it finishes writing when the process exits.
                self._writer = threading.Thread(target=self._write_all, name="evenstep-checkpoint")
                self._writer.start()

    def close(self) -> None:
        """Wait until the last checkpoint is written."""
        with self._lock:
            writer = self._writer
        if writer is not None:
            writer.join(CLOSE_S)
            if writer.is_alive():
                log.warning("the last checkpoint is still not written after %.0f s", CLOSE_S)
        self._reusable = []

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is intact; None if there is none.

        Damaged ones that are newer are renamed, so that nobody takes them for the newest.
        """
        for path in reversed(self._files()):
            try:
                found = load_checkpoint(path)
                if self._fence and found.run not in ("", self._fence.run):
                    whose = f"is of run {found.run}, and this is run {self._fence.run}"
                    log.warning("%s: %s; trying an older checkpoint", path, whose)
                    continue
                return found
            except CheckpointError as e:
                log.warning("%s; %strying an older checkpoint", e, _set_aside(path, e))
        return None

    def age_s(self) -> float:
        """Age of the newest one, whichever worker wrote it; inf if there is none."""
        try:
            written_s = self._files()[-1].stat().st_mtime
            return max(0.0, time.time() - written_s)  # noqa: TID251 - files have wall-clock times
        except (IndexError, OSError):
            return math.inf

    def _files(self) -> list[Path]:
        """Checkpoint files, oldest first."""
        try:
            found = [p for p in self.folder.iterdir() if NAME.fullmatch(p.name)]
        except OSError:
            return []
        return sorted(found, key=_step_of)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                snapshot, self._pending = self._pending, None
                if snapshot is None:
                    self._writer = None
                    return
            try:
                self._write(snapshot)
                if self.problem:
                    log.warning("checkpoints are written again, that of step %d", snapshot.step)
                self.problem = ""
            except Exception as e:  # training goes on without it, for example on a full disk
                problem = _root_cause(e)
                if problem != self.problem:
                    log.warning("checkpoint of step %d not written: %s", snapshot.step, problem)
                self.problem = problem
            with self._lock:
                self._reusable = snapshot.tensors

    def _write(self, snapshot: Snapshot) -> None:
        self._check_fence()  # first: a removed folder must not be created again
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for leftover in self.folder.glob("*.part"):  # of a process killed while writing
            leftover.unlink(missing_ok=True)
        failpoint("checkpoint")
        term, generation = self._fence.position() if self._fence else (0, 0)
        content = {
            "format": FORMAT,
            "evenstep": __version__,
            "run": self._fence.run if self._fence else "",
            "term": term,
            "generation": generation,
            "step": snapshot.step,
            "check": _checksum(snapshot.structure, snapshot.tensors),
            "state": unflatten(snapshot.structure, snapshot.tensors),
        }
        part = self.folder / f"step-{snapshot.step:08}.{os.getpid()}.part"
        try:
            with _Summed(FileIO(part, "w")) as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            _verify(part, file.crc)
            self._check_fence()  # again: writing takes a while
            part.rename(self.folder / f"step-{snapshot.step:08}.pt")
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        if any(map(_has_nan, snapshot.tensors)):
            self._keep_those_before(self.folder / f"step-{snapshot.step:08}.pt")
            return
        # Later ones exist if they were damaged and the run resumed from an older one: ignore them.
        files = [path for path in self._files() if _step_of(path) <= snapshot.step]
        for old in files[: -self.keep]:
            old.unlink(missing_ok=True)

    def _keep_those_before(self, path: Path) -> None:
        """A state with values that are no numbers does not replace checkpoints without."""
        if not self._with_nan:
            older = [p.name for p in self._files() if _step_of(p) < _step_of(path)]
            log.warning(
                "%s has values that are not a number; checkpoints before it are kept (newest: %s). "
                "To go on from there, stop the run, remove the newer ones, and resume",
                *(path, older[-1] if older else "none"),
            )
        self._with_nan.append(path)
        for old in self._with_nan[: -self.keep]:
            old.unlink(missing_ok=True)
        del self._with_nan[: -self.keep]

    def _check_fence(self) -> None:
        if self._fence is not None:
            self._fence.check()


class _Summed(BufferedWriter):
    """A file with the checksum of what was written to it."""

    crc = 0

    def write(self, data: Any, /) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return super().write(data)


def _verify(path: Path, written_crc: int) -> None:
    """Read a file back from disk. Not with mmap: a disk error would be a SIGBUS."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from the page cache
        while data := file.read(2**20):
            crc = zlib.crc32(data, crc)
    if crc != written_crc:
        raise CheckpointError(str(path), "was not stored as written: its checksum does not match")


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a checkpoint and verify its checksum. Raises CheckpointError if it is damaged."""
    with _reading(path):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        version = content["format"]
    if version != FORMAT:  # not damage: skipping it would restart the run from scratch
        raise ConfigError(str(path), f"has format {version}; this evenstep reads format {FORMAT}")
    with _reading(path):
        step, check = content["step"], content["check"]
        structure, tensors = flatten(content["state"])
        intact = check == _checksum(structure, tensors)
    if not intact:
        raise CheckpointError(str(path), "is damaged: its checksum does not match")
    # `apply` copies the models' tensors and keeps the others, which must not depend on the file.
    own = [
        tensor if tensor_path[0] == "models" else tensor.clone()
        for tensor_path, tensor in zip(tensor_paths(structure), tensors, strict=True)
    ]
    return Checkpoint(path, step, unflatten(structure, own), content.get("run", ""))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # damage surfaces as almost any error: zip, pickle, EOF, a missing key
        first_line = str(e).partition("\n")[0]
        problem = f"cannot be read: {type(e).__name__}: {first_line}"
        raise CheckpointError(str(path), problem) from e


def _copy(tensors: Sequence[torch.Tensor], reusable: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy to host memory, reusing buffers where they fit: fresh memory is slower."""
    buffers = dict(enumerate(reusable))
    copies = []
    for i, tensor in enumerate(tensors):
        buffer = buffers.pop(i, None)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        copies.append(buffer.copy_(tensor, non_blocking=tensor.is_cuda))
    _synchronise(tensor.device for tensor in tensors)
    return copies


def _synchronise(devices: Iterable[torch.device]) -> None:
    """Wait for the copies from GPUs to complete."""
    for device in {device for device in devices if device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _has_nan(tensor: torch.Tensor) -> bool:
    """Infinite values may be meant, as in masks."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return False
    return bool(torch.isnan(tensor.sum())) and bool(torch.isnan(tensor).any())


def _checksum(structure: bytes, tensors: Sequence[torch.Tensor]) -> int:
    crc = zlib.crc32(structure)
    for tensor in tensors:
        crc = zlib.crc32(bytes_of(tensor.contiguous()).numpy().data, crc)
    return crc


def _root_cause(error: BaseException) -> str:
    """The first error in the chain: torch raises its own on top of a full disk's."""
    while error.__context__ is not None:
        error = error.__context__
    # Without the file name, which contains the step.
    problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{type(error).__name__}: {problem}"


def _set_aside(path: Path, error: CheckpointError) -> str:
    """Rename a damaged checkpoint, unless the disk or memory is to blame. Returns what it did."""
    aside = path.with_name(f"{path.name}.damaged")
    if not isinstance(error.__cause__, OSError | MemoryError):
        with suppress(OSError):
            path.rename(aside)
            return f"kept as {aside.name}, "
    return ""


def _step_of(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])
