"""Accelerate, and Trainer on top of it, take every worker for a single process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import PartialState

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def without_torchrun() -> Iterator[None]:
    """Hide torchrun's variables, so that Accelerate makes no process group of its own."""
    hidden = {name: os.environ.pop(name) for name in TORCHRUN if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def show_rank(rank: int) -> bool:
    """Make this process the main one, which writes and prints, if it leads.

    Returns whether its rank has changed.
    """
    process = PartialState()
    has_changed = bool(process.process_index != rank)
    process.process_index = process.local_process_index = rank
    return has_changed
