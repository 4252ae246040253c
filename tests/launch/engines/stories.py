"""`evenstep run --on ENGINE` with the script of the fault tests, and what it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.testbed.cli_run import ENVIRONMENT, CliRun
from bench.testbed.live_run import HELD, same

from evenstep.journal import read
from evenstep.types import AnyEvent, Joined, LaunchFailed
from tests.faults.conftest import Alone

ARGS = [*HELD, "--sum"]


class EngineRun(CliRun):
    """A run whose coordinator is here, on loopback, and whose workers are an engine's."""

    def __init__(
        self,
        folder: Path,
        engine: Sequence[str],
        *,
        workers: str = "2:8",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        args: Sequence[str] = ARGS,
    ) -> None:
        super().__init__(
            folder,
            workers=workers,
            options=["--on", *engine, "--host", "127.0.0.1", *options],
            args=args,
            env={**ENVIRONMENT, **(env or {})},
        )

    def events(self) -> list[AnyEvent]:
        """The journal's, so far."""
        _, records = read(self.folder / "journal.jsonl")
        return [record.event for record in records]

    def kinds(self) -> dict[str, str]:
        """Of all workers that have joined."""
        joined = [e for e in self.events() if isinstance(e, Joined)]
        return {worker.id: worker.kind for event in joined for worker in event.workers}

    def failures(self) -> list[LaunchFailed]:
        """Requests that the engine did not meet."""
        return [e for e in self.events() if isinstance(e, LaunchFailed)]

    def scale(self, num_workers: int) -> None:
        self.ask("scale", num_workers=num_workers)

    def until_worker(self, worker: str, state: str) -> dict[str, Any]:
        """Wait until a worker is in this state."""
        return self.until(
            lambda status: any(
                (row["worker"], row["state"]) == (worker, state) for row in status["workers"]
            )
        )

    def until_trains_on(self) -> None:
        """Wait until some more steps are committed."""
        self.until_step(self.status()["step"] + 20)

    def is_same_as(self, alone: Alone) -> bool:
        """Whether it ended as one process that trained alone."""
        results = self.results()
        assert results
        return all(same(result, alone(*ARGS, *self.epochs)) for result in results.values())
