"""The process group of one generation: made directly over a store prefix, never registered.

A prefix carries its generation and is never used twice. All waiting is done in slices, so that a
blocked sum can be given up when a peer has failed: Gloo itself cannot be interrupted.
"""

from __future__ import annotations

import threading
import time
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

CPU = torch.device("cpu")
SLICE = timedelta(milliseconds=50)


LAST_WORDS_S = 2.0


class PeerLostError(EvenstepError, ConnectionError):
    """A peer is gone without a word: killed, or cut off."""


class Group:
    """A roster that can reduce tensors together.

    Sums of one group are matched by the order in which ranks start them; what may start in another
    order gets a group of its own, under another name. `check` is called while a sum is waited for:
    it raises if there is no use in waiting on.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        rank: int,
        world: int,
        *,
        timeout_s: float,
        name: str = "control",
        device: torch.device = CPU,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.generation, self.rank, self.world = generation, rank, world
        self.device, self._check = device, check
        self._backend: Any = None
        if world > 1:
            prefix = PrefixStore(f"evenstep/{generation}/{name}", store)
            self._backend = _backend(prefix, rank, world, device, timedelta(seconds=timeout_s))

    def sum_async(self, tensor: torch.Tensor) -> Work | None:
        """Start summing a tensor over the group, in place. All ranks start sums in one order."""
        if self._backend is None:
            return None
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        work: Work = self._backend.allreduce([tensor], options)
        return work

    def wait(self, work: Work | None) -> None:
        """Wait for a sum, unless a newer generation makes it void."""
        if work is None:
            return
        if self.device.type == "cuda":
            work.wait()  # orders the streams; the host goes on
            return
        while True:
            try:
                work.wait(SLICE)
                return
            except RuntimeError as e:
                self._check()
                if "Operation timed out" not in str(e):
                    self._mourn(e)

    def _mourn(self, error: RuntimeError) -> NoReturn:
        """A peer's connection broke: give its own word time to arrive, then say what is known."""
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            self._check()
            time.sleep(0.02)
        raise PeerLostError(
            f"rank {self.rank} lost a peer in generation {self.generation}: {error}"
        )

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the group, in place."""
        self.wait(self.sum_async(tensor))
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The leader's tensor on every rank, in place."""
        if self._backend is None:
            return
        options = BroadcastOptions()
        options.rootRank = 0
        here = tensor.to(self.device)
        self.wait(self._backend.broadcast([here], options))
        if here is not tensor:
            tensor.copy_(here)

    def close(self) -> None:
        """Let the group go. Waits a little for what is still blocked in it, and no longer."""
        # The destructor joins a blocked sum, until its peers have closed their ends too: never in
        # the training thread. A process that ends in the midst of it would be aborted.
        box, self._backend = [self._backend], None
        thread = threading.Thread(target=box.clear, name="evenstep-close", daemon=True)
        thread.start()
        thread.join(LAST_WORDS_S)


def _backend(store: Store, rank: int, world: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, world, options)
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, world, timeout)
