"""The end of a run: announced like any other change, hurried, and settled."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as altered

from evenstep.coordinate.announce import announce, dismiss
from evenstep.coordinate.draft import Draft
from evenstep.coordinate.events import EndRun, SaveStores
from evenstep.coordinate.state import Ended, Stopping, WorkerState
from evenstep.coordinate.terms import Ending
from evenstep.messages import Generation
from evenstep.types import Left


def announce_end(d: Draft) -> None:
    """The end is a change like others: planned, with an empty roster."""
    assert isinstance(d.closing, Stopping)
    d.closing = replace(d.closing, announced=True, since_s=d.now_s)
    d.effects.append(SaveStores(stores={}))  # nobody may take over workers that leave
    generation = Generation(
        number=d.number + 1,
        roster=(),
        shares=(),
        planned=d.running is not None and d.coming is None,
        saves=d.saver(d.roster),
        reason=d.stopping,
    )
    announce(d, generation)


def hurry(d: Draft) -> None:
    """The step in flight will not end: all leave at once."""
    if d.coming is not None and d.coming.planned:
        d.log("the step in flight does not end: all workers leave at once", "warning")
        number, saves = d.coming.number + 1, d.saver(d.roster)
        announce(d, altered(d.coming, number=number, planned=False, saves=saves))


def settle(d: Draft) -> None:
    """End the run if there is nothing left to wait for."""
    if d.ending is not None or d.away:
        return
    training = d.training()
    if d.stopping:
        if not training:
            end(d, Ending(ok=True, why=f"stopped: {d.stopping}"))
    elif d.finishing:
        # A change that was announced and not passed on is not waited for.
        if not any(d.running is None or d.is_running(m.id) for m in training):
            end(d, Ending(ok=True, why="trained to the end"))
    elif d.has_launched and not d.expects_workers():
        end(d, Ending(ok=False, why=f"no worker is left; {d.last_loss}"))


def end(d: Draft, ending: Ending) -> None:
    """End the run now."""
    if d.ending is not None:
        return
    d.log(f"the run ends: {ending.why}")
    d.closing = Ended(ending=ending, stopped_because=d.stopping)
    if d.roster:
        d.decide(Left(workers=d.roster, cause=ending.why))  # a resumed run waits for none of them
    d.effects.append(EndRun(ending=ending))
    for member in list(d.members.values()):
        if member.state is not WorkerState.DISMISSED and member.id != ending.worker:
            dismiss(d, member, ending.why)
