"""The actor that runs one worker: a process of its own, as on any other engine.

The script keeps its main thread, its signals and its exit code, and need not know of Ray. This
module imports Ray only inside of an actor.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from evenstep.launch.die_with_parent import die_with_parent

GRACE_S = 30.0  # between SIGTERM and SIGKILL
KEEP_S = 600.0  # after the script's end, for a coordinator that is away to learn its exit code


class WorkerStatus(NamedTuple):
    """What an actor tells of its worker."""

    node: str
    exit_code: int | None  # None: it runs


class RayWorker:
    """Runs `python -m evenstep.launch.worker *command` and keeps its exit code."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: str, log: str
    ) -> None:
        where = Path(folder)  # else that of the actor's runtime environment
        path = Path(log)
        self._process = subprocess.Popen(
            die_with_parent([sys.executable, "-m", "evenstep.launch.worker", *command]),
            stdin=subprocess.DEVNULL,
            stdout=path.open("ab") if os.access(path.parent, os.W_OK) else None,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            cwd=where if where.is_dir() else None,
            start_new_session=True,
        )
        threading.Thread(target=self._outlive, daemon=True).start()

    def status(self) -> WorkerStatus:
        """Whether it runs, and where."""
        import ray

        node: Any = ray.get_runtime_context().get_node_id()
        return WorkerStatus(node=str(node), exit_code=self._process.poll())

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if that does not end it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            timer = threading.Timer(GRACE_S, self._kill)
            timer.daemon = True
            timer.start()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _outlive(self) -> None:
        """Free the resources of a worker that no coordinator asks about any more."""
        self._process.wait()
        threading.Event().wait(KEEP_S)
        os._exit(0)
