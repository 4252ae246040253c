"""The process group of one generation: made directly over a store prefix, never registered.

A prefix carries its generation and is never used twice. All waiting is done in slices, so that a
blocked sum can be given up when a peer has failed: Gloo itself cannot be interrupted.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOp,
    Store,
    Work,
)

from evenstep.errors import EvenstepError

CPU = torch.device("cpu")
SLICE = timedelta(milliseconds=20)
LAST_WORDS_S = 2.0
REACH_S = 10.0  # for one attempt
REACH = timedelta(seconds=REACH_S)

CLOSING, MEETING = "evenstep-close", "evenstep-meet"  # threads

T = TypeVar("T")

Check = Callable[[float], None]
"""Called while waiting, with the seconds waited so far. Raises if there is no use in waiting on."""


class GroupGoneError(EvenstepError):
    """The group can reduce nothing any more."""


class PeerLostError(GroupGoneError, ConnectionError):
    """A peer is gone without a word: killed, or cut off."""


class SupersededError(GroupGoneError):
    """There is a newer generation: what was begun in this one is void."""


class Transfer:
    """A send or recv under way, which can be waited for in slices.

    Gloo itself cannot: a wait of its own that times out closes all links of the group.
    """

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name="evenstep-transfer", daemon=True).start()

    def _run(self) -> None:
        try:
            assert self._work is not None
            self._work.wait()
        except RuntimeError as e:
            self._error = e
        self._work = None  # it would keep the group's links open
        self._ended.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end, raising what Gloo would for a sum."""
        if not self._ended.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """End it unfinished, and with it all others of its group: nothing is written after this."""
        work = self._work
        if work is not None:
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))  # closes the links
        self._ended.wait(LAST_WORDS_S)


