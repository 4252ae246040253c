"""Unusual parameters, gradients and backward passes are exact, or refused by name."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evenstep.errors import EvenstepError
from evenstep.train.comm.group import GroupGoneError
from evenstep.train.reduce import bucket
from evenstep.train.reduce.reducer import Reducer
from evenstep.train.session import Session
from evenstep.train.step import FORGOTTEN, Batch, Step
from tests.train.ranks import control_of, run_ranks
from tests.train.test_exact import assert_exact
from tests.train.test_loop import data, made, mse, result, sgd

Use = Callable[[Session], object]


def error_of(world: int, use: Use) -> str:
    """The most detailed message of the error that all ranks raise."""
    messages: list[str] = []

    def body(session: Session) -> None:
        try:
            use(session)
        except EvenstepError as e:
            messages.append(str(e))
            raise

    with pytest.raises(EvenstepError):
        run_ranks(world, body, policy="uniform")
    return max(messages, key=len)


def steps(
    session: Session, net: nn.Module, optimizer: torch.optim.Optimizer, *, before: Use | None = None
) -> None:
    """Train an epoch; `before` is called before each step."""
    for x, y in session.loader(data(), batch=8):
        if before is not None:
            before(session)
        optimizer.zero_grad()
        mse(net(x), y).backward()
        optimizer.step()


# Parameters that are not reduced.


def unfrozen(session: Session) -> None:
    net = made()
    assert isinstance(net, nn.Sequential)
    net[0].requires_grad_(False)
    net, optimizer = session.prepare(net, sgd(net))
    steps(session, net, optimizer, before=lambda s: net[0].requires_grad_(s.step > 1))


def new_head(session: Session) -> None:
    net = made()
    assert isinstance(net, nn.Sequential)
    net, optimizer = session.prepare(net, sgd(net))
    net.append(nn.Linear(1, 1, dtype=torch.float64))
    optimizer.add_param_group({"params": net[3].parameters()})
    steps(session, net, optimizer)


def weighted_loss(session: Session) -> None:
    net, scale = made(), nn.Parameter(torch.ones(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD([*net.parameters(), scale], lr=0.1)
    net, optimizer = session.prepare(net, optimizer)
    for x, y in session.loader(data(), batch=8):
        optimizer.zero_grad()
        (scale.mean() * mse(net(x), y)).backward()
        optimizer.step()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("use", "who", "way_out"),
    [
        (unfrozen, "0.weight, shape (16, 6)", "frozen and unfrozen at any time"),
        (new_head, "3.weight, shape (1, 1)", "Call prepare once the model"),
        (weighted_loss, "(shape (3, 1))", "torch.nn.ModuleList([model, ...])"),
    ],
)
def test_an_optimizer_never_steps_by_a_gradient_that_was_not_reduced(
    world: int, use: Use, who: str, way_out: str
) -> None:
    message = error_of(world, use)
    assert who in message
    assert way_out in message


def test_parameters_frozen_after_prepare_and_unfrozen_later_are_exact() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        net = made()
        assert isinstance(net, nn.Sequential)
        start = result(net)[0]
        net, optimizer = session.prepare(net, sgd(net))
        net[0].requires_grad_(False)

        def unfreeze(session: Session) -> None:
            net[0].requires_grad_(session.step > 2)
            assert torch.equal(net[0].weight, start) == (session.step < 4)

        steps(session, net, optimizer, before=unfreeze)
        return result(net)

    assert_exact(body, [5, 2, 1])


def test_parameters_outside_the_model_without_a_gradient_are_ignored() -> None:
    def body(session: Session) -> None:
        net, other = made(), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*net.parameters(), other], lr=0.1)
        steps(session, *session.prepare(net, optimizer))

    run_ranks(2, body)


# Dtypes.


class Waves(nn.Module):
    """Complex weights between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.waves = nn.Parameter(torch.randn(8, 5, dtype=torch.complex128))
        self.turn = nn.Parameter(torch.randn(5, 3, dtype=torch.complex128).T)
        self.last = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.first(x).to(torch.complex128) @ self.waves @ self.turn.T.conj()
        out: torch.Tensor = self.last(turned.real.tanh() * turned.imag.tanh())
        return out


torch.manual_seed(3)
WAVES, TURNED = Waves(), nn.Linear(6, 1, dtype=torch.complex128)


def waves(session: Session) -> list[torch.Tensor]:
    net = made(WAVES)
    net, optimizer = session.prepare(net, sgd(net, 0.01))
    steps(session, net, optimizer)
    return result(net)


def only_complex(session: Session) -> list[torch.Tensor]:
    """The control values travel with complex gradients, too."""
    net = made(TURNED)
    net, optimizer = session.prepare(net, sgd(net))
    for x, y in session.loader(data(), batch=8):
        optimizer.zero_grad()
        (net(x.to(torch.complex128)) - y).abs().square().mean().backward()
        optimizer.step()
    return result(net)


