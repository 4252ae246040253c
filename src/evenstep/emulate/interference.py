"""Interfering load: processes that take CPU time on given cores."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from evenstep.errors import EvenstepError, InvalidInputError

_BURN = Path(__file__).with_name("burn.py")


class InterferenceError(EvenstepError, RuntimeError):
    """An interfering process could not start, or has ended."""


class Interference:
    """One process per core in `cores`, pinned to it, that uses `duty` of it.

    The processes run until `close`, or until this process ends.
    """

    def __init__(self, cores: Sequence[int], duty: float = 1.0) -> None:
        unknown = sorted(set(cores) - os.sched_getaffinity(0))
        if unknown or not cores:
            usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise InvalidInputError("cores", f"asked for {unknown or 'none'}; usable: {usable}")
        self.duty = 0.0
        self._burners: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._burners, os.getpid())
        try:
            for core in cores:
                command = [sys.executable, "-I", "-S", str(_BURN), str(core), str(os.getpid())]
                pipe = subprocess.PIPE
                self._burners.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0))
            self.set(duty)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The interfering processes."""
        return [burner.pid for burner in self._burners]

    def set(self, duty: float) -> None:
        """Use this fraction of each core, 0 to 1. Returns when all processes have acknowledged."""
        if not 0 <= duty <= 1:
            raise InvalidInputError("duty", f"must lie in [0, 1], got {duty}")
        for burner in self._burners:
            assert burner.stdin is not None
            assert burner.stdout is not None
            try:
                burner.stdin.write(f"{duty}\n".encode())
                acknowledged = burner.stdout.read(1)
            except BrokenPipeError:
                acknowledged = b""
            if not acknowledged:
                raise InterferenceError(f"the interfering process {burner.pid} has ended")
        self.duty = duty

    def close(self) -> None:
        """End the processes. May be called again."""
        self._end()

    def __enter__(self) -> Interference:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(burners: list[subprocess.Popen[bytes]], owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not end its parent's processes
        return
    for burner in burners:
        burner.kill()
    for burner in burners:
        burner.communicate()
    burners.clear()
