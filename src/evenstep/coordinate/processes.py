"""Launched workers: the machine's orders to a launcher, and why some could not be obeyed."""

from __future__ import annotations

import logging

from evenstep.coordinate.events import NotStarted, StartProcesses
from evenstep.ports import Launcher
from evenstep.types import Launch, WorkerId

log = logging.getLogger("evenstep")


class Processes:
    """Starts and stops workers through `launcher`, which asks `name` for each worker's id."""

    def __init__(self) -> None:
        self.launcher: Launcher | None = None
        self._name: WorkerId = ""

    def name(self) -> WorkerId:
        """The id of the worker that is being launched."""
        return self._name

    def start(self, order: StartProcesses) -> NotStarted | None:
        """Launch workers one by one; which of them could not be launched, and why."""
        failed, causes = [], []
        for worker in order.workers:
            self._name = worker
            try:
                if self.launcher is None:
                    raise RuntimeError("this run starts no workers itself; join some")
                self.launcher.launch(Launch(num_workers=1, kind=order.kind, reason=order.reason))
            except Exception as e:  # whatever happens in a launcher, the run goes on without it
                log.warning("a worker could not be started: %s", e)
                failed.append(worker)
                causes.append(str(e) or type(e).__name__)
        return NotStarted(workers=tuple(failed), cause=causes[0]) if failed else None

    def stop(self, worker: WorkerId) -> None:
        """Terminate a worker's process."""
        if self.launcher is not None:
            self.launcher.stop(worker)
