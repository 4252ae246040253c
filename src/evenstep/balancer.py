"""The brain as a plain object, for any framework: report step times, get shares.

This is LB-BSP's batch size manager without network or clock. It does not import torch.
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
from evenstep.types import Joined, Left, Pause, StepDone, StepReport, Worker, WorkerId


class Balancer:
    """Balances the shares of a fixed global batch, step by step.

        balancer = Balancer(512, ["fast", "slow"])
        shares = balancer.shares()                     # {"fast": 256, "slow": 256}
        balancer.report("fast", 0.11)                  # compute seconds, excluding waits
        balancer.report("slow", 0.34)
        shares = balancer.shares()                     # for the next step

    Shares always add up to the batch and respect each worker's cap. `policy` and `forecaster` are
    names, or mappings with a name and options. With a journal, close the balancer at the end or use
    it as a context manager.
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
            raise InvalidInputError("workers", f"expected a list of names, got {workers!r}")
        size = {"size": whole("batch", batch, 1), "min_share": min_share}
        checked = build(Settings, {"batch": size, "policy": policy, "forecaster": forecaster})
        self._engine = Engine(checked)
        self._elapsed_s = 0.0
        self._pause_reason = ""
        self._reports: dict[WorkerId, StepReport] = {}
        joined = Joined(workers=tuple(_worker(w) for w in workers))
        if not joined.workers:
            raise InvalidInputError("workers", "the list is empty; name at least one")
        if journal is not None:
            self._engine.journal = Journal.create(journal, checked)
        self._handle(joined)

    def report(
        self,
        worker: WorkerId,
        seconds: SupportsFloat,
        *,
        samples: SupportsIndex | None = None,
        free_cpu: SupportsFloat = 1.0,
        free_memory: SupportsFloat = 1.0,
    ) -> None:
        """Report one worker's compute seconds in the current step, excluding waits.

        `samples` defaults to its share. `free_cpu` and `free_memory` are fractions at the start of
        the next step; forecasts use them.
        """
        planned = self._engine.cluster.shares.get(worker)
        if planned is None:
            known = ", ".join(self._engine.cluster.shares)
            raise InvalidInputError("report", f"no worker {worker}; the workers are {known}")
        if worker in self._reports:
            raise InvalidInputError("report", f"{worker} has already reported this step")
        self._reports[worker] = StepReport(
            worker=worker,
            # Convert the framework's number types to Python's, which a journal can store.
            samples=planned if samples is None else whole("samples", samples),
            compute_s=_number("seconds", seconds),
            free_cpu=_number("free_cpu", free_cpu),
            free_memory=_number("free_memory", free_memory),
        )

    def shares(self) -> dict[WorkerId, int]:
        """Each worker's share of the next step. Completes the reported step, if any."""
        self._complete_step()
        if not self._engine.cluster.shares:
            raise PausedError(self._pause_reason)
        return dict(self._engine.cluster.shares)

    def join(self, worker: WorkerId | Worker) -> None:
        """Add a worker; the shares change at once. Completes the reported step."""
        self._complete_step()
        self._handle(Joined(workers=(_worker(worker),)))

    def leave(self, worker: WorkerId) -> None:
        """Remove a worker; the others take over its share at once. Completes the reported step."""
        if worker not in self._engine.cluster.workers:
            raise InvalidInputError("leave", f"there is no worker {worker}")
        self._complete_step()
        self._handle(Left(workers=(worker,)))

    def close(self) -> None:
        """Close the journal, if there is one."""
        if self._engine.journal is not None:
            self._engine.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def reason(self) -> str:
        """The reason for the current shares."""
        plan = self._engine.cluster.plan
        return plan.reason if plan else ""

    def _complete_step(self) -> None:
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
        for action in self._engine.handle(self._elapsed_s, event):
            if isinstance(action, Pause):
                self._pause_reason = action.reason
                raise PausedError(action.reason)


def _worker(worker: WorkerId | Worker) -> Worker:
    return worker if isinstance(worker, Worker) else Worker(id=worker)


def _number(field: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(field, f"expected a number, got {value!r}") from None
