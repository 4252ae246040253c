"""Calls for worker scripts started by `run_uneven`; in any other process they do nothing.

`run_uneven` and its workers share a folder, named by an environment variable. A worker that lines
up creates `ready-<rank>` and waits for `go`. Without quotas, `run_uneven` writes the worker's cores
to `cores-<rank>`, and a worker that throttles itself creates `throttled-<rank>`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from evenstep.emulate.throttle import Throttle

FOLDER_VARIABLE = "EVENSTEP_CREW"
POLL_S = 0.005


def line_up() -> None:
    """Start barrier: wait until all workers are here; then the quotas and the schedule start.

    Imports, data loading and the first compile thus run at full speed.
    """
    if FOLDER_VARIABLE in os.environ:
        folder, rank = _folder_and_rank()
        (folder / f"ready-{rank}").touch()
        while not (folder / "go").exists():  # `run_uneven` kills this process if it never comes
            time.sleep(POLL_S)


def own_throttle() -> Throttle:
    """The throttle that replaces this worker's quota; does nothing if it has a quota."""
    if FOLDER_VARIABLE not in os.environ:
        return Throttle(1.0)
    folder, rank = _folder_and_rank()
    cores = folder / f"cores-{rank}"
    if not cores.exists():
        return Throttle(1.0)
    (folder / f"throttled-{rank}").touch()
    return Throttle(lambda: max(1.0, 1.0 / float(cores.read_text(encoding="utf-8"))))


def _folder_and_rank() -> tuple[Path, str]:
    return Path(os.environ[FOLDER_VARIABLE]), os.environ["RANK"]
