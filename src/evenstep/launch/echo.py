"""What workers write to their logs, shown line by line under their names, by a thread of its own.

Workers write to files and never wait for anybody who reads along. Who writes more than can be
shown is cut short here; the log has it all.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

LOOK_S = 0.25  # a look takes 0.1 ms of a core that may be a worker's
LINE_BYTES = 4096
SHOWN_BYTES = 2**16  # of one worker, at one look
CLOSING_S = 5.0


@dataclass(slots=True)
class _Log:
    name: str
    path: Path
    file: int
    at: int = 0
    rest: bytes = b""
    ended: bool = False  # nobody writes to it any more


class Echo:
    """Follows log files. Nothing waits for it, and it waits for nothing but its own output."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._logs: list[_Log] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._over = False  # nothing is shown any more
        self._thread = threading.Thread(target=self._run, name="evenstep-echo", daemon=True)
        self._thread.start()

    def follow(self, name: str, path: Path) -> None:
        """Show what is written to a file from now on."""
        with self._lock:
            if not self._over:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._logs.append(_Log(name, path, file, at=os.fstat(file).st_size))

    def unfollow(self, name: str) -> None:
        """Show what is left of a file that nobody writes to any more, soon, and let it go."""
        with self._lock:
            for log in self._logs:
                log.ended |= log.name == name

    def close(self) -> None:
        """Show what is left, unless nobody reads it."""
        self._closing.set()
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        try:
            last = False
            while not last:
                last = self._closing.wait(LOOK_S)
                with self._lock:
                    logs = [(log, last or log.ended) for log in self._logs]
                for log, is_last in logs:
                    self._show(log, is_last)
                    if is_last:
                        self._let_go(log)
        except (OSError, ValueError):
            pass  # nobody looks any more; the logs are there
        finally:
            with self._lock:
                self._over = True
            for log in list(self._logs):
                self._let_go(log)

    def _let_go(self, log: _Log) -> None:
        with self._lock:
            self._logs.remove(log)
        os.close(log.file)

    def _show(self, log: _Log, last: bool) -> None:
        size = os.fstat(log.file).st_size
        if size - log.at > SHOWN_BYTES:
            skipped = size - log.at - SHOWN_BYTES
            self._out.write(f"[{log.name}] ... {skipped} bytes more are in {log.path}\n")
            log.at, log.rest = log.at + skipped, b""
        data = log.rest + os.pread(log.file, SHOWN_BYTES, log.at)
        log.at += len(data) - len(log.rest)
        *lines, log.rest = data.split(b"\n")
        if log.rest and (last or len(log.rest) > LINE_BYTES):
            lines, log.rest = [*lines, log.rest], b""
        for line in lines:
            # Of a progress bar that overwrites itself, the newest state.
            shown = line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_BYTES].decode(errors="replace")
            self._out.write(f"[{log.name}] {shown}\n")
        if lines:
            self._out.flush()
