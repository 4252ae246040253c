"""States of all shapes, taken apart and put together again."""

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
from evenstep.train.recover.flatten import MAKES, places, put_together, take_apart

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
    """Equal in value, kind and order; NaN is equal to itself."""
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
    plan, found = take_apart(state)
    return put_together(plan, found)


@given(states)
def test_any_state_comes_back_as_it_was(state: Any) -> None:
    plan, found = take_apart(state)
    again = put_together(plan, found)
    assert same(again, state)
    assert take_apart(again)[0] == plan
    paths = places(plan)
    assert len(set(paths)) == len(paths) == len(found)


tags = st.sampled_from(["int", "tensor", "dtype", "device", "set", *MAKES])
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
def test_bytes_that_are_no_plan_do_nothing_worse_than_be_refused(plan: bytes) -> None:
    for read in (lambda: put_together(plan, [torch.zeros(1)] * 9), lambda: places(plan)):
        with suppress(InvalidInputError):
            read()


def test_tensors_are_found_by_their_paths() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    plan, found = take_apart({"a": [{0: one}], "0": {"0": two, 0: 3}})
    assert found[0].data_ptr() == one.data_ptr()
    assert places(plan) == [("a", 0, 0), ("0", "0")]
    assert put_together(plan, ["x", "y"]) == {"a": [{0: "x"}], "0": {"0": "y", 0: 3}}


def test_equal_sets_have_equal_plans_in_every_process() -> None:
    script = (
        "from evenstep.train.recover.flatten import take_apart\n"
        "print(take_apart({str(i) for i in range(50)})[0].hex())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=600,
        ).stdout
        for seed in "12"
    }
    assert len(told) == 1


def test_whole_numbers_of_any_size_survive() -> None:
    state = [
        sign * (2**bits + more)
        for sign in (1, -1)
        for bits in (62, 63, 64, 5000)
        for more in (-1, 0, 1)
    ]
    assert round_trip(state) == state
    assert round_trip({2**64: 1}) == {2**64: 1}


def test_numbers_of_numpy_become_plain_ones() -> None:
    again = round_trip([np.float64(0.5), np.float32(0.25), np.int64(3), np.bool_(True)])
    assert same(again, [0.5, 0.25, 3, True])


def test_generators_of_numpy_survive() -> None:
    generator = np.random.default_rng(3)
    generator.random(5)
    other = np.random.default_rng(0)
    other.bit_generator.state = round_trip(generator.bit_generator.state)
    assert other.random() == generator.random()


def test_what_a_module_says_of_its_versions_survives() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    again = round_trip(state)
    assert isinstance(again, OrderedDict)
    assert again._metadata == state._metadata  # type: ignore[attr-defined]
    assert again._metadata["0"] == {"version": 2}  # type: ignore[attr-defined]


Pair = namedtuple("Pair", "a b")
HELD: list[Any] = []
HELD.append(HELD)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"state": {0: {"history": deque()}}}, "state.0.history: a deque cannot be handed over"),
        ({"a": [1, {"b": object()}]}, "a.1.b: an object cannot be handed over"),
        ({"a": np.zeros(3)}, "a: a ndarray cannot be handed over; keep tensors"),
        ({"a": defaultdict(int)}, "a: a defaultdict cannot"),
        ({"a": Pair(1, 2)}, "a: a Pair cannot"),
        ({"a": {(1, 2): 3}}, "a: a tuple cannot be handed over as a key"),
        ({"a": {True: 3}}, "a: a bool cannot be handed over as a key"),
        ({"a": torch.eye(2).to_sparse()}, "a: a sparse_coo Tensor cannot be handed over"),
        ({"a": 1j}, "a: a complex cannot"),
        ({"a": lambda: 3}, "a: a function cannot"),
        ({"a": "\ud800"}, "text that is not Unicode"),
        (HELD, "nested too deeply, or holds itself"),
    ],
)
def test_what_cannot_be_handed_over_is_named(state: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        take_apart(state)
    assert says in str(caught.value)


Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Make] = {
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


def test_every_schedule_of_torch_is_among_them() -> None:
    assert set(lr.__all__) - {"LRScheduler"} <= SCHEDULES.keys()


def advance(schedule: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    rates = []
    for i in range(steps):
        optimizer.step()
        schedule.step(*([1.0 + i] if isinstance(schedule, lr.ReduceLROnPlateau) else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_where_it_was(name: str) -> None:
    one, other = (
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9) for _ in "ab"
    )
    schedule, copy = SCHEDULES[name](one), SCHEDULES[name](other)
    advance(schedule, one, 4)
    copy.load_state_dict(round_trip(schedule.state_dict()))
    other.load_state_dict(round_trip(one.state_dict()))
    other.step()  # as torch wants it of a schedule's first step
    assert advance(copy, other, 5) == advance(schedule, one, 5)


def test_an_averaged_model_survives() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    mean, copy = AveragedModel(net), AveragedModel(torch.nn.Linear(3, 2))
    mean.update_parameters(net)
    copy.load_state_dict(round_trip(mean.state_dict()))
    assert all(map(torch.equal, copy.state_dict().values(), mean.state_dict().values()))
