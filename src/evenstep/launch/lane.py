"""Calls that may take long or hang, one after the other in a thread of their own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Lane:
    """Runs one call at a time, and reports in the event loop that submitted it.

    A call that hangs occupies its lane and nothing else: the thread is a daemon.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.since_s: float | None = None  # when the present call was submitted; None: free
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self.since_s is not None

    def submit(
        self,
        call: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        now_s: float,
    ) -> None:
        """Run `call`, then `done` in this event loop, with its result or what it raised."""
        assert not self.is_busy
        self.since_s = now_s
        loop = asyncio.get_running_loop()

        def run() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as e:  # whatever an engine's library raises, even SystemExit
                error = e
            with suppress(RuntimeError):  # the loop is closed: nobody is interested any more
                loop.call_soon_threadsafe(self._done, done, result, error)

        self._calls.put(run)

    def close(self) -> None:
        """End the thread after the present call."""
        self._calls.put(None)

    def _done(
        self,
        done: Callable[[Any, BaseException | None], None],
        result: Any,
        error: BaseException | None,
    ) -> None:
        self.since_s = None
        done(result, error)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
