"""Real Gloo ranks as threads of one process, each with its own session."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from evenstep.launch.ranks import StaticRank
from evenstep.observe.sinks import SinkChoice
from evenstep.train.comm.group import Group
from evenstep.train.job import Options
from evenstep.train.join import fixed_session
from evenstep.train.roster.fixed import FixedRoster
from evenstep.train.session import Session

T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def control_of(session: Session) -> Group:
    """The control group of a rank."""
    roster = session._roster
    assert isinstance(roster, FixedRoster)
    return roster.control


def run_ranks(
    world: int, body: Callable[[Session], T], sinks: Sequence[SinkChoice] = (), **settings: Any
) -> list[T]:
    """What `body` returns on each rank; the first real failure is raised."""
    port = free_port()

    def one(rank: int) -> T:
        place = StaticRank(rank=rank, world=world, port=port, hosts_store=rank == 0)
        options = Options(settings=settings, min_share=0)
        with fixed_session(place, options, sinks=sinks) as session:
            return body(session)

    with ThreadPoolExecutor(world) as pool:
        return [f.result(timeout=600) for f in [pool.submit(one, r) for r in range(world)]]
