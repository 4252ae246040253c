"""Schedulers of a script that does not tell its framework of them."""

from __future__ import annotations

import gc

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.errors import ConfigError


def schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[LRScheduler]:
    """All schedulers of these optimizers, or of Fabric's wrappers around them.

    Scripts do not tell Fabric of them. The order is the same in all processes.
    """
    gc.collect()
    numbers = {id(optimizer): i for i, optimizer in enumerate(optimizers)}
    found: dict[tuple[int, str], LRScheduler] = {}
    known = [obj for obj in gc.get_objects() if issubclass(type(obj), LRScheduler)]
    inside = {id(part) for s in known for part in getattr(s, "_schedulers", ())}
    for scheduler in known:
        optimizer = getattr(scheduler, "optimizer", None)
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if id(scheduler) in inside or id(optimizer) not in numbers:
            continue
        key = numbers[id(optimizer)], type(scheduler).__name__
        if key in found:
            raise ConfigError(
                "scheduler",
                f"there are two of {key[1]} for one optimizer; put them into one "
                "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR",
            )
        found[key] = scheduler
    return [found[key] for key in sorted(found)]
