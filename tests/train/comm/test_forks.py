"""What a forked process, such as those of a DataLoader, does to its parent's process groups."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from evenstep.train.comm.group import Group

BOUND_S = 120


def pair() -> list[Group]:
    store = HashStore()
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: Group(store, 1, rank, 2, timeout_s=60), range(2)))


def works(groups: list[Group]) -> list[Any]:
    """An all-reduce of each rank, done, after the end of their groups."""
    started = [group.sum_async(torch.zeros(1)) for group in groups]
    for group, work in zip(groups, started, strict=True):
        group.wait(work)
    for group in groups:
        group.close()
    return started


def status_of_fork(run: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(BOUND_S)  # joining a thread that is not there may hang instead
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("make", [lambda: works(pair()), pair])
def test_garbage_of_the_parent_is_collected_without_a_crash(
    make: Callable[[], list[Any]],
) -> None:
    """As left behind by exceptions: their tracebacks hold frames that hold them."""
    gc.disable()
    try:
        garbage: list[Any] = [make()]
        garbage.append(garbage)
        del garbage
        assert status_of_fork(gc.collect) == 0
        assert status_of_fork(lambda: status_of_fork(gc.collect)) == 0
    finally:
        gc.enable()
        gc.collect()
