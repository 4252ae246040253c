"""The virtual clock's agenda."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from evenstep.types import AnyEvent


class Timeline:
    """Events to come, in order of time; those of one time in the order they were put in."""

    def __init__(self) -> None:
        self._order = count()
        self._heap: list[tuple[float, int, AnyEvent]] = []

    @property
    def next_s(self) -> float:
        """When the next event is; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def at(self, when_s: float, event: AnyEvent) -> None:
        """Put an event on the agenda."""
        heappush(self._heap, (when_s, next(self._order), event))

    def until(self, now_s: float) -> Iterator[AnyEvent]:
        """Take what is due by now off the agenda."""
        while self.next_s <= now_s:
            yield heappop(self._heap)[2]
