"""Batch normalisation over uneven workers equals that of one process with the whole batch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import TensorDataset

from evenstep.errors import ConfigError, EvenstepError
from evenstep.train.comm.group import Group
from evenstep.train.reduce.batch_norm import (
    SyncNorm,
    average_buffers,
    disconnect,
    local_layers,
    local_stats_warning,
    synchronise,
)
from evenstep.train.session import Session
from tests.train.ranks import run_ranks

T = TypeVar("T")
ROUNDS = 3


def run_groups(world: int, body: Callable[[Group], T]) -> list[T]:
    """What `body` returns on each rank of a group of threads."""
    store = HashStore()
    groups: list[Group] = []  # none is destroyed while another rank still connects to it

    def one(rank: int) -> T:
        group = Group(store, 1, rank, world, timeout_s=600.0, name="norm")
        groups.append(group)
        return body(group)

    with ThreadPoolExecutor(world) as pool:
        return [f.result(timeout=600) for f in [pool.submit(one, r) for r in range(world)]]


@dataclass
class LayerResults:
    """Outputs and gradients of a layer by round, and its buffers at the end."""

    y: list[Tensor] = field(default_factory=list)
    dx: list[Tensor] = field(default_factory=list)
    params: list[list[Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def pass_through(layer: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> LayerResults:
    """Forward and backward, for a loss that is a weighted mean over the batch."""
    seen = LayerResults()
    for values, tokens in batches:
        x = values.clone().requires_grad_()
        y = layer(x)
        each = (y.flatten(1).double() ** 3).sum(1) + (y.flatten(1).double().sin()).sum(1)
        loss = (each * tokens).sum() / tokens.sum()
        layer.zero_grad()
        loss.backward()
        assert x.grad is not None
        seen.y.append(y.detach())
        seen.dx.append(x.grad)
        seen.params.append([p.grad.clone() for p in layer.parameters() if p.grad is not None])
    seen.buffers = {name: b.clone() for name, b in layer.named_buffers()}
    return seen


def check_against_one_process(
    template: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], shares: Sequence[int], tol: float
) -> None:
    """Compare every rank with one process; a share of zero has a stand-in of NaN."""
    truth = pass_through(copy.deepcopy(template), batches)
    bounds = [(sum(shares[:r]), sum(shares[: r + 1])) for r in range(len(shares))]

    def body(group: Group) -> LayerResults:
        low, high = bounds[group.rank]
        mine = [(x[low:high], t[low:high]) for x, t in batches]
        if low == high:
            mine = [(torch.full_like(x[:1], torch.nan), t[:1]) for x, t in batches]
        weights = iter([float(t.sum()) if high > low else 0.0 for _, t in mine])
        layer = synchronise(copy.deepcopy(template), group, lambda: next(weights))
        return pass_through(layer, mine)

    def close(ours: Tensor, theirs: Tensor) -> None:
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tol * scale)

    ranks = run_groups(len(shares), body)
    for i, (_, tokens) in enumerate(batches):
        part = [float(tokens[low:high].sum() / tokens.sum()) for low, high in bounds]
        for rank, (low, high), of_loss in zip(ranks, bounds, part, strict=True):
            if high > low:
                close(rank.y[i], truth.y[i][low:high])
                close(rank.dx[i] * of_loss, truth.dx[i][low:high])
            else:
                assert not rank.dx[i].any()
        for k, theirs in enumerate(truth.params[i]):  # weighted like in the reducer
            pairs = [(p, r.params[i][k]) for p, r in zip(part, ranks, strict=True) if p > 0]
            close(torch.stack([p * grad for p, grad in pairs]).sum(0), theirs)
    for rank in ranks:
        for name, buffer in rank.buffers.items():
            close(buffer, truth.buffers[name])
            assert torch.equal(buffer, ranks[0].buffers[name])


def batches(
    shape: Sequence[int], dtype: torch.dtype, tokens: bool = False
) -> list[tuple[Tensor, Tensor]]:
    make = torch.Generator().manual_seed(3)
    drawn = []
    for _ in range(ROUNDS):
        x = torch.randn(*shape, generator=make, dtype=torch.float64) * 2 + 3
        counts = torch.randint(1, 9, (shape[0],), generator=make).double()
        drawn.append((x.to(dtype), counts if tokens else torch.ones_like(counts)))
    return drawn


def disturbed(layer: nn.Module) -> nn.Module:
    """Give the parameters values other than ones and zeros."""
    make = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn(p.shape, generator=make))
    return layer


LAYERS = [
    pytest.param(nn.BatchNorm1d(3), (8, 3), id="1d"),
    pytest.param(nn.BatchNorm1d(3), (8, 3, 5), id="1d-sequence"),
    pytest.param(nn.BatchNorm2d(3), (8, 3, 4, 2), id="2d"),
    pytest.param(nn.BatchNorm3d(3), (8, 3, 2, 3, 2), id="3d"),
    pytest.param(nn.BatchNorm2d(3, momentum=None), (8, 3, 4, 2), id="cumulative"),
    pytest.param(nn.BatchNorm2d(3, affine=False), (8, 3, 4, 2), id="not-affine"),
    pytest.param(nn.BatchNorm2d(3, track_running_stats=False), (8, 3, 4, 2), id="untracked"),
]
DOUBLE = (torch.float64, 1e-12)


@pytest.mark.parametrize("shares", [(5, 2, 1), (1, 1, 6), (3, 0, 5), (8, 0, 0)], ids=str)
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [DOUBLE, (torch.float32, 1e-5)])
def test_everything_equals_one_process_with_the_whole_batch(
    layer: nn.Module,
    shape: Sequence[int],
    shares: Sequence[int],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    template = disturbed(copy.deepcopy(layer).to(dtype))
    check_against_one_process(template, batches(shape, dtype), shares, tolerance)


@pytest.mark.parametrize("shares", [(5, 2, 1), (1, 0, 7)], ids=str)
def test_a_loss_that_is_a_mean_over_tokens_is_exact_too(shares: Sequence[int]) -> None:
    template = disturbed(nn.BatchNorm1d(3).double())
    check_against_one_process(template, batches((8, 3), torch.float64, tokens=True), shares, 1e-12)


def test_channels_last_is_exact_too() -> None:
    drawn = batches((8, 3, 4, 2), torch.float64)
    last = [(x.contiguous(memory_format=torch.channels_last), t) for x, t in drawn]
    check_against_one_process(disturbed(nn.BatchNorm2d(3).double()), last, (5, 2, 1), 1e-12)


def test_a_mean_far_from_zero_costs_no_more_digits_than_in_one_process() -> None:
    make = torch.Generator().manual_seed(5)
    x = torch.randn(64, 3, 8, 8, generator=make, dtype=torch.float64) + 1000
    exact = nn.BatchNorm2d(3).double()(x)
    plain = nn.BatchNorm2d(3)(x.float())

    def body(group: Group) -> Tensor:
        part = x.float().split([40, 20, 4])[group.rank]
        layer = synchronise(nn.BatchNorm2d(3), group, lambda: float(len(part)))
        y: Tensor = layer(part).detach()
        return y

    ours = torch.cat(run_groups(3, body))
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_precision_input_gives_half_precision_output(param_dtype: torch.dtype) -> None:
    [(values, _), *_] = batches((8, 3, 4, 2), torch.bfloat16)
    truth = nn.BatchNorm2d(3)(values.float())

    def body(group: Group) -> tuple[Tensor, Tensor]:
        x = values.split([5, 3])[group.rank].clone().requires_grad_()
        layer = synchronise(nn.BatchNorm2d(3).to(param_dtype), group, lambda: float(len(x)))
        y: Tensor = layer(x)
        y.pow(2).mean().backward()
        assert x.grad is not None
        assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {param_dtype}
        return y.detach(), x.grad

    for part, (y, dx) in zip(truth.split([5, 3]), run_groups(2, body), strict=True):
        assert y.dtype == dx.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), part.detach(), rtol=2e-2, atol=2e-2)


def test_it_costs_one_all_reduce_forward_and_one_backward_and_reports_the_wait() -> None:
    def body(group: Group) -> list[int]:
        waits: list[float] = []
        layer = synchronise(nn.BatchNorm1d(3), group, lambda: 2.0, waits.append)
        counts = []
        for needs_grad in (True, False):
            y = layer(torch.randn(2, 3).requires_grad_(needs_grad))
            counts.append(len(waits))
            y.sum().backward()
            counts.append(len(waits))
        assert min(waits) > 0
        return counts

    assert run_groups(2, body) == [[1, 2, 3, 3]] * 2


def test_once_the_group_is_closed_layers_still_run_for_the_void_step() -> None:
    """Their results do not count, but they must not end the run."""

    def body(group: Group) -> bool:
        layer = synchronise(nn.BatchNorm1d(3), group, lambda: 0.0, on_lost=lambda _: None)
        group.close()
        return bool(layer(torch.randn(1, 3)).isfinite().all())

    assert run_groups(2, body) == [True, True]


def test_evaluation_is_plain_and_does_not_communicate() -> None:
    template = disturbed(nn.BatchNorm1d(3))
    x = torch.randn(4, 3)

    def body(group: Group) -> bool:
        layer = synchronise(copy.deepcopy(template), group, lambda: 1.0)
        if group.rank == 0:  # only this rank: an all-reduce would block forever
            return torch.equal(layer.eval()(x), copy.deepcopy(template).eval()(x))
        return True

    assert run_groups(2, body) == [True, True]


def alone() -> Group:
    return Group(HashStore(), 1, 0, 1, timeout_s=1.0)


def test_a_single_worker_has_plain_batch_norm() -> None:
    template, x = disturbed(nn.BatchNorm1d(3)), torch.randn(4, 3)
    layer = synchronise(copy.deepcopy(template), alone(), lambda: 4.0)
    assert isinstance(layer, SyncNorm)
    assert torch.equal(layer(x), template(x))


def test_training_mode_outside_a_step_is_refused() -> None:
    def body(group: Group) -> None:
        layer = synchronise(nn.BatchNorm1d(3), group, lambda: 0.0)
        with pytest.raises(EvenstepError, match=r"no worker had a batch.*model\.eval\(\)"):
            layer(torch.randn(4, 3))

    run_groups(2, body)


def test_one_value_per_channel_is_refused_as_in_one_process() -> None:
    def body(group: Group) -> None:
        layer = synchronise(nn.BatchNorm1d(3), group, lambda: float(group.rank == 0))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(torch.randn(1, 3))

    run_groups(2, body)


def test_one_sample_each_is_enough() -> None:
    def body(group: Group) -> None:
        layer = synchronise(nn.BatchNorm1d(3), group, lambda: 1.0)
        assert layer(torch.full((1, 3), float(group.rank))).abs().max() > 0.9

    run_groups(2, body)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4)
    )


def test_modules_parameters_buffers_and_hooks_stay_the_same_objects() -> None:
    net, called = network(), []
    net[1].register_forward_hook(lambda *_: called.append(True))
    before = [id(t) for t in (*net.modules(), *net.parameters(), *net.buffers())]
    assert synchronise(net, alone(), lambda: 1.0) is net
    assert [id(t) for t in (*net.modules(), *net.parameters(), *net.buffers())] == before
    assert [type(m) for m in net] == [nn.Conv2d, SyncNorm, nn.Flatten, nn.Linear, SyncNorm]
    net(torch.randn(4, 1, 4, 4))
    assert called


def test_plain_and_synchronised_layers_load_each_others_state() -> None:
    plain, sync = network(), synchronise(network(), alone(), lambda: 1.0)
    plain(torch.randn(4, 1, 4, 4))
    sync.load_state_dict(plain.state_dict())
    fresh = network()
    fresh.load_state_dict(sync.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name])


def test_a_second_call_moves_the_layers_to_the_new_group() -> None:
    old, new = alone(), alone()
    net = synchronise(synchronise(network(), old, lambda: 1.0), new, lambda: 1.0)
    assert [m.group for m in net.modules() if isinstance(m, SyncNorm)] == [new] * 2


def test_copies_of_a_model_follow_it_to_the_new_group() -> None:
    old, new = alone(), alone()
    net = synchronise(network(), old, lambda: 1.0)
    twin = copy.deepcopy(net)
    synchronise(net, new, lambda: 1.0)
    assert [m.group for m in twin.modules() if isinstance(m, SyncNorm)] == [new] * 2


def test_a_void_step_does_not_communicate_even_if_there_is_a_new_group_already() -> None:
    def body(group: Group) -> bool:
        layer = synchronise(nn.BatchNorm1d(3), group, lambda: 2.0, is_void=lambda: True)
        if group.rank == 0:  # only this rank: an all-reduce would block forever
            return bool(layer(torch.randn(2, 3)).isfinite().all())
        return True

    assert run_groups(2, body) == [True, True]


def test_layers_of_a_closed_session_can_be_synchronised_again() -> None:
    net = synchronise(network(), alone(), lambda: 1.0)
    disconnect(net)
    assert local_layers(net) == ["1", "4"]
    new = alone()
    synchronise(net, new, lambda: 1.0)
    assert [m.group for m in net.modules() if isinstance(m, SyncNorm)] == [new] * 2


def test_a_copy_stays_synchronised_and_a_saved_model_does_not() -> None:
    net = synchronise(network(), alone(), lambda: 1.0)
    twin = copy.deepcopy(net)
    assert isinstance(twin, nn.Sequential)
    assert isinstance(net, nn.Sequential)
    assert twin[1].context is net[1].context is not None
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded[1].context is None
    loaded(torch.randn(4, 1, 4, 4))


class CustomNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_a_subclass_of_batch_norm_is_refused_and_nothing_is_changed() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), CustomNorm(3))
    with pytest.raises(ConfigError, match="sync_batchnorm: 1 is a CustomNorm"):
        synchronise(net, alone(), lambda: 1.0)
    assert type(net[0]) is nn.BatchNorm1d


def test_the_warning_names_layers_with_local_statistics() -> None:
    net = nn.Sequential(network(), network())
    assert local_layers(net) == ["0.1", "0.4", "1.1", "1.4"]
    warning = local_stats_warning(local_layers(net))
    assert "0.1, 0.4, 1.1 and 1 more" in warning
    assert "sync_batchnorm=True" in warning
    assert "the model" in local_stats_warning(local_layers(nn.BatchNorm1d(3)))
    assert local_layers(synchronise(net, alone(), lambda: 1.0)) == []


def test_running_buffers_are_averaged_by_share() -> None:
    def body(group: Group) -> dict[str, Tensor]:
        net = network()
        weight = (5.0, 3.0, 0.0)[group.rank]
        values = {
            "running_mean": (1.0, 9.0, torch.nan),
            "running_var": (2.0, 10.0, torch.nan),
            "num_batches_tracked": (0, 1, 2),
        }
        for name, buffer in net.named_buffers():
            buffer.fill_(values[name.split(".")[1]][group.rank])
        average_buffers(net, group.sum, weight)
        return dict(net.named_buffers())

    for rank, buffers in enumerate(run_groups(3, body)):
        for name, buffer in buffers.items():
            kind = name.split(".")[1]
            wanted = {"running_mean": 4.0, "running_var": 5.0, "num_batches_tracked": rank}[kind]
            assert buffer.eq(wanted).all(), name


def test_buffers_stay_if_all_weights_are_zero() -> None:
    def body(group: Group) -> None:
        net = network()
        before = {name: buffer.fill_(7).clone() for name, buffer in net.named_buffers()}
        average_buffers(net, group.sum, 0.0)
        assert all(torch.equal(b, before[name]) for name, b in net.named_buffers())

    run_groups(2, body)


# The compiler suppresses a warning of its own, which fails in two threads at once.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_model_is_exact_too() -> None:
    [(values, tokens), *_] = batches((8, 6), torch.float64)
    truth = pass_through(copy.deepcopy(SMALL), [(values, tokens)])

    def body(group: Group) -> LayerResults:
        x = values.split([5, 3])[group.rank]
        net = synchronise(copy.deepcopy(SMALL), group, lambda: float(len(x)))
        compiled = torch.compile(net, backend="eager")
        assert isinstance(compiled, nn.Module)
        return pass_through(compiled, [(x, tokens[: len(x)])])

    first, second = run_groups(2, body)
    for k, theirs in enumerate(truth.params[0]):
        ours = (5 * first.params[0][k] + 3 * second.params[0][k]) / 8
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Branched(nn.Module):
    """Large enough for several buckets, with a layer that not every batch needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 256)
        self.norm = nn.BatchNorm1d(256)
        self.wide = nn.Linear(256, 600)
        self.again = nn.BatchNorm1d(600)
        self.last = nn.Linear(600, 1)
        self.rare = nn.Linear(600, 300)

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.wide(self.norm(self.first(x)).tanh())).tanh()
        out: Tensor = self.last(h)
        rare = x[:, :1] > 1.2
        if rare.any():
            out = out + self.rare(h).tanh().mean(1, keepdim=True) * rare
        return out


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1), nn.BatchNorm1d(1)
    )


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    # Built once and copied: ranks are threads here and would race for torch's global random state.
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make().double()


