"""Calls for worker scripts started by `run_uneven`; in any other process they do nothing.

`run_uneven` and its workers share a folder, named by an environment variable. A worker that lines
up creates `ready-<rank>` and waits for `go`. Without quotas, `run_uneven` writes the worker's cores
to `cores-<rank>`, and a worker that throttles itself creates `throttled-<rank>`. Workers of
`evenstep run` have no rank of their own, and go by their name instead.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from evenstep.emulate.throttle import Throttle

FOLDER_VARIABLE = "EVENSTEP_CREW"
START = "go"
"""In that folder: the workers may start."""

POLL_S = 0.005


def line_up() -> None:
    """Start barrier: wait until all workers are here; then the quotas and the schedule start.

    Imports, data loading and the first compile thus run at full speed.
    """
    if FOLDER_VARIABLE in os.environ:
        folder, name = _folder_and_name()
        parent = os.getppid()
        ready_mark(folder, name).touch()
        while not (folder / START).exists():
            if os.getppid() != parent:
                sys.exit("evenstep: the parent of this worker ended before the worker could start")
            time.sleep(POLL_S)


def own_throttle() -> Throttle:
    """The throttle that replaces this worker's quota; does nothing if it has a quota."""
    if FOLDER_VARIABLE not in os.environ:
        return Throttle(1.0)
    folder, name = _folder_and_name()
    cores = folder / f"cores-{name}"
    if not cores.exists():
        return Throttle(1.0)
    (folder / f"throttled-{name}").touch()
    return Throttle(lambda: max(1.0, 1.0 / float(cores.read_text(encoding="utf-8"))))


def ready_mark(folder: Path, name: object) -> Path:
    """Exists once a worker has lined up."""
    return folder / f"ready-{name}"


def set_cores(folder: Path, name: object, cores: float) -> None:
    """Tell a worker without a quota how many cores it has, before it starts or later."""
    fresh = folder / f"fresh-{name}"
    fresh.write_text(str(cores), encoding="utf-8")
    fresh.rename(folder / f"cores-{name}")  # a worker never reads a partial number


def _folder_and_name() -> tuple[Path, str]:
    name = os.environ.get("EVENSTEP_WORKER") or os.environ["RANK"]
    return Path(os.environ[FOLDER_VARIABLE]), name
