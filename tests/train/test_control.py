"""A worker's line to a coordinator that goes away and comes back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from evenstep.errors import InvalidInputError
from evenstep.launch.environment import Coordinator
from evenstep.messages import (
    Alive,
    FromClient,
    Greeting,
    Hello,
    Leaving,
    Stuck,
    Welcome,
    from_client,
    to_client,
)
from evenstep.train.control import WAITING_LINES, Control
from tests.coordinate.fake import ready

WAIT_S = 20.0


class Desk:
    """A coordinator's end of the line, spoken by hand."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self._calls: list[Call] = []
        self.where = Coordinator(
            host="127.0.0.1", port=self._listener.getsockname()[1], token="t", worker="w0"
        )

    def close(self) -> None:
        self._listener.close()
        for call in self._calls:
            call.hang_up()

    def slam(self) -> None:
        """Take a call and hang up before a word."""
        self._listener.accept()[0].close()

    def babble(self) -> None:
        """Something else listens there."""
        with closing(self._listener.accept()[0]) as there:
            there.sendall(b"SSH-2.0\r\n")

    def accept(self) -> Call:
        """Let the worker in."""
        there, _ = self._listener.accept()
        there.settimeout(WAIT_S)
        there.sendall(to_client.encode(Greeting(nonce="00" * 16)))
        call = Call(there)
        self._calls.append(call)
        assert isinstance(call.hear(), Hello)
        there.sendall(to_client.encode(Welcome(worker="w0", lease_s=600.0)))
        return call


class Call:
    """One connection."""

    def __init__(self, there: socket.socket) -> None:
        self._there, self._lines = there, there.makefile("rb")

    def hear(self) -> FromClient:
        """The next message that is no heartbeat."""
        while True:
            message = from_client.decode(self._lines.readline())
            if not isinstance(message, Alive):
                return message

    def hang_up(self) -> None:
        self._lines.close()
        self._there.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    with closing(Desk()) as desk:
        yield desk


class Worker:
    """What a control asks of training."""

    def __init__(self, desk: Desk) -> None:
        self.generation = 0
        self._desk = desk

    def dial(self) -> tuple[Control, Call]:
        """A control, and the other end of its line."""
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(self._desk.accept)
            return Control(self._desk.where, lambda: (self.generation, 0, False)), call.result()


@pytest.mark.parametrize("generation", [0, 3])
def test_who_has_no_place_yet_says_again_that_it_is_ready(desk: Desk, generation: int) -> None:
    worker = Worker(desk)
    control, call = worker.dial()
    control.tell(ready())
    assert call.hear() == ready()
    worker.generation = generation
    call.hang_up()
    again = desk.accept()
    while not control.connected:  # until then, what it says is dropped
        control.wait(0.01)
    control.tell(Stuck(generation=0, step=1, waited_s=1.0))
    first = again.hear()
    assert first == ready() if generation == 0 else isinstance(first, Stuck)
    control.close()


def test_the_wish_to_leave_outlives_a_coordinator(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    call.hang_up()
    control.tell(Leaving(why="SIGTERM"))  # perhaps while nobody listens
    assert desk.accept().hear() == Leaving(why="SIGTERM")
    control.close()


def test_whoever_listens_in_between_it_dials_on(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    call.hang_up()
    desk.slam()
    desk.babble()
    control.tell(Leaving(why="SIGTERM"))
    assert desk.accept().hear() == Leaving(why="SIGTERM")
    assert control.goodbye is None
    control.close()


def test_what_cannot_be_written_is_refused_where_it_is_said(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        control.tell(ready(settings={"policy": object()}))
    control.tell(ready())
    assert call.hear() == ready()  # and the line is still there
    control.close()


def test_with_a_coordinator_that_does_not_listen_nothing_waits(desk: Desk) -> None:
    """More than the line holds, and nobody reads: telling and closing return all the same."""
    control, call = Worker(desk).dial()
    long = Leaving(why="x" * 100_000)
    for _ in range(2 * WAITING_LINES):
        control.tell(long)
    call.hang_up()
    control.close()
