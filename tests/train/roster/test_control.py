"""A worker's connection to a coordinator that disappears and comes back."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from evenstep.coordinate import client
from evenstep.coordinate.client import StrangerError
from evenstep.coordinate.tls import make_certificate, pem_fingerprint, server_context
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
from evenstep.train.roster.generations import GenerationTracker, LeftError
from evenstep.train.step import Step
from tests.coordinate.fake import ready

WAIT_S = 600.0
WELCOME = Welcome(worker="w0", lease_s=600.0)
ELSEWHERE = Generation(number=9, roster=("w0", "x"), shares=(1, 1), planned=False, reason="come")


class FakeCoordinator:
    """A coordinator whose messages are scripted by the test."""

    def __init__(self, certificate: Path | None = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._tls = server_context(certificate) if certificate else None
        fingerprint = pem_fingerprint(certificate, certificate.read_bytes()) if certificate else ""
        self._listener.settimeout(WAIT_S)
        self._connections: list[Connection] = []
        self.where = CoordinatorAddress(
            host="127.0.0.1",
            port=self._listener.getsockname()[1],
            token="t",
            fingerprint=fingerprint,
            worker="w0",
        )

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def accept_and_close(self) -> None:
        """Close a connection without a word."""
        self._listener.accept()[0].close()

    def send_garbage(self) -> None:
        """Answer like another protocol's server."""
        with closing(self._listener.accept()[0]) as there:
            there.sendall(b"SSH-2.0\r\n")

    def impersonate(self, *messages: ToClient) -> None:
        """Send a greeting and, after the worker's hello, these messages."""
        connection = self.greet()
        connection.receive()
        connection.send(*messages)
        connection.close()

    def accept(self, answer: Welcome | Refused = WELCOME) -> Connection:
        """Complete the handshake: admit the worker, or refuse it."""
        connection = self.greet()
        self.answer(connection, answer)
        return connection

    def answer(self, connection: Connection, answer: Welcome | Refused = WELCOME) -> None:
        """Complete the handshake of a worker that was greeted."""
        hello = connection.receive()
        assert isinstance(hello, Hello)
        connection.send(replace(answer, proof=proof(self.where.token, hello.nonce, COORDINATOR)))

    def accept_silently(self) -> Connection:
        """Accept a connection and send nothing."""
        there, _ = self._listener.accept()
        there.settimeout(WAIT_S)
        if self._tls is not None:
            there = self._tls.wrap_socket(there, server_side=True)
        self._connections.append(Connection(there))
        return self._connections[-1]

    def greet(self) -> Connection:
        connection = self.accept_silently()
        connection.send(Greeting(nonce="00" * 16))
        return connection


class Connection:
    def __init__(self, there: socket.socket) -> None:
        self._there, self._lines = there, there.makefile("rb")

    def receive(self) -> FromClient:
        """The next message other than heartbeats."""
        while True:
            message = from_client.decode(self._lines.readline())
            if not isinstance(message, Alive):
                return message

    def send(self, *messages: ToClient) -> None:
        self.send_bytes(b"".join(map(to_client.encode, messages)))

    def send_bytes(self, data: bytes) -> None:
        self._there.sendall(data)

    def read_to_end(self) -> None:
        """Until the worker has closed the connection."""
        while self._lines.readline():
            pass

    def close(self) -> None:
        self._lines.close()
        self._there.close()


@pytest.fixture(params=["plain", "tls"])
def coordinator(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeCoordinator]:
    certificate = tmp_path / "tls.pem" if request.param == "tls" else None
    if certificate is not None:
        certificate.write_bytes(make_certificate())
    with closing(FakeCoordinator(certificate)) as coordinator:
        yield coordinator


class Worker:
    """Connects to a fake coordinator; has the progress that heartbeats report."""

    def __init__(self, coordinator: FakeCoordinator) -> None:
        self.generation, self.waiting = 0, False
        self._coordinator = coordinator

    def _progress(self) -> Alive:
        return Alive(generation=self.generation, step=0, waiting=self.waiting)

    def connect(self) -> tuple[Control, Connection]:
        """Both ends of a new connection."""
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(self._coordinator.accept)
            return self.control(), accepted.result()

    def control(self) -> Control:
        return Control(self._coordinator.where, self._progress)


