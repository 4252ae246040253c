"""Workers that an engine starts: they wait in its queue, never come, or lose their hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.coordinate.events import Begun, Exited, Gone, NotStarted, Preempted, Terms
from evenstep.journal import read
from evenstep.types import LaunchFailed
from tests.coordinate.world import World

QUEUES = Terms(gather_s=5.0, start_s=100.0, queues=True)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, QUEUES)


def train(world: World, num_workers: int) -> None:
    """This many workers of the engine train."""
    world.start_run(num_workers)
    for name in list(world.starting):
        worker = world.connect(name, launched=True)
        assert worker is not None
        world.starting.remove(name)
        world.ready(worker)
    world.settle(20)
    assert len(world.state.cluster.roster if world.state.cluster else ()) == num_workers


def failures(world: World) -> list[LaunchFailed]:
    _, records = read(world.folder / "journal.jsonl")
    return [r.event for r in records if isinstance(r.event, LaunchFailed)]


def states(world: World) -> dict[str, str]:
    return {row["worker"]: row["state"] for row in world.status()["workers"]}


def test_a_worker_in_the_queue_is_not_late_and_one_that_was_started_is(world: World) -> None:
    world.start_run(1)
    world.now_s += 1000.0
    world.tick()
    assert world.stopped == []
    assert states(world) == {"w0": "queued"}
    world.handle(Begun(workers=("w0",)))
    assert states(world) == {"w0": "starting"}
    world.now_s += 99.0
    world.tick()
    assert world.stopped == []
    world.now_s += 2.0
    world.tick()
    assert world.stopped == ["w0"]


def test_requests_that_are_given_up_are_in_the_journal_and_training_goes_on(world: World) -> None:
    train(world, 1)
    assert world.ask("scale", num_workers=3).problem == ""
    world.settle(5)
    step = world.step
    world.handle(NotStarted(workers=("w1", "w2"), cause="given up after 600 s: pending: QOS"))
    assert [(f.num_workers, f.cause) for f in failures(world)] == [
        (2, "given up after 600 s: pending: QOS")
    ]
    world.settle(5)
    assert world.step > step
    assert world.ending is None


def test_a_replacement_that_does_not_come_is_in_the_journal_too(world: World) -> None:
    train(world, 2)
    world.workers["w1"].connected = False
    world.disconnected("w1")
    world.handle(Exited(worker="w1", code=-9, why="Slurm: NODE_FAIL"))
    assert world.starting == ["w2"]
    world.starting.clear()
    world.handle(NotStarted(workers=("w2",), cause="no room"))
    assert [(f.num_workers, f.cause) for f in failures(world)] == [(1, "no room")]
    world.settle(5)
    assert world.ending is None


def test_a_worker_whose_host_is_about_to_go_leaves_and_is_replaced(world: World) -> None:
    train(world, 2)
    restarts = world.state.restarts_left
    world.handle(Preempted(worker="w1", why="its node is preempted"))
    assert world.starting == ["w2"]
    world.starting.clear()
    world.settle(10)
    assert world.state.cluster is not None
    assert world.state.cluster.roster == ("w0",)
    assert world.state.restarts_left == restarts
    assert world.state.processes["w1"].in_order, "it has left: that is no loss"


def test_the_engine_s_words_are_passed_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    train(world, 2)
    world.workers["w1"].connected = False
    world.disconnected("w1")
    world.handle(Exited(worker="w1", code=-9, why="Slurm: NODE_FAIL"))
    assert "w1 has ended: Slurm: NODE_FAIL" in caplog.text


def test_a_coordinator_that_takes_over_does_not_wait_for_workers_that_are_gone(
    world: World,
) -> None:
    train(world, 2)
    world.take_over(next_name=2)
    assert set(world.state.away) == {"w0", "w1"}
    world.handle(Gone(workers=("w1",)))
    assert set(world.state.away) == {"w0"}


def test_first_shares_follow_the_flops_of_kinds_or_else_their_cores(tmp_path: Path) -> None:
    def first_shares(terms: Terms, folder: Path) -> dict[str, int]:
        folder.mkdir()
        world = World(folder, terms)
        world.start_run(2)
        for name, kind, cores in (("w0", "gpu", 4.0), ("w1", "cpu", 12.0)):
            worker = world.connect(name, launched=True)
            assert worker is not None
            world.starting.remove(name)
            world.ready(worker, kind=kind, cores=cores, settings={"policy": {"name": "static"}})
        assert world.announced
        return dict(zip(world.announced[0].roster, world.announced[0].shares, strict=True))

    known = Terms(gather_s=5.0, flops=(("gpu", 3e12), ("cpu", 1e12)))
    assert first_shares(known, tmp_path / "known") == {"w0": 48, "w1": 16}
    unknown = Terms(gather_s=5.0, flops=(("gpu", 3e12),))
    assert first_shares(unknown, tmp_path / "unknown") == {"w0": 16, "w1": 48}
