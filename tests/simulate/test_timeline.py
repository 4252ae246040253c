"""The event queue of the virtual clock."""

from __future__ import annotations

from evenstep.simulate.workers import Timeline
from evenstep.types import SizeAsked


def test_events_come_in_order_of_time_then_of_insertion() -> None:
    timeline = Timeline()
    for when_s, num in ((3.0, 1), (1.0, 2), (1.0, 3), (9.0, 4)):
        timeline.at(when_s, SizeAsked(num_workers=num))
    assert timeline.next_s == 1.0
    due = [e.num_workers for e in timeline.until(3.0) if isinstance(e, SizeAsked)]
    assert due == [2, 3, 1]
    assert timeline.next_s == 9.0


def test_an_empty_timeline_has_no_due_events() -> None:
    assert Timeline().next_s == float("inf")
    assert list(Timeline().until(1e9)) == []
