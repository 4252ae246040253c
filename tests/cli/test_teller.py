"""Lines on a run for output that is not a terminal."""

from __future__ import annotations

from evenstep.cli.live_view import Teller
from tests.observe.a_status import status


def test_a_run_that_stands_still_is_told_to_ever_more_rarely() -> None:
    teller = Teller(status(step=-1, at_s=0.0, state="starting"))
    told = {}
    for at_s in range(10, 4000, 10):
        if line := teller.line(status(step=-1, at_s=at_s, state="starting")):
            told[at_s] = line
    assert list(told)[:7] == [10, 20, 40, 80, 160, 320, 640]
    assert list(told)[7:] == [1240, 1840, 2440, 3040, 3640]
    assert told[80].startswith("starting, step -1, ")
    assert told[80].endswith(", no step for 80 s")
    assert told[3640].endswith(", no step for 60:40 min")


def test_each_look_at_a_run_that_trains_is_a_line_and_a_new_stall_is_told_at_once() -> None:
    teller = Teller(status(step=-1, at_s=0.0))
    for step in (5, 9):
        line = teller.line(status(step=step, at_s=10.0 * step))
        assert line.startswith("training, ")
        assert "no step" not in line
    assert teller.line(status(step=9, at_s=100.0)).endswith("no step for 10 s")
    assert not teller.line(status(step=9, at_s=105.0))
    assert teller.line(status(step=9, at_s=110.0)).endswith("no step for 20 s")
    assert "no step" not in teller.line(status(step=10, at_s=120.0))
