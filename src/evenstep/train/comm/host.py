"""The processes of one host that together are one worker, because they shard one model.

The loss of another host, or a new generation, may reach these processes at different times or
reach only one of them. They must act on it together, so they agree here first. The calls are
collectives on the host's own process group. They need no failure handling: the processes of a
host live and die together.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import distributed

from evenstep.train.comm.group import GroupGoneError, WorkerLostError

log = logging.getLogger("evenstep")

LAST_WORDS_S = 1.0  # for a process to exit after its connection has closed
FAILED_S = 5.0  # for the host's other processes to exit after the first one has failed


class OtherProcesses:
    """The processes that a host's first process started. If one is killed, the host is lost."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes
        self._have_met = self._is_ending = False
        for process in processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def have_met(self) -> None:
        """The host's process group is made."""
        self._have_met = True

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code < 0 and not self._is_ending:
            log.error("process %d of this host was ended by signal %d", process.pid, -code)
            os.kill(os.getpid(), signal.SIGKILL)
        if not self._have_met:  # this process waits for that one, and nothing else would tell it
            log.error("process %d of this host ended with %d before it joined", process.pid, code)
            os._exit(1)

    def end_if_killed(self) -> None:
        """If a process was killed, die by SIGKILL too: the host counts as lost, not as failed."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                if process.wait(LAST_WORDS_S) < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

    def see_off(self, within_s: float) -> None:
        """Wait for all of them to exit, and kill those that do not in time."""
        self._is_ending = True
        until_s = time.monotonic() + within_s
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This process's place on its host. By default it is a worker of its own."""

    rank: int = 0
    size: int = 1
    links: tuple[socket.socket, ...] = ()  # from the first process to each other one, or to it
    others: OtherProcesses | None = None  # on the first process

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
        """The sum over the host's processes."""
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

    def first_decides(self, number: int) -> int:
        """The first process's number, on all of them."""
        if not self.is_shared:
            return number
        decided = torch.tensor([number])
        distributed.broadcast(decided, src=0)
        return int(decided)

    def agree(self, lost: GroupGoneError | None) -> GroupGoneError | None:
        """Why a collective with other hosts failed in any process; None if it succeeded in all."""
        if not self.is_shared:
            return lost
        kinds = (None, GroupGoneError, WorkerLostError)
        own = 0 if lost is None else 2 if isinstance(lost, WorkerLostError) else 1
        worst = torch.tensor([own])
        distributed.all_reduce(worst, distributed.ReduceOp.MAX)
        kind = kinds[int(worst)]
        if kind is None or isinstance(lost, kind):
            return lost
        return kind("another process of this host has lost its connections to other hosts")

    def end_if_killed(self) -> None:
        """If a process of this host was killed, die as it did: that explains the error here."""
        if self.others is not None:
            self.others.end_if_killed()

    def failed(self) -> None:
        """The script failed in this process. The others may be waiting for it, so end them."""
        if self.others is not None:
            self.others.see_off(FAILED_S)


ALONE = Host()