SMALL, BRANCHED = seeded(small), seeded(Branched)


@pytest.mark.parametrize(
    ("shares", "num"), [([5, 2, 1], 48), ([8, 0, 0], 48), ([6, 1, 1], 45)], ids=str
)
@pytest.mark.parametrize("template", [SMALL, BRANCHED], ids=["small", "branched"])
def test_a_run_ends_with_the_parameters_of_one_process(
    template: nn.Module, shares: list[int], num: int
) -> None:
    make = torch.Generator().manual_seed(6)
    x = torch.randn(num, 6, generator=make, dtype=torch.float64)
    data = TensorDataset(x, (x.sum(1, keepdim=True) * 0.3).tanh())
    store = HashStore()

    def body(session: Session) -> dict[str, Tensor]:
        net = copy.deepcopy(template)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9)
        net, optimizer = session.prepare(net, optimizer)
        if session.world > 1:
            group = Group(store, 1, session.rank, session.world, timeout_s=30.0, name="norm")
            net = synchronise(net, group, lambda: float(session.counted))
        loader = session.loader(data, batch=8)
        for _ in session.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return {name: tensor.clone() for name, tensor in net.state_dict().items()}

    [truth] = run_ranks(1, body, policy="uniform")
    ranks = run_ranks(len(shares), body, policy={"name": "fixed", "shares": shares})
    for rank in ranks:
        for name, tensor in rank.items():
            assert torch.equal(tensor, ranks[0][name]), name
            torch.testing.assert_close(tensor, truth[name], rtol=0, atol=1e-12)


def test_after_the_session_layers_of_the_model_and_of_its_copies_are_plain() -> None:
    make = torch.Generator().manual_seed(6)
    x = torch.randn(32, 6, generator=make, dtype=torch.float64)

    def body(session: Session) -> tuple[nn.Module, AveragedModel, Tensor]:
        net = session.prepare(copy.deepcopy(SMALL), sync_batchnorm=True)
        averaged = AveragedModel(net)
        for xs in session.loader(x, batch=16):
            loss = net(xs).pow(2).mean()
            loss.backward()
        again: Tensor = net(xs).pow(2).mean()
        return net, averaged, again

    plain = copy.deepcopy(SMALL)
    update_bn(x.split(8), plain)
    for net, averaged, loss in run_ranks(2, body, policy="uniform"):
        with pytest.raises(EvenstepError, match="after the session was closed"):
            loss.backward()
        for trained in (net, averaged.module):
            trained.load_state_dict(SMALL.state_dict())
            update_bn(x.split(8), trained)
            for name, buffer in plain.named_buffers():
                assert torch.equal(trained.get_buffer(name), buffer), name
