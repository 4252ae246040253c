"""Point-to-point sends and receives, and blocking calls that can be given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

from torch.distributed.distributed_c10d import Work

from evenstep.train.comm.forks import never_freed_in_forks

SLICE_S = 0.02  # poll interval of a wait, to check whether to go on waiting
ABANDON_S = 2.0
TIMED_OUT = "Operation timed out"  # in the message: Gloo has only one exception type

CLOSING, MEETING, MOVING = THREADS = ("evenstep-close", "evenstep-meet", "evenstep-transfer")

T = TypeVar("T")

Check = Callable[[float], None]
"""Called while waiting, with the seconds waited so far. Raises to end the wait."""


class Transfer:
    """A send or receive in flight that can be waited for in slices.

    Gloo's own wait cannot: when it times out, it closes all connections of the group.
    """

    def __init__(self, work: Work) -> None:
        self._work: Work | None = never_freed_in_forks(work)
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name=MOVING, daemon=True).start()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work.wait()
        except RuntimeError as e:
            self._error = e
        self._work = None  # it would keep the group's connections open
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for completion, raising what Gloo would raise for an all-reduce."""
        if not self._ended.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError(f"{TIMED_OUT}!")
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Abort all transfers of its group: afterwards none of them writes to memory."""
        work = self._work
        if work is not None:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))  # the timeout closes the connections
        self._ended.wait(ABANDON_S)


def interruptible(call: Callable[[], T], check: Check) -> T:
    """The result of a blocking call, which runs in a thread so that `check` can give it up."""
    outcome: SimpleQueue[T | _Failure] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put(call())
        except Exception as e:
            outcome.put(_Failure(e))

    threading.Thread(target=run, name=MEETING, daemon=True).start()
    began_s = time.monotonic()
    while True:
        try:
            result = outcome.get(timeout=SLICE_S)
        except Empty:
            pass
        else:
            if isinstance(result, _Failure):
                raise result.error
            return result
        check(time.monotonic() - began_s)  # outside of the handler: what it raises is the cause


@dataclass(frozen=True)
class _Failure:
    error: Exception


def await_closed(wait_s: float) -> None:
    """Wait until closed groups are destroyed, for at most `wait_s`.

    The interpreter aborts if it shuts down while one of these threads is still inside Gloo.
    """
    until_s = time.monotonic() + wait_s
    for thread in threading.enumerate():
        if thread.name in THREADS and thread.ident is not None:  # it has started
            thread.join(max(0.0, until_s - time.monotonic()))
