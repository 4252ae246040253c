"""Who is blamed when workers wait for each other."""

from __future__ import annotations

from typing import Any

from evenstep.coordinate.liveness import APART_S, FIRST_STEP_S, deadlocked, overdue
from evenstep.coordinate.state import Contact

NOW_S = 1000.0


Named = tuple[str, Contact]


def member(worker: str, **more: Any) -> Named:
    """One that was heard from just now, and computes."""
    contact = {"heard_s": NOW_S, "heartbeat_s": NOW_S, "has_stepped": True, **more}
    return worker, Contact(**contact)


def stuck(worker: str, waited_s: float = 40.0, **more: Any) -> Named:
    told = {"stuck_s": NOW_S - 1.0, "waiting": True, "waiting_since_s": NOW_S - waited_s}
    return member(worker, **{**told, **more})


def blamed(*roster: Named) -> list[str]:
    found = overdue(dict(roster), NOW_S, silent_s=5.0, patience_s=30.0, lease_s=3600.0)
    return sorted(found)


def test_nobody_is_blamed_for_silence_alone() -> None:
    assert blamed(member("a"), member("b", heard_s=NOW_S - 600.0)) == []


def test_the_silent_are_blamed_when_others_wait() -> None:
    assert blamed(stuck("a", 6.0), member("b", heard_s=NOW_S - 5.1), member("c")) == ["b"]
    assert blamed(stuck("a", 6.0), member("b", heard_s=NOW_S - 4.9), member("c")) == []


def test_one_who_waited_and_then_fell_silent_is_blamed_too() -> None:
    assert blamed(stuck("a"), stuck("b", heard_s=NOW_S - 9.0), stuck("c")) == ["b"]


def test_all_who_are_silent_are_blamed_at_once() -> None:
    gone = [member(w, heard_s=NOW_S - 9.0) for w in "bc"]
    assert blamed(stuck("a"), *gone) == ["b", "c"]


def test_the_only_one_who_computes_is_blamed_after_patience() -> None:
    assert blamed(stuck("a", 31.0), stuck("b", 31.0), member("c")) == ["c"]
    assert blamed(stuck("a", 31.0), stuck("b", 29.0), member("c")) == []


def test_a_first_step_may_take_long() -> None:
    new = member("c", has_stepped=False)
    assert blamed(stuck("a", FIRST_STEP_S - 1), new) == []
    assert blamed(stuck("a", FIRST_STEP_S + 1), new) == ["c"]


def test_what_a_script_does_between_two_steps_may_take_longer() -> None:
    apart = member("c", apart=True)
    assert blamed(stuck("a", APART_S - 1), apart) == []
    assert blamed(stuck("a", APART_S + 1), apart) == ["c"]


def test_two_who_compute_are_not_blamed() -> None:
    assert blamed(stuck("a", 99.0), member("b"), member("c")) == []


def test_one_whose_heartbeats_wait_is_not_the_one_who_computes() -> None:
    waits = member("b", waiting=True, waiting_since_s=NOW_S - 40.0)
    assert blamed(stuck("a"), waits, member("c")) == ["c"]
    before = member("b", waiting=True, waiting_since_s=NOW_S - 20.0, heartbeat_s=NOW_S - 3.0)
    assert blamed(stuck("a"), before, member("c")) == []


def test_heartbeats_that_wait_for_long_are_a_complaint() -> None:
    waits = member("a", waiting=True, waiting_since_s=NOW_S - 31.0)
    assert blamed(waits, member("b", heard_s=NOW_S - 9.0)) == ["b"]
    soon = member("a", waiting=True, waiting_since_s=NOW_S - 29.0)
    assert blamed(soon, member("b", heard_s=NOW_S - 9.0)) == []


def test_nobody_is_blamed_when_all_wait() -> None:
    assert blamed(stuck("a", 99.0), stuck("b", 99.0)) == []


def test_if_nobody_is_heard_of_it_may_be_us() -> None:
    silent = [stuck(w, heard_s=NOW_S - 3000.0) for w in "ab"]
    assert blamed(*silent) == []
    silent = [stuck(w, heard_s=NOW_S - 3601.0) for w in "ab"]
    assert blamed(*silent) == ["a", "b"]


def test_nobody_at_all_is_nobody_to_blame() -> None:
    assert blamed() == []


def test_all_who_wait_wait_for_each_other() -> None:
    waits = member("b", waiting=True, waiting_since_s=NOW_S - 31.0)
    assert deadlocked(dict([stuck("a", 0.0), waits]), NOW_S, 30.0)
    assert not deadlocked(dict([stuck("a"), member("b")]), NOW_S, 30.0)
    assert not deadlocked(dict([stuck("a")]), NOW_S, 30.0)
    assert not deadlocked({}, NOW_S, 30.0)
