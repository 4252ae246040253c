"""The event queue of the virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from evenstep.types import AnyEvent


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
