"""Handing over the training state, between real Gloo ranks that are threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore

from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.comm.group import Group, SupersededError, WorkerLostError
from evenstep.train.comm.transfer import Transfer
from evenstep.train.recover import handover, slices
from evenstep.train.recover.handover import Relay, hand_over
from evenstep.train.recover.preallocate import preallocate
from evenstep.train.recover.slices import TensorSpec, cut_into_slices, flat_views
from evenstep.train.recover.state import TrainingState

T = TypeVar("T")

WORLD, SOURCES, RECEIVERS, BYSTANDER = 5, [2, 0], [4, 1], 3
STORE, generations = HashStore(), count(1)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 64)
    monkeypatch.setattr(slices, "LARGE_BYTES", 40)
    monkeypatch.setattr(handover, "IN_FLIGHT", 2)


def all_ranks(
    body: Callable[[Group], T],
    kind: type[Group] = Group,
    check: Callable[[int], None] = lambda rank: None,
) -> list[T]:
    """What `body` returns on each of five ranks of a new generation."""
    generation, formed = next(generations), threading.Barrier(WORLD, timeout=600)

    def one(rank: int) -> T:
        group = kind(
            STORE,
            generation,
            rank,
            WORLD,
            timeout_s=60,
            check=lambda _: check(rank),
            last_words_s=0.1,
        )
        formed.wait()  # no rank finishes before all have begun
        try:
            return body(group)
        finally:
            group.close()

    with ThreadPoolExecutor(WORLD) as pool:
        return [f.result(timeout=600) for f in [pool.submit(one, r) for r in range(WORLD)]]


def outcome(body: Callable[[Group], Any]) -> Callable[[Group], Any]:
    """Return the error of a rank in place of its result."""

    def run(group: Group) -> Any:
        try:
            return body(group)
        except Exception as e:
            return e

    return run


class Odd(nn.Module):
    """Parameters and buffers of many dtypes and memory layouts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, generator=make).mul(9).to(dtype)

        self.plain = nn.Parameter(numbers(7, 5))
        self.turned = nn.Parameter(numbers(5, 9).t())
        self.last = nn.Parameter(numbers(3, 4, 2, 5).to(memory_format=torch.channels_last))
        self.part = nn.Parameter(numbers(6, 8)[::2, 1::3])
        self.short = nn.Parameter(numbers(11, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(numbers(3), requires_grad=False)
        self.register_buffer("one", numbers(dtype=torch.float64))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("yes", numbers(13).gt(0))
        self.register_buffer("small", numbers(5, dtype=torch.int8))
        self.register_buffer("wide", numbers(2).expand(4, 2))
        self.register_buffer("mixed", torch.complex(numbers(21), numbers(21)).conj())
        self.register_buffer("unsaved", numbers(2), persistent=False)


def tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach() for n, t in (*net.named_parameters(), *net.named_buffers())}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_models_are_written_in_place_and_bystanders_left_alone() -> None:
    def body(group: Group) -> tuple[nn.Module, dict[str, Any]]:
        net = Odd(seed=7 if group.rank in SOURCES else group.rank)
        before = {name: (t, t.data_ptr()) for name, t in net.named_parameters()}
        state = TrainingState({"net": net}, {}, {"step": group.rank, "random": torch.arange(9)})
        hand_over(group, SOURCES, RECEIVERS, state)
        for name, param in net.named_parameters():
            assert (param, param.data_ptr()) == before[name]
        assert not state.torn
        return net, state.plain

    every = all_ranks(body)
    for rank in RECEIVERS:
        net, plain = every[rank]
        assert equal(tensors(net), tensors(Odd(seed=7)))
        assert plain["step"] == SOURCES[0]  # from the first source
    for rank in (BYSTANDER, *SOURCES):
        net, plain = every[rank]
        assert equal(tensors(net), tensors(Odd(seed=7 if rank in SOURCES else rank)))
        assert plain["step"] == rank


def numbers(rank: int) -> nn.Linear:
    net = nn.Linear(16, 16)
    for tensor in tensors(net).values():
        tensor.fill_(float(rank))
    return net


# Optimizers.

OPTIMIZERS = [
    getattr(torch.optim, name)
    for name in sorted(vars(torch.optim))
    if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
]


class Trained:
    """A small model and its optimizer, after some steps."""

    def __init__(self, kind: Any, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.sparse = kind is torch.optim.SparseAdam
        if self.sparse:
            self.net: nn.Module = nn.Embedding(9, 4, sparse=True)
        else:  # Muon takes only matrices
            self.net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer: Any = kind(self.net.parameters(), lr=0.01 + seed / 100, **options)
        self.train(steps, seed)
        self.state = TrainingState({"net": self.net}, {"optimizer": self.optimizer}, {})

    def train(self, steps: int, seed: int) -> None:
        make = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x = torch.randn(6, 4, generator=make)
            rows = torch.randint(9, (6,), generator=make)

            def closure(x: torch.Tensor = x, rows: torch.Tensor = rows) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = self.net(rows if self.sparse else x).square().mean()
                loss.backward()
                return loss

            self.optimizer.step(closure)


@pytest.mark.parametrize("preallocated", [False, True], ids=["", "preallocated"])
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: str(kind.__name__))
def test_with_every_optimizer_receivers_train_on_like_the_sources(
    kind: Any, preallocated: bool
) -> None:
    # One receiver is new, the other only behind.
    steps = {RECEIVERS[0]: 0, RECEIVERS[1]: 2}
    workers = [Trained(kind, r * (r in RECEIVERS), steps.get(r, 3)) for r in range(WORLD)]
    if preallocated:
        preallocate(workers[RECEIVERS[0]].optimizer)

    def body(group: Group) -> dict[str, torch.Tensor]:
        mine = workers[group.rank]
        hand_over(group, SOURCES, RECEIVERS, mine.state)
        mine.train(3, seed=99)
        return tensors(mine.net)

    every = all_ranks(body)
    assert equal(every[RECEIVERS[0]], every[SOURCES[0]])
    assert equal(every[RECEIVERS[1]], every[SOURCES[0]])
    assert not equal(tensors(Trained(kind, seed=0, steps=3).net), every[SOURCES[0]])


def test_optimizer_state_is_received_in_place() -> None:
    workers = [Trained(torch.optim.Adam, seed=rank, steps=2) for rank in range(WORLD)]

    def body(group: Group) -> None:
        mine = workers[group.rank]
        param = next(mine.net.parameters())
        before = mine.optimizer.state[param]["exp_avg"].data_ptr()
        hand_over(group, [0], [1, 2, 3, 4], mine.state)
        assert mine.optimizer.state[param]["exp_avg"].data_ptr() == before

    all_ranks(body)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (torch.optim.SGD, ["momentum_buffer"]),
        (torch.optim.AdamW, ["exp_avg", "exp_avg_sq"]),
        (torch.optim.Adafactor, []),  # row and column statistics, not parameter-shaped
        (torch.optim.SparseAdam, []),  # takes no dense gradients
        (torch.optim.LBFGS, []),  # steps by a closure
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_preallocated_optimizer_state_is_received_in_place(kind: Any, names: list[str]) -> None:
    workers = [Trained(kind, seed=0, steps=2 * (rank == 0)) for rank in range(WORLD)]
    before = []
    for worker in workers[1:]:
        params = tensors(worker.net)
        preallocate(worker.optimizer)
        assert equal(tensors(worker.net), params)
        state = worker.optimizer.state
        assert all(list(s) == names for s in state.values())
        assert len(state) == (3 if names else 0)
        before.append({(p, n): state[p][n].data_ptr() for p in state for n in names})
        assert not any(state[p][n].any() for p in state for n in names)
    all_ranks(lambda group: hand_over(group, [0], [1, 2, 3, 4], workers[group.rank].state))
    for worker, pointers in zip(workers[1:], before, strict=True):
        state = worker.optimizer.state
        assert all(state[p][n].data_ptr() == ptr for (p, n), ptr in pointers.items())


def test_preallocating_keeps_existing_state() -> None:
    worker = Trained(torch.optim.Adam, seed=1, steps=2)
    before = {p: dict(state) for p, state in worker.optimizer.state.items()}
    preallocate(worker.optimizer)
    assert all(worker.optimizer.state[p][n] is t for p in before for n, t in before[p].items())


class Mean:
    """An average of parameters that starts as a view of them, as in many scripts."""

    def __init__(self, net: nn.Module) -> None:
        self.shadow = {name: p.detach() for name, p in net.named_parameters()}

    def update(self, net: nn.Module) -> None:
        self.shadow = {n: 0.5 * self.shadow[n] + 0.5 * p for n, p in tensors(net).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_state_that_begins_as_a_view_of_parameters_does_not_overwrite_them() -> None:
    def body(group: Group) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        net = numbers(7 if group.rank in SOURCES else group.rank)
        mean = Mean(net)
        if group.rank in SOURCES:
            mean.update(numbers(9))
        hand_over(group, SOURCES, RECEIVERS, TrainingState({"net": net}, {"mean": mean}, {}))
        return tensors(net), mean.shadow

    every = all_ranks(body)
    net, shadow = every[SOURCES[0]]
    assert not equal(net, shadow)
    for rank in RECEIVERS:
        assert equal(every[rank][0], net)
        assert equal(every[rank][1], shadow)


@pytest.mark.parametrize("grads", [True, False])
def test_gradients_are_handed_over_on_request(grads: bool) -> None:
    def body(group: Group) -> list[torch.Tensor | None]:
        net = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
        used = 0 if group.rank in SOURCES else 1
        net[used].weight.grad = torch.full((3, 3), float(used))
        hand_over(group, SOURCES, RECEIVERS, TrainingState({"net": net}, {}, {}), grads=grads)
        return [p.grad for p in net.parameters()]

    first, second = all_ranks(body)[RECEIVERS[0]]
    if grads:
        assert first is not None
        assert first.eq(0).all()
        assert second is None
    else:
        assert first is None
        assert second is not None


# Bounds.


class Counting(Group):
    """Counts the slices in flight from and to this rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sizes: dict[Transfer, int] = {}
        self.max_bytes = self.max_in_flight = self.slices = 0

    def _count(self, transfer: Transfer, tensor: torch.Tensor, tag: int) -> Transfer:
        if tag >= handover.FIRST_TAG:
            self.slices += 1
            self.sizes[transfer] = tensor.nbytes
            self.max_in_flight = max(self.max_in_flight, len(self.sizes))
            self.max_bytes = max(self.max_bytes, sum(self.sizes.values()))
        return transfer

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        return self._count(super().send(tensor, rank, tag), tensor, tag)

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        return self._count(super().recv(tensor, rank, tag), tensor, tag)

    def wait(self, work: Any) -> None:
        super().wait(work)
        self.sizes.pop(work, None)


def test_few_slices_are_in_flight_and_sources_and_receivers_share_the_work() -> None:
    num = 64 * 60 // 4

    def body(group: Group) -> tuple[int, int, int]:
        assert isinstance(group, Counting)
        state = TrainingState({}, {}, {"numbers": torch.full((num,), float(group.rank))})
        hand_over(group, SOURCES, RECEIVERS, state)
        return group.slices, group.max_in_flight, group.max_bytes

    every = all_ranks(body, Counting)
    for rank in SOURCES:
        assert every[rank] == (30, 2, 2 * 64)
    for rank in RECEIVERS:
        # Each receives all slices and passes on those that it gets first.
        assert every[rank][0] == 60 + 30
        assert every[rank][1] <= 2 + 1  # one is passed on while the others arrive
        assert every[rank][2] <= 3 * 64
    assert every[BYSTANDER] == (0, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 7), max_size=4),
            st.sampled_from([torch.int8, torch.int16, torch.float32, torch.complex128]),
            st.integers(0, 99),
            st.integers(1, 2),
        ),
        max_size=5,
    )
)
@example([([1], torch.int16, 0, 2)])  # one element may have any stride
def test_slices_have_every_element_once_in_any_layout(shapes: list[Any]) -> None:
    sent, received, specs = [], [], []
    for shape, dtype, seed, stride in shapes:
        dims = np.random.default_rng(seed).permutation(len(shape)).tolist()
        wide = [n * stride for n in shape]
        sent.append(torch.randint(100, wide).to(dtype)[tuple(slice(0, n, stride) for n in wide)])
        received.append(torch.zeros([shape[d] for d in dims], dtype=dtype))
        received[-1] = received[-1].permute([dims.index(d) for d in range(len(dims))])
        specs.append(TensorSpec.of(sent[-1]))
    pairs = zip(cut_into_slices(sent, specs), cut_into_slices(received, specs), strict=True)
    for one, other in pairs:
        assert one.num_bytes == other.num_bytes <= slices.SLICE_BYTES
        data = one.data(torch.zeros(64, dtype=torch.uint8))
        one.pack(data)
        arrived = other.data(torch.zeros(64, dtype=torch.uint8))
        arrived.copy_(data)
        other.unpack(arrived)
    assert all(map(torch.equal, sent, received))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_flat_views_are_a_range_of_the_flattened_tensor(shape: list[int], data: Any) -> None:
    tensor = torch.arange(2 * torch.Size(shape).numel()).view(*shape, 2)[..., 0]
    begin = data.draw(st.integers(0, tensor.numel()))
    end = data.draw(st.integers(begin, tensor.numel()))
    views = list(flat_views(tensor, begin, end))
    assert all(v.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for v in views)
    flat = torch.cat([v.reshape(-1) for v in views]) if views else torch.zeros(0)
    assert flat.tolist() == tensor.flatten()[begin:end].tolist()


# Failures.


class Watched(Group):
    """Records the transfers that this rank began, and how many slices have arrived."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.transfers: list[Transfer] = []
        self.incoming: set[Transfer] = set()
        self.num_arrived = 0

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        self.transfers.append(super().send(tensor, rank, tag))
        return self.transfers[-1]

    def recv(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        self.transfers.append(super().recv(tensor, rank, tag))
        if tag >= handover.FIRST_TAG:
            self.incoming.add(self.transfers[-1])
        return self.transfers[-1]

    def wait(self, work: Any) -> None:
        super().wait(work)
        self.num_arrived += work in self.incoming


def test_a_newer_generation_interrupts_all_ranks_and_the_next_handover_repairs_them() -> None:
    states = [TrainingState({"net": numbers(r)}, {}, {"step": r}) for r in range(WORLD)]
    groups: dict[int, Watched] = {}
    silent, newer = SOURCES[1], threading.Event()

    def check(rank: int) -> None:
        # A newer generation appears once slices have arrived and the next one does not.
        if rank in groups and groups[rank].num_arrived:
            newer.set()
        if newer.is_set():
            raise SupersededError("there is a newer generation")

    def body(group: Group) -> None:
        assert isinstance(group, Watched)
        groups[group.rank] = group
        try:
            if group.rank == silent:  # stopped, or cut off, after the header
                Relay(group, SOURCES, RECEIVERS).recv_header()
                assert newer.wait(30)
            else:
                hand_over(group, SOURCES, RECEIVERS, states[group.rank])
        finally:
            for transfer in group.transfers:
                assert_ended(transfer)

    every = all_ranks(outcome(body), Watched, check)
    assert every[BYSTANDER] is None
    assert every[silent] is None
    for rank in (SOURCES[0], *RECEIVERS):
        assert isinstance(every[rank], SupersededError | WorkerLostError), every[rank]
    assert any(isinstance(every[rank], SupersededError) for rank in RECEIVERS)
    for rank in RECEIVERS:
        assert states[rank].torn

    all_ranks(lambda group: hand_over(group, [2], [0, *RECEIVERS], states[group.rank]))
    for rank in RECEIVERS:
        assert not states[rank].torn
        assert equal(tensors(states[rank].models["net"]), tensors(numbers(2)))


def assert_ended(transfer: Transfer) -> None:
    """Completed or failed, but not still in flight."""
    try:
        transfer.wait(timedelta(milliseconds=1))
    except RuntimeError as e:
        if "Operation timed out" in str(e):
            raise AssertionError("a transfer is still in flight") from e


def test_a_completed_transfer_does_not_keep_a_closed_group_open() -> None:
    kept: list[Transfer] = []

    def body(group: Group) -> None:
        if group.rank == 0:
            kept.append(group.send(torch.ones(1), 1, 5))
            group.wait(kept[0])
        elif group.rank == 1:
            group.wait(group.recv(torch.zeros(1), 0, 5))
            group.wait(group.recv(torch.zeros(1), 0, 6))  # rank 0 is gone

    began_s = time.monotonic()

    def check(rank: int) -> None:
        if time.monotonic() > began_s + 600:
            raise TimeoutError("rank 1 did not notice that rank 0 is gone")

    every = all_ranks(outcome(body), check=check)
    assert isinstance(every[1], WorkerLostError)


class Dying(Group):
    """A source that is lost after a few slices."""

    is_lost = threading.Event()

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Transfer:
        if self.rank == SOURCES[1] and tag > handover.FIRST_TAG + 5:
            self.close()
            self.is_lost.set()
            raise ConnectionError("this rank is gone")
        return super().send(tensor, rank, tag)


def test_losing_a_source_ends_the_handover_on_all_ranks_and_nothing_is_written_later() -> None:
    nets = [numbers(r) for r in range(WORLD)]
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def body(group: Group) -> None:
        try:
            hand_over(group, SOURCES, RECEIVERS, TrainingState({"net": nets[group.rank]}, {}, {}))
        finally:
            seen[group.rank] = {k: t.clone() for k, t in tensors(nets[group.rank]).items()}

    lost_s = []

    def check(rank: int) -> None:
        """Gloo does not notify all ranks; the coordinator does, a little later."""
        if Dying.is_lost.is_set():
            lost_s.append(time.monotonic())
            if lost_s[-1] > lost_s[0] + 1:
                raise SupersededError("there is a newer generation")

    every = all_ranks(outcome(body), Dying, check)
    others = [every[rank] for rank in (SOURCES[0], *RECEIVERS)]
    assert all(isinstance(e, WorkerLostError | SupersededError) for e in others), every
    for rank in RECEIVERS:
        assert equal(tensors(nets[rank]), seen[rank])


def test_a_different_model_is_refused_by_name_before_anything_is_written() -> None:
    def body(group: Group) -> None:
        net = nn.Linear(16, 3 if group.rank in RECEIVERS else 16)
        nn.init.constant_(net.weight, group.rank)
        state = TrainingState({"net": net}, {}, {})
        try:
            hand_over(group, SOURCES, RECEIVERS, state)
        finally:
            assert not state.torn
            assert net.weight.eq(group.rank).all()

    every = all_ranks(outcome(body))
    for rank in RECEIVERS:
        assert isinstance(every[rank], ConfigError)
        assert "net.weight: is (3, 16) float32 here, (16, 16) float32" in str(every[rank])


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"mean": Mean(nn.Linear(2, 2))}, "mean: is in this process, but not in the run's state"),
        ({}, "other: is in the run's state, but not in this process"),
    ],
)
def test_objects_that_only_one_side_has_are_named(theirs: dict[str, Any], message: str) -> None:
    def body(group: Group) -> None:
        other = {"other": Mean(nn.Linear(2, 2))}
        mine = other if group.rank in SOURCES else theirs | (other if theirs else {})
        hand_over(group, SOURCES, RECEIVERS, TrainingState({"net": numbers(1)}, mine, {}))

    every = all_ranks(outcome(body))
    assert message in str(every[RECEIVERS[0]])


