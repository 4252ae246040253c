"""The processes of one host that are one worker together, because they shard one model.

What happens outside of the host may reach its processes at different times, or only one of them:
another host is lost, or the coordinator announces a generation. They must not act on it before all
of them know, so they agree here first. These calls are collective and go over the host's own
process group. They have no failures to handle: the processes of a host end together.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import distributed

from evenstep.train.comm.group import GroupGoneError

LAST_WORDS_S = 1.0  # for a process whose connection has closed to be seen as ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This process's place on its host. By default it is a worker of its own."""

    rank: int = 0
    size: int = 1
    links: tuple[socket.socket, ...] = ()  # from the first process to each other one, or to it
    others: tuple[subprocess.Popen[bytes], ...] = ()  # that the first process has started

    @property
    def is_shared(self) -> bool:
        """Whether the worker has several processes."""
        return self.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the worker."""
        return self.rank == 0

    def part(self, begin: int, end: int) -> tuple[int, int]:
        """This process's part of the worker's samples."""
        num = end - begin
        return begin + num * self.rank // self.size, begin + num * (self.rank + 1) // self.size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the host's processes; the tensor itself may be overwritten."""
        if self.is_shared:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def from_first(self, values: torch.Tensor) -> None:
        """Overwrite a tensor with that of the first process."""
        if self.is_shared:
            whole = values.contiguous()
            distributed.broadcast(whole, src=0)
            values.copy_(whole)

    def first_decides(self, decide: Callable[[], int]) -> int:
        """What the first process decides, on all of them."""
        if not self.is_shared:
            return decide()
        number = torch.tensor([decide() if self.is_first else 0])
        distributed.broadcast(number, src=0)
        return int(number)

    def agree(self, lost: GroupGoneError | None) -> GroupGoneError | None:
        """Why something failed that all processes did with other hosts; None if all succeeded."""
        if not self.is_shared:
            return lost
        if not self.sum(torch.tensor([lost is not None])):
            return None
        return lost or GroupGoneError("another process of this host has lost another host")

    def end_if_killed(self) -> None:
        """If another process of the host was killed, end this one likewise: the host is lost."""
        for other in self.others:
            with suppress(subprocess.TimeoutExpired):
                if other.wait(LAST_WORDS_S) < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    def end_others(self) -> None:
        """This process has failed: the others would wait for it."""
        end(self.others)


ALONE = Host()


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes, and wait for them."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