@pytest.mark.parametrize("loop", [waves, only_complex], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("shares", [[5, 2, 1], [8, 0, 0]], ids=str)
def test_complex_parameters_end_where_one_process_ends(
    loop: Callable[[Session], list[torch.Tensor]], shares: list[int]
) -> None:
    assert_exact(loop, shares)


def test_norms_of_complex_gradients_are_exact() -> None:
    def body(session: Session) -> tuple[float, float]:
        net = made(TURNED)
        net, _ = session.prepare(net, sgd(net))
        for x, y in session.loader(data(), per_worker=8, limit=16):
            (net(x.to(torch.complex128)) - y).abs().square().mean().backward()
            return session._job.step.grad_squared_norm, sum(
                float(p.grad.abs().square().sum()) for p in net.parameters() if p.grad is not None
            )
        raise AssertionError("no step")

    for reported, norm in run_ranks(2, body, batch={"lr_rule": "adascale"}):
        assert reported == pytest.approx(norm)


def test_parameters_and_buffers_of_any_dtype_start_with_the_leaders_values() -> None:
    kinds = [torch.int16, torch.bool, torch.complex64, torch.bfloat16, torch.uint8, torch.int64]

    def body(session: Session) -> list[torch.Tensor]:
        net = nn.Linear(1, 1)
        value = 1 - session.rank
        for i, dtype in enumerate(kinds):
            net.register_buffer(f"flat{i}", torch.full((3, 2), value, dtype=dtype))
            net.register_buffer(f"turned{i}", torch.full((3, 2), value, dtype=dtype).T)
            net.register_buffer(f"one{i}", torch.tensor(value, dtype=dtype))
        net.register_buffer("expanded", torch.tensor([float(value)]).expand(4))
        net.register_buffer("gaps", torch.full((4, 4), float(value))[:, ::2])
        net.register_buffer("empty", torch.zeros(0))
        net.turn = nn.Parameter(torch.full((2,), value + 1j * value))
        session.prepare(net)
        return [*net.buffers(), net.turn.detach()]

    for tensors in run_ranks(2, body):
        for tensor in tensors:
            assert bool((tensor.abs() if tensor.is_complex() else tensor).all())


# Gradients that cannot be reduced.


def sparse(session: Session) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(4, 1))
    net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    words = TensorDataset(torch.arange(16)[:, None] % 10, torch.ones(16, 1))
    for x, y in session.loader(words, batch=8):
        optimizer.zero_grad()
        mse(net(x), y).backward()
        optimizer.step()


def second_order(session: Session) -> None:
    net = made()
    net, optimizer = session.prepare(net, sgd(net))
    for x, y in session.loader(data(), batch=8):
        mse(net(x), y).backward(create_graph=True)
        optimizer.step()


def converted(session: Session) -> None:
    net = made()
    net, optimizer = session.prepare(net, sgd(net))
    net.float()
    for x, y in session.loader(data(), batch=8):
        mse(net(x.float()), y.float()).backward()
        optimizer.step()


def test_a_model_that_was_converted_after_it_was_prepared_is_refused() -> None:
    says = "was torch.float64 when session.prepare was called, and is torch.float32 now"
    assert says in error_of(2, converted)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("use", "way_out"),
    [(sparse, "shape (10, 4) got a sparse gradient"), (second_order, "without create_graph=True")],
)
def test_gradients_that_cannot_be_reduced_are_refused(world: int, use: Use, way_out: str) -> None:
    assert way_out in error_of(world, use)


def test_a_gradient_penalty_by_autograd_grad_is_exact() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        net = made()
        net, optimizer = session.prepare(net, sgd(net))
        for x, y in session.loader(data(), batch=8):
            optimizer.zero_grad()
            x.requires_grad_()
            out = net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (mse(out, y) + slope.square().sum(1).mean()).backward()
            optimizer.step()
        return result(net)

    assert_exact(body, [5, 2, 1])


