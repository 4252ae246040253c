"""Who lives at which place, since when, until when, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable

from evenstep.simulate.timeline import Timeline
from evenstep.simulate.world import World
from evenstep.types import Joined, Launch, Left, Worker, WorkerId


class Crew:
    """The workers of a run, those that are starting up included."""

    def __init__(self, world: World, timeline: Timeline, detect_s: float) -> None:
        self._world, self._timeline, self._detect_s = world, timeline, detect_s
        self.place_of: dict[WorkerId, int] = {}
        self.there: set[WorkerId] = set()
        self._paid_since_s: dict[WorkerId, float] = {}
        self._fails_at_s: dict[WorkerId, float] = {}
        self._lives = [0] * len(world)  # how many workers each place has had
        self._taken: set[int] = set()  # places where none can be launched
        self._cost = 0.0

    def begin(self) -> None:
        """Put the workers of the scenario on the agenda."""
        for place in range(self._world.num_initial):
            at_s = self._world.groups[place].joins_at_s
            joins_s = 0.0 if at_s is None else at_s + float(self._world.late_s[place])
            self._start(place, now_s=joins_s, joins_s=joins_s)

    def launch(self, order: Launch, now_s: float) -> int:
        """Start as many of the ordered workers as there are places for; they join later.

        A place that never had a worker comes first. One whose worker was lost is gone for good.
        """
        groups = self._world.groups
        free = [p for p in range(len(groups)) if p not in self._taken]
        fitting = [p for p in free if order.kind in ("", groups[p].kind)]
        chosen = sorted(fitting, key=lambda p: (self._lives[p], p))[: order.num_workers]
        for place in chosen:
            self._start(place, now_s=now_s, joins_s=now_s + groups[place].startup_s)
        return len(chosen)

    def join(self, workers: Iterable[Worker]) -> None:
        """Workers have started up."""
        self.there.update(w.id for w in workers)

    def end(self, worker: WorkerId, now_s: float, *, lost: bool) -> None:
        """A worker is gone; its place is free again unless it was lost."""
        self._cost += self._price(worker, now_s)
        self.there.remove(worker)
        place = self.place_of.pop(worker)
        del self._paid_since_s[worker]
        self._fails_at_s.pop(worker, None)
        if not lost:
            self._taken.remove(place)

    def missed(self, now_s: float) -> list[WorkerId]:
        """Whose failure has been noticed by now."""
        failures = self._fails_at_s.items()
        return [w for w, s in failures if w in self.there and s + self._detect_s <= now_s]

    def next_failure_s(self) -> tuple[float, float]:
        """When the next of those who are there fails, and when that is noticed."""
        ahead = (s for w, s in self._fails_at_s.items() if w in self.there)
        fails_s = min(ahead, default=float("inf"))
        return fails_s, fails_s + self._detect_s

    def cost(self, now_s: float) -> float:
        """What all workers have cost by now; a launched one is paid for while it starts up."""
        return self._cost + sum(self._price(w, now_s) for w in self._paid_since_s)

    def _start(self, place: int, *, now_s: float, joins_s: float) -> None:
        group, late_s = self._world.groups[place], float(self._world.late_s[place])
        self._taken.add(place)
        self._lives[place] += 1
        worker = self._world.worker(place, self._lives[place])
        self.place_of[worker.id] = place
        self._paid_since_s[worker.id] = now_s
        self._timeline.at(joins_s, Joined(workers=(worker,)))
        if group.leaves_at_s is not None and group.leaves_at_s + late_s > joins_s:
            self._timeline.at(group.leaves_at_s + late_s, Left(workers=(worker.id,)))
        if group.fails_at_s is not None and group.fails_at_s + late_s > joins_s:
            self._fails_at_s[worker.id] = group.fails_at_s + late_s

    def _price(self, worker: WorkerId, now_s: float) -> float:
        hours = max(0.0, now_s - self._paid_since_s[worker]) / 3600
        return self._world.groups[self.place_of[worker]].price * hours
