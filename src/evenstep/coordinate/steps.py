"""Which steps workers can have taken: what they say of steps is checked against it.

The last reported step is where the run was for certain. Nobody trains longer than a lease without
the coordinator, and no step is shorter than FASTEST_S, so a number far above cannot be true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from evenstep.coordinate.draft import LEASE_MARGIN_S, Draft
from evenstep.coordinate.state import LastStep
from evenstep.errors import InvalidInputError
from evenstep.messages import MOST, Generation, Stepped
from evenstep.types import WorkerId, listed

FASTEST_S = 1e-4  # of a step with a sum over workers; the shortest measured is ten times as long


def furthest(d: Draft) -> int:
    """The most steps that any worker can have taken by now."""
    last = d.timing.last_step
    unheard_s = d.now_s - last.at_s + max(d.terms.lease_s, last.lease_s) + LEASE_MARGIN_S
    return int(min(MOST, last.num_taken + unheard_s / FASTEST_S))


def known(d: Draft, num_taken: int, *, generation: int = 0, lease_s: float = 0.0) -> None:
    """So many steps have been taken. Nobody counts back: after a rollback it stays as it was."""
    last = d.timing.last_step
    last = LastStep(
        num_taken=max(num_taken, last.num_taken),
        at_s=d.now_s if num_taken >= last.num_taken else last.at_s,
        generation=generation or last.generation,
        step=num_taken - 1 if generation else last.step,
        lease_s=lease_s or last.lease_s,
    )
    d.timing = replace(d.timing, last_step=last)


def doubt_number(d: Draft, num_taken: int) -> str:
    """Why nobody can have taken so many steps; empty if somebody can."""
    if num_taken <= (most := furthest(d)):
        return ""
    last = d.timing.last_step.num_taken
    return (
        f"it says that it is at step {num_taken}, which cannot be: the run was last known to be at "
        f"step {last}, and can have come to step {most} at most"
    )


def check_report(d: Draft, running: Generation, message: Stepped) -> None:
    """InvalidInputError: this report of the leader cannot be true of its generation."""
    last, what = d.timing.last_step, f"step {message.step} of generation {running.number}"
    if message.generation == last.generation and message.step <= last.step:
        raise InvalidInputError(what, f"comes after step {last.step} of the same generation")
    if tuple(report.worker for report in message.reports) != running.roster:
        raise InvalidInputError(what, f"is not of its roster: {', '.join(running.roster)}")
    if not set(message.nonfinite) <= set(running.roster):
        raise InvalidInputError(what, f"names {message.nonfinite}, who are not all in its roster")
    most = furthest(d)
    if (num := message.quiet.num + message.earlier.num) > most:
        raise InvalidInputError(what, f"comes after {num} steps; {most} at most can be")
    assert d.cluster is not None
    batch = d.cluster.settings.batch
    if (largest := batch.size or batch.limit) and message.position > (most + 1) * largest:
        raise InvalidInputError(what, f"ends at sample {message.position}, of {largest} a step")


def note_faulty(d: Draft, running: Generation, message: Stepped) -> None:
    """Say once of each worker that its gradients are not finite.

    The run goes on: one process would have computed the same.
    """
    new = [worker for worker in message.nonfinite if worker not in d.nonfinite]
    if not new:
        return
    d.nonfinite = {**d.nonfinite, **dict.fromkeys(new, message.step)}
    for text in tell_faulty(d.nonfinite, running.roster, new):
        d.log(f"{text}; without a GradScaler in the session, the model is lost", "warning")


def tell_faulty(
    nonfinite: Mapping[WorkerId, int], roster: Sequence[WorkerId], workers: Sequence[WorkerId]
) -> list[str]:
    """A line for each of these workers of a roster; one line if it is about all of the roster."""
    at = {worker: nonfinite[worker] for worker in roster if worker in nonfinite}
    if len(roster) > 1 and len(at) == len(roster):
        first = [worker for worker, step in at.items() if step == min(at.values())]
        which = "" if len(first) == len(roster) else f"{listed(first)}'s first, "
        return [f"the gradients of all workers are not finite ({which}step {min(at.values())})"]
    return [f"{w}'s gradients are not finite (step {at[w]})" for w in workers if w in at]
