"""Gates: where they stand, that a closed one saves the rest, and that nobody else notices them."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from evenstep.train.reduce.early_abort import put_gates


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8, bias=False) for _ in range(4))
    return nn.Sequential(*layers)


def with_gradients(model: nn.Sequential) -> list[int]:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    return [i for i, p in enumerate(model.parameters()) if p.grad is not None]


def test_a_closed_gate_lets_nothing_through_and_an_open_one_all() -> None:
    model, closed = net(), False
    handles = put_gates(model, lambda: closed, 2 * 8 * 8 * 4)  # behind the second and the fourth
    assert len(handles) == 2
    assert with_gradients(model) == [0, 1, 2, 3]
    closed = True
    assert with_gradients(model) == []
    for handle in handles:
        handle.remove()
    assert with_gradients(model) == [0, 1, 2, 3]


def test_a_gate_that_closes_late_stops_what_comes_after() -> None:
    model, gates = net(), 0

    def is_closed() -> bool:
        nonlocal gates
        gates += 1
        return gates > 1

    put_gates(model, is_closed, 2 * 8 * 8 * 4)
    assert with_gradients(model) == [2, 3]


def test_a_small_model_has_none() -> None:
    assert put_gates(net(), bool, 1 << 20) == []


def test_copies_of_a_model_have_gates_that_are_open() -> None:
    model = net()
    put_gates(model, lambda: True, 1)
    assert with_gradients(copy.deepcopy(model)) == [0, 1, 2, 3]
    assert with_gradients(pickle.loads(pickle.dumps(model))) == [0, 1, 2, 3]


def test_a_compiled_model_goes_without() -> None:
    model = net()
    put_gates(model, lambda: True, 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    model.zero_grad()
    compiled(torch.ones(2, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
