"""Signals to a worker: SIGTERM before it loses its machine, SIGURG if its script must end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class SigtermNotice:
    """Calls `on_notice` instead of ending the process, until it is closed."""

    def __init__(self, on_notice: Callable[[], None]) -> None:
        self._on_notice, self._pid = on_notice, os.getpid()
        self._previous: Any = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, *_: Any) -> None:
        if os.getpid() == self._pid:
            self._on_notice()
            return
        # In a process forked from this one, the signal has its previous meaning.
        signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Restore the previous handler."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)


class ScriptInterrupt:
    """Calls `leave` in the main thread, also if the script sleeps, but only in the script's code.

    Within evenstep, whose state may be inconsistent, it does nothing: waits there end by
    themselves. SIGURG is ignored by default, so it is harmless if it comes late.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave, self._pid = leave, os.getpid()
        self._previous: Any = None
        self._is_set = threading.current_thread() is threading.main_thread()
        if self._is_set:
            self._previous = signal.signal(signal.SIGURG, self._handle)

    def send(self) -> None:
        """Interrupt the main thread. From any thread."""
        main = threading.main_thread().ident
        if self._is_set and main is not None:
            signal.pthread_kill(main, signal.SIGURG)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        while frame is not None:
            if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "evenstep":
                return
            frame = frame.f_back
        self._leave()

    def close(self) -> None:
        """Restore the previous handler."""
        if self._is_set and signal.getsignal(signal.SIGURG) == self._handle:
            signal.signal(signal.SIGURG, self._previous or signal.SIG_DFL)
