"""A job that trains some steps on request, so that jobs, or states of one job, can take turns."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.jobs import BIN, BOUND_S, ENVIRONMENT, ROOT, end_process
from bench.turns import KEEP_MEMORY

BATCH, WORLD = 256, 2


class TurnJob:
    """Trains `steps` steps a turn, at most `turns` times; ends with `cleanup`."""

    def __init__(
        self, folder: Path, starter: Sequence[str], cleanup: ExitStack, *, turns: int, steps: int
    ) -> None:
        self.log, self._folder, self._turn = folder / "log", folder, 0
        folder.mkdir()
        script = str(ROOT / "bench" / "rivals" / "in_turns.py")
        args = ["--out", str(folder), "--batch", str(BATCH), "--turns", str(turns)]
        log = cleanup.enter_context(self.log.open("w"))
        process = subprocess.Popen(
            [str(BIN / starter[0]), *starter[1:], script, *args, "--steps", str(steps)],
            env={**os.environ, **ENVIRONMENT, **KEEP_MEMORY},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        cleanup.callback(end_process, process)

    def take(self) -> float:
        """Train one turn. Returns the seconds of the slowest worker."""
        (self._folder / f"go-{self._turn}").touch()
        results = [self._folder / f"done-{self._turn}-{rank}" for rank in range(WORLD)]
        self._turn += 1
        deadline_s = time.monotonic() + BOUND_S
        while not all(path.exists() for path in results):
            if time.monotonic() > deadline_s:
                raise SystemExit(self.log.read_text()[-3000:])
            time.sleep(0.005)
        return max(float(path.read_text()) for path in results)
