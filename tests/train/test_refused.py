"""Bad input in a training script is refused at once, on every rank, with a remedy."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.utils.data import IterableDataset, TensorDataset

import evenstep
from evenstep.errors import ConfigError, EvenstepError
from evenstep.launch.environment import read_environment
from evenstep.launch.ranks import StaticRank
from evenstep.train.comm.model_check import ModelsDifferError
from evenstep.train.comm.shared_store import RankFailedError
from evenstep.train.data.batch_size import NothingFitsError, largest_share
from evenstep.train.data.loader import Loader
from evenstep.train.job import Options
from evenstep.train.session import Session
from tests.train.ranks import run_ranks

TEMPLATE = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


def net_and_sgd(session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = copy.deepcopy(TEMPLATE)
    prepared: tuple[nn.Module, torch.optim.Optimizer] = session.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    return prepared


def epochs(session: Session, num: Any) -> object:
    session.loader(DATA, batch=8)
    return next(session.epochs(num))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda s: s.loader(DATA, batch=65), "65 is more than the 64 samples of the dataset"),
        (lambda s: s.loader(DATA, batch=0), "batch: must be 1 or more, got 0"),
        (lambda s: s.evaluation(Endless(), batch_size=8), "dataset: has no length"),
        (lambda s: s.loader(DATA, batch=8, in_order=False), "in_order: must be True"),
        (lambda s: s.loader(DATA, batch="8"), "batch: expected a whole number, 1 or more, got '8'"),
        (lambda s: s.loader(DATA, per_worker="8", limit=16), "per_worker: expected a whole number"),
        (lambda s: s.loader(DATA, per_worker=8, limit=1.5), "limit: expected a whole number"),
        (lambda s: epochs(s, "3"), "epochs: expected a whole number, 0 or more, got '3'"),
        (lambda s: epochs(s, -3), "epochs: must be 0 or more, got -3"),
        (
            lambda s: s.prepare(SGD(TEMPLATE.parameters()), TEMPLATE),
            "model: expected a torch.nn.Module, got SGD; give the model first",
        ),
        (lambda s: s.prepare(nn.ReLU()), "no trainable parameters"),
        (lambda s: s.prepare(copy.deepcopy(TEMPLATE).requires_grad_(False)), "no trainable"),
        (lambda s: next(s.epochs(1)), "call session.loader"),
        (lambda s: next(iter(s.loader(DATA, batch=8))), "call session.prepare"),
        (lambda s: s.register("x", object()), "x: has no state_dict"),
        (lambda s: s.register("x", net_and_sgd(s)[1]), "x: is an optimizer: give it to"),
        (lambda s: [net_and_sgd(s) for _ in "ab"], "put several models into one"),
        (lambda s: [s.loader(DATA, batch=8) for _ in "ab"], "use session.evaluation"),
    ],
)
def test_an_invalid_call_is_refused_with_a_remedy(
    use: Callable[[Session], object], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_ranks(1, use)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cap": "a"}, "cap: expected a whole number, 1 or more, got 'a'"),
        ({"cap": 0}, "cap: must be 1 or more, got 0"),
        ({"min_share": "x"}, "min_share: expected a whole number, 0 or more, got 'x'"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"kind": 3}, "kind: expected a name, got 3"),
    ],
)
def test_an_invalid_option_of_join_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        evenstep.join(**options)
    assert str(caught.value) == says


def test_a_batch_that_cannot_give_everyone_a_sample_is_refused_with_the_numbers() -> None:
    def body(session: Session) -> None:
        session._job.options = Options(min_share=3)
        session.loader(DATA, batch=8)

    with pytest.raises(EvenstepError, match="a batch of 8 cannot give 3 workers their minimum, 9"):
        run_ranks(3, body)


def test_caps_that_cannot_hold_the_batch_are_refused_with_the_numbers() -> None:
    def body(session: Session) -> None:
        session._job.options = Options(cap=3)
        session.loader(DATA, batch=8)

    with pytest.raises(EvenstepError, match="a batch of 8 does not fit 2 workers that hold 6"):
        run_ranks(2, body)


def test_models_that_differ_are_named_by_parameter_and_shapes() -> None:
    def body(session: Session) -> None:
        session.prepare(nn.Sequential(nn.Linear(4, 8 + session.rank), nn.Linear(8, 1)))

    with pytest.raises((ModelsDifferError, RankFailedError)) as caught:
        run_ranks(2, body)
    told = str(caught.value)
    assert "0.weight (9, 4) torch.float32 where rank 0 has 0.weight (8, 4)" in told


def test_ranks_that_disagree_on_the_batch_are_refused() -> None:
    def body(session: Session) -> None:
        session.loader(DATA, batch=8 + session.rank)

    with pytest.raises((ConfigError, RankFailedError), match=r"batch: is \d on rank"):
        run_ranks(2, body)


def test_ranks_that_disagree_on_the_order_are_refused() -> None:
    def body(session: Session) -> None:
        session.loader(DATA, batch=8, shuffle=session.rank == 0)

    with pytest.raises((ConfigError, RankFailedError), match=r"shuffle: is (True|False) on rank"):
        run_ranks(2, body)


def test_ranks_with_different_seeds_are_refused() -> None:
    def body(session: Session) -> None:
        session._job.options = Options(seed=session.rank)
        session.loader(DATA, batch=8)

    with pytest.raises((ConfigError, RankFailedError), match=r"seed: is \d on rank"):
        run_ranks(2, body)


def scale(session: Session, scaler: torch.amp.GradScaler, how: str) -> float:
    """Take two steps with a scaler that is passed to `prepare`, registered late, or neither."""
    net = copy.deepcopy(TEMPLATE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.prepare(net, optimizer, *([scaler] if how == "prepare" else []))
    loader = session.loader(DATA, batch=32)
    if how == "register":
        session.register("scaler", scaler)
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(net(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


HOW = ("prepare", "register", "not")


def test_a_scaler_that_is_disabled_on_one_rank_is_refused_before_the_first_step() -> None:
    def body(session: Session) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=session.rank == 0)
        session.prepare(copy.deepcopy(TEMPLATE), scaler)
        session.loader(DATA, batch=32)

    says = r"disabled_scalers: is .* on rank \d, .* on rank \d; enable GradScaler on all"
    with pytest.raises((ConfigError, RankFailedError), match=says):
        run_ranks(2, body)


@pytest.mark.parametrize("how", HOW[1:])
def test_an_unprepared_scaler_that_is_disabled_on_one_rank_ends_the_run(how: str) -> None:
    def body(session: Session) -> None:
        scale(session, torch.amp.GradScaler("cpu", enabled=session.rank == 1), how)

    says = "the loss is scaled by 1 on rank 0, by 65536 on rank 1"
    with pytest.raises((ConfigError, RankFailedError), match=says):
        run_ranks(2, body)


@pytest.mark.parametrize("how", HOW)
def test_scales_that_differ_between_ranks_end_the_run(how: str) -> None:
    def body(session: Session) -> None:
        scale(session, torch.amp.GradScaler("cpu", init_scale=256.0 * (session.rank + 1)), how)

    says = "the loss is scaled by 256 on rank 0, by 512 on rank 1"
    with pytest.raises((ConfigError, RankFailedError), match=says):
        run_ranks(2, body)


@pytest.mark.parametrize("lost_on", [0, 1, 2])
def test_scales_stay_equal_when_gradients_overflow_on_one_rank(lost_on: int) -> None:
    """Also on a rank with a share of zero, whose gradients do not count."""

    def body(session: Session) -> list[float]:
        net, optimizer = net_and_sgd(session)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales = []
        for step, (x, y) in enumerate(session.loader(DATA, batch=8)):
            optimizer.zero_grad()
            factor = float("inf") if session.rank == lost_on and step in (0, 4) else 1.0
            scaler.scale(nn.functional.mse_loss(net(x), y) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    first, *others = run_ranks(3, body, policy={"name": "fixed", "shares": [5, 3, 0]})
    assert others == [first, first]
    assert (first[0] == 128.0) == (lost_on < 2)


def test_a_batch_without_a_backward_pass_is_an_error() -> None:
    def body(session: Session) -> None:
        net_and_sgd(session)
        for _ in session.loader(DATA, batch=8):
            pass

    with pytest.raises(EvenstepError, match="step 0 had no backward pass"):
        run_ranks(1, body)


@pytest.mark.parametrize("world", [1, 2])
def test_a_closed_session_neither_sums_nor_trains(world: int) -> None:
    def body(session: Session) -> tuple[Session, Loader]:
        net_and_sgd(session)
        return session, session.loader(DATA, batch=8)

    for session, loader in run_ranks(world, body):
        with pytest.raises(
            EvenstepError, match=r"session\.sum was used after the session was clos"
        ):
            session.sum(1.0)
        with pytest.raises(
            EvenstepError, match=r"session\.loader was used after the session was c"
        ):
            next(iter(loader))


def never_step(session: Session, net: nn.Module) -> None:
    loader = session.loader(DATA, batch=2)
    for _ in session.epochs(9):
        for x, y in loader:
            nn.functional.mse_loss(net(x), y).backward()


def test_a_script_that_never_steps_its_optimizer_gets_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "evenstep"):
        run_ranks(1, lambda session: never_step(session, net_and_sgd(session)[0]))
    [said] = caplog.messages
    assert "call optimizer.step()" in said


def test_an_optimizer_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(EvenstepError, match="given no optimizer, and 200 batches have passed"):
        run_ranks(1, lambda session: never_step(session, session.prepare(nn.Linear(4, 1))))


def test_a_rank_that_raises_ends_the_others_with_its_traceback() -> None:
    def body(session: Session) -> str:
        net, optimizer = net_and_sgd(session)
        try:
            for step, (x, y) in enumerate(session.loader(DATA, batch=10)):
                if session.rank == 2 and step == 3:
                    raise ZeroDivisionError("mine")
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        except RankFailedError as e:
            return str(e)
        except ZeroDivisionError as e:
            session._roster.fail(e)
            return "mine"
        return "no error"

    told = run_ranks(5, body)
    assert told[2] == "mine"
    for other in (told[0], told[1], told[3], told[4]):
        assert other.startswith("rank 2 failed:")
        assert "ZeroDivisionError: mine" in other


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 50))
def test_the_largest_share_is_found_by_doubling(room: int, limit: int, start: int) -> None:
    tried: list[int] = []

    def step(samples: int) -> None:
        tried.append(samples)
        if samples > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    if start > limit:
        with pytest.raises(ValueError, match="need 1 <= start <= limit"):
            largest_share(step, limit=limit, start=start)
        return
    assert largest_share(step, limit=limit, start=start) == min(room, limit)
    assert len(tried) <= 20


def test_if_no_batch_size_fits_the_error_says_so() -> None:
    def step(samples: int) -> None:
        raise MemoryError

    with pytest.raises(NothingFitsError):
        largest_share(step, limit=64, start=8)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK: must"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR: is missing"),
        ({"RANK": "0"}, "WORLD_SIZE: is missing"),
        ({"RANK": "a", "WORLD_SIZE": "2"}, 'RANK: expected a number, got "a"'),
    ],
)
def test_a_half_set_environment_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(environment)
    assert says in str(caught.value)


def test_without_an_environment_a_script_runs_alone() -> None:
    assert read_environment({}) == StaticRank()


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_an_invalid_batch_weight_is_refused(weight: float) -> None:
    def body(session: Session) -> None:
        net_and_sgd(session)
        next(iter(session.loader(DATA, batch=8, weight=lambda batch: weight)))

    with pytest.raises(EvenstepError, match=f"weight=... returned {weight} for the batch"):
        run_ranks(1, body)
