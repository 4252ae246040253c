"""Straggler detection: which worker to replace because it stays far slower than its kind.

The rule is the published one (an EWMA of throughput over the median, below a threshold), with a
measure that is fair to uneven shares. Samples per second are not fair: a step has a fixed cost, so
a small share looks slow. We assume that the curves of one kind differ by a factor only,

    seconds = factor * slope * (share + offset),

with one `offset` per kind: the fixed cost, expressed in samples. Then (share + offset) / seconds
compares workers at any shares. The offset is estimated from reports alone, whenever a worker's
share moves by `MOVED` or more within a few steps. Until a kind has an estimate, a worker is scored
by the better of the two extremes, no fixed cost (samples per second) and fixed cost only (steps per
second): it is a straggler only if it is one for every offset.

A worker that is alone of its kind is compared with its own mean, relative to how the other workers
compare with theirs: if all slow down, none is a straggler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec
import numpy as np

from evenstep.config import StragglerSettings
from evenstep.types import FloatArray, StepReport, Worker, WorkerId

MOVED = 0.2  # relative change of a share that is large enough to estimate the offset
STEADY = 0.05  # a share that moved by less counts as unchanged
CHANGED = 0.25  # relative; a step time further from the median is a change of the worker
NUM_RECENT = 8  # steps in which to find a moved share; over more, the worker may have changed
MAX_OFFSETS = 31  # newest offset estimates kept per kind; their median is used

RecentSteps = tuple[tuple[int, float], ...]
"""Shares and seconds of a worker's last measured steps."""


class WorkerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The history of one worker. A msgspec struct for speed: each step makes one per worker."""

    ratio: float = 1.0  # EWMA of its speed over the median of its kind
    last_ratio: float = 1.0  # assumed to hold while the worker has no share to measure
    num_steps: int = 0  # in the roster, with or without a share
    num_under: int = 0  # consecutive steps with the EWMA under the threshold
    num_measured: int = 0
    samples_per_s: float = 0.0  # means over all its measured steps
    steps_per_s: float = 0.0
    recent: RecentSteps = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """The state between steps. One worker is replaced at a time."""

    traces: Mapping[WorkerId, WorkerTrace] = field(default_factory=dict)
    offsets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # estimates by kind
    leaving: Worker | None = None  # the named straggler, until it has left
    roster_when_named: frozenset[WorkerId] = frozenset()  # tells its substitute from the others
    substitute: WorkerId | None = None  # joined for a straggler, not judged yet
    cooldown_steps: int = 0  # steps left in which no straggler is named


def judge(
    memory: Stragglers,
    settings: StragglerSettings,
    roster: Sequence[Worker],
    reports: Sequence[StepReport],
    *,
    num_steps: int = 1,
) -> tuple[Stragglers, WorkerId | None, str]:
    """Learn from one step of a roster in rank order; the worker to replace, if any, and why.

    `num_steps` counts this step and the quiet ones before it.

    A straggler is named after `warmup_steps` consecutive steps under the threshold, which gives its
    share time to adapt. The leader is never named, nor is anyone until the last straggler has left
    and its substitute was judged. If the substitute is no better after its own warm-up, no
    straggler is named for `cooldown_steps`. The reason is empty if nothing has changed.
    """
    if not settings.replace:
        return memory, None, ""
    memory = _learn(memory, settings, roster, reports, num_steps)
    kinds = {w.id: w.kind for w in roster}
    if memory.leaving is not None:
        if memory.leaving.id in kinds:
            return memory, None, ""
        kind = memory.leaving.kind
        joined = [w for w in roster if w.id not in memory.roster_when_named]
        joined.sort(key=lambda w: w.kind != kind)
        substitute = joined[0].id if joined else None
        memory = replace(memory, leaving=None, roster_when_named=frozenset(), substitute=substitute)
    if memory.substitute is not None:
        substitute, trace = memory.substitute, memory.traces.get(memory.substitute)
        if trace is not None and trace.num_steps < settings.warmup_steps:
            return memory, None, ""
        memory = replace(memory, substitute=None)
        if trace is not None and trace.ratio < settings.threshold:
            reason = (
                f"{substitute} is no faster than the worker it replaced: "
                f"{_below(trace, settings)}; no replacement for {settings.cooldown_steps} steps"
            )
            return replace(memory, cooldown_steps=settings.cooldown_steps), None, reason
    if memory.cooldown_steps > 0:
        cooldown_steps = max(0, memory.cooldown_steps - num_steps)
        return replace(memory, cooldown_steps=cooldown_steps), None, ""
    min_under = max(settings.warmup_steps, 1)
    slow = [w for w in roster[1:] if memory.traces[w.id].num_under >= min_under]
    if not slow:
        return memory, None, ""
    worst = min(slow, key=lambda w: (memory.traces[w.id].ratio, w.id))
    trace = memory.traces[worst.id]
    reason = (
        f"replace {worst.id}: {_below(trace, settings)} of the usual speed of {worst.kind} "
        f"workers for {trace.num_under} steps, last with a share of {trace.recent[-1][0]}"
    )
    return replace(memory, leaving=worst, roster_when_named=frozenset(kinds)), worst.id, reason


def give_up(memory: Stragglers, settings: StragglerSettings) -> Stragglers:
    """No substitute is available: keep the straggler, and name no other during a cool-down."""
    return replace(
        memory,
        leaving=None,
        roster_when_named=frozenset(),
        substitute=None,
        cooldown_steps=settings.cooldown_steps,
    )


def _below(trace: WorkerTrace, settings: StragglerSettings) -> str:
    return f"{trace.ratio:.2f} < {settings.threshold:.2f}"


def _learn(
    memory: Stragglers,
    settings: StragglerSettings,
    roster: Sequence[Worker],
    reports: Sequence[StepReport],
    num_steps: int,
) -> Stragglers:
    old = {w.id: memory.traces.get(w.id) or WorkerTrace() for w in roster}
    measured = {r.worker: r for r in reports if r.samples > 0 and r.worker in old}
    recent, offsets = {w: trace.recent for w, trace in old.items()}, dict(memory.offsets)
    for worker in roster:
        if worker.id in measured:
            recent[worker.id], offset = _add_step(recent[worker.id], measured[worker.id])
            if offset is not None:
                offsets[worker.kind] = (*offsets.get(worker.kind, ()), offset)[-MAX_OFFSETS:]
    # A worker is judged from its second step on: the first often includes warm-up.
    rows = [(w, measured[w.id]) for w in roster if w.id in measured and w.id in memory.traces]
    ratios = _ratios(rows, old, {kind: float(np.median(o)) for kind, o in offsets.items()})
    traces = {
        w: _next(trace, settings, recent[w], ratios.get(w), measured.get(w), num_steps)
        for w, trace in old.items()
    }
    return replace(memory, traces=traces, offsets=offsets)


def _next(
    trace: WorkerTrace,
    settings: StragglerSettings,
    recent: RecentSteps,
    ratio: float | None,
    report: StepReport | None,
    num_steps: int,
) -> WorkerTrace:
    n, samples_per_s, steps_per_s = trace.num_measured, trace.samples_per_s, trace.steps_per_s
    alpha = settings.alpha if n else 1.0
    if ratio is not None and report is not None:
        n += 1
        samples_per_s += (report.samples / report.compute_s - samples_per_s) / n
        steps_per_s += (1 / report.compute_s - steps_per_s) / n
    last = trace.last_ratio if ratio is None else ratio
    mean = alpha * last + (1 - alpha) * trace.ratio
    under = mean < settings.threshold
    return WorkerTrace(
        ratio=mean,
        last_ratio=last,
        num_steps=trace.num_steps + num_steps,
        # Quiet steps count only if the worker was under the threshold before them.
        num_under=trace.num_under + (num_steps if trace.num_under else 1) if under else 0,
        num_measured=n,
        samples_per_s=samples_per_s,
        steps_per_s=steps_per_s,
        recent=recent,
    )


def _add_step(before: RecentSteps, report: StepReport) -> tuple[RecentSteps, float | None]:
    """The recent steps with this one; an offset estimate, at the second step of a moved share."""
    share, seconds = report.samples, report.compute_s
    recent = (*before, (share, seconds))[-NUM_RECENT:]
    held_twice = len(before) > 0 and _moved(before[-1][0], share) < STEADY
    held_longer = len(before) > 1 and _moved(before[-2][0], before[-1][0]) < STEADY
    if not held_twice or held_longer:
        return recent, None
    old, old_s = next((r for r in reversed(before) if _moved(r[0], share) >= MOVED), (0, 0.0))
    if old == 0:
        return recent, None
    # The share moved in response to the last step at the old share. If that step was merely noisy,
    # the median of earlier steps at that share is better; if the worker had changed, it is not.
    *earlier, _ = (s for b, s in before if _moved(old, b) < STEADY)
    median_s = float(np.median(earlier)) if earlier else old_s
    old_s = median_s if abs(old_s / median_s - 1) < CHANGED else old_s
    # Elasticity at the old share, old / (old + offset): 1 without fixed cost, 0 with nothing else.
    elasticity = (seconds / old_s - 1) / (share / old - 1)
    if not -0.2 < elasticity < 1.2:
        return recent, None  # impossible for a curve: the worker itself changed in between
    return recent, old * (1 / min(max(elasticity, 0.02), 1.0) - 1)


def _moved(old: int, share: int) -> float:
    return abs(share - old) / old


def _ratios(
    rows: Sequence[tuple[Worker, StepReport]],
    traces: Mapping[WorkerId, WorkerTrace],
    offsets: Mapping[str, float],
) -> dict[WorkerId, float]:
    """Each worker's speed in this step over its expected speed."""
    share = np.array([r.samples for _, r in rows], dtype=np.float64)
    seconds = np.array([r.compute_s for _, r in rows], dtype=np.float64)
    past = [traces[w.id] for w, _ in rows]
    is_new = np.array([t.num_measured == 0 for t in past], dtype=bool)
    samples_per_s = np.where(is_new, share / seconds, [t.samples_per_s for t in past])
    steps_per_s = np.where(is_new, 1 / seconds, [t.steps_per_s for t in past])
    kinds: dict[str, list[int]] = {}
    for i, (worker, _) in enumerate(rows):
        kinds.setdefault(worker.kind, []).append(i)
    ratio, own_ratio = np.ones(len(rows)), np.ones(len(rows))
    for kind, members in kinds.items():
        at = np.array(members)
        candidates = [offsets[kind]] if kind in offsets else [0.0, inf]
        speeds = [_speed(share[at] / seconds[at], 1 / seconds[at], o) for o in candidates]
        means = [_speed(samples_per_s[at], steps_per_s[at], o) for o in candidates]
        ratio[at] = np.max([v / np.median(v) for v in speeds], axis=0)
        own_ratio[at] = np.max([v / m for v, m in zip(speeds, means, strict=True)], axis=0)
    for members in kinds.values():
        if len(members) == 1 and len(rows) > 1:
            alone = members[0]
            ratio[alone] = own_ratio[alone] / np.median(np.delete(own_ratio, alone))
    return {worker.id: float(ratio[i]) for i, (worker, _) in enumerate(rows)}


def _speed(samples_per_s: FloatArray, steps_per_s: FloatArray, offset: float) -> FloatArray:
    """(share + offset) / seconds, up to a constant factor; linear, so it applies to means too."""
    return steps_per_s if offset == inf else samples_per_s + offset * steps_per_s
