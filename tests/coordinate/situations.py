"""A world brought into a situation, and what is then seen of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evenstep.coordinate.events import Ending
from evenstep.journal import read
from evenstep.messages import Stuck
from tests.coordinate.world import SimWorker, World

Make = Callable[..., World]
"""A world under given terms: the fixture `make`."""


def training(world: World, num: int) -> list[SimWorker]:
    """Workers from outside that train together."""
    workers = [world.join() for _ in range(num)]
    world.settle(8)
    assert status(world)["state"] == "training"
    assert len(roster(world)) == num
    return workers


def launched(world: World, num: int) -> list[SimWorker]:
    """Workers of the launcher that train together."""
    world.start_run(num)
    world.settle(4)
    return [world.workers[w] for w in roster(world)]


def status(world: World) -> dict[str, Any]:
    return world.status()


def states(world: World) -> dict[str, str]:
    """Of the workers, as operators see them."""
    return {row["worker"]: row["state"] for row in status(world)["workers"]}


def roster(world: World) -> tuple[str, ...]:
    return world.announced[-1].roster


def events(world: World) -> list[Any]:
    return [record.event for record in read(world.folder / "journal.jsonl")[1]]


def heard(worker: SimWorker, kind: type) -> list[Any]:
    return [m for m in worker.heard if isinstance(m, kind)]


def ask(world: World, what: str, **more: Any) -> Any:
    return world.ask(what, **more)


def ending(world: World) -> Ending:
    assert world.ending is not None
    return world.ending


def complain(world: World, *workers: SimWorker) -> None:
    """They say that they are stuck."""
    for worker in workers:
        world.say(worker, Stuck(generation=worker.generation, step=1, waited_s=0.0))
