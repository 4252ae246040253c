"""Abort hooks: where they are, that they save the rest of a pass, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from evenstep.train.reduce.early_abort import register_abort_hooks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8, bias=False) for _ in range(4))
    return nn.Sequential(*layers)


def with_gradients(model: nn.Sequential) -> list[int]:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    return [i for i, p in enumerate(model.parameters()) if p.grad is not None]


def test_an_aborted_pass_computes_no_gradients_and_any_other_pass_all() -> None:
    model, abort = net(), False
    handles = register_abort_hooks(model, lambda: abort, 2 * 8 * 8 * 4)  # at 2 and 4
    assert len(handles) == 2
    assert with_gradients(model) == [0, 1, 2, 3]
    abort = True
    assert with_gradients(model) == []
    for handle in handles:
        handle.remove()
    assert with_gradients(model) == [0, 1, 2, 3]


def test_aborting_in_mid_pass_skips_the_rest() -> None:
    model, calls = net(), 0

    def should_abort() -> bool:
        nonlocal calls
        calls += 1
        return calls > 1

    register_abort_hooks(model, should_abort, 2 * 8 * 8 * 4)
    assert with_gradients(model) == [2, 3]


def test_a_small_model_has_no_hooks() -> None:
    assert register_abort_hooks(net(), bool, 1 << 20) == []


def test_copies_of_a_model_never_abort() -> None:
    model = net()
    register_abort_hooks(model, lambda: True, 1)
    assert with_gradients(copy.deepcopy(model)) == [0, 1, 2, 3]
    assert with_gradients(pickle.loads(pickle.dumps(model))) == [0, 1, 2, 3]


def test_a_compiled_model_never_aborts() -> None:
    model = net()
    register_abort_hooks(model, lambda: True, 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    model.zero_grad()
    compiled(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
