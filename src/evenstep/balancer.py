"""The brain as a plain object, for any framework: report what workers measured, get their shares.

This is LB-BSP's batch size manager without a wire or a clock. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, SupportsFloat, SupportsIndex

from evenstep.config import Settings
from evenstep.engine import Engine
from evenstep.errors import ConfigError, InvalidInputError, PausedError
from evenstep.journal import Journal
from evenstep.strict import build, whole
from evenstep.types import AnyAction, Joined, Left, Pause, StepDone, StepReport, Worker, WorkerId


class Balancer:
    """Shares of a fixed global batch, balanced step by step.

        balancer = Balancer(512, ["fast", "slow"])
        shares = balancer.shares()                     # {"fast": 256, "slow": 256}
        balancer.report("fast", 0.11)                  # seconds of compute, waiting excluded
        balancer.report("slow", 0.34)
        shares = balancer.shares()                     # of the next step

    Shares always add up to the batch and keep within each worker's cap. `policy` and `forecaster`
    are names, or mappings with a name and options. With a journal, close the balancer at the end
    or use it as a context.
    """

    def __init__(
        self,
        batch: SupportsIndex,
        workers: Iterable[WorkerId | Worker],
        *,
        policy: str | Mapping[str, Any] = "auto",
        forecaster: str | Mapping[str, Any] = "narx",
        min_share: int = 0,
        journal: Path | None = None,
    ) -> None:
        if isinstance(workers, str) or not isinstance(workers, Iterable):
            raise InvalidInputError("workers", f"expected several names, got {workers!r}")
        size = {"size": whole("batch", batch, 1), "min_share": min_share}
        checked = build(Settings, {"batch": size, "policy": policy, "forecaster": forecaster})
        self._engine = Engine(checked)
        self._elapsed_s = 0.0
        self._paused = ""
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
        seconds: SupportsFloat,
        *,
        samples: SupportsIndex | None = None,
        free_cpu: SupportsFloat = 1.0,
        free_memory: SupportsFloat = 1.0,
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
            # Whatever a framework calls a number becomes one of Python's, which journals can hold.
            samples=planned if samples is None else whole("samples", samples),
            compute_s=_number("seconds", seconds),
            free_cpu=_number("free_cpu", free_cpu),
            free_memory=_number("free_memory", free_memory),
        )

    def shares(self) -> dict[WorkerId, int]:
        """Each worker's share of the coming step. Closes the step that was reported, if one was."""
        self._close_step()
        if not self._engine.cluster.shares:
            raise PausedError(self._paused)
        return dict(self._engine.cluster.shares)

    def join(self, worker: WorkerId | Worker) -> None:
        """Take a worker in; the shares change at once. Closes the step that was reported."""
        self._close_step()
        self._handle(Joined(workers=(_worker(worker),)))

    def leave(self, worker: WorkerId) -> None:
        """Let a worker go; the others take over its share at once. Closes the step, as `join`."""
        if worker not in self._engine.cluster.workers:
            raise InvalidInputError("leave", f"no worker {worker}")
        self._close_step()
        self._handle(Left(workers=(worker,)))

    def close(self) -> None:
        """End the journal, if there is one."""
        if self._engine.journal is not None:
            self._engine.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reason(self) -> str:
        """Why the shares are what they are."""
        plan = self._engine.cluster.plan
        return plan.reason if plan else ""

    def _close_step(self) -> None:
        reports, self._reports = tuple(self._reports.values()), {}
        slowest_s = max((r.compute_s for r in reports), default=0.0)
        if slowest_s > 0:
            self._elapsed_s += slowest_s
            cluster = self._engine.cluster
            done = StepDone(
                step=cluster.step + 1,
                generation=cluster.generation,
                seconds=slowest_s,
                reports=reports,
            )
            self._handle(done)

    def _handle(self, event: Joined | Left | StepDone) -> None:
        actions: tuple[AnyAction, ...] = self._engine.handle(self._elapsed_s, event)
        for action in actions:
            if isinstance(action, Pause):
                self._paused = action.reason
                raise PausedError(action.reason)


def _worker(worker: WorkerId | Worker) -> Worker:
    return worker if isinstance(worker, Worker) else Worker(id=worker)


def _number(field: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(field, f"expected a number, got {value!r}") from None
