"""Histories of a run: anything may happen to workers, connections and coordinators, in any order.

A history is a string of bytes, two for each action: which one, and what chance has to decide in it.
So hypothesis can draw, shrink and repeat histories at little cost.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from evenstep.coordinate.events import Terms
from evenstep.messages import Done, Failed, FromClient, Leaving
from tests.coordinate.network import CLOSED, Network, Worker
from tests.coordinate.replayed import replayed

LEASE_S = 20.0
TERMS = Terms(
    gather_s=5.0,
    lease_s=LEASE_S,
    patience_s=5.0,
    start_s=15.0,
    restarts=3,
    sets=("policy=uniform",),
)
REST_S = 600  # bound of what a run that is left alone needs
IN_MEMORY = "/dev/shm"

T = TypeVar("T")
Action = Callable[["History", int], object]
ACTIONS: list[tuple[int, str, Action]] = []  # with weights


def action(weight: int) -> Callable[[Action], Action]:
    """One action; it returns False if it is not possible now."""

    def add(function: Action) -> Action:
        ACTIONS.append((weight, function.__name__, function))
        return function

    return add


def pick(things: Sequence[T], chance: int) -> T:
    return things[chance % len(things)]


class History:
    """One run, from its start until it is left alone and comes to its end."""

    def __init__(self, folder: Path, first: int, second: int) -> None:
        self.num_launched = first % 4
        self.log: list[str] = []
        terms = replace(TERMS, spares=first // 4 % 3, awaits_joiners=self.num_launched == 0)
        self.net = Network(folder, terms, num_steps=8 + second % 16)
        self.net.start_run(self.num_launched)
        for _ in range(second // 16 % 4):
            self.net.join()
        if second // 64:
            self.go_on(2.0)

    def take(self, which: int, chance: int) -> None:
        """The action that a byte stands for, or the next one that is possible."""
        for i in range(len(ACTIONS)):
            _, name, act = ACTIONS[(TABLE[which] + i) % len(ACTIONS)]
            done = act(self, chance)
            if done is not False:
                self.log.append(f"{self.net.now_s:6.1f} s  {name} {chance}: {done or ''}")
                return

    def running(self) -> list[Worker]:
        return [w for w in self.net.workers if w.alive and not w.frozen]

    # Left alone.

    def round(self) -> bool:
        """Everybody does one thing; False: nobody can."""
        net, moved = self.net, False
        while net.starting:
            net.start_one()
            moved = True
        for connection in net.going_up:
            while connection.up:
                net.arrive_up(connection)
            moved = True
        for connection in net.going_down:
            while connection.down and connection.worker.connection is connection:
                net.arrive_down(connection)
            moved = True
        if net.is_up:
            while net.exits:
                net.see_exit()
                moved = True
        net.terminate()
        for worker in self.running():
            if worker.can_dial:
                worker.dial()
                moved = True
            if worker.welcome is not None and not worker.said_ready:
                worker.prepare()
                moved = True
            moved |= worker.act()
        return moved

    def go_on(self, seconds: float) -> None:
        """Without faults for a while."""
        until_s = self.net.now_s + seconds
        while self.net.now_s < until_s:
            for _ in range(12):
                if not self.round():
                    break
            self.net.pass_time(1.0)

    def comes_to_an_end(self) -> None:
        """Left alone, the run trains to its end, or waits for workers if there are none."""
        net = self.net
        if not net.is_up:
            net.recover(self.num_launched)
        for worker in net.workers:
            worker.cut_off = False
        until_s = net.now_s + REST_S
        while True:
            for _ in range(200):
                if not self.round():
                    break
            if not self.running() and not net.starting and self._has_settled():
                return
            assert net.now_s < until_s, f"no end: {net.status()} {net.workers}"
            net.pass_time(1.0)

    def _has_settled(self) -> bool:
        net = self.net
        return net.ending is not None or net.status()["state"] in ("paused", "starting")


# What may happen.


@action(2)
def nothing(h: History, chance: int) -> object:
    return ""


@action(40)
def the_coordinator_reads(h: History, chance: int) -> object:
    if not (there := h.net.going_up):
        return False
    connection = pick(there, chance)
    told = f"{connection.name} {connection.up[0]}"
    h.net.arrive_up(connection)
    return told


@action(40)
def a_worker_reads(h: History, chance: int) -> object:
    if not (there := h.net.going_down):
        return False
    connection = pick(there, chance)
    told = f"{connection.worker} {connection.down[0]}"
    h.net.arrive_down(connection)
    return told


@action(50)
def a_worker_acts(h: History, chance: int) -> object:
    workers = h.running()
    for i in range(len(workers)):
        worker = workers[(chance // 2 + i) % len(workers)]
        if worker.act(chance):
            return worker
    return False


@action(12)
def a_worker_is_ready(h: History, chance: int) -> object:
    if not (new := [w for w in h.running() if w.welcome is not None and not w.said_ready]):
        return False
    worker = pick(new, chance)
    worker.prepare()
    return worker


@action(20)
def all_go_on(h: History, chance: int) -> object:
    for _ in range(1 + chance % 6):
        h.round()
    return h.net.workers


@action(12)
def time_passes(h: History, chance: int) -> object:
    h.net.pass_time(0.5 + chance % 4 * 0.5)
    return ""


@action(6)
def time_passes_without_news(h: History, chance: int) -> object:
    for _ in range(2 + chance % 16):
        h.net.pass_time(1.5)
    return ""


@action(1)
def the_coordinator_stands_still(h: History, chance: int) -> object:
    h.net.pass_time(3.0 + chance % 25)
    return ""


@action(4)
def a_worker_joins(h: History, chance: int) -> object:
    return h.net.join() if len(h.running()) < 6 and h.net.is_up else False


@action(10)
def a_launched_worker_comes(h: History, chance: int) -> object:
    if not h.net.starting or not h.net.is_up:
        return False
    return h.net.start_one(chance % len(h.net.starting))


@action(2)
def a_launched_worker_fails(h: History, chance: int) -> object:
    if not h.net.starting:
        return False
    name = h.net.starting.pop(0)
    h.net.exits.append((name, pick((-9, 0, 75, 1), chance)))
    return name


@action(6)
def a_worker_dies(h: History, chance: int) -> object:
    alive = [w for w in h.net.workers if w.alive]
    if not alive:
        return False
    worker = pick(alive, chance // 2)
    worker.exit(-9, loses=bool(chance % 2))
    return worker


@action(1)
def several_die(h: History, chance: int) -> object:
    dead = [w for i, w in enumerate(h.net.workers) if w.alive and chance >> i & 1]
    for worker in dead:
        worker.exit(-9)
    return dead or False


@action(8)
def the_launcher_sees_an_exit(h: History, chance: int) -> object:
    if not (h.net.exits and h.net.is_up):
        return False
    told = h.net.exits[0]
    h.net.see_exit()
    return told


@action(6)
def processes_are_terminated(h: History, chance: int) -> object:
    if not h.net.stopped:
        return False
    told = list(h.net.stopped)
    h.net.terminate()
    return told


@action(3)
def a_worker_freezes(h: History, chance: int) -> object:
    if not (workers := h.running()):
        return False
    worker = pick(workers, chance)
    worker.frozen = True
    return worker


@action(4)
def a_worker_wakes(h: History, chance: int) -> object:
    if not (frozen := [w for w in h.net.workers if w.alive and w.frozen]):
        return False
    worker = pick(frozen, chance)
    worker.frozen = False
    return worker


@action(4)
def a_connection_breaks(h: History, chance: int) -> object:
    there = [c for c in h.net.connections if c.worker.connection is c]
    if not there:
        return False
    connection = pick(there, chance)
    connection.reset()
    return connection.worker


@action(1)
def all_connections_break(h: History, chance: int) -> object:
    for connection in h.net.connections:
        connection.reset()
    return ""


@action(3)
def workers_are_cut_off_from_the_coordinator(h: History, chance: int) -> object:
    away = [w for i, w in enumerate(h.net.workers) if w.alive and chance >> i % 8 & 1]
    for worker in away:
        worker.cut_off = True
    return away or False


@action(3)
def connections_of_those_cut_off_time_out(h: History, chance: int) -> object:
    there = [c for c in h.net.connections if c.worker.cut_off and c.worker.connection is c]
    for connection in there:
        connection.reset()
        if chance % 2:  # only at the coordinator; the worker learns of it when it reaches it again
            connection.down = deque([CLOSED])
    return there or False


@action(3)
def all_reach_the_coordinator_again(h: History, chance: int) -> object:
    away = [w for w in h.net.workers if w.cut_off]
    for worker in away:
        worker.cut_off = False
    return away or False


@action(12)
def a_worker_dials_again(h: History, chance: int) -> object:
    if not (away := [w for w in h.net.workers if w.can_dial]):
        return False
    worker = pick(away, chance)
    worker.dial()
    return worker


@action(2)
def two_cannot_connect(h: History, chance: int) -> object:
    workers = [w.id for w in h.running() if w.id]
    pair = frozenset((pick(workers, chance), pick(workers, chance // 16))) if workers else ()
    if len(pair) < 2:
        return False
    h.net.cut_links.add(frozenset(pair))
    return set(pair)


@action(2)
def all_can_connect_again(h: History, chance: int) -> object:
    if not h.net.cut_links:
        return False
    h.net.cut_links.clear()
    return ""


@action(3)
def a_worker_wants_to_leave(h: History, chance: int) -> object:
    if not (workers := h.running()):
        return False
    worker = pick(workers, chance)
    worker.say(Leaving(why="a spot notice"))
    return worker


@action(2)
def a_worker_is_drained(h: History, chance: int) -> object:
    if not (h.net.is_up and h.net.served):
        return False
    return h.net.ask("drain", worker=pick(list(h.net.served), chance))


@action(3)
def another_size_is_asked_for(h: History, chance: int) -> object:
    if not h.net.is_up:
        return False
    return h.net.ask("scale", num_workers=1 + chance % 5)


@action(1)
def the_script_fails(h: History, chance: int) -> object:
    workers = [w for w in h.running() if w.welcome is not None]
    if not workers:
        return False
    worker = pick(workers, chance)
    worker.say(Failed(told="no such file"))
    worker.exit(1)
    return worker


@action(1)
def the_script_ends(h: History, chance: int) -> object:
    workers = [w for w in h.running() if w.welcome is not None]
    if not workers:
        return False
    worker = pick(workers, chance)
    worker.exit(0)
    return worker


@action(2)
def a_worker_lies(h: History, chance: int) -> object:
    if not (workers := [w for w in h.running() if w.generation]):
        return False
    worker = pick(workers, chance // 8)
    step = worker.state[0] + pick((0, 3, 10**6, 10**15), chance)
    lies: list[FromClient] = [Done(step=step)]
    lies.append(h.net.report(worker.told[worker.generation], step))
    worker.lies = True
    worker.say(pick(lies, chance // 4))
    return worker


@action(3)
def the_coordinator_is_killed(h: History, chance: int) -> object:
    if not h.net.is_up or h.net.ending is not None:
        return False
    h.net.crash(loses=bool(chance % 2))
    return ""


@action(8)
def the_coordinator_of_a_run_that_has_ended_exits(h: History, chance: int) -> object:
    """The run may be resumed at once, while workers that it does not see have not heard of it."""
    if not h.net.is_up or h.net.ending is None:
        return False
    h.net.leave()
    return ""


@action(12)
def another_coordinator_takes_over(h: History, chance: int) -> object:
    if h.net.is_up:
        return False
    h.net.recover(h.num_launched)
    return ""


@action(4)
def a_checkpoint_is_written(h: History, chance: int) -> object:
    for worker in h.running():
        if worker.begun and worker.sums is None and not worker.forming and not worker.lost:
            worker.save(worker.told[worker.generation])
    return h.net.checkpoint


@action(3)
def the_run_is_stopped(h: History, chance: int) -> object:
    if not h.net.is_up or h.net.num_taken < 5:
        return False
    h.net.stop_run("enough")
    return ""


TABLE = [i for i, (weight, *_) in enumerate(ACTIONS) for _ in range(weight)]
TABLE = [TABLE[j * len(TABLE) // 256] for j in range(256)]


def live(history: bytes, *, replays: bool = False) -> History:
    """Let a history happen, and come to its end. Raises if that goes wrong, with what happened.

    `replays`: its record is handled again, with the same effects.
    """
    where = IN_MEMORY if Path(IN_MEMORY).is_dir() else None
    folder = Path(tempfile.mkdtemp(dir=where))
    run = None
    try:
        run = History(folder, history[0], history[1])
        for which, chance in zip(history[2::2], history[3::2], strict=False):
            run.take(which, chance)
        run.comes_to_an_end()
        run.net.close()
        if replays:
            replayed(folder)
        return run
    except BaseException as e:
        if run is not None:
            e.add_note("\n".join(run.log))
        raise
    finally:
        if run is not None:
            run.net.close()
        shutil.rmtree(folder)