class Group:
    """A roster that can reduce tensors together.

    Sums of one group are matched by the order in which ranks start them; what may start in another
    order gets a group of its own, under another name. A peer that is gone raises PeerLostError, for
    which its own word is waited for `last_words_s`: `check` may know better.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        rank: int,
        world: int,
        *,
        timeout_s: float,
        meet_s: float = 600.0,
        name: str = "control",
        device: torch.device = CPU,
        address: str = "",
        check: Check = lambda _: None,
        last_words_s: float = LAST_WORDS_S,
    ) -> None:
        self.generation, self.rank, self.world = generation, rank, world
        self.device, self._check, self._last_words_s = device, check, last_words_s
        self._backend: Any = None
        self.is_closed = False
        if world > 1:
            prefix = PrefixStore(f"evenstep/{generation}/{name}", store)
            self._backend = self._meet(
                lambda: _backend(prefix, rank, world, device, address, timedelta(seconds=meet_s))
            )
            self._backend._set_default_timeout(timedelta(seconds=timeout_s))

    def _meet(self, make: Callable[[], Any]) -> Any:
        try:
            return patiently(make, self._check)
        except RuntimeError as e:
            self._mourn(e)

    def sum_async(self, tensor: torch.Tensor) -> Work | None:
        """Start summing a tensor over the group, in place. All ranks start sums in one order."""
        if self._backend is None:
            return None
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        work: Work = self._backend.allreduce([tensor], options)
        return work

    def wait(self, work: Work | Transfer | None) -> None:
        """Wait for a sum or a transfer, unless a newer generation makes it void."""
        if work is None:
            return
        if self.device.type == "cuda":
            work.wait()  # orders the streams; the host goes on
            return
        begun_s = time.monotonic()
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as e:
                self._check(time.monotonic() - begun_s)
                if "Operation timed out" not in str(e):
                    self._mourn(e)

    def _mourn(self, error: Exception) -> NoReturn:
        """A peer's connection broke: give its own word time to arrive, then say what is known."""
        deadline = time.monotonic() + self._last_words_s
        while time.monotonic() < deadline:
            self._check(0.0)
            time.sleep(0.02)
        raise PeerLostError(
            f"rank {self.rank} lost a peer in generation {self.generation}: {error}"
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the group, in place."""
        self.wait(self.sum_async(tensor))
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """One rank's tensor, the leader's unless told otherwise, on every rank, in place."""
        if self._backend is None:
            return
        options = BroadcastOptions()
        options.rootRank = root
        here = tensor.to(self.device)
        self.wait(self._backend.broadcast([here], options))
        if here is not tensor:
            tensor.copy_(here)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        """Start sending a dense tensor on the host to a rank, which receives it by its tag."""
        try:
            return Transfer(self._backend.send([tensor], rank, tag))
        except RuntimeError as e:  # the link is broken already
            self._mourn(e)

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        """Start receiving what a rank sends under a tag: of exactly the tensor's size."""
        try:
            return Transfer(self._backend.recv([tensor], rank, tag))
        except RuntimeError as e:
            self._mourn(e)

    def close(self, wait_s: float = LAST_WORDS_S) -> None:
        """Let the group go. Waits a little for what is still blocked in it, and no longer."""
        # The destructor joins a blocked sum, until its peers have closed their ends too: never in
        # the training thread. A process that ends in the midst of it would be aborted.
        box, self._backend, self.is_closed = [self._backend], None, True
        thread = threading.Thread(target=box.clear, name=CLOSING, daemon=True)
        thread.start()
        thread.join(wait_s)


def await_closed(wait_s: float = LAST_WORDS_S) -> None:
    """Give groups that were let go the time to be gone, before the process ends."""
    until_s = time.monotonic() + wait_s
    for thread in threading.enumerate():
        if thread.name in (CLOSING, MEETING):
            thread.join(max(0.0, until_s - time.monotonic()))


def patiently(make: Callable[[], T], check: Check) -> T:
    """What `make` makes, in a thread: it blocks until peers are there, and some may never come."""
    made: SimpleQueue[T | Exception] = SimpleQueue()

    def run() -> None:
        try:
            made.put(make())
        except Exception as e:
            made.put(e)

    threading.Thread(target=run, name=MEETING, daemon=True).start()
    begun_s = time.monotonic()
    while True:
        try:
            found = made.get(timeout=SLICE.total_seconds())
        except Empty:
            check(time.monotonic() - begun_s)
            continue
        if isinstance(found, Exception):
            raise found
        return found


def reach(address: str, port: int, check: Check) -> Store:
    """The store that a leader hosts; PeerLostError if nobody listens there any more."""
    try:
        socket.create_connection((address, port), timeout=REACH_S).close()
        # Only now: by itself a store's client goes on dialling for minutes.
        return patiently(
            lambda: TCPStore(address, port, None, False, REACH, wait_for_workers=False), check
        )
    except (OSError, RuntimeError) as e:
        raise PeerLostError(f"the leader's store at {address}:{port} is gone: {e}") from e


def gather(store: Store, generation: int, rank: int, world: int, check: Check) -> None:
    """Wait until all ranks of a generation are at its store.

    Making a group blocks, and nothing can interrupt it: it is begun when nobody is missing.
    """
    keys = [f"evenstep/{generation}/here/{other}" for other in range(world)]
    begun_s = time.monotonic()
    try:
        store.set(keys[rank], "")
        while not store.check(keys):
            check(time.monotonic() - begun_s)
            time.sleep(0.002)
    except DistError as e:
        raise PeerLostError(f"the leader's store is gone: {e}") from e


def _backend(
    store: Store, rank: int, world: int, device: torch.device, address: str, timeout: timedelta
) -> Any:
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, world, options)
    from torch.distributed import ProcessGroupGloo

    if not address or "GLOO_SOCKET_IFNAME" in os.environ:  # who names an interface, means it
        return ProcessGroupGloo(store, rank, world, timeout)
    gloo: Any = ProcessGroupGloo  # its options are not as the stubs have them
    chosen = gloo._Options()
    chosen._timeout = timeout
    chosen._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, world, chosen)
