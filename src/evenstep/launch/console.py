"""Prints workers' logs to the console from a thread, each line prefixed with the worker's name.

Workers' output is drained into files (see output.py) and waits for no reader here. The console
skips output that comes too fast; the log files have all of it. A progress bar (a line that a script
rewrites with carriage returns) is redrawn in place on a terminal, above the rows that show the run;
otherwise it is printed at most every BAR_S seconds.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from evenstep.launch.screen import BottomRows

POLL_S = 0.25  # a poll takes 0.1 ms of a core that a worker may need
LINE_BYTES = 4096
MAX_BYTES = 2**16  # per worker and poll
BAR_S = 10.0  # between two prints of a progress bar if the output is not a terminal
CLOSE_S = 5.0

ERASE = "\r\x1b[K"  # clears the current line of the terminal
_NESTED = re.compile(rb"\n([^\n]*)\x1b\[A")  # a bar below another, then cursor up

# evenstep's own log lines (see logs.py) follow a bar without a newline.
_BEFORE_LOG = re.compile(rb"\r[^\r\n]+?(?=\d\d:\d\d:\d\d evenstep: )")


@dataclass(slots=True, eq=False)
class _Log:
    name: str
    path: Path
    file: int = -1
    offset: int = 0
    rest: bytes = b""  # unfinished line; of a progress bar only its newest state
    bar: str = ""  # the newest state of an unfinished progress bar
    bar_printed: str = ""
    bar_printed_s: float = -math.inf
    ended: bool = False  # nothing writes to it any more

    def is_open(self) -> bool:
        """Open the file, if it is there: on a full disk it is made later."""
        if self.file < 0:
            with suppress(OSError):
                self.file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self.file >= 0


class ConsoleOutput:
    """Follows log files and prints what is new. Nothing waits for it."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self.is_terminal = out.isatty()
        self._front: _Log | None = None  # the worker whose bar is on the terminal
        self._screen = BottomRows()
        self._below: Sequence[str] = ()  # rows that show the run
        self._said: deque[str] = deque()  # lines of evenstep's own
        self._logs: list[_Log] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="evenstep-console", daemon=True)
        self._thread.start()

    def follow(self, name: str, path: Path) -> None:
        """Print what is appended to a file from now on."""
        with self._lock:
            if not self._closed:
                log = _Log(name, path)
                self._logs.append(log)
                if log.is_open():
                    log.offset = os.fstat(log.file).st_size

    def unfollow(self, name: str) -> None:
        """Print the rest of a finished file at the next poll, then close it."""
        with self._lock:
            for log in self._logs:
                log.ended |= log.name == name

    def say(self, line: str) -> bool:
        """Print a line of evenstep's own at the next poll. False: nothing is printed any more."""
        with self._lock:
            if self._closed:
                return False
            self._said.append(line)
            return True

    def show_below(self, rows: Sequence[str]) -> None:
        """On a terminal: the rows at its bottom from now on."""
        self._below = rows

    def close(self) -> None:
        """Print what is left, without the rows below; give up after CLOSE_S if the reader hangs."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            last = False
            while not last:
                last = self._closing.wait(POLL_S)
                if last:
                    self._below = ()
                with self._lock:
                    logs = [(log, last or log.ended) for log in self._logs]
                self._print(logs)
                for log, is_last in logs:
                    if is_last:
                        self._close_log(log)
        except (OSError, ValueError):
            pass  # the reader is gone; the log files stay
        finally:
            with self._lock:
                self._closed = True
            for log in list(self._logs):
                self._close_log(log)

    def _close_log(self, log: _Log) -> None:
        with self._lock:
            self._logs.remove(log)
        if log.file >= 0:
            os.close(log.file)

    def _print(self, logs: list[tuple[_Log, bool]]) -> None:
        """Print what is new in all logs with one write: complete lines, then a progress bar."""
        lines = [self._said.popleft() for _ in range(len(self._said))]
        moved: list[_Log] = []  # whose progress bar has changed
        for log, is_last in logs:
            before = log.bar
            lines += _read_lines(log, last=is_last)
            if log.bar and log.bar != before:
                moved.append(log)
        pending = [log for log, _ in logs if log.bar]
        if self.is_terminal:
            text = self._redraw(lines, moved, pending)
        else:
            text = "".join(f"{line}\n" for line in [*lines, *self._due_bars(pending)])
        if text:
            self._out.write(text)
            self._out.flush()

    def _redraw(self, lines: list[str], moved: list[_Log], pending: list[_Log]) -> str:
        """Lines above the progress bar that changed last, which is redrawn in place."""
        if moved:
            self._front = moved[-1]
        elif self._front not in pending:
            self._front = pending[-1] if pending else None
        bar = [_labelled(self._front, self._front.bar)] if self._front else []
        return self._screen.redraw(lines, [*bar, *self._below])

    def _due_bars(self, logs: list[_Log]) -> list[str]:
        """Bars that have changed and were last printed at least BAR_S ago."""
        now_s = self._clock()
        due = [g for g in logs if g.bar != g.bar_printed and now_s - g.bar_printed_s >= BAR_S]
        for log in due:
            log.bar_printed, log.bar_printed_s = log.bar, now_s
        return [_labelled(log, log.bar) for log in due]


def _read_lines(log: _Log, *, last: bool) -> list[str]:
    """The new complete lines of a log; an unfinished line is kept for the next poll."""
    lines: list[str] = []
    if not log.is_open():
        return lines
    size = os.fstat(log.file).st_size
    if size - log.offset > MAX_BYTES:
        skipped = size - log.offset - MAX_BYTES
        lines.append(_labelled(log, f"... {skipped} more bytes in {log.path}"))
        log.offset, log.rest = log.offset + skipped, b""
    new = os.pread(log.file, MAX_BYTES, log.offset)
    log.offset += len(new)
    data = log.rest + new
    while _NESTED.search(data):
        data = _NESTED.sub(rb"\r\1\r", data)
    if b" evenstep: " in data:
        data = _BEFORE_LOG.sub(b"\r", data)
    *whole, rest = data.split(b"\n")
    rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]  # keep a bar's newest state
    if rest.strip() and (last or len(rest) > LINE_BYTES):
        whole, rest = [*whole, rest], b""
    log.rest = rest
    log.bar = _newest(rest).rstrip() if b"\r" in rest else ""
    return [*lines, *(_labelled(log, _newest(line)) for line in whole)]


def _newest(line: bytes) -> str:
    """The newest state of a line, which carriage returns may rewrite."""
    return line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_BYTES].decode(errors="replace")


def _labelled(log: _Log, text: str) -> str:
    return f"[{log.name}] {text}"
