"""A run in phases, from its journal: between two changes of its workers, what a step took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from evenstep.journal import read
from evenstep.types import StepDone

SETTLE = 8  # steps of a phase in which shares settle, or half of a phase that is shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps with the same workers, by the clock: with everything between two steps."""

    shares: tuple[int, ...]  # the last ones, in the order of the workers' names
    num_steps: int
    seconds: float  # of all its steps, with the change before them
    settled_s: float  # of a step, once shares have settled
    compute_s: tuple[float, ...]  # likewise, means of these steps
    idle_s: float  # before its first step, without training because the roster changed


def phases(journal: Path, changes: tuple[int, ...] = (), *, first: int = 0) -> list[Phase]:
    """The phases of a run: cut at each change of its roster, and at these steps.

    Steps before `first` do not count.
    """
    steps: dict[tuple[int, int], list[tuple[float, StepDone]]] = {}
    began_s = 0.0
    for record in read(journal)[1]:
        done = record.event
        if isinstance(done, StepDone):
            if done.step < first:
                began_s = record.at_s
                continue
            key = (done.generation, sum(done.step >= change for change in changes))
            steps.setdefault(key, []).append((record.at_s, done))
    found, last = [], first - 1
    for reported in steps.values():
        phase = _phase(reported, began_s, last)
        began_s, last = reported[-1][0], reported[-1][1].step
        found.append(phase)
    return found


def _phase(reported: list[tuple[float, StepDone]], began_s: float, last: int) -> Phase:
    ended_s, final = reported[-1]
    num_steps = final.step - last
    settled = [r for r in reported if r[1].step > last + min(SETTLE, num_steps // 2)]
    since_s, since = settled[0] if len(settled) > 1 else (began_s, reported[0][1])
    num_settled = final.step - since.step if len(settled) > 1 else num_steps
    by_name = sorted(final.reports, key=lambda report: report.worker)
    times: dict[str, list[float]] = {report.worker: [] for report in by_name}
    final_shares = {report.worker: report.samples for report in by_name}
    for _, done in settled or reported:
        for report in done.reports:
            # Shares differ little by now: their times are compared at the last ones.
            ratio = final_shares[report.worker] / max(1, report.samples)
            times[report.worker].append(report.compute_s * ratio)
    return Phase(
        shares=tuple(report.samples for report in by_name),
        num_steps=num_steps,
        seconds=ended_s - began_s,
        settled_s=(ended_s - since_s) / num_settled,
        compute_s=tuple(map(fmean, times.values())),
        idle_s=sum(done.idle_s for _, done in reported),
    )