def test_sources_with_different_states_are_detected() -> None:
    def body(group: Group) -> None:
        plain = {"rows": torch.zeros(3 + group.rank)}
        hand_over(group, SOURCES, RECEIVERS, TrainingState({"net": numbers(1)}, {}, plain))

    every = all_ranks(outcome(body))
    assert isinstance(every[SOURCES[1]], EvenstepError)
    assert "plain.rows is (3,) float32 on rank 0, (5,) float32 on rank 2" in str(every[SOURCES[1]])


def test_an_unsupported_value_is_named_on_the_source() -> None:
    class Keeps:
        def state_dict(self) -> dict[str, Any]:
            return {"state": {0: {"history": deque([1])}}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(ConfigError) as caught:
        TrainingState({}, {"optimizer": Keeps()}, {}).flatten()
    assert str(caught.value).startswith("optimizer.state.0.history: a deque cannot be serialised")


@pytest.mark.parametrize("here", [True, False])
def test_a_scaler_that_is_enabled_on_one_side_only_is_refused(here: bool) -> None:
    mine, theirs = (torch.amp.GradScaler("cpu", enabled=on) for on in (here, not here))
    state, there = (TrainingState({}, {"scaler": scaler}, {}) for scaler in (mine, theirs))
    with pytest.raises(ConfigError, match=r"scaler: is (en|dis)abled here but (en|dis)abled in"):
        state.apply(there.collect())
    assert not state.torn
