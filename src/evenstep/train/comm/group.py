"""The process group of one generation: made directly over a store prefix, never registered.

A prefix carries its generation and is never used twice. All waiting is done in slices, so that a
blocked sum can be given up when a peer has failed; closing the group then aborts the sum.

NCCL is for rosters that stay. Where workers come and go, what is on CUDA meets in host memory over
Gloo, unless EVENSTEP_NCCL=1 in the environment of all workers asks for NCCL there too.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from hashlib import blake2b
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

log = logging.getLogger("evenstep")

CPU = torch.device("cpu")
SLICE_S = 0.02  # of a wait, between two looks at whether there is any use in it
POLL_S = 0.0002  # between two looks at a sum of NCCL
FLUSH_S = 60.0  # for a card to get through the sums that the host has left it
LAST_WORDS_S = 2.0
REACH_S = 10.0  # for one attempt
REACH = timedelta(seconds=REACH_S)

ABORT_TAG = 2**31 - 1  # of a receive that no rank ever sends to
CLOSING, MEETING, MOVING = THREADS = ("evenstep-close", "evenstep-meet", "evenstep-transfer")

USE_NCCL = "EVENSTEP_NCCL"
ON_ERROR = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")

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
        threading.Thread(target=self._run, name=MOVING, daemon=True).start()

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
    which its own word is waited for `last_words_s`: `check` may know better, and is asked after
    every `slice_s` of a wait.
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
        slice_s: float = SLICE_S,
        last_words_s: float = LAST_WORDS_S,
    ) -> None:
        self.generation, self.rank, self.world = generation, rank, world
        self.device, self._check, self._last_words_s = device, check, last_words_s
        self._slice = timedelta(seconds=slice_s)
        self._backend: Any = None
        self._left: Callable[[], Any] = lambda: None  # of it, for whoever waits for its end
        self._newest: Work | None = None  # the sum that was started last
        self._is_broken = False  # a wait has failed or was given up: something may be blocked
        self.sees_through = False  # block the host until the NCCL op completes or `check` raises
        self.is_closed = self.is_gone = False  # let go; with nothing left of it that may write
        if world > 1:
            prefix = PrefixStore(f"evenstep/{generation}/{name}", store)
            self._backend = self._meet(
                lambda: _backend(prefix, rank, world, device, address, timedelta(seconds=meet_s))
            )
            self._backend._set_default_timeout(timedelta(seconds=timeout_s))
            self._left = weakref.ref(self._backend)

    def _meet(self, make: Callable[[], Any]) -> Any:
        try:
            return patiently(make, self._check)
        except EvenstepError:
            raise  # by the check, which knows the cause
        except RuntimeError as e:
            problem = str(e)
        self._mourn(problem)

    def sum_async(self, tensor: torch.Tensor) -> Work | None:
        """Start summing a tensor over the group, in place. All ranks start sums in one order."""
        self._check_open()
        if self._backend is None:
            return None
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        work: Work = self._backend.allreduce([tensor], options)
        self._newest = work
        return work

    def _check_open(self) -> None:
        """Refuse to take this rank's own value for the sum over a group that is closed."""
        if self.is_closed and self.world > 1:
            raise GroupGoneError(
                f"rank {self.rank} has closed its group of {self.world} workers: nothing is summed"
            )

    def wait(self, work: Work | Transfer | None) -> None:
        """Wait for a sum or a transfer, unless a newer generation makes it void."""
        if work is None:
            return
        try:
            if self.device.type == "cuda":
                self._wait_on_card(work)
            else:
                self._wait_on_host(work)
        except BaseException:
            self._is_broken = True
            raise

    def _wait_on_host(self, work: Work | Transfer) -> None:
        begun_s = time.monotonic()
        while True:
            try:
                work.wait(self._slice)
                return
            except RuntimeError as e:
                problem = str(e)
            # Outside of the handler, or a traceback would open with Gloo's error, not the cause.
            self._check(time.monotonic() - begun_s)
            if "Operation timed out" not in problem:
                self._mourn(problem)

    def _wait_on_card(self, work: Any) -> None:
        """Whatever the card does next comes after the sum; the host goes on, or sees it through.

        Never with a timeout of NCCL's, which would break off the sum.
        """
        try:
            if self.sees_through:
                self._poll(work)
                # NCCL counts a failed sum as completed, and `wait` does not raise its error.
                if (error := work.exception()) is not None:
                    self._mourn(str(error))
            work.wait()
            return
        except EvenstepError:
            raise
        except RuntimeError as e:
            problem = str(e)
        self._mourn(problem)

    def _poll(self, work: Any) -> None:
        begun_s = asked_s = time.monotonic()
        while not work.is_completed():
            now_s = time.monotonic()
            if now_s - asked_s >= self._slice.total_seconds():
                asked_s = now_s
                try:
                    self._check(now_s - begun_s)
                except GroupGoneError:
                    self.close()  # at once: what waits for this sum on the card would hang with it
                    raise
            time.sleep(POLL_S)

    def _mourn(self, problem: str) -> NoReturn:
        """A peer's connection broke: give its own word time to arrive, then say what is known.

        Call it outside of an exception handler, so that only what it raises is shown.
        """
        deadline = time.monotonic() + self._last_words_s
        while time.monotonic() < deadline:
            self._check(0.0)
            time.sleep(0.02)
        raise PeerLostError(
            f"rank {self.rank} lost a peer in generation {self.generation}: {problem}"
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the group, in place."""
        self.wait(self.sum_async(tensor))
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """One rank's tensor, the leader's unless told otherwise, on every rank, in place."""
        self._check_open()
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
            problem = str(e)
        self._mourn(problem)

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        """Start receiving what a rank sends under a tag: of exactly the tensor's size."""
        try:
            return Transfer(self._backend.recv([tensor], rank, tag))
        except RuntimeError as e:
            problem = str(e)
        self._mourn(problem)

    def close(self, wait_s: float = LAST_WORDS_S) -> None:
        """Destroy the group, aborting what is still blocked in it; wait up to `wait_s` for that."""
        # In a thread: the destructor joins the group's own threads, and training need not wait.
        box, self._backend, self.is_closed = [self._backend], None, True
        newest, self._newest = self._newest, None

        def end() -> None:
            nonlocal newest
            blocked = self._is_broken or (newest is not None and not newest.is_completed())
            if self.device.type == "cuda" and box[0] is not None:
                _end_nccl(box[0], None if self.sees_through else newest)
            elif box[0] is not None and blocked:
                _abort_gloo(box[0], self.rank, self.world)
            newest = None  # a work keeps its group alive
            box.clear()
            # Its destructor has waited for all sums, unless somebody holds on to it still.
            self.is_gone = self._left() is None

        thread = threading.Thread(target=end, name=CLOSING, daemon=True)
        thread.start()
        thread.join(wait_s)


def await_closed(wait_s: float) -> None:
    """Wait until groups that were closed are destroyed, for at most `wait_s`.

    The interpreter aborts if it shuts down while one of these threads is still inside Gloo.
    """
    until_s = time.monotonic() + wait_s
    for thread in threading.enumerate():
        if thread.name in THREADS and thread.ident is not None:  # it has begun
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
            found = made.get(timeout=SLICE_S)
        except Empty:
            pass
        else:
            if isinstance(found, Exception):
                raise found
            return found
        check(time.monotonic() - begun_s)  # outside of the handler: what it raises is the cause


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


def card_of(device: torch.device) -> int:
    """A number for a device's card, the same in all processes; 0: none that NCCL can use."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return 0
    name = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def on_cards(group: Group, card: int, *, elastic: bool) -> bool:
    """Whether gradients can meet on the cards that they are on. All ranks ask at once."""
    table = torch.zeros(group.world, 2, dtype=torch.int64)  # floats would not tell cards apart
    willing = not elastic or os.environ.get(USE_NCCL) == "1"
    table[group.rank, 0], table[group.rank, 1] = card, willing
    cards, wills = group.sum(table).T.tolist()
    why = why_on_host(cards, wills)
    if why and any(cards) and group.rank == 0:
        _tell(why)
    return not why


def ends_on_error() -> bool:
    """Whether NCCL's watchdog ends the process after a failed sum, as it does by default."""
    mode = next((os.environ[name] for name in ON_ERROR if name in os.environ), "")
    return mode not in ("0", "2")  # no handling, and clean-up only


@contextmanager
def surviving_errors(wanted: bool) -> Iterator[None]:
    """NCCL groups created in this context do not kill the process after a failed sum, if `wanted`.

    Each group reads the environment once, as it is made. The user's own setting stays.
    """
    if not wanted or any(name in os.environ for name in ON_ERROR):
        yield
        return
    os.environ[ON_ERROR[0]] = "0"
    try:
        yield
    finally:
        os.environ.pop(ON_ERROR[0], None)


def why_on_host(cards: Sequence[int], willing: Sequence[int]) -> str:
    """Why gradients go through host memory, by the card of each rank; empty: they need not."""
    if 0 in cards:
        return "not all workers have a card that NCCL can use"
    if shared := [rank for rank, card in enumerate(cards) if cards.count(card) > 1]:
        return f"ranks {', '.join(map(str, shared))} share cards, and NCCL needs one for each"
    if not all(willing):
        return (
            "where workers come and go, one that dies may leave NCCL hanging; "
            f"{USE_NCCL}=1 for all workers uses it all the same"
        )
    return ""


@cache  # once for each reason, not in every generation
def _tell(why: str) -> None:
    log.info("gradients on CUDA go through host memory, over Gloo: %s", why)


def _abort_gloo(backend: Any, rank: int, world: int) -> None:
    """Fail every operation that is blocked in a group of Gloo, on this rank.

    Gloo has no call for it. But a receive that times out closes all connections of its context,
    which is that of the collectives too; and with them closed, peers fail at once as well.
    """
    for peer in range(world):
        if peer == rank:
            continue
        try:
            nothing = backend.recv([torch.zeros(1)], peer, ABORT_TAG)
        except RuntimeError:
            continue  # the connection to this one is broken: nothing can time out on it
        with suppress(RuntimeError):
            nothing.wait(timedelta(milliseconds=1))
        return


def _end_nccl(backend: Any, newest: Any) -> None:
    """Let a group of NCCL go, after a sum that still counts: ending it breaks off all under way."""
    until_s = time.monotonic() + FLUSH_S
    while newest is not None and not newest.is_completed() and time.monotonic() < until_s:
        time.sleep(POLL_S)
    backend.abort()


def _backend(
    store: Store, rank: int, world: int, device: torch.device, address: str, timeout: timedelta
) -> Any:
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = ProcessGroupNCCL(store, rank, world, options)
        with torch.cuda.device(device):  # this thread's
            # Now, when waiting has bounds: by itself it would do so in the first backward pass.
            nccl.eager_connect_single_device(device)
        return nccl
    from torch.distributed import ProcessGroupGloo

    if not address or "GLOO_SOCKET_IFNAME" in os.environ:  # who names an interface, means it
        return ProcessGroupGloo(store, rank, world, timeout)
    gloo: Any = ProcessGroupGloo  # its options are not as the stubs have them
    chosen = gloo._Options()
    chosen._timeout = timeout
    chosen._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, world, chosen)
