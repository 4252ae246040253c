"""The decisions of a run: what, when, why, and the shares before and after."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from evenstep.observe.tally import kind_of
from evenstep.types import (
    AnyAction,
    AnyEvent,
    DrainAsked,
    Joined,
    Launch,
    LaunchFailed,
    Left,
    Lost,
    Plan,
    Regroup,
    Resumed,
    SizeAsked,
    StepDone,
    WorkerId,
    listed,
)

MAX_KEPT = 20_000
"""Decisions kept in memory: of more, every other older plan is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One action of the brain, with the event that it was decided on."""

    index: int  # its number in the run, from 0
    at_s: float
    kind: str  # plan, regroup, launch, drain, pause or stay
    reason: str
    event: str  # what happened
    step: int  # the last one before it; -1: none
    generation: int  # after it
    workers: tuple[WorkerId, ...]  # of a plan and a regroup, after it
    before: tuple[int, ...] = ()  # the shares of `workers` before a plan; 0 if it had none
    after: tuple[int, ...] = ()


class Decisions:
    """Follows the decisions, record by record."""

    def __init__(self) -> None:
        self.kept: list[Decision] = []
        self.num = 0  # in all
        self._shares: dict[WorkerId, int] = {}
        self._step, self._generation = -1, 0

    @property
    def num_dropped(self) -> int:
        """Plans that are not kept, to save memory."""
        return self.num - len(self.kept)

    def get(self, index: int) -> Decision | None:
        """The decision with a number; None if there is none, or it was dropped."""
        at = bisect_left(self.kept, index, key=attrgetter("index"))
        found = self.kept[at] if at < len(self.kept) else None
        return found if found is not None and found.index == index else None

    def between(self, begin_s: float, end_s: float) -> list[Decision]:
        """The decisions taken from `begin_s` to `end_s`."""
        first = bisect_left(self.kept, begin_s, key=attrgetter("at_s"))
        return [d for d in self.kept[first:] if d.at_s <= end_s]

    def stepped(self, at_s: float, step: int, actions: tuple[AnyAction, ...]) -> None:
        """A step was done, and what was decided on it."""
        self._step = step
        if actions:
            self.add(at_s, f"step {step:,}", actions)

    def add(self, at_s: float, event: str, actions: tuple[AnyAction, ...]) -> None:
        """What was decided on an event."""
        for action in actions:
            self._add(at_s, event, action)
        if len(self.kept) > MAX_KEPT:
            self._drop()

    def _add(self, at_s: float, event: str, action: AnyAction) -> None:
        workers: tuple[WorkerId, ...] = ()
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        match action:
            case Plan(shares=shares, generation=generation):
                workers, after = tuple(shares), tuple(shares.values())
                before = tuple(self._shares.get(w, 0) for w in workers)
                self._shares, self._generation = shares, generation
            case Regroup(roster=roster, generation=generation):
                workers, self._generation = roster, generation
            case Launch(num_workers=num, kind=kind):
                event = f"{event}; launch {num}" + (f" of kind {kind}" if kind else "")
        self.kept.append(
            Decision(
                index=self.num,
                at_s=at_s,
                kind=kind_of(action),
                reason=action.reason,
                event=event,
                step=self._step,
                generation=self._generation,
                workers=workers,
                before=before,
                after=after,
            )
        )
        self.num += 1

    def _drop(self) -> None:
        half = len(self.kept) // 2
        old = [d for i, d in enumerate(self.kept[:half]) if d.kind != "plan" or i % 2]
        self.kept = old + self.kept[half:]


def happened(event: AnyEvent) -> str:
    """An event in a few words."""
    match event:
        case StepDone(step=step):
            return f"step {step:,}"
        case Joined(workers=joined):
            return f"{listed([w.id for w in joined])} joined"
        case Left(workers=gone, cause=cause):
            return f"{listed(gone)} left" + (f": {cause}" if cause else "")
        case Lost(workers=gone, cause=cause):
            return f"{listed(gone)} lost" + (f": {cause}" if cause else "")
        case LaunchFailed(num_workers=num, cause=cause):
            return f"{num} launches failed" + (f": {cause}" if cause else "")
        case SizeAsked(num_workers=num):
            return f"size {num} requested"
        case DrainAsked(worker=worker):
            return f"{worker} asked to leave"
        case Resumed():
            return "resumed after records were lost"
