"""Somebody else on the machine: processes that take CPU time on given cores."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from evenstep.errors import EvenstepError, InvalidInputError

PERIOD_S = 0.02
_BURN = Path(__file__).with_name("burn.py")


class InterferenceError(EvenstepError, RuntimeError):
    """An interfering process could not start, or is gone."""


class Interference:
    """One process for each of `cores`, pinned there, that takes `duty` of it.

    They run from the start to `close`, and never longer than this process.
    """

    def __init__(
        self, cores: Sequence[int], duty: float = 1.0, *, period_s: float = PERIOD_S
    ) -> None:
        wrong = sorted(set(cores) - os.sched_getaffinity(0))
        if wrong or not cores:
            have = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise InvalidInputError("cores", f"asked for {wrong or 'none'}; there are {have}")
        if not 0 < period_s < float("inf"):
            raise InvalidInputError("period_s", f"must be above 0 and finite, got {period_s}")
        self.duty = 0.0
        self._burners: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._burners, os.getpid())
        try:
            for core in cores:
                command = [sys.executable, "-I", "-S", str(_BURN), str(core), str(os.getpid())]
                self._burners.append(
                    subprocess.Popen(
                        [*command, str(period_s)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        bufsize=0,
                    )
                )
            self.set(duty)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes that interfere."""
        return [burner.pid for burner in self._burners]

    def set(self, duty: float) -> None:
        """Take this part of each core from now on, 0 to 1. Returns when all have heard."""
        if not 0 <= duty <= 1:
            raise InvalidInputError("duty", f"must lie in [0, 1], got {duty}")
        for burner in self._burners:
            assert burner.stdin is not None
            assert burner.stdout is not None
            try:
                burner.stdin.write(f"{duty}\n".encode())
                heard = burner.stdout.read(1)
            except BrokenPipeError:
                heard = b""
            if not heard:
                raise InterferenceError(f"the interfering process {burner.pid} has ended")
        self.duty = duty

    def close(self) -> None:
        """End the processes. May be called again."""
        self._end()

    def __enter__(self) -> Interference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _end(burners: list[subprocess.Popen[bytes]], owner: int) -> None:
    if os.getpid() != owner:  # a forked child that ends stops nothing of its parent's
        return
    for burner in burners:
        burner.kill()
    for burner in burners:
        burner.communicate()
    burners.clear()
