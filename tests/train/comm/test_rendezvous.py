"""Real Gloo groups that meet over published values instead of a TCP store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch

from evenstep.train.comm import rendezvous
from evenstep.train.comm.group import Group, SupersededError
from evenstep.train.comm.rendezvous import GenerationGroups, RendezvousStore
from evenstep.train.comm.transfer import MEETING, await_closed
from tests.train.roster.test_elastic import generation_of

WORLD = 3
WAIT_S = 600.0


class LocalBoard:
    """Publishes to all ranks of this process."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], bytes] = {}
        self._changed = threading.Condition()

    def publish(self, generation: int, key: str, value: bytes) -> None:
        with self._changed:
            self._values[generation, key] = value
            self._changed.notify_all()

    def published(self, generation: int, key: str) -> bytes | None:
        return self._values.get((generation, key))

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)


def test_ranks_meet_again_in_every_generation() -> None:
    board = LocalBoard()

    def one(rank: int) -> list[float]:
        groups, sums = GenerationGroups(board, "127.0.0.1", lambda _: None), []
        for number in (4, 5):
            groups.form(generation_of(number, WORLD), rank, WORLD)
            second = groups.make("norm", torch.device("cpu"))
            groups.control.sum(mine := torch.tensor([float(number)]))
            second.sum(mine)
            sums.append(float(mine))
            groups.close()
        return sums

    with ThreadPoolExecutor(WORLD) as pool:
        assert list(pool.map(one, range(WORLD))) == [[36.0, 45.0]] * WORLD


def test_a_rank_that_waits_for_others_gives_up_when_its_check_raises() -> None:
    def check(_: float) -> None:
        raise SupersededError("generation 5 replaces 4")

    groups = GenerationGroups(LocalBoard(), "127.0.0.1", check)
    with pytest.raises(SupersededError):
        groups.form(generation_of(4, WORLD), 0, WORLD)


def test_a_rank_that_makes_a_group_gives_up_when_its_check_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks were at the rendezvous; then the others were lost. Nothing waits for them."""

    def check(_: float) -> None:
        raise SupersededError("generation 5 replaces 4")

    monkeypatch.setattr(rendezvous, "MEET_S", 10 * WAIT_S)
    board = LocalBoard()
    for rank in range(1, WORLD):
        board.publish(4, f"here/{rank}", b"")
    groups = GenerationGroups(board, "127.0.0.1", check)
    with pytest.raises(SupersededError):
        groups.form(generation_of(4, WORLD), 0, WORLD)
    groups.close()
    await_closed(WAIT_S)
    assert MEETING not in [thread.name for thread in threading.enumerate()]


def test_closing_the_store_ends_its_waits() -> None:
    store = RendezvousStore(LocalBoard(), 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "address/1")
        store.close()
        with pytest.raises(RuntimeError, match="generation 4 lacks address/1"):
            waiting.result()


def test_a_key_that_does_not_come_in_time_raises() -> None:
    with pytest.raises(RuntimeError, match="lacks address/1"):
        RendezvousStore(LocalBoard(), 4).wait(["address/1"], timedelta(0))


def test_making_a_group_opens_no_port_but_gloos() -> None:
    def listening() -> int:
        connections = psutil.Process().net_connections("tcp")
        return sum(c.status == psutil.CONN_LISTEN for c in connections)

    board, before = LocalBoard(), listening()

    def one(rank: int) -> Group:
        groups = GenerationGroups(board, "127.0.0.1", lambda _: None)
        groups.form(generation_of(1, 2), rank, 2)
        return groups.control

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(one, range(2)))
        assert listening() - before <= len(made)  # Gloo's listener, one for each rank
    for group in made:
        group.close()
