"""States of all shapes survive being flattened and unflattened."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR, AveragedModel

from evenstep.errors import ConfigError, InvalidInputError
from evenstep.train.recover.flatten import CONTAINERS, flatten, tensor_paths, unflatten

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**140), 2**140),
    st.floats(),
    st.text(),
    st.binary(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)]),
    st.builds(torch.Size, st.lists(st.integers(0, 9))),
)
tensors = st.builds(torch.tensor, st.lists(st.integers(-9, 9)) | st.floats())
keys = st.text() | st.integers()
states = st.recursive(
    scalars | tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.sets(scalars, max_size=4),
    ),
    max_leaves=25,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(
            same(a[k], b[k]) for k in a
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set):
        return sorted(map(repr, a)) == sorted(map(repr, b))
    return repr(a) == repr(b)


def round_trip(state: Any) -> Any:
    structure, found = flatten(state)
    return unflatten(structure, found)


@given(states)
def test_any_state_survives_the_round_trip(state: Any) -> None:
    structure, found = flatten(state)
    again = unflatten(structure, found)
    assert same(again, state)
    assert flatten(again)[0] == structure
    paths = tensor_paths(structure)
    assert len(set(paths)) == len(paths) == len(found)


tags = st.sampled_from(["int", "tensor", "dtype", "device", "set", *CONTAINERS])
nonsense = st.recursive(
    st.none() | st.integers(-5, 99) | st.text(max_size=3) | tags | st.sampled_from(["cpu", "save"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(tags, st.lists(inner, max_size=3)),
        st.tuples(tags, inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
)


@given(st.one_of(st.binary(max_size=60), nonsense.map(msgspec.msgpack.encode)))
def test_malformed_structures_only_raise_invalid_input(structure: bytes) -> None:
    for read in (
        lambda: unflatten(structure, [torch.zeros(1)] * 9),
        lambda: tensor_paths(structure),
    ):
        with suppress(InvalidInputError):
            read()


def test_tensors_have_paths() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    structure, found = flatten({"a": [{0: one}], "0": {"0": two, 0: 3}})
    assert found[0].data_ptr() == one.data_ptr()
    assert tensor_paths(structure) == [("a", 0, 0), ("0", "0")]
    assert unflatten(structure, ["x", "y"]) == {"a": [{0: "x"}], "0": {"0": "y", 0: 3}}


@pytest.mark.long
def test_equal_sets_have_equal_structures_in_every_process() -> None:
    script = (
        "from evenstep.train.recover.flatten import flatten\n"
        "print(flatten({str(i) for i in range(50)})[0].hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=600,
        ).stdout
        for seed in "12"
    }
    assert len(outputs) == 1


def test_integers_of_any_size_survive() -> None:
    state = [
        sign * (2**bits + more)
        for sign in (1, -1)
        for bits in (62, 63, 64, 5000)
        for more in (-1, 0, 1)
    ]
    assert round_trip(state) == state
    assert round_trip({2**64: 1}) == {2**64: 1}


def test_numpy_scalars_become_python_numbers() -> None:
    again = round_trip([np.float64(0.5), np.float32(0.25), np.int64(3), np.bool_(True)])
    assert same(again, [0.5, 0.25, 3, True])


def test_numpy_generators_survive() -> None:
    generator = np.random.default_rng(3)
    generator.random(5)
    other = np.random.default_rng(0)
    other.bit_generator.state = round_trip(generator.bit_generator.state)
    assert other.random() == generator.random()


def test_the_metadata_of_a_modules_state_survives() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    again = round_trip(state)
    assert isinstance(again, OrderedDict)
    assert again._metadata == state._metadata  # type: ignore[attr-defined]
    assert again._metadata["0"] == {"version": 2}  # type: ignore[attr-defined]


Pair = namedtuple("Pair", "a b")
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"state": {0: {"history": deque()}}}, "state.0.history: a deque cannot be serialised"),
        ({"a": [1, {"b": object()}]}, "a.1.b: an object cannot be serialised"),
        ({"a": np.zeros(3)}, "a: a ndarray cannot be serialised; keep only tensors"),
        ({"a": defaultdict(int)}, "a: a defaultdict cannot"),
        ({"a": Pair(1, 2)}, "a: a Pair cannot"),
        ({"a": {(1, 2): 3}}, "a: a tuple cannot be serialised as a key"),
        ({"a": {True: 3}}, "a: a bool cannot be serialised as a key"),
        ({"a": torch.eye(2).to_sparse()}, "a: a sparse_coo Tensor cannot be serialised"),
        ({"a": 1j}, "a: a complex cannot"),
        ({"a": lambda: 3}, "a: a function cannot"),
        ({"a": "\ud800"}, "text that is not Unicode"),
        (CYCLE, "nested too deeply, or contains itself"),
    ],
)
def test_unsupported_values_are_named(state: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flatten(state)
    assert message in str(caught.value)


Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda e: 0.9**e),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda e: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 2),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lr.ConstantLR(o),
    "LinearLR": lambda o: lr.LinearLR(o),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2, 2),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.1, 0.2, 3, scale_fn=lambda x: 0.5, scale_mode="cycle"),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.5, 12),
    "PolynomialLR": lambda o: lr.PolynomialLR(o),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o), lr.MultiStepLR(o, [1, 2])], milestones=[3]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.LinearLR(o), lr.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=4),
}


def test_every_scheduler_of_torch_is_covered() -> None:
    assert set(lr.__all__) - {"LRScheduler"} <= SCHEDULERS.keys()


def advance(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    rates = []
    for i in range(steps):
        optimizer.step()
        schedule.step(*([1.0 + i] if isinstance(schedule, lr.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_where_it_was(name: str) -> None:
    one, other = (
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9) for _ in "ab"
    )
    schedule, copy = SCHEDULERS[name](one), SCHEDULERS[name](other)
    advance(schedule, one, 4)
    copy.load_state_dict(round_trip(schedule.state_dict()))
    other.load_state_dict(round_trip(one.state_dict()))
    other.step()  # or torch warns at the scheduler's first step
    assert advance(copy, other, 5) == advance(schedule, one, 5)


def test_an_averaged_model_survives() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    mean, copy = AveragedModel(net), AveragedModel(torch.nn.Linear(3, 2))
    mean.update_parameters(net)
    copy.load_state_dict(round_trip(mean.state_dict()))
    assert all(map(torch.equal, copy.state_dict().values(), mean.state_dict().values()))