# Optimizers that step inside of a backward pass.


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("hooks_first", [True, False])
def test_an_optimizer_that_steps_inside_of_backward_is_refused(
    world: int, hooks_first: bool
) -> None:
    """One optimizer per parameter, in a hook that runs before or after that of the session."""

    def in_backward(session: Session) -> None:
        net = made()
        optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {
            param: torch.optim.SGD([param], lr=0.1) for param in net.parameters()
        }

        def step(param: torch.Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        def add_hooks() -> None:
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(step)

        if hooks_first:
            add_hooks()
        session.prepare(net, *optimizers.values())
        if not hooks_first:
            add_hooks()
        for x, y in session.loader(data(), batch=8):
            mse(net(x), y).backward()

    assert "steps inside of backward()" in error_of(world, in_backward)


@pytest.mark.parametrize("world", [1, 2])
def test_a_hook_that_uses_a_gradient_up_before_it_is_reduced_is_refused(world: int) -> None:
    """As an update by hand in a hook that was there before the session's."""

    @torch.no_grad()
    def update(param: torch.Tensor) -> None:
        assert param.grad is not None
        param -= 0.1 * param.grad
        param.grad = None

    def by_hand(session: Session) -> None:
        net = made()
        for param in net.parameters():
            param.register_post_accumulate_grad_hook(update)
        net, optimizer = session.prepare(net, sgd(net))
        steps(session, net, optimizer)

    assert "has no gradient left when it is to be reduced" in error_of(world, by_hand)


# Accumulating over many batches.


def accumulate(session: Session, num: int, every: int) -> list[torch.Tensor]:
    net = made()
    net, optimizer = session.prepare(net, sgd(net))
    for i, (x, y) in enumerate(session.loader(data(3 * num), batch=3)):
        (mse(net(x), y) / every).backward()
        if i % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return result(net)


def test_accumulating_over_unusually_many_batches_is_exact_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = FORGOTTEN + 6
    with caplog.at_level(logging.WARNING, "evenstep"):
        assert_exact(lambda session: accumulate(session, 2 * every, every), [2, 1])
    warnings = [m for m in caplog.messages if "has taken a step" in m]
    assert len(warnings) == 2  # from the reference run and from the leader of two
    assert f"in {FORGOTTEN} batches" in warnings[0]


def test_several_backward_passes_of_a_batch_count_as_one_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(session: Session) -> None:
        net = made()
        net, optimizer = session.prepare(net, sgd(net))
        for x, y in session.loader(data(6), batch=3):
            for _ in range(FORGOTTEN):
                (mse(net(x), y) / FORGOTTEN).backward()
        optimizer.step()

    with caplog.at_level(logging.WARNING, "evenstep"):
        run_ranks(1, body)
    assert not caplog.messages


# Backward passes that fail.


class Fails(nn.Module):
    """An identity whose next `left` backward passes fail."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x.register_hook(self._fail)
        return x

    def _fail(self, grad: torch.Tensor) -> None:
        if self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")


def retrying(session: Session) -> list[torch.Tensor]:
    """After an out-of-memory error, retry the same batch."""
    early, late = copy.deepcopy(made()).children(), Fails()
    first, tanh, last = early
    net = nn.Sequential(first, late, tanh, last)  # fails after the last layer's gradients
    net, optimizer = session.prepare(net, sgd(net))
    for step, (x, y) in enumerate(session.loader(data(), batch=8)):
        late.left = 2 if step in (0, 3) and session.rank == 0 else 0
        while True:
            optimizer.zero_grad()
            try:
                mse(net(x), y).backward()
                break
            except torch.OutOfMemoryError:
                continue
        optimizer.step()
    return result(net)


def test_retrying_a_failed_backward_pass_is_exact() -> None:
    assert_exact(retrying, [5, 2, 1])


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "FIRST_BUCKET_BYTES", 64)
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 64)


def test_retrying_after_a_bucket_was_sent_is_an_error(small_buckets: None) -> None:
    assert "failed after part of its gradients was sent" in error_of(2, retrying)


# Several devices in one process: autograd has a thread per device, so hooks run concurrently.


class Slow(torch.Tensor):
    """A gradient whose copy into a bucket blocks until `meanwhile` returns."""

    meanwhile: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.mul:
            args[0].meanwhile()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_bucket_is_sent_once_it_has_the_gradients_of_all_devices() -> None:
    def body(session: Session) -> tuple[bool, list[torch.Tensor]]:
        slow, fast = params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
        lost: list[GroupGoneError] = []
        step = Step()
        step.batch = Batch(weight=1.0)
        reducer = Reducer(
            params,
            step,
            on_ready=lambda used, norm, _: torch.tensor([norm, *map(float, used)]),
            on_reduced=lambda pulse: (1.0, [True, True]),
            on_lost=lost.append,
        )
        control = control_of(session)
        reducer.regroup(control, control, 1)
        [bucket] = reducer.buckets
        bucket.flat.fill_(torch.nan)
        sent_early: list[bool] = []

        def on_other_device() -> None:
            other = threading.Thread(target=reducer._on_grad, args=(fast,), daemon=True)
            other.start()
            other.join(30.0)
            sent_early.append(other.is_alive() or bucket.work is not None)

        def on_pass(_: torch.Tensor) -> None:
            gradient = torch.ones(4).as_subclass(Slow)
            gradient.meanwhile = on_other_device
            slow.grad, fast.grad = gradient, 2 * torch.ones(4)
            reducer._on_grad(slow)

        x = torch.ones(1, requires_grad=True)
        x.register_hook(on_pass)  # runs within a backward pass, like parameters' hooks
        x.sum().backward()
        reducer.close()
        return sent_early == [True], [p.grad.clone() for p in params if p.grad is not None]

    for sent_early, gradients in run_ranks(2, body):
        assert not sent_early
        for gradient, expected in zip(gradients, (2.0, 4.0), strict=True):
            assert torch.equal(gradient, torch.full((4,), expected))
