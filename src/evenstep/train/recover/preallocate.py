"""Room for an optimizer's state before it comes: a first touch of so much memory takes its time.

Whoever joins a run is handed the optimizer's state while the others wait. What it will look like is
tried out beforehand, on parameters of a few numbers.
"""

from __future__ import annotations

import copy
import logging

import torch

log = logging.getLogger("evenstep")


def make_room(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer on the host a state of zeros, like the one that it will be handed.

    One that has a state keeps it. One whose state cannot be foreseen gets none, and is handed its
    state all the same.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state or any(p.device.type != "cpu" for p in params):
        return
    small = [_small(p) for p in params]
    try:
        twin = copy.deepcopy(optimizer, {id(p): s for p, s in zip(params, small, strict=True)})
        type(optimizer).step(twin)
    except Exception as e:  # somebody else's class: what it does not allow is not worth more
        log.debug("no room for the state of %s: %s", type(optimizer).__name__, e)
        return
    for param, its_small in zip(params, small, strict=True):
        for name, value in twin.state.get(its_small, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == its_small.shape:
                optimizer.state[param][name] = torch.zeros_like(param, dtype=value.dtype)


def _small(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """A parameter of as many dimensions, two at the most along each, with a gradient."""
    shape = [min(size, 2) for size in param.shape]
    small = torch.nn.Parameter(param.new_zeros(shape), requires_grad=param.requires_grad)
    if param.requires_grad:
        small.grad = torch.zeros_like(small)
    return small
