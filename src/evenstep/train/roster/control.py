"""A worker's line to the coordinator: two threads beside training, which never waits for them.

What comes in is kept until the training thread looks; what goes out is dropped while there is no
connection. A lost coordinator is dialled again until the lease is over, and is then told again what
it has to know: that this worker is ready, if it has no place yet, and that it wants to leave.

Whoever listens where the coordinator was is nobody until it has proved that it knows the run's
token: it cannot order a worker about, nor end one that is in the run.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from evenstep.coordinate.handshake import StrangerError, connect, handshake
from evenstep.errors import EvenstepError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.messages import (
    Alive,
    FromClient,
    Generation,
    Goodbye,
    Hello,
    Lease,
    Leaving,
    NewPlan,
    Paused,
    Ready,
    Refused,
    ToClient,
    Welcome,
    from_client,
    to_client,
)
from evenstep.wire import MAX_BYTES

log = logging.getLogger("evenstep")

DIAL_S = 5.0  # for one attempt
AGAIN_S = 0.2  # between attempts
WAITING_LINES = 1000
MOST_QUOTED = 200  # letters of what a stranger says


class NotWelcomeError(EvenstepError, ConnectionError):
    """The coordinator refuses this worker."""


class Control:
    """The connection, and all that the coordinator has said.

    `progress` is what the heartbeat says: where training stands.
    """

    def __init__(self, where: CoordinatorAddress, progress: Callable[[], Alive]) -> None:
        self._where, self._progress = where, progress
        self._lock = threading.Condition()
        self._socket: socket.socket | None = None
        # Of this kind, since a signal's handler may put something in while we do so, too.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lasting: dict[type, bytes] = {}  # what a coordinator that comes back has to know
        self.generations: dict[int, Generation] = {}
        self.newest = 0  # of all generations announced
        self.newest_at_once = 0  # of those that make the step at hand void
        self._plan: NewPlan | None = None
        self.paused = ""
        self.goodbye: str | None = None
        self._closed = False
        # When each heartbeat was sent that has no answer yet. The lease runs from there, not from
        # the answer, which may have been long on its way: so it never ends after the coordinator's.
        self._asked_s: deque[float] = deque()
        self._leased_s = time.monotonic()
        self.welcome = self._dial()
        self._leased_s += self.welcome.lease_s
        self._every_s = min(1.0, self.welcome.lease_s / 10)
        self._threads = [
            threading.Thread(target=run, name=f"evenstep-control-{name}", daemon=True)
            for name, run in (("in", self._read), ("out", self._write))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._socket is not None

    @property
    def lease_over(self) -> bool:
        """Whether the coordinator may by now have given this worker's place to others."""
        return time.monotonic() > self._leased_s

    def tell(self, message: FromClient) -> None:
        """Say something soon. Never waits; if the coordinator does not listen, it is dropped."""
        line = from_client.encode(message)
        if isinstance(message, Ready | Leaving):
            self._lasting[type(message)] = line
        if self._outbox.qsize() < WAITING_LINES:
            self._outbox.put(line)
        else:
            log.debug("the coordinator does not listen: dropped %s", type(message).__name__)

    def take_plan(self, generation: int) -> NewPlan | None:
        """The newest plan of a generation, once."""
        with self._lock:
            plan, self._plan = self._plan, None
        return plan if plan is not None and plan.generation == generation else None

    def forget_before(self, generation: int) -> None:
        """Generations older than this one are of no use any more."""
        with self._lock:
            for number in [n for n in self.generations if n < generation]:
                del self.generations[number]

    def wait(self, seconds: float) -> None:
        """Until something comes in, or a while has passed."""
        with self._lock:
            self._lock.wait(seconds)

    def close(self) -> None:
        """Say what is left to be said, and hang up."""
        self._outbox.put(None)
        self._threads[1].join(DIAL_S)
        with self._lock:
            self._closed = True
            if self._socket is not None:
                _hang_up(self._socket)
        self._threads[0].join(DIAL_S)

    # The threads.

    def _read(self) -> None:
        while not self._closed:
            try:
                while line := self._lines.readline(MAX_BYTES):
                    self._hear(to_client.decode(line))
            except (OSError, ValueError) as e:
                log.debug("the line to the coordinator broke: %s", e)
            with self._lock:
                there, self._socket = self._socket, None
            if there is not None:
                self._lines.close()
                _hang_up(there)
            stranger = ""
            while not self._closed and self.goodbye is None and not self.lease_over:
                try:
                    self._dial()
                    log.info("the coordinator is back")
                    self._tell_again()
                    break
                except NotWelcomeError as e:
                    with self._lock:
                        self.goodbye = str(e)
                        self._lock.notify_all()
                except StrangerError as e:
                    if str(e) != stranger:
                        log.warning("%s This worker goes on, and looks again", e)
                    stranger = str(e)
                    self.wait(AGAIN_S)
                except (OSError, ValueError) as e:  # nobody, or something else, listens there
                    log.debug("the coordinator is not there: %s", e)
                    self.wait(AGAIN_S)
            else:
                return

    def _tell_again(self) -> None:
        generation = self._progress().generation
        for kind, line in list(self._lasting.items()):
            if kind is not Ready or generation == 0:
                self._outbox.put(line)

    def _hear(self, message: ToClient) -> None:
        with self._lock:
            match message:
                case Generation(number=number, planned=planned):
                    self.generations[number] = message
                    self.newest = max(self.newest, number)
                    if not planned:
                        self.newest_at_once = max(self.newest_at_once, number)
                    self.paused = ""
                case NewPlan():
                    self._plan = message
                case Paused(reason=reason):
                    self.paused = reason
                case Lease():
                    if self._asked_s:
                        self._leased_s = self._asked_s.popleft() + self.welcome.lease_s
                case Goodbye(why=why) | Refused(why=why):
                    self.goodbye = why
                case _:
                    pass
            self._lock.notify_all()

    def _write(self) -> None:
        beat_s = time.monotonic() + self._every_s
        while True:
            line: bytes | None
            left_s = beat_s - time.monotonic()
            beats = left_s <= 0  # also while there is a lot to say, as a leader has
            if beats:
                line = from_client.encode(self._progress())
                beat_s = time.monotonic() + self._every_s
            else:
                try:
                    line = self._outbox.get(timeout=left_s)
                except queue.Empty:
                    continue
            if line is None:
                return
            with self._lock:
                there = self._socket
                if there is not None and beats:
                    self._asked_s.append(time.monotonic())
            try:
                if there is not None:
                    there.sendall(line)
            except OSError as e:
                log.debug("not told: %s", e)

    # The connection.

    def _dial(self) -> Welcome:
        where, known = self._where, getattr(self, "welcome", None)
        there = connect(where.host, where.port, DIAL_S, where.tls_ca)
        try:
            lines = there.makefile("rb")
            hello = Hello(
                proof="",
                worker=known.worker if known else where.worker,
                generation=self._progress().generation,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            answer, proved = handshake(
                there, lines, hello, Welcome, token=where.token, address=str(where)
            )
            if isinstance(answer, Refused) and (proved or known is None):
                raise NotWelcomeError(
                    f"the coordinator at {where} refuses this worker: {answer.why}"
                )
            if isinstance(answer, Refused) or not proved:
                raise StrangerError(_unproved(where, answer))
            there.settimeout(None)
        except BaseException:
            there.close()
            raise
        with self._lock:
            self._lines, self._socket = lines, there
            self._asked_s.clear()
        return answer


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
