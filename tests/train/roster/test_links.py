"""Workers test their connections to each other over real sockets."""

from __future__ import annotations

import os
import queue
import socket
from dataclasses import dataclass, field

import pytest

from evenstep.messages import FromClient, Listen, Listening, Reach, Reached
from evenstep.train.roster.links import Links

WAIT_S = 600.0
TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass
class Worker:
    """A worker's links, and what they report."""

    token: str = TOKEN
    address: str = "127.0.0.1"
    reports: queue.Queue[FromClient] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.links = Links(self.address, self.token, self.reports.put)

    def listen(self, worker: str, seconds: float = WAIT_S) -> Listening:
        self.links.listen(Listen(probe="1.1", seconds=seconds), worker)
        answer = self.reports.get(timeout=WAIT_S)
        assert isinstance(answer, Listening)
        return answer

    def unreached(self, within_s: float = WAIT_S, **doors: tuple[str, int]) -> tuple[str, ...]:
        self.links.reach(Reach(probe="1.1", doors=doors, within_s=within_s))
        answer = self.reports.get(timeout=WAIT_S)
        assert isinstance(answer, Reached)
        return answer.unreached


def door(listening: Listening) -> tuple[str, int]:
    return listening.host, listening.port


def closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "127.0.0.1", int(listener.getsockname()[1])


def test_workers_report_whom_they_cannot_connect_to() -> None:
    a, b, c = Worker(), Worker(), Worker()
    at_b, at_c = door(b.listen("b")), door(c.listen("c"))
    assert a.unreached(b=at_b, c=at_c) == ()
    assert a.unreached(within_s=3.0, b=at_b, c=closed_port()) == ("c",)


def test_a_refused_connection_is_tried_again() -> None:
    """So that the coordinator learns first of a process that has just ended."""
    a, b = Worker(), Worker()
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))  # it refuses until it listens
        a.links.reach(Reach(probe="1.1", doors={"b": late.getsockname()}, within_s=WAIT_S))
        with pytest.raises(queue.Empty):
            a.reports.get(timeout=0.2)
        late.listen()
        there, _ = late.accept()
        with there:
            there.sendall(b.links._proof("1.1", "b"))
            assert a.reports.get(timeout=WAIT_S) == Reached(probe="1.1")


def test_another_process_at_a_workers_address_is_not_that_worker() -> None:
    a, b, stranger = Worker(), Worker(), Worker(token="f" * 32)
    at_b, elsewhere = door(b.listen("b")), door(stranger.listen("c"))
    assert a.unreached(b=at_b, c=at_b, d=elsewhere) == ("c", "d")


def test_packets_that_are_dropped_count_as_no_connection() -> None:
    """A full backlog drops them, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        at = full.getsockname()
        with socket.create_connection(at):
            assert Worker().unreached(within_s=0.2, b=at) == ("b",)


def test_a_worker_whose_threads_are_busy_is_reached_all_the_same() -> None:
    """Its kernel answers for it."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        assert Worker().unreached(within_s=0.2, b=busy.getsockname()) == ()


def test_strangers_that_stay_connected_hold_nobody_up() -> None:
    a, b = Worker(), Worker()
    at_b = door(b.listen("b"))
    strangers = [socket.create_connection(at_b) for _ in range(50)]
    for stranger in strangers:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
    assert a.unreached(b=at_b) == ()
    for stranger in strangers:
        stranger.close()


def test_a_port_is_closed_after_its_time_and_in_forked_processes() -> None:
    b = Worker()
    at_b = door(b.listen("b", seconds=0.5))
    pid = os.fork()
    if pid == 0:
        b.links.close_in_child()
        assert b.links._listener is not None
        os._exit(b.links._listener.fileno() >= 0)
    assert os.waitpid(pid, 0)[1] == 0
    while not Worker().unreached(within_s=0.2, b=at_b):
        pass


def test_a_port_is_closed_by_the_next_test() -> None:
    b = Worker()
    before = door(b.listen("b"))
    now = door(b.listen("b"))
    while not Worker().unreached(within_s=0.2, b=before):
        pass
    assert not Worker().unreached(b=now)


def test_a_worker_that_cannot_listen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Worker(address="192.0.2.1").listen("b").port == 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    answer = Worker().listen("b")
    assert (answer.host, answer.port) == ("", 0)
