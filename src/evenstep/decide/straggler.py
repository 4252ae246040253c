"""Whom to replace: a worker that stays far below its kind after the shares have made up for it.

The rule is the published one (an EWMA of throughput over the median, below a threshold), with a
measure that is fair to uneven shares. Samples per second are not: a step costs a fixed part too, so
a small share looks slow. We take the curves of one kind to differ by a factor only,

    seconds = factor * slope * (share + offset),

with one `offset` for the kind: the fixed part, counted in samples. Then (share + offset) / seconds
compares workers at any shares. The offset is learned from reports alone, whenever a worker's share
moves by `MOVED` or more within a few steps. Until a kind has shown it, a worker gets the better of
the two extremes, no fixed part (samples per second) and nothing else (steps per second): it is a
straggler only if it is one under every offset.

A worker alone of its kind is compared with its own mean, relative to how the others do against
theirs: if all slow down, none is a straggler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec
import numpy as np

from evenstep.config import StragglerSettings
from evenstep.types import FloatArray, StepReport, Worker, WorkerId

MOVED = 0.2  # a share that moved by this much shows the slope of the curve
STEADY = 0.05  # a share that moved by less counts as the same
NOISE = 0.25  # a step that took more than this longer than usual is a change
NUM_RECENT = 8  # steps to see a move in: over a longer time the worker itself may have changed
MAX_OFFSETS = 31  # the latest of a kind, of which the median counts

Steps = tuple[tuple[int, float], ...]
"""Shares and seconds of a worker's last measured steps."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one worker. A struct, since each step makes one for every worker."""

    ratio: float = 1.0  # EWMA of its speed over what its kind does
    last_ratio: float = 1.0  # taken to hold while it has no share and so no measurement
    num_steps: int = 0  # in the roster, with a share or without
    num_under: int = 0  # steps in a row with the EWMA under the threshold
    num_measured: int = 0
    samples_per_s: float = 0.0  # its own means over all measured steps
    steps_per_s: float = 0.0
    recent: Steps = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """What is remembered between steps. One worker is replaced at a time."""

    traces: Mapping[WorkerId, Trace] = field(default_factory=dict)
    offsets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # seen, by kind
    leaving: Worker | None = None  # named, and not gone yet
    peers: frozenset[WorkerId] = frozenset()  # who was there when it was named
    substitute: WorkerId | None = None  # joined in its place, and not judged yet
    num_quiet: int = 0  # steps left in which nobody is named


def judge(
    memory: Stragglers,
    settings: StragglerSettings,
    roster: Sequence[Worker],
    reports: Sequence[StepReport],
    *,
    num_steps: int = 1,
) -> tuple[Stragglers, WorkerId | None, str]:
    """Learn from one step of a roster in rank order; name the worker to replace, if any, and why.

    `num_steps` counts it and the quiet ones before it, which were as those before them.

    A worker is named once it has been under the threshold for `warmup_steps` steps in a row: time
    for its share to follow. The leader never is. While a named worker is still there, and until its
    substitute has been judged, no other is named. A substitute that is no better after its own
    warm-up ends the attempt: nobody is named for `cooldown_steps`. No news, no reason.
    """
    if not settings.replace:
        return memory, None, ""
    memory = _learn(memory, settings, roster, reports, num_steps)
    kinds = {w.id: w.kind for w in roster}
    if memory.leaving is not None:
        if memory.leaving.id in kinds:
            return memory, None, ""
        kind = memory.leaving.kind
        joined = sorted(
            (w for w in roster if w.id not in memory.peers), key=lambda w: w.kind != kind
        )
        who = joined[0].id if joined else None
        memory = replace(memory, leaving=None, peers=frozenset(), substitute=who)
    if memory.substitute is not None:
        who, trace = memory.substitute, memory.traces.get(memory.substitute)
        if trace is not None and trace.num_steps < settings.warmup_steps:
            return memory, None, ""
        memory = replace(memory, substitute=None)
        if trace is not None and trace.ratio < settings.threshold:
            reason = (
                f"{who} is no better than the worker it replaced: {_told(trace, settings)}; "
                f"nobody is replaced for {settings.cooldown_steps} steps"
            )
            return replace(memory, num_quiet=settings.cooldown_steps), None, reason
    if memory.num_quiet > 0:
        return replace(memory, num_quiet=max(0, memory.num_quiet - num_steps)), None, ""
    lasting = max(settings.warmup_steps, 1)
    slow = [w for w in roster[1:] if memory.traces[w.id].num_under >= lasting]
    if not slow:
        return memory, None, ""
    worst = min(slow, key=lambda w: (memory.traces[w.id].ratio, w.id))
    trace = memory.traces[worst.id]
    reason = (
        f"replace {worst.id}: {_told(trace, settings)} of what {worst.kind} workers do, "
        f"for {trace.num_under} steps, last with a share of {trace.recent[-1][0]}"
    )
    return replace(memory, leaving=worst, peers=frozenset(kinds)), worst.id, reason


def give_up(memory: Stragglers, settings: StragglerSettings) -> Stragglers:
    """No substitute could be had: the named worker stays, and nobody is named for a while."""
    return replace(
        memory, leaving=None, peers=frozenset(), substitute=None, num_quiet=settings.cooldown_steps
    )


def _told(trace: Trace, settings: StragglerSettings) -> str:
    return f"{trace.ratio:.2f} < {settings.threshold:.2f}"