@pytest.mark.parametrize("generation", [0, 3])
def test_after_a_reconnect_a_worker_without_a_generation_is_ready_again(
    coordinator: FakeCoordinator, generation: int
) -> None:
    worker = Worker(coordinator)
    control, connection = worker.connect()
    control.send(ready())
    assert connection.receive() == ready()
    worker.generation = generation
    connection.close()
    again = coordinator.accept()
    while not control.connected:  # until then, messages are dropped
        control.wait(0.01)
    control.send(Stuck(generation=0, step=1, waited_s=1.0))
    first = again.receive()
    assert first == ready() if generation == 0 else isinstance(first, Stuck)
    control.close()


def test_a_process_forked_from_a_worker_does_not_hold_its_connection(
    coordinator: FakeCoordinator,
) -> None:
    """Or the death of a worker with DataLoader processes would be noticed when these have ended."""
    control, connection = Worker(coordinator).connect()
    child = os.fork()
    if not child:
        held = control._socket is not None and control._socket.fileno() >= 0
        os._exit(1 if held else 0)
    assert os.waitpid(child, 0)[1] == 0
    control.send(ready())
    assert connection.receive() == ready()
    control.close()


def test_a_leave_request_survives_a_lost_coordinator(coordinator: FakeCoordinator) -> None:
    control, connection = Worker(coordinator).connect()
    connection.close()
    control.send(Leaving(why="SIGTERM"))  # possibly while disconnected
    assert coordinator.accept().receive() == Leaving(why="SIGTERM")
    control.close()


@pytest.mark.parametrize("waiting", [True, False])
def test_a_worker_that_is_still_stuck_says_so_to_the_next_coordinator(
    coordinator: FakeCoordinator, waiting: bool
) -> None:
    worker = Worker(coordinator)
    control, connection = worker.connect()
    worker.generation, worker.waiting = 3, waiting
    said: list[FromClient] = [Stuck(generation=3, step=1, waited_s=1.0), Leaving(why="SIGTERM")]
    for message in said:
        control.send(message)
        assert connection.receive() == message
    connection.close()
    again = coordinator.accept()
    for message in said if waiting else said[1:]:
        assert again.receive() == message
    control.close()


