"""The brain as a plain object, for any framework: report what workers measured, get their shares.

This is LB-BSP's batch size manager without a wire or a clock. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from evenstep.config import Settings
from evenstep.engine import Engine
from evenstep.errors import InvalidInputError, PausedError
from evenstep.journal import Journal
from evenstep.strict import build
from evenstep.types import AnyAction, Joined, Left, Pause, StepDone, StepReport, Worker, WorkerId


class Balancer:
    """Shares of a fixed global batch, balanced step by step.

        balancer = Balancer(512, ["fast", "slow"])
        shares = balancer.shares()                     # {"fast": 256, "slow": 256}
        balancer.report("fast", 0.11)                  # seconds of compute, waiting excluded
        balancer.report("slow", 0.34)
        shares = balancer.shares()                     # of the next step

    Shares always add up to the batch and keep within each worker's cap. `policy` is a name or a
    mapping with a name and options; further `settings` are those of the config tree.
    """

    def __init__(
        self,
        batch: int,
        workers: Iterable[WorkerId | Worker],
        *,
        policy: str | Mapping[str, Any] = "auto",
        journal: Path | None = None,
        **settings: Any,
    ) -> None:
        plain = {"batch": {"size": batch}, "policy": policy, **settings}
        checked = build(Settings, plain)
        self._engine = Engine(checked)
        self._elapsed_s = 0.0
        self._reports: dict[WorkerId, StepReport] = {}
        first = Joined(workers=tuple(_worker(w) for w in workers))
        if not first.workers:
            raise InvalidInputError("workers", "none given; name at least one")
        if journal is not None:
            self._engine.journal = Journal.create(journal, checked)
        self._handle(first)

    def report(
        self,
        worker: WorkerId,
        seconds: float,
        *,
        samples: int | None = None,
        free_cpu: float = 1.0,
        free_memory: float = 1.0,
    ) -> None:
        """What a worker measured in the step at hand: compute seconds, waiting excluded.

        `samples` is its share unless it computed another number. `free_cpu` and `free_memory` are
        fractions as the next step begins; forecasts rest on them.
        """
        planned = self._engine.cluster.shares.get(worker)
        if planned is None:
            known = ", ".join(self._engine.cluster.shares)
            raise InvalidInputError("report", f"no worker {worker}; there are {known}")
        if worker in self._reports:
            raise InvalidInputError("report", f"{worker} reported this step already")
        self._reports[worker] = StepReport(
            worker=worker,
            samples=planned if samples is None else samples,
            compute_s=seconds,
            free_cpu=free_cpu,
            free_memory=free_memory,
        )

    def shares(self) -> dict[WorkerId, int]:
        """Each worker's share of the coming step. Closes the step that was reported, if one was."""
        if self._reports:
            slowest_s = max(r.compute_s for r in self._reports.values())
            self._elapsed_s += slowest_s
            cluster = self._engine.cluster
            done = StepDone(
                step=cluster.step + 1,
                generation=cluster.generation,
                seconds=slowest_s,
                reports=tuple(self._reports.values()),
            )
            self._reports = {}
            self._handle(done)
        return dict(self._engine.cluster.shares)

    def join(self, worker: WorkerId | Worker) -> None:
        """Take a worker in; the shares change at once."""
        self._handle(Joined(workers=(_worker(worker),)))
        self._reports = {}

    def leave(self, worker: WorkerId) -> None:
        """Let a worker go; the others take over its share at once."""
        if worker not in self._engine.cluster.workers:
            raise InvalidInputError("leave", f"no worker {worker}")
        self._handle(Left(workers=(worker,)))
        self._reports = {}

    @property
    def reason(self) -> str:
        """Why the shares are what they are."""
        plan = self._engine.cluster.plan
        return plan.reason if plan else ""

    def _handle(self, event: Joined | Left | StepDone) -> None:
        actions: tuple[AnyAction, ...] = self._engine.handle(self._elapsed_s, event)
        for action in actions:
            if isinstance(action, Pause):
                raise PausedError(action.reason)


def _worker(worker: WorkerId | Worker) -> Worker:
    return worker if isinstance(worker, Worker) else Worker(id=worker)