def _learn(
    memory: Stragglers,
    settings: StragglerSettings,
    roster: Sequence[Worker],
    reports: Sequence[StepReport],
    num_steps: int,
) -> Stragglers:
    old = {w.id: memory.traces.get(w.id) or Trace() for w in roster}
    measured = {r.worker: r for r in reports if r.samples > 0 and r.worker in old}
    recent, offsets = {w: trace.recent for w, trace in old.items()}, dict(memory.offsets)
    for worker in roster:
        if worker.id in measured:
            recent[worker.id], offset = _follow(recent[worker.id], measured[worker.id])
            if offset is not None:
                offsets[worker.kind] = (*offsets.get(worker.kind, ()), offset)[-MAX_OFFSETS:]
    # A worker's first step often takes longer: only from its second on is it judged.
    rows = [(w, measured[w.id]) for w in roster if w.id in measured and w.id in memory.traces]
    ratios = _ratios(rows, old, {kind: float(np.median(o)) for kind, o in offsets.items()})
    traces = {
        w: _next(trace, settings, recent[w], ratios.get(w), measured.get(w), num_steps)
        for w, trace in old.items()
    }
    return replace(memory, traces=traces, offsets=offsets)


def _next(
    trace: Trace,
    settings: StragglerSettings,
    recent: Steps,
    ratio: float | None,
    report: StepReport | None,
    num_steps: int,
) -> Trace:
    n, samples_per_s, steps_per_s = trace.num_measured, trace.samples_per_s, trace.steps_per_s
    alpha = settings.alpha if n else 1.0
    if ratio is not None and report is not None:
        n += 1
        samples_per_s += (report.samples / report.compute_s - samples_per_s) / n
        steps_per_s += (1 / report.compute_s - steps_per_s) / n
    last = trace.last_ratio if ratio is None else ratio
    mean = alpha * last + (1 - alpha) * trace.ratio
    under = mean < settings.threshold
    return Trace(
        ratio=mean,
        last_ratio=last,
        num_steps=trace.num_steps + num_steps,
        # Quiet steps are as the one before them: they do not make it under any earlier.
        num_under=trace.num_under + (num_steps if trace.num_under else 1) if under else 0,
        num_measured=n,
        samples_per_s=samples_per_s,
        steps_per_s=steps_per_s,
        recent=recent,
    )


def _follow(before: Steps, report: StepReport) -> tuple[Steps, float | None]:
    """The recent steps with this one; the offset, at the second step of a share that has moved."""
    share, seconds = report.samples, report.compute_s
    recent = (*before, (share, seconds))[-NUM_RECENT:]
    has_held = len(before) > 0 and _moved(before[-1][0], share) < STEADY
    held_already = len(before) > 1 and _moved(before[-2][0], before[-1][0]) < STEADY
    if not has_held or held_already:
        return recent, None
    was, was_s = next((r for r in reversed(before) if _moved(r[0], share) >= MOVED), (0, 0.0))
    if was == 0:
        return recent, None
    # The last step at the old share is the one that the move answered. If it was merely noisy, the
    # steps before it tell better what that share takes; if the worker had changed, it alone does.
    *earlier, _ = (s for b, s in before if _moved(was, b) < STEADY)
    usual_s = float(np.median(earlier)) if earlier else was_s
    was_s = usual_s if abs(was_s / usual_s - 1) < NOISE else was_s
    # Elasticity at the old share, was / (was + offset): 1 without a fixed part, 0 with only that.
    elasticity = (seconds / was_s - 1) / (share / was - 1)
    if not -0.2 < elasticity < 1.2:
        return recent, None  # no curve does that: the worker itself changed in between
    return recent, was * (1 / min(max(elasticity, 0.02), 1.0) - 1)


def _moved(was: int, share: int) -> float:
    return abs(share - was) / was


def _ratios(
    rows: Sequence[tuple[Worker, StepReport]],
    traces: Mapping[WorkerId, Trace],
    offsets: Mapping[str, float],
) -> dict[WorkerId, float]:
    """This step's speed of each worker over what it should be."""
    share = np.array([r.samples for _, r in rows], dtype=np.float64)
    seconds = np.array([r.compute_s for _, r in rows], dtype=np.float64)
    past = [traces[w.id] for w, _ in rows]
    is_new = np.array([t.num_measured == 0 for t in past], dtype=bool)
    samples_per_s = np.where(is_new, share / seconds, [t.samples_per_s for t in past])
    steps_per_s = np.where(is_new, 1 / seconds, [t.steps_per_s for t in past])
    kinds: dict[str, list[int]] = {}
    for i, (worker, _) in enumerate(rows):
        kinds.setdefault(worker.kind, []).append(i)
    found, own = np.ones(len(rows)), np.ones(len(rows))
    for kind, members in kinds.items():
        at = np.array(members)
        candidates = [offsets[kind]] if kind in offsets else [0.0, inf]
        speeds = [_speed(share[at] / seconds[at], 1 / seconds[at], o) for o in candidates]
        usual = [_speed(samples_per_s[at], steps_per_s[at], o) for o in candidates]
        found[at] = np.max([v / np.median(v) for v in speeds], axis=0)
        own[at] = np.max([v / u for v, u in zip(speeds, usual, strict=True)], axis=0)
    for members in kinds.values():
        if len(members) == 1 and len(rows) > 1:
            alone = members[0]
            found[alone] = own[alone] / np.median(np.delete(own, alone))
    return {worker.id: float(found[i]) for i, (worker, _) in enumerate(rows)}


def _speed(samples_per_s: FloatArray, steps_per_s: FloatArray, offset: float) -> FloatArray:
    """(share + offset) / seconds, up to a constant; linear, so it holds for means as well."""
    return steps_per_s if offset == inf else samples_per_s + offset * steps_per_s