def test_a_new_worker_reconnects_if_the_coordinator_hangs_up_before_it_answers(
    coordinator: FakeCoordinator,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(Worker(coordinator).control)
        coordinator.accept_and_close()
        connection = coordinator.accept()
        control = made.result()
    control.send(ready())
    assert connection.receive() == ready()
    control.close()


def test_a_worker_waits_for_the_coordinator_and_follows_it_to_the_address_in_the_run_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(FakeCoordinator()) as gone:
        where = dataclasses.replace(gone.where, folder=tmp_path)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(Control, where, Worker(gone)._progress)
        while "Trying again" not in caplog.text:
            time.sleep(0.01)
        found_s = time.monotonic()
        for _ in range(2):  # its first connection, and the next one
            with closing(FakeCoordinator()) as coordinator:
                (tmp_path / "address").write_text(f"{coordinator.where}\n")
                coordinator.accept()
                control = made.result()
    assert control._leased_s >= found_s + WELCOME.lease_s  # the wait before is not counted
    control.close()


def test_a_worker_without_a_coordinator_ends_with_one_line_and_exit_code_75(
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(FakeCoordinator()) as gone:
        pass
    monkeypatch.setattr(client, "FIRST_DIAL_S", 0.0)
    with pytest.raises(LeftError) as left:
        GenerationTracker(gone.where, Step())
    assert left.value.code == 75
    assert f"no coordinator listens at {gone.where}" in caplog.messages[-1]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(coordinator.accept, Refused(why="the run is ending"))
        with pytest.raises(LeftError) as left:
            GenerationTracker(coordinator.where, Step())
        done.result()
    assert left.value.code == 75
    assert "refuses this worker: the run is ending" in caplog.messages[-1]


def test_a_worker_keeps_reconnecting_past_other_servers(coordinator: FakeCoordinator) -> None:
    control, connection = Worker(coordinator).connect()
    connection.close()
    coordinator.accept_and_close()
    coordinator.send_garbage()
    control.send(Leaving(why="SIGTERM"))
    assert coordinator.accept().receive() == Leaving(why="SIGTERM")
    assert control.goodbye is None
    control.close()


@pytest.mark.parametrize(
    "messages",
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
def test_an_impostor_can_neither_stop_nor_command_a_worker(
    coordinator: FakeCoordinator, messages: tuple[ToClient, ...], caplog: pytest.LogCaptureFixture
) -> None:
    control, connection = Worker(coordinator).connect()
    connection.close()
    coordinator.impersonate(*messages)
    coordinator.impersonate(*messages)
    control.send(Leaving(why="SIGTERM"))
    assert coordinator.accept().receive() == Leaving(why="SIGTERM")
    assert (control.goodbye, control.newest) == (None, 0)
    assert caplog.text.count(str(coordinator.where)) == 1  # logged once, not at every attempt
    control.close()


def test_messages_before_a_greeting_do_not_stop_a_worker(coordinator: FakeCoordinator) -> None:
    control, connection = Worker(coordinator).connect()
    connection.close()
    for message in (Goodbye(why="the run has ended"), Refused(why="go"), WELCOME):
        impostor = coordinator.accept_silently()
        impostor.send(message)
        impostor.close()
    control.send(Leaving(why="SIGTERM"))
    assert coordinator.accept().receive() == Leaving(why="SIGTERM")
    assert control.goodbye is None
    control.close()


def test_the_coordinator_may_refuse_a_reconnecting_worker(coordinator: FakeCoordinator) -> None:
    control, connection = Worker(coordinator).connect()
    connection.close()
    coordinator.accept(Refused(why="the run is ending"))
    until_s = time.monotonic() + WAIT_S
    while control.goodbye is None and time.monotonic() < until_s:
        control.wait(0.01)
    assert "the run is ending" in (control.goodbye or "")
    control.close()


def test_a_new_worker_raises_if_the_handshake_fails(coordinator: FakeCoordinator) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(coordinator.impersonate, WELCOME)
        with pytest.raises(StrangerError, match="no proof that it knows the run's token"):
            Worker(coordinator).control()
        done.result()
        done = pool.submit(
            coordinator.impersonate, Refused(why="the token is not that of this run")
        )
        with pytest.raises(StrangerError, match='said: "the token is not that of this run"'):
            Worker(coordinator).control()
        done.result()
        done_so = pool.submit(coordinator.accept, Refused(why="the run is ending"))
        with pytest.raises(NotWelcomeError, match="refuses this worker: the run is ending"):
            Worker(coordinator).control()
        done_so.result()


def test_a_message_over_the_size_limit_closes_the_connection(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 2**12)
    control, connection = Worker(coordinator).connect()
    connection.send_bytes(b"x" * 2**13)
    other = coordinator.accept_silently()  # it reconnects
    other.send_bytes(b"x" * GREETING_BYTES)
    control.send(Leaving(why="SIGTERM"))
    assert coordinator.accept().receive() == Leaving(why="SIGTERM")
    control.close()


def test_a_message_that_cannot_be_encoded_raises_in_send(coordinator: FakeCoordinator) -> None:
    control, connection = Worker(coordinator).connect()
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        control.send(ready(settings={"policy": object()}))
    control.send(ready())
    assert connection.receive() == ready()  # still connected
    control.close()


def test_a_connection_that_is_made_while_a_worker_disconnects_is_closed(
    coordinator: FakeCoordinator,
) -> None:
    control, connection = Worker(coordinator).connect()
    connection.close()
    again = coordinator.greet()
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(control.close)
        while not control._closed:
            control.wait(0.01)
        coordinator.answer(again)
        again.read_to_end()
        closed.result()


def test_send_and_close_do_not_block_if_the_coordinator_does_not_read(
    coordinator: FakeCoordinator,
) -> None:
    """The test sends more than the queue holds."""
    control, connection = Worker(coordinator).connect()
    long = Leaving(why="x" * 100_000)
    for _ in range(2 * MAX_QUEUED):
        control.send(long)
    connection.close()
    control.close()
