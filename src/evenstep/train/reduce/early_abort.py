"""Places in a large model at which a backward pass that is of no use is broken off.

Nobody can stop autograd, but where a gradient is missing it computes nothing more on the way back.
So the largest parts of a model get a gate behind them: closed, it lets no gradient through. A model
of less than a bucket has none, nor has one that is compiled at such a place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Gradients = tuple[torch.Tensor | None, ...]


class BackwardGate:
    """A forward hook of a module. Copies of the module have one that is always open."""

    def __init__(self, is_closed: Callable[[], bool] | None = None) -> None:
        self._is_closed = is_closed

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self._is_closed is None or torch.compiler.is_compiling():
            return
        if isinstance(out, torch.Tensor) and out.grad_fn is not None:
            out.grad_fn.register_prehook(self._pass)

    def _pass(self, gradients: Gradients) -> Gradients | None:
        assert self._is_closed is not None
        return (None,) * len(gradients) if self._is_closed() else None

    def __deepcopy__(self, memo: object) -> BackwardGate:
        return BackwardGate()

    def __reduce__(self) -> tuple[type[BackwardGate], tuple[()]]:
        return BackwardGate, ()


def put_gates(model: torch.nn.Module, is_closed: Callable[[], bool], every_bytes: int) -> list[Any]:
    """A gate behind every so many bytes of parameters, in the order of the modules; handles."""
    handles, counted, since = [], set(), 0
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if id(param) not in counted:
                counted.add(id(param))
                since += param.numel() * param.element_size()
        if since >= every_bytes:
            handles.append(module.register_forward_hook(BackwardGate(is_closed)))
            since = 0
    return handles
