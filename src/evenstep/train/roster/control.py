"""A worker's connection to the coordinator: two threads that training never waits for.

Incoming messages are stored until the training thread reads them; outgoing ones are dropped while
there is no connection. After a lost connection the worker reconnects until its lease is over, and
sends again what a restarted coordinator must know: that this worker is ready, if it is in no
generation yet, that it is stuck, if it still waits, and that it wants to leave.

A process that listens at the coordinator's address must prove that it knows the run's token before
any of its messages counts.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from evenstep.coordinate.client import (
    StrangerError,
    await_coordinator,
    connect,
    handshake,
    reaching,
    retry_pauses,
)
from evenstep.coordinate.run_folder import address_from_here
from evenstep.errors import EvenstepError
from evenstep.launch.environment import CoordinatorAddress, host_and_port
from evenstep.messages import (
    Alive,
    FromClient,
    Generation,
    Goodbye,
    Hello,
    Lease,
    Leaving,
    Listen,
    NewPlan,
    Paused,
    Publish,
    Published,
    Reach,
    Ready,
    Refused,
    Stuck,
    ToClient,
    Welcome,
    from_client,
    to_client,
)
from evenstep.train.comm.host import ALONE, Host
from evenstep.train.roster.links import Links
from evenstep.train.roster.relay import HostRelay, follow
from evenstep.wire import MAX_BYTES

log = logging.getLogger("evenstep")

DIAL_S = 5.0  # for one attempt
MAX_QUEUED = 1000  # outgoing messages
MOST_QUOTED = 200  # characters of a stranger's message


class NotWelcomeError(EvenstepError, ConnectionError):
    """The coordinator refuses this worker. `trained`: as the run has been trained to the end."""

    def __init__(self, why: str, *, trained: bool = False) -> None:
        super().__init__(why)
        self.trained = trained


class Control:
    """The connection, and everything that the coordinator has sent.

    `progress` returns the content of a heartbeat. If a host's processes are one worker, the first
    one is connected to the coordinator, and the others to it.
    """

    def __init__(
        self, where: CoordinatorAddress, progress: Callable[[], Alive], host: Host = ALONE
    ) -> None:
        self._where, self._progress, self._host = where, progress, host
        self._relay: HostRelay | None = None
        self._links = Links(where.address, where.token, self.send)
        self._lock = threading.Condition()
        self._socket: socket.socket | None = None
        # A SimpleQueue is reentrant: a signal handler may interrupt a `put` with one of its own.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Sent again to a restarted coordinator, by message type or by published key.
        self._to_resend: dict[type | tuple[int, str], bytes] = {}
        self._published: dict[tuple[int, str], bytes] = {}  # by generation and key
        self.generations: dict[int, Generation] = {}
        self.newest = 0  # of all generations announced
        self.newest_unplanned = 0  # of those that make the step at hand void
        self.term = 0  # of the coordinator that last answered
        self._plan: NewPlan | None = None
        self.sees_folder = False  # this worker can write checkpoints to the run folder
        self.paused = ""
        self.goodbye: str | None = None
        self.trained = False  # the coordinator says that the run was trained to the end
        self._closed = False
        # When each unanswered heartbeat was sent. The lease counts from then, not from the answer,
        # which may have been delayed: so it never ends later than the coordinator thinks.
        self._asked_s: deque[float] = deque()
        self._leased_s = time.monotonic()
        self.welcome = await_coordinator(self._dial, where.wait_s)
        self._leased_s += self.welcome.lease_s
        self._every_s = min(1.0, self.welcome.lease_s / 10)
        if host.is_first and host.links:
            self._relay = HostRelay(host.links, self.welcome, self.publish, self.send)
        self._threads = [
            threading.Thread(target=run, name=f"evenstep-control-{name}", daemon=True)
            for name, run in (("in", self._read), ("out", self._write))
        ]
        for thread in self._threads:
            thread.start()
        # Processes of a DataLoader would keep the connection of a worker that was killed open.
        close = weakref.WeakMethod(self._close_in_child)
        os.register_at_fork(after_in_child=lambda: (method := close()) and method())

    def _close_in_child(self) -> None:
        """In a forked process. No lock is taken: a thread that is not there may hold it."""
        self._links.close_in_child()
        if self._socket is not None:
            os.close(self._socket.detach())

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""
        return self._socket is not None

    @property
    def lease_over(self) -> bool:
        """Whether the coordinator may have replaced this worker."""
        return time.monotonic() > self._leased_s

    def send(self, message: FromClient) -> None:
        """Queue a message. Never blocks: if the queue is full, the message is dropped."""
        line = from_client.encode(message)
        if isinstance(message, Ready | Leaving | Stuck):
            self._to_resend[type(message)] = line
        self._enqueue(line)

    def _enqueue(self, line: bytes) -> None:
        if self._outbox.qsize() < MAX_QUEUED:
            self._outbox.put(line)
        else:
            log.debug("the coordinator does not read: dropped %r", line[:MOST_QUOTED])

    def publish(self, generation: int, key: str, value: bytes) -> None:
        """Pass a value on to the other workers of a generation."""
        line = from_client.encode(Publish(generation=generation, key=key, value=value))
        with self._lock:
            self._published[generation, key] = value
            self._to_resend[generation, key] = line
        self._enqueue(line)

    def published(self, generation: int, key: str) -> bytes | None:
        """What a worker of a generation has published under a key; None if nothing yet."""
        return self._published.get((generation, key))

    def take_plan(self, generation: int) -> NewPlan | None:
        """The newest plan of a generation, once."""
        with self._lock:
            plan, self._plan = self._plan, None
        return plan if plan is not None and plan.generation == generation else None

    def forget_before(self, generation: int) -> None:
        """Forget generations older than this one."""
        with self._lock:
            for number in [n for n in self.generations if n < generation]:
                del self.generations[number]
            for about in [about for about in self._published if about[0] < generation]:
                del self._published[about]
                self._to_resend.pop(about, None)

    def wait(self, seconds: float) -> None:
        """Wait for a message, at most so many seconds."""
        with self._lock:
            self._lock.wait(seconds)

    def expel(self, why: str) -> None:
        """The run goes on without this worker, though no coordinator was there to say so."""
        with self._lock:
            self.goodbye = self.goodbye or why
            self._lock.notify_all()

    def close(self) -> None:
        """Send what is queued, and disconnect."""
        self._outbox.put(None)
        self._threads[1].join(DIAL_S)
        with self._lock:
            self._closed = True
            if self._socket is not None:
                _hang_up(self._socket)
        self._threads[0].join(DIAL_S)
        if self._relay is not None:
            self._relay.close()

    # The two threads.

    def _read(self) -> None:
        while not self._closed:
            try:
                while line := self._lines.readline(MAX_BYTES):
                    self._receive(to_client.decode(line))
            except (OSError, ValueError) as e:
                log.debug("the connection to the coordinator broke: %s", e)
            self._drop()
            warned, pauses = "", retry_pauses()
            while not self._closed and self.goodbye is None and not self.lease_over:
                try:
                    self._dial()
                    log.info("reconnected to the coordinator")
                    self._send_again()
                    break
                except NotWelcomeError as e:
                    with self._lock:
                        self.goodbye, self.trained = str(e), e.trained
                        self._lock.notify_all()
                except StrangerError as e:
                    if str(e) != warned:
                        log.warning("%s This worker goes on training and keeps trying", e)
                    warned = str(e)
                    self.wait(next(pauses))
                except (OSError, ValueError) as e:
                    log.debug("the coordinator does not answer: %s", e)
                    self.wait(next(pauses))
            else:
                return
        self._drop()  # if it was made after `close`

    def _drop(self) -> None:
        """Close the connection on this side."""
        with self._lock:
            broken, self._socket = self._socket, None
        if broken is not None:
            self._lines.close()
            _hang_up(broken)

    def _send_again(self) -> None:
        progress = self._progress()
        if progress.generation > 0:
            self._to_resend.pop(Ready, None)
        if not progress.waiting:
            self._to_resend.pop(Stuck, None)
        for line in list(self._to_resend.values()):
            self._outbox.put(line)

    def _receive(self, message: ToClient) -> None:
        if self._relay is not None:
            self._relay.pass_on(message)
        with self._lock:
            match message:
                case Generation(number=number, planned=planned):
                    self.generations[number] = message
                    self.newest = max(self.newest, number)
                    if not planned:
                        self.newest_unplanned = max(self.newest_unplanned, number)
                    self.paused = ""
                case Published(generation=number, key=key, value=value):
                    self._published[number, key] = value
                case Listen():
                    self._links.listen(message, self.welcome.worker)
                case Reach():
                    self._links.reach(message)
                case NewPlan():
                    self._plan = message
                case Paused(reason=reason):
                    self.paused = reason
                case Lease():
                    if self._asked_s:
                        self._leased_s = self._asked_s.popleft() + self.welcome.lease_s
                case Goodbye(why=why, trained=trained) | Refused(why=why, trained=trained):
                    self.goodbye, self.trained = why, trained
                case _:
                    pass
            self._lock.notify_all()

    def _write(self) -> None:
        heartbeat_s = time.monotonic() + self._every_s
        while True:
            line: bytes | None
            left_s = heartbeat_s - time.monotonic()
            is_heartbeat = left_s <= 0  # even if messages are queued, as on a busy leader
            if is_heartbeat:
                line = from_client.encode(self._progress())
                heartbeat_s = time.monotonic() + self._every_s
            else:
                try:
                    line = self._outbox.get(timeout=left_s)
                except queue.Empty:
                    continue
            if line is None:
                return
            with self._lock:
                connection = self._socket
                if connection is not None and is_heartbeat:
                    self._asked_s.append(time.monotonic())
            try:
                if connection is not None:
                    connection.sendall(line)
            except OSError as e:
                log.debug("message not sent: %s", e)

    # The connection.

    def _dial(self) -> Welcome:
        """Connect where the coordinator was, or where the run folder says that it is now."""
        if not self._host.is_first:
            self._lines, self._socket, welcome = follow(self._host.links[0])
            return welcome
        try:
            return self._dial_at(self._where)
        except (OSError, ValueError):
            if (moved := _moved(self._where)) is None:
                raise
        welcome = self._dial_at(moved)
        self._where = moved
        return welcome

    def _dial_at(self, where: CoordinatorAddress) -> Welcome:
        with reaching(str(where)):
            there = connect(where.host, where.port, DIAL_S, where.fingerprint)
            return self._meet(where, there)

    def _meet(self, where: CoordinatorAddress, there: socket.socket) -> Welcome:
        known, progress = getattr(self, "welcome", None), self._progress()
        if known is None:
            self._leased_s = time.monotonic()
        lines = there.makefile("rb")
        try:
            hello = Hello(
                proof="",
                worker=known.worker if known else where.worker,
                generation=progress.generation,
                forming=progress.forming,
                host=socket.gethostname(),
                pid=os.getpid(),
                sees_folder=self.sees_folder,
            )
            answer, proved = handshake(
                there, lines, hello, Welcome, token=where.token, address=str(where)
            )
            if not proved:
                raise StrangerError(_unproved(where, answer))
            if isinstance(answer, Refused):
                raise NotWelcomeError(
                    f"the coordinator at {where} refuses this worker: {answer.why}",
                    trained=answer.trained,
                )
            there.settimeout(None)
        except BaseException:
            lines.close()
            there.close()
            raise
        with self._lock:
            self._lines, self._socket, self.term = lines, there, answer.term
            self._asked_s.clear()
        return answer


def _moved(where: CoordinatorAddress) -> CoordinatorAddress | None:
    """Another address that the run folder names; None if there is none."""
    try:
        parts = host_and_port(address_from_here(where.folder)) if where.folder else None
    except OSError:  # a host name that is not known here
        return None
    if parts is None or parts == (where.host, where.port):
        return None
    return replace(where, host=parts[0], port=parts[1])


def _unproved(where: CoordinatorAddress, answer: Welcome | Refused) -> str:
    said = f' It said: "{answer.why[:MOST_QUOTED]}"' if isinstance(answer, Refused) else ""
    return (
        f"the process at {where} is not the run's coordinator: it gives no proof that it knows "
        f"the run's token.{said}"
    )


def _hang_up(there: socket.socket) -> None:
    with suppress(OSError):
        there.shutdown(socket.SHUT_RDWR)
    there.close()
