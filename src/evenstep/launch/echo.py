"""Shows workers' logs on the console, line by line under their names, from a thread of its own.

Workers write to files and never wait for a reader. Output beyond what can be shown is skipped here;
the log has it all. A progress bar, that is a line that a script rewrites with carriage returns, is
shown while it moves: in place on a terminal, elsewhere as a line every BAR_S seconds at most.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

LOOK_S = 0.25  # a look takes 0.1 ms of a core that may be a worker's
LINE_BYTES = 4096
SHOWN_BYTES = 2**16  # of one worker, at one look
BAR_S = 10.0  # between two states of a progress bar where the output is not a terminal
CLOSING_S = 5.0

ERASE = "\r\x1b[K"  # empties the terminal's current line
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"  # ERASE takes one row, so a bar must not wrap
_NESTED = re.compile(rb"\n([^\n]*)\x1b\[A")  # a bar below another, and the cursor up again

# evenstep's own log lines (see logs.py) come right behind a bar that was drawn before.
_BEFORE_LOG = re.compile(rb"\r[^\r\n]+?(?=\d\d:\d\d:\d\d evenstep: )")


@dataclass(slots=True, eq=False)
class _Log:
    name: str
    path: Path
    file: int
    at: int = 0
    rest: bytes = b""  # after the last newline; of a progress bar the newest state only
    bar: str = ""  # the newest state of a progress bar that has not ended
    bar_shown: str = ""
    bar_shown_s: float = -math.inf
    ended: bool = False  # nobody writes to it any more


class Echo:
    """Follows log files. Nothing waits for it, and it waits for nothing but its own output."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._is_terminal = out.isatty()
        self._front: _Log | None = None  # the worker whose bar the terminal shows
        self._in_place = ""  # that bar as it was written
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
                self._show(logs)
                for log, is_last in logs:
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

    def _show(self, logs: list[tuple[_Log, bool]]) -> None:
        """Write what is new in all logs, by one call: complete lines, then a progress bar."""
        lines: list[str] = []
        moved: list[_Log] = []  # whose progress bar is not as it was
        for log, is_last in logs:
            before = log.bar
            lines += _read_lines(log, last=is_last)
            if log.bar and log.bar != before:
                moved.append(log)
        pending = [log for log, _ in logs if log.bar]
        if self._is_terminal:
            text = self._over_bar(lines, moved, pending)
        else:
            text = "".join(f"{line}\n" for line in [*lines, *self._due_bars(pending)])
        if text:
            self._out.write(text)
            self._out.flush()

    def _over_bar(self, lines: list[str], moved: list[_Log], pending: list[_Log]) -> str:
        """Lines above the bar of the worker that wrote last, which is redrawn in place."""
        if moved:
            self._front = moved[-1]
        elif self._front not in pending:
            self._front = pending[-1] if pending else None
        was, bar = self._in_place, _labelled(self._front, self._front.bar) if self._front else ""
        if not lines and bar == was:
            return ""
        self._in_place = bar
        erase, redrawn = (ERASE if was or bar else ""), (f"{_NO_WRAP}{bar}{_WRAP}" if bar else "")
        return "".join([erase, *(f"{line}\n" for line in lines), redrawn])

    def _due_bars(self, logs: list[_Log]) -> list[str]:
        """Bars that have moved since they were last written, BAR_S ago or longer."""
        now_s = self._clock()
        due = [g for g in logs if g.bar != g.bar_shown and now_s - g.bar_shown_s >= BAR_S]
        for log in due:
            log.bar_shown, log.bar_shown_s = log.bar, now_s
        return [_labelled(log, log.bar) for log in due]


def _read_lines(log: _Log, *, last: bool) -> list[str]:
    """The complete lines that are new in a log, as they are shown; what follows stays in it."""
    lines = []
    size = os.fstat(log.file).st_size
    if size - log.at > SHOWN_BYTES:
        skipped = size - log.at - SHOWN_BYTES
        lines.append(_labelled(log, f"... {skipped} bytes more are in {log.path}"))
        log.at, log.rest = log.at + skipped, b""
    new = os.pread(log.file, SHOWN_BYTES, log.at)
    log.at += len(new)
    data = log.rest + new
    while _NESTED.search(data):
        data = _NESTED.sub(rb"\r\1\r", data)
    if b" evenstep: " in data:
        data = _BEFORE_LOG.sub(b"\r", data)
    *whole, rest = data.split(b"\n")
    rest = rest[max(0, rest.rstrip(b"\r").rfind(b"\r")) :]  # of a progress bar the newest state
    if rest.strip() and (last or len(rest) > LINE_BYTES):
        whole, rest = [*whole, rest], b""
    log.rest = rest
    log.bar = _newest(rest).rstrip() if b"\r" in rest else ""
    return [*lines, *(_labelled(log, _newest(line)) for line in whole)]


def _newest(line: bytes) -> str:
    """The newest state of a line that may be rewritten with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2][:LINE_BYTES].decode(errors="replace")


def _labelled(log: _Log, text: str) -> str:
    return f"[{log.name}] {text}"
