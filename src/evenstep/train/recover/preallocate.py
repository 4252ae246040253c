"""Allocates memory for an optimizer's state before that state arrives, since first touch is slow.

The others wait while a joiner receives the state. Its shape is found beforehand, by a step on tiny
parameters.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

import torch

from evenstep.train.comm.local_shards import is_sharded

log = logging.getLogger("evenstep")


class Preallocation:
    """Optimizers of a joiner whose state is only a placeholder so far."""

    def __init__(self) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []

    def make(self, objects: Iterable[Any]) -> None:
        """Preallocate for every optimizer that has no state yet."""
        for obj in objects:
            if isinstance(obj, torch.optim.Optimizer) and not obj.state:
                preallocate(obj)
                self._optimizers.append(obj)

    def discard(self) -> None:
        """No worker is left to hand over a state: start without one."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def filled(self) -> None:
        """The state has arrived."""
        self._optimizers.clear()


def preallocate(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer on the host a state of zeros, shaped like the one that it will receive.

    An optimizer with a state keeps it. If the shape cannot be predicted, nothing is preallocated,
    and the state is received all the same.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.device.type != "cpu" or is_sharded(p) for p in params):
        return
    small = [_small(p) for p in params]
    try:
        twin = copy.deepcopy(optimizer, {id(p): s for p, s in zip(params, small, strict=True)})
        type(optimizer).step(twin)
    except Exception as e:  # the script's own class may not allow this: go without
        log.debug("cannot preallocate the state of %s: %s", type(optimizer).__name__, e)
        return
    for param, its_small in zip(params, small, strict=True):
        for name, value in twin.state.get(its_small, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == its_small.shape:
                optimizer.state[param][name] = torch.zeros_like(param, dtype=value.dtype)


def _small(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter with a gradient, of as many dimensions but at most two numbers along each."""
    shape = [min(size, 2) for size in param.shape]
    small = torch.nn.Parameter(param.new_zeros(shape), requires_grad=param.requires_grad)
    if param.requires_grad:
        small.grad = torch.zeros_like(small)
    return small
