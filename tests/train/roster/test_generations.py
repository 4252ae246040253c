"""A worker learns that its generation is replaced while it waits for the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from msgspec.structs import replace

from evenstep.train.comm.group import SupersededError
from evenstep.train.roster.generations import GenerationTracker
from evenstep.train.step import Step
from tests.train.roster.test_control import FakeCoordinator
from tests.train.roster.test_elastic import generation_of


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_wait_for_the_others_ends_when_a_newer_generation_holds_at_once(has_begun: bool) -> None:
    """A planned one does not end it, not even for a joiner that has not begun.

    The leader may have, and then expects the joiner in this generation until it passes the next
    one on.
    """
    first = generation_of(1, 2)
    with closing(FakeCoordinator()) as coordinator, ThreadPoolExecutor(1) as pool:
        made = pool.submit(GenerationTracker, coordinator.where, Step())
        connection = coordinator.accept()
        tracker = made.result()
        connection.send(first)
        tracker.enter(tracker.next())
        if has_begun:
            tracker.began_training()
        connection.send(generation_of(2, 2))  # planned: at the end of a step
        while tracker.num_pending < 1:
            tracker.control.wait(0.05)
        tracker.check(0.0)
        connection.send(replace(generation_of(3, 1), planned=False))
        while tracker.num_pending < 2:
            tracker.control.wait(0.05)
        with pytest.raises(SupersededError, match="generation 3 replaces 1"):
            tracker.check(0.0)
        tracker.control.close()
