"""The process group of one generation.

Its store prefix carries the generation's number and is never used twice. Waits are sliced, so that
a blocked all-reduce can be given up when another worker has failed; closing the group aborts it.
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ReduceOp,
    Store,
    Work,
)

from evenstep.errors import EvenstepError
from evenstep.train.comm.backend import POLL_S, abort_gloo, end_nccl, make_backend
from evenstep.train.comm.forks import never_freed_in_forks
from evenstep.train.comm.transfer import (
    CLOSING,
    SLICE_S,
    TIMED_OUT,
    Check,
    Transfer,
    interruptible,
)

CPU = torch.device("cpu")
LAST_WORDS_S = 2.0

GLOO_NOISE = re.compile(r"^\[\S+:\d+\] | This is typically caused by .*", re.DOTALL)
"""Around what Gloo says of a broken connection: its source file, and advice for its own users."""


WRONG_CALL = re.compile(r"Invalid scalar type|[Uu]nsupported|^ProcessGroupGloo::")
"""In errors of an operation that could not even be tried, such as that of a wrong dtype."""


class GroupGoneError(EvenstepError):
    """The process group is no longer usable."""


class WorkerLostError(GroupGoneError, ConnectionError):
    """Another worker's connection broke: it was killed, or cut off."""


class SupersededError(GroupGoneError):
    """A newer generation exists; whatever was started in this one is void."""


class Group:
    """The ranks of a generation, reducing tensors together.

    All-reduces of one group are matched by the order in which ranks start them; those that may
    start in different orders need a group of their own, under another name. When a connection
    breaks, `check` is given `last_words_s` to raise the cause before WorkerLostError is raised. It
    is called after every `slice_s` of a wait.
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
        self._alive: Callable[[], Any] = lambda: None  # the backend, while anyone holds it
        self._newest: Work | None = None  # the all-reduce that was started last
        self._is_broken = False  # a wait failed or was given up: operations may be blocked
        self.sees_through = False  # block the host until an NCCL op completes or `check` raises
        self.is_closed = False
        self.is_gone = False  # closed and destroyed: no operation can write to a tensor any more
        if world > 1:
            prefix = PrefixStore(f"evenstep/{generation}/{name}", store)
            timeout = timedelta(seconds=meet_s)
            self._backend = self._meet(
                lambda: make_backend(prefix, rank, world, device, address, timeout)
            )
            self._backend._set_default_timeout(timedelta(seconds=timeout_s))
            self._alive = weakref.ref(self._backend)

    def _meet(self, make: Callable[[], Any]) -> Any:
        try:
            return interruptible(make, self._check)
        except EvenstepError:
            raise  # from the check, which knows the cause
        except RuntimeError as e:
            problem = str(e)
        self._raise_lost(problem)

    def sum_async(self, tensor: torch.Tensor) -> Work | None:
        """Start an in-place all-reduce (sum). All ranks start them in the same order."""
        self._check_open()
        if self._backend is None:
            return None
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        work: Work = never_freed_in_forks(self._backend.allreduce([tensor], options))
        self._newest = work
        return work

    def _check_open(self) -> None:
        """Refuse to return this rank's own value as the sum over a closed group."""
        if self.is_closed and self.world > 1:
            raise GroupGoneError(
                f"rank {self.rank} has closed its group of {self.world} workers: nothing is summed"
            )

    def wait(self, work: Work | Transfer | None) -> None:
        """Wait for an operation, unless `check` raises first."""
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
        began_s = time.monotonic()
        while True:
            try:
                work.wait(self._slice)
                return
            except RuntimeError as e:
                problem = str(e)
            # Outside of the handler, or a traceback would open with Gloo's error, not the cause.
            self._check(time.monotonic() - began_s)
            if TIMED_OUT not in problem:
                self._raise_failed(problem)

    def _wait_on_card(self, work: Any) -> None:
        """Order the GPU's next work after the operation; with `sees_through`, block the host too.

        Never use NCCL's own timeout, which would abort the operation.
        """
        try:
            if self.sees_through:
                self._poll(work)
                # NCCL counts a failed operation as completed, and `wait` does not raise its error.
                if (error := work.exception()) is not None:
                    self._raise_lost(str(error))
            work.wait()
            return
        except EvenstepError:
            raise
        except RuntimeError as e:
            problem = str(e)
        self._raise_lost(problem)

    def _poll(self, work: Any) -> None:
        began_s = checked_s = time.monotonic()
        while not work.is_completed():
            now_s = time.monotonic()
            if now_s - checked_s >= self._slice.total_seconds():
                checked_s = now_s
                try:
                    self._check(now_s - began_s)
                except GroupGoneError:
                    self.close()  # at once: kernels queued behind this operation would hang with it
                    raise
            time.sleep(POLL_S)

    def _raise_failed(self, problem: str) -> NoReturn:
        """An operation of Gloo failed: a connection broke, unless the call itself was wrong.

        Gloo runs an operation in a thread, so a wait raises what was wrong with its call, too.
        """
        if WRONG_CALL.search(problem):
            raise EvenstepError(
                f"rank {self.rank} cannot complete an operation over {self.world} workers, though "
                f"no connection is broken: {problem}"
            )
        self._raise_lost(problem)

    def _raise_lost(self, problem: str) -> NoReturn:
        """A connection broke: give `check` time to learn the cause, then raise what is known.

        Call it outside of an exception handler, so that only what it raises is shown.
        """
        deadline_s = time.monotonic() + self._last_words_s
        while time.monotonic() < deadline_s:
            self._check(0.0)
            time.sleep(0.02)
        raise WorkerLostError(
            f"rank {self.rank} lost another worker in generation {self.generation}: "
            f"{GLOO_NOISE.sub('', problem)}"
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor (sum), in place."""
        self.wait(self.sum_async(tensor))
        return tensor

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copy one rank's tensor to every rank, in place."""
        self._check_open()
        if self._backend is None:
            return
        options = BroadcastOptions()
        options.rootRank = root
        here = tensor.to(self.device)
        self.wait(never_freed_in_forks(self._backend.broadcast([here], options)))
        if here is not tensor:
            tensor.copy_(here)

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        """Start sending a dense tensor in host memory to a rank, under a tag."""
        try:
            return Transfer(self._backend.send([tensor], rank, tag))
        except RuntimeError as e:  # the connection may be broken already
            problem = str(e)
        self._raise_failed(problem)

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        """Start receiving from a rank what it sends under a tag; sizes must match exactly."""
        try:
            return Transfer(self._backend.recv([tensor], rank, tag))
        except RuntimeError as e:
            problem = str(e)
        self._raise_failed(problem)

    def close(self, wait_s: float = LAST_WORDS_S) -> None:
        """Destroy the group, aborting blocked operations; wait up to `wait_s` for that."""
        # In a thread: the destructor joins the group's own threads, and training need not wait.
        box, self._backend, self.is_closed = [self._backend], None, True
        newest, self._newest = self._newest, None

        def end() -> None:
            nonlocal newest
            blocked = self._is_broken or (newest is not None and not newest.is_completed())
            if self.device.type == "cuda" and box[0] is not None:
                end_nccl(box[0], None if self.sees_through else newest)
            elif box[0] is not None and blocked:
                abort_gloo(box[0], self.rank, self.world)
            newest = None  # an operation keeps its group alive
            box.clear()
            # The destructor waits for all operations, unless someone still holds the backend.
            self.is_gone = self._alive() is None

        thread = threading.Thread(target=end, name=CLOSING, daemon=True)
        thread.start()
        thread.join(wait_s)
