"""A file of lines with one writer: a line is written whole or not at all.

While the disk is full, fails or is read-only, lines wait in memory, in order, and are written when
there is room again. The log says when that begins and when it ends. Lines of which the disk says
only later that it could not store them, when they are synced, are written once more.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("evenstep")

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
"""Errors of the disk, which may pass; any other error on opening a file is the caller's."""

MAX_WAITING_BYTES = 64 * 2**20
MAX_UNSYNCED_BYTES = 2**20  # kept in memory after they were written


class LineFile:
    """Appends lines to a file, as its only writer.

    Raises OSError if the file cannot be opened, unless the disk is the reason: opening it is then
    tried again. A truncated last line of an existing file is removed.
    """

    def __init__(
        self, path: Path, flags: int = 0, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self.path = path
        self._flags, self._max_bytes = flags, max_waiting_bytes
        self._file, self._end = -1, 0
        self._closed = self._partial = self._must_sync = False
        self._is_new = False  # its folder may not know of it after a power failure
        self._waiting: deque[tuple[bytes, bool]] = deque()  # with whether it may be dropped
        self._unsynced: deque[tuple[bytes, bool]] = deque()  # the last ones of the file
        self._num_bytes = self._num_waited = self._num_dropped = self._num_unsynced = 0
        self._problem = ""  # why the file cannot be written
        try:
            self._open()
        except OSError as e:
            if e.errno not in DISK_ERRORS:
                raise
            self._failed(e)

    @property
    def num_waiting(self) -> int:
        """Lines that are not written yet."""
        return len(self._waiting)

    @property
    def num_lost(self) -> int:
        """Lines that will never be written."""
        return self._num_dropped + (len(self._waiting) if self._closed else 0)

    @property
    def problem(self) -> str:
        """Why lines wait; empty if none do."""
        if not self._problem:
            return ""
        return f"{self.path}: cannot be written: {self._problem}; {self.num_waiting} records wait"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written to it."""
        return self._end == 0 and not self._waiting

    def append(self, line: bytes, *, droppable: bool = False) -> None:
        """Write a line, or let it wait. Droppable lines give way if too many wait."""
        if self._closed:
            raise ValueError("is closed; resume it to continue writing")
        self._waiting.append((line, droppable))
        self._num_bytes += len(line)
        self.flush()
        if self._num_bytes > self._max_bytes:
            self._drop()

    def sync(self) -> None:
        """Force what was written to the disk."""
        self._must_sync = not self._closed
        self.flush()

    def flush(self) -> None:
        """Write what waits, if that is possible by now."""
        if self._closed or not (self._waiting or self._must_sync):
            return
        try:
            if self._file < 0:
                self._open()
            while self._waiting:
                self._write(self._waiting[0][0])
                self._written(self._waiting.popleft())
            if self._must_sync:
                self._sync()
        except OSError as e:
            self._failed(e)
        else:
            self._recovered()

    def close(self) -> None:
        """Write and sync what waits, if that is possible, and close the file."""
        self.sync()
        self.flush()  # once more: the first may have told of an error that has passed
        if self._file >= 0:
            os.close(self._file)
        self._file, self._closed = -1, True

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | self._flags
        file = private(self.path, flags)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = end_of_lines(file)
            if end < os.fstat(file).st_size:
                os.ftruncate(file, end)
        except BaseException:
            os.close(file)
            raise
        self._file, self._end = file, end
        self._is_new = bool(self._flags & os.O_CREAT)
        self._flags &= ~os.O_EXCL

    def _write(self, line: bytes) -> None:
        if self._partial:
            os.ftruncate(self._file, self._end)
        self._partial = True
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._partial = False
        self._end += len(line)

    def _written(self, line: tuple[bytes, bool]) -> None:
        self._num_bytes -= len(line[0])
        self._unsynced.append(line)
        self._num_unsynced += len(line[0])
        while self._num_unsynced > MAX_UNSYNCED_BYTES:
            self._num_unsynced -= len(self._unsynced.popleft()[0])

    def _sync(self) -> None:
        try:
            os.fdatasync(self._file)
        except OSError:  # the kernel may have dropped what it could not store
            self._end -= self._num_unsynced
            self._partial = True
            self._waiting.extendleft(reversed(self._unsynced))
            self._num_bytes += self._num_unsynced
            raise
        finally:
            self._unsynced.clear()
            self._num_unsynced = 0
        if self._is_new:
            sync_folder(self.path.parent)
        self._must_sync = self._is_new = False

    def _drop(self) -> None:
        """Drop droppable lines, oldest first, until the rest is within the bound."""
        kept: deque[tuple[bytes, bool]] = deque()
        for line, droppable in self._waiting:
            if droppable and self._num_bytes > self._max_bytes // 2:
                self._num_bytes -= len(line)
                self._num_dropped += 1
            else:
                kept.append((line, droppable))
        self._waiting = kept

    def _failed(self, error: OSError) -> None:
        if not self._problem:
            log.error(
                "%s: cannot be written: %s; the run goes on, and its records wait in memory until "
                "there is room",
                *(self.path, error.strerror),
            )
        self._problem = str(error.strerror)
        self._num_waited = max(self._num_waited, len(self._waiting))

    def _recovered(self) -> None:
        if self._problem:
            text = "%s: is written again, with the %d records that waited; %d were dropped"
            log.warning(text, self.path, self._num_waited, self._num_dropped)
        self._problem, self._num_waited = "", 0


def private(path: str | os.PathLike[str], flags: int) -> int:
    """An opener: a new file is for this user only."""
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable, where the file system supports it."""
    with suppress(OSError):
        file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def end_of_lines(file: int) -> int:
    """The number of bytes up to the end of the last complete line."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 2**16)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
