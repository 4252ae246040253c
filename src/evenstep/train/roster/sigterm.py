"""SIGTERM as the announcement that this worker is about to lose its machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
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
