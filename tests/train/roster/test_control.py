"""A worker's line to a coordinator that goes away and comes back."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from msgspec.structs import replace

from evenstep.coordinate.client import StrangerError
from evenstep.errors import InvalidInputError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import (
    COORDINATOR,
    GREETING_BYTES,
    Alive,
    FromClient,
    Generation,
    Goodbye,
    Greeting,
    Hello,
    Leaving,
    Refused,
    Stuck,
    ToClient,
    Welcome,
    from_client,
    proof,
    to_client,
)
from evenstep.train.roster import control as module
from evenstep.train.roster.control import MAX_QUEUED, Control, NotWelcomeError
from tests.coordinate.fake import ready

WAIT_S = 600.0
WELCOME = Welcome(worker="w0", lease_s=600.0)
ELSEWHERE = Generation(
    number=9, roster=("w0", "x"), shares=(1, 1), planned=False, address="192.0.2.1", reason="come"
)


class Desk:
    """A coordinator's end of the line, spoken by hand."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self._calls: list[Call] = []
        self.where = CoordinatorAddress(
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

    def pretend(self, *said: ToClient) -> None:
        """Somebody greets, and says this after the worker's first words."""
        call = self._greet()
        call.hear()
        call.say(*said)
        call.hang_up()

    def accept(self, answer: Welcome | Refused = WELCOME) -> Call:
        """Let the worker in, or refuse it, as its coordinator does."""
        call = self._greet()
        hello = call.hear()
        assert isinstance(hello, Hello)
        call.say(replace(answer, proof=proof(self.where.token, hello.nonce, COORDINATOR)))
        return call

    def pick_up(self) -> Call:
        """Take a call, and say nothing."""
        there, _ = self._listener.accept()
        there.settimeout(WAIT_S)
        self._calls.append(Call(there))
        return self._calls[-1]

    def _greet(self) -> Call:
        call = self.pick_up()
        call.say(Greeting(nonce="00" * 16))
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

    def say(self, *messages: ToClient) -> None:
        self.say_bytes(b"".join(map(to_client.encode, messages)))

    def say_bytes(self, data: bytes) -> None:
        self._there.sendall(data)

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

    def _progress(self) -> Alive:
        return Alive(generation=self.generation, step=0, waiting=False)

    def dial(self) -> tuple[Control, Call]:
        """A control, and the other end of its line."""
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(self._desk.accept)
            return self.control(), call.result()

    def control(self) -> Control:
        return Control(self._desk.where, self._progress)


@pytest.mark.parametrize("generation", [0, 3])
def test_who_has_no_place_yet_says_again_that_it_is_ready(desk: Desk, generation: int) -> None:
    worker = Worker(desk)
    control, call = worker.dial()
    control.send(ready())
    assert call.hear() == ready()
    worker.generation = generation
    call.hang_up()
    again = desk.accept()
    while not control.connected:  # until then, what it says is dropped
        control.wait(0.01)
    control.send(Stuck(generation=0, step=1, waited_s=1.0))
    first = again.hear()
    assert first == ready() if generation == 0 else isinstance(first, Stuck)
    control.close()


def test_the_wish_to_leave_outlives_a_coordinator(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    call.hang_up()
    control.send(Leaving(why="SIGTERM"))  # perhaps while nobody listens
    assert desk.accept().hear() == Leaving(why="SIGTERM")
    control.close()


def test_whoever_listens_in_between_it_dials_on(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    call.hang_up()
    desk.slam()
    desk.babble()
    control.send(Leaving(why="SIGTERM"))
    assert desk.accept().hear() == Leaving(why="SIGTERM")
    assert control.goodbye is None
    control.close()


@pytest.mark.parametrize(
    "said",
    [
        (WELCOME, ELSEWHERE),
        (replace(WELCOME, proof=proof("t", "00" * 16)), Goodbye(why="the run has ended")),
        (replace(WELCOME, proof=proof("another", "00" * 16, COORDINATOR)), Goodbye()),
        (Goodbye(why="the run has ended"),),
        (Refused(why="the token is not that of this run"),),
        (ELSEWHERE,),
    ],
    ids=["welcome", "echo", "another run's", "goodbye", "refused", "generation"],
)
def test_one_who_took_the_coordinators_place_cannot_end_nor_order_a_worker(
    desk: Desk, said: tuple[ToClient, ...], caplog: pytest.LogCaptureFixture
) -> None:
    control, call = Worker(desk).dial()
    call.hang_up()
    desk.pretend(*said)
    desk.pretend(*said)
    control.send(Leaving(why="SIGTERM"))
    assert desk.accept().hear() == Leaving(why="SIGTERM")
    assert (control.goodbye, control.newest) == (None, 0)
    assert caplog.text.count(str(desk.where)) == 1  # told, and not at every attempt
    control.close()


def test_the_first_words_of_a_stranger_end_nobody(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    call.hang_up()
    for said in (Goodbye(why="the run has ended"), Refused(why="go"), WELCOME):
        stranger = desk.pick_up()
        stranger.say(said)
        stranger.hang_up()
    control.send(Leaving(why="SIGTERM"))
    assert desk.accept().hear() == Leaving(why="SIGTERM")
    assert control.goodbye is None
    control.close()


def test_the_coordinator_itself_may_refuse_one_that_comes_back(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    call.hang_up()
    desk.accept(Refused(why="the run is ending"))
    until_s = time.monotonic() + WAIT_S
    while control.goodbye is None and time.monotonic() < until_s:
        control.wait(0.01)
    assert "the run is ending" in (control.goodbye or "")
    control.close()


def test_a_new_worker_is_told_who_is_there(desk: Desk) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(desk.pretend, WELCOME)
        with pytest.raises(StrangerError, match="no proof that it knows the run's token"):
            Worker(desk).control()
        done.result()
        done = pool.submit(desk.pretend, Refused(why="the token is not that of this run"))
        with pytest.raises(NotWelcomeError, match="the token is not that of this run"):
            Worker(desk).control()
        done.result()


def test_a_line_without_end_is_not_read_to_its_end(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 2**12)
    control, call = Worker(desk).dial()
    call.say_bytes(b"x" * 2**13)
    babbler = desk.pick_up()  # it has hung up and dials again
    babbler.say_bytes(b"x" * GREETING_BYTES)
    control.send(Leaving(why="SIGTERM"))
    assert desk.accept().hear() == Leaving(why="SIGTERM")
    control.close()


def test_what_cannot_be_written_is_refused_where_it_is_said(desk: Desk) -> None:
    control, call = Worker(desk).dial()
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        control.send(ready(settings={"policy": object()}))
    control.send(ready())
    assert call.hear() == ready()  # and the line is still there
    control.close()


def test_with_a_coordinator_that_does_not_listen_nothing_waits(desk: Desk) -> None:
    """More than the line holds, and nobody reads: telling and closing return all the same."""
    control, call = Worker(desk).dial()
    long = Leaving(why="x" * 100_000)
    for _ in range(2 * MAX_QUEUED):
        control.send(long)
    call.hang_up()
    control.close()
