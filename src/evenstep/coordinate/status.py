"""A run as people want to see it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from evenstep.types import StepDone, Steps, WorkerId

if TYPE_CHECKING:
    from evenstep.coordinate.state import RunState

RECENT_S = 10.0  # of the run's clock; the newest steps count even if they took longer
OVERDUE = 10.0  # no report for this many times the last report's duration: stalled


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples per second of a generation's last steps, as its leader reports them."""

    generation: int = 0
    reported: tuple[tuple[float, Steps], ...] = ()  # when, and the steps since the one before

    def add(self, now_s: float, generation: int, steps: Steps) -> Throughput:
        """With some more steps. Those of an earlier generation are dropped."""
        before = self.reported if generation == self.generation else ()
        recent = tuple(entry for entry in before if now_s - entry[0] <= RECENT_S)
        return Throughput(generation, (*recent, (now_s, steps)))

    def samples_per_s(self, now_s: float, generation: int) -> float:
        """0 if this generation has reported no step, or none for much longer than a step takes."""
        if generation != self.generation or not self.reported:
            return 0.0
        last_s, newest = self.reported[-1]
        if now_s - last_s > max(RECENT_S, OVERDUE * newest.seconds):
            return 0.0
        recent = [steps for at_s, steps in self.reported if now_s - at_s <= RECENT_S] or [newest]
        return round(sum(s.samples for s in recent) / sum(s.seconds for s in recent), 1)


def own_steps(done: StepDone, batch: int) -> Steps:
    """The reported steps, with quiet samples capped to this generation's own."""
    quiet = done.quiet
    own = msgspec.structs.replace(quiet, samples=min(quiet.samples, quiet.num * batch))
    return msgspec.structs.replace(done, quiet=own).steps


def status(state: RunState, now_s: float) -> dict[str, Any]:
    """The run: its phase, its speed, and one row for each worker."""
    cluster, running = state.cluster, state.running
    roster = running.roster if running else cluster.roster if cluster else ()
    number = running.number if running else cluster.generation if cluster else 0
    rank = {worker: i for i, worker in enumerate(roster)}
    ids = dict.fromkeys((*roster, *state.members, *sorted(state.running_processes)))
    return {
        "run": state.terms.run,
        "state": state.phase_name,
        "reason": state.reason,
        "generation": number,
        "step": state.progress.step,
        "samples_per_s": state.progress.throughput.samples_per_s(now_s, number),
        "restarts_left": state.restarts_left,
        "settings": msgspec.to_builtins(cluster.settings) if cluster else {},
        "workers": [_row(state, worker, rank.get(worker)) for worker in ids],
    }


def _row(state: RunState, worker: WorkerId, rank: int | None) -> dict[str, Any]:
    member = state.members.get(worker)
    report = state.progress.reports.get(worker) if member else None
    return {
        "worker": worker,
        "rank": rank,
        "share": report.samples if report and rank is not None else 0,
        "compute_s": report.compute_s if report else 0.0,
        "wait_s": report.wait_s if report else 0.0,
        "state": state.name_of(worker),
        "host": member.host if member else "",
        "pid": member.pid if member else 0,
    }
