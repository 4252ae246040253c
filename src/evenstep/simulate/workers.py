"""Future events, and the simulated workers: which slot each runs in, until when, at what cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count

from evenstep.simulate.world import World
from evenstep.types import AnyEvent, Joined, Launch, Left, Worker, WorkerId


class Timeline:
    """Future events in order of time; events of the same time in the order they were added."""

    def __init__(self) -> None:
        self._order = count()
        self._heap: list[tuple[float, int, AnyEvent]] = []

    @property
    def next_s(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def at(self, when_s: float, event: AnyEvent) -> None:
        """Add an event."""
        heappush(self._heap, (when_s, next(self._order), event))

    def until(self, now_s: float) -> Iterator[AnyEvent]:
        """Remove and return the events that are due."""
        while self.next_s <= now_s:
            yield heappop(self._heap)[2]


class SimulatedWorkers:
    """The workers of a run, including those that are starting up."""

    def __init__(self, world: World, timeline: Timeline, detect_s: float) -> None:
        self._world, self._timeline, self._detect_s = world, timeline, detect_s
        self.slot_of: dict[WorkerId, int] = {}
        self.joined: set[WorkerId] = set()
        self._paid_since_s: dict[WorkerId, float] = {}
        self._fails_at_s: dict[WorkerId, float] = {}
        self._num_lives = [0] * len(world)  # workers that each slot has had
        self._taken: set[int] = set()  # slots that cannot be used
        self._cost = 0.0

    def schedule_initial(self) -> None:
        """Schedule the workers that the scenario starts with."""
        for slot in range(self._world.num_initial):
            at_s = self._world.groups[slot].joins_at_s
            joins_s = 0.0 if at_s is None else at_s + float(self._world.late_s[slot])
            self._start(slot, now_s=joins_s, joins_s=joins_s)

    def launch(self, order: Launch, now_s: float) -> int:
        """Start as many of the ordered workers as there are free slots; they join later.

        Unused slots come first. The slot of a lost worker stays taken.
        """
        groups = self._world.groups
        free = [s for s in range(len(groups)) if s not in self._taken]
        fitting = [s for s in free if order.kind in ("", groups[s].kind)]
        chosen = sorted(fitting, key=lambda s: (self._num_lives[s], s))[: order.num_workers]
        for slot in chosen:
            self._start(slot, now_s=now_s, joins_s=now_s + groups[slot].startup_s)
        return len(chosen)

    def join(self, workers: Iterable[Worker]) -> None:
        """Note that workers have started up."""
        self.joined.update(w.id for w in workers)

    def end(self, worker: WorkerId, now_s: float, *, lost: bool) -> None:
        """Note that a worker is gone; its slot is free again unless it was lost."""
        self._cost += self._price(worker, now_s)
        self.joined.remove(worker)
        slot = self.slot_of.pop(worker)
        del self._paid_since_s[worker]
        self._fails_at_s.pop(worker, None)
        if not lost:
            self._taken.remove(slot)

    def detected_failures(self, now_s: float) -> list[WorkerId]:
        """Workers whose failure has been detected."""
        failures = self._fails_at_s.items()
        return [w for w, s in failures if w in self.joined and s + self._detect_s <= now_s]

    def next_failure_s(self) -> tuple[float, float]:
        """When the next worker fails, and when that is detected."""
        ahead = (s for w, s in self._fails_at_s.items() if w in self.joined)
        fails_s = min(ahead, default=float("inf"))
        return fails_s, fails_s + self._detect_s

    def cost(self, now_s: float) -> float:
        """Cost of all workers so far, start-up included."""
        return self._cost + sum(self._price(w, now_s) for w in self._paid_since_s)

    def _start(self, slot: int, *, now_s: float, joins_s: float) -> None:
        group, late_s = self._world.groups[slot], float(self._world.late_s[slot])
        self._taken.add(slot)
        self._num_lives[slot] += 1
        worker = self._world.worker(slot, self._num_lives[slot])
        self.slot_of[worker.id] = slot
        self._paid_since_s[worker.id] = now_s
        self._timeline.at(joins_s, Joined(workers=(worker,)))
        if group.leaves_at_s is not None and group.leaves_at_s + late_s > joins_s:
            self._timeline.at(group.leaves_at_s + late_s, Left(workers=(worker.id,)))
        if group.fails_at_s is not None and group.fails_at_s + late_s > joins_s:
            self._fails_at_s[worker.id] = group.fails_at_s + late_s

    def _price(self, worker: WorkerId, now_s: float) -> float:
        hours = max(0.0, now_s - self._paid_since_s[worker]) / 3600
        return self._world.groups[self.slot_of[worker]].price * hours
