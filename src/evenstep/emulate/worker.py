"""What a worker can ask of the crew it was started in. Outside one, nothing happens.

A crew and its workers share a folder, named by an environment variable: `here-<rank>` is made by a
worker that has lined up, `go` by the crew; where there are no quotas, the crew keeps the worker's
cores in `cores-<rank>`, and a worker that heeds them makes `throttled-<rank>`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from evenstep.emulate.throttle import Throttle

FOLDER = "EVENSTEP_CREW"
LOOK_S = 0.005


def line_up() -> None:
    """Wait here until all workers do: then quotas take hold and the schedule's time begins.

    Imports, data and the first compile are then not slowed down, and all begin together.
    """
    if FOLDER in os.environ:
        folder, rank = _folder_and_rank()
        (folder / f"here-{rank}").touch()
        while not (folder / "go").exists():  # the crew ends us if it never comes
            time.sleep(LOOK_S)


def own_throttle() -> Throttle:
    """What slows this worker down where there are no quotas; otherwise one that does nothing."""
    if FOLDER not in os.environ:
        return Throttle(1.0)
    folder, rank = _folder_and_rank()
    cores = folder / f"cores-{rank}"
    if not cores.exists():
        return Throttle(1.0)
    (folder / f"throttled-{rank}").touch()
    return Throttle(lambda: max(1.0, 1.0 / float(cores.read_text(encoding="utf-8"))))


def _folder_and_rank() -> tuple[Path, str]:
    return Path(os.environ[FOLDER]), os.environ["RANK"]
