"""Loops that count batches: right by the session's own numbers, refused where they would not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from evenstep.errors import ConfigError, EvenstepError
from evenstep.launch.environment import CoordinatorAddress
from evenstep.launch.ranks import StaticRank
from evenstep.train.join import elastic_session, fixed_session
from evenstep.train.session import Session
from tests.coordinate.hosted import hosted
from tests.train.ranks import run_ranks
from tests.train.test_left import BATCH, NUM, Training


class Registered(Training):
    """A model with a schedule and an average of its weights."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        session.register("schedule", self.schedule)
        session.register("average", self.average)


Loop = Callable[[Any], None]


def in_a_run(folder: Path, loop: Loop) -> None:
    """Train as the only worker of a run that others may join."""
    with hosted(folder) as run:
        where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
        with elastic_session(where) as session:
            loop(Registered(session))


def accumulate(training: Training, batches: Any, num: int = 3) -> None:
    for i, batch in batches:
        torch.nn.functional.mse_loss(training.net(batch[0]), batch[1]).backward()
        if (i + 1) % num == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()


def by_builtin(training: Training) -> None:
    for _ in range(2):
        accumulate(training, enumerate(training.loader))


def by_session_enumerate(training: Training) -> None:
    for _ in range(2):
        accumulate(training, training.session.enumerate(training.loader))


def by_session_step(training: Training) -> None:
    for _ in range(2):
        for batch in training.loader:
            torch.nn.functional.mse_loss(training.net(batch[0]), batch[1]).backward()
            if training.session.step % 3 == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()


def every_batch(training: Training) -> None:
    for batch in training.loader:
        training.step(batch)


def with_the_next_batch_in_hand(training: Training) -> None:
    batches = iter(training.loader)
    batch = next(batches, None)
    while batch is not None:
        torch.nn.functional.mse_loss(training.net(batch[0]), batch[1]).backward()
        batch = next(batches, None)
        training.optimizer.step()
        training.optimizer.zero_grad()


def at_the_beginning_of_the_next_window(training: Training) -> None:
    for i, batch in training.session.enumerate(training.loader):
        if i and i % 2 == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()
        torch.nn.functional.mse_loss(training.net(batch[0]), batch[1]).backward()


def by_closures(training: Training) -> None:
    """As frameworks step: forward and backward are in a function that the optimizer calls."""
    for i, batch in training.session.enumerate(training.loader):

        def compute(batch: Any = batch) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(training.net(batch[0]), batch[1])
            loss.backward()
            return loss

        if i % 2 == 0:
            compute()
        else:
            training.optimizer.step(compute)
            training.optimizer.zero_grad()


def after_the_epoch(training: Training) -> None:
    """What is left of a window, once the loop is over."""
    for _ in range(2):
        accumulate(training, training.session.enumerate(training.loader), num=4)
        training.optimizer.step()
        training.optimizer.zero_grad()


def alternating(training: Training) -> None:
    """Two steps in each batch, with a backward pass before each."""
    for batch in training.loader:
        training.step(batch)
        training.step(batch)


def scheduled(
    training: Registered, batches: Any, when: Callable[[int], bool], average: Any = None
) -> None:
    for i, batch in batches:
        training.step(batch)
        if not when(i):
            continue
        if average is None:
            training.schedule.step()
        else:
            average.update_parameters(training.net)


def scheduled_in_every_batch(training: Registered) -> None:
    for _ in range(3):
        scheduled(training, enumerate(training.loader), lambda i: True)


def scheduled_in_every_epoch(training: Registered) -> None:
    """Also by loops that never ask for the end of an epoch, or that leave it early."""
    for _ in range(3):
        scheduled(training, enumerate(training.loader), lambda i: False)
        training.schedule.step()
    for _ in range(3):
        batches = iter(training.loader)
        for _ in range(len(training.loader)):
            training.step(next(batches))
        training.schedule.step()
    for _ in range(3):
        for i, batch in enumerate(training.loader):
            training.step(batch)
            if i == 2:
                break
        training.schedule.step()


def scheduled_by_session_enumerate(training: Registered) -> None:
    for _ in range(3):
        batches = training.session.enumerate(training.loader)
        scheduled(training, batches, lambda i: i % 3 == 2)


def averaged_in_every_batch(training: Registered) -> None:
    for _ in range(3):
        scheduled(training, enumerate(training.loader), lambda i: True, training.average)


def averaged_by_session_enumerate(training: Registered) -> None:
    for _ in range(3):
        batches = training.session.enumerate(training.loader)
        scheduled(training, batches, lambda i: i % 2 == 1, training.average)


def averaged_where_the_data_says(training: Registered) -> None:
    """By chance in every second batch for a while."""
    scheduled(training, enumerate(training.loader), lambda i: i == 0, training.average)
    for _ in range(4):
        scheduled(training, enumerate(training.loader), lambda i: i % 2 == 1, training.average)


def averaged_after_every_epoch(training: Registered) -> None:
    for _ in range(5):
        scheduled(training, enumerate(training.loader), lambda i: False)
        training.average.update_parameters(training.net)


def when_the_loss_is_low(training: Training) -> None:
    """Batches are left out irregularly, by what they are."""
    for batch in training.loader:
        training.optimizer.zero_grad()
        torch.nn.functional.mse_loss(training.net(batch[0]), batch[1]).backward()
        if training.loader.index in (0, 2, 3, 5):
            training.optimizer.step()


def test_a_loop_that_counts_batches_by_itself_is_refused_in_an_elastic_run(tmp_path: Path) -> None:
    with pytest.raises(EvenstepError, match=r"every 3 batches.*session\.enumerate"):
        in_a_run(tmp_path / "run", by_builtin)


@pytest.mark.parametrize("loop", [with_the_next_batch_in_hand, at_the_beginning_of_the_next_window])
def test_a_step_with_the_next_batch_in_hand_is_refused_in_an_elastic_run(
    tmp_path: Path, loop: Loop
) -> None:
    """Between two batches there would always be gradients: nobody could join, nothing be saved."""
    with pytest.raises(EvenstepError, match=r"after batch \d+ was taken.*before you take the next"):
        in_a_run(tmp_path / "run", loop)


@pytest.mark.parametrize(
    "loop",
    [
        after_the_epoch,
        alternating,
        averaged_after_every_epoch,
        averaged_by_session_enumerate,
        averaged_in_every_batch,
        averaged_where_the_data_says,
        scheduled_by_session_enumerate,
        scheduled_in_every_batch,
        scheduled_in_every_epoch,
        by_closures,
        by_session_enumerate,
        by_session_step,
        every_batch,
        when_the_loss_is_low,
    ],
)
def test_loops_that_count_rightly_or_not_at_all_are_not_refused(tmp_path: Path, loop: Loop) -> None:
    in_a_run(tmp_path / "run", loop)


def test_a_fixed_roster_repeats_no_batch_so_any_count_is_right() -> None:
    with fixed_session(StaticRank()) as session:
        by_builtin(Training(session))


def looks_first(training: Training) -> None:
    next(iter(training.loader))
    for _ in range(2):
        every_batch(training)


def looks_between(training: Training) -> None:
    for _ in range(3):
        next(iter(training.loader))
        every_batch(training)


def looks_in_numbered_epochs(training: Training) -> None:
    for _ in training.session.epochs(2):
        next(iter(training.loader))
        every_batch(training)


@pytest.mark.parametrize(
    ("loop", "num_warnings"),
    [(looks_first, 0), (looks_between, 1), (looks_in_numbered_epochs, 0)],
)
def test_the_leader_warns_once_of_looks_that_joiners_cannot_follow(
    tmp_path: Path, loop: Loop, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_run(tmp_path / "run", loop)
    assert caplog.text.count("left before its first backward pass, between") == num_warnings


def test_batches_are_numbered_within_their_epoch() -> None:
    def body(session: Session) -> list[int]:
        training, numbers = Training(session), []
        for _ in range(2):
            for i, batch in session.enumerate(training.loader, start=1):
                training.step(batch)
                numbers.append(i)
        return numbers

    assert run_ranks(2, body) == [[1, 2, 3, 4, 5, 6] * 2] * 2


def test_windows_have_so_many_batches_and_fewer_at_the_end_of_an_epoch() -> None:
    def body(session: Session) -> list[tuple[int, int]]:
        training, sizes = Training(session), []
        for _ in session.epochs(2):
            for window in session.accumulate(training.loader, 4):
                num = 0
                for batch in window:
                    training.step(batch)
                    num += 1
                sizes.append((len(window), num))
        return sizes

    assert run_ranks(2, body) == [[(4, 4), (2, 2)] * 2] * 2


def test_a_window_that_is_looped_over_twice_is_refused() -> None:
    """Its first batch would be handed out again, after the step that it was trained on."""
    with fixed_session(StaticRank()) as session:
        training = Training(session)
        window = next(session.accumulate(training.loader, 2))
        for batch in window:
            training.step(batch)
        with pytest.raises(EvenstepError, match="looped over a second time, but each of its 2"):
            iter(window)


def test_steps_are_counted_from_their_backward_pass_on() -> None:
    with fixed_session(StaticRank()) as session:
        training = Training(session)
        for i, batch in enumerate(training.loader):
            assert (session.step, session.samples) == (i, i * BATCH)
            training.step(batch)
            assert (session.step, session.samples) == (i + 1, (i + 1) * BATCH)


def test_an_optimizer_that_steps_on_one_rank_only_is_refused() -> None:
    def body(session: Session) -> None:
        training = Training(session)
        for batch in training.loader:
            torch.nn.functional.mse_loss(training.net(batch[0]), batch[1]).backward()
            if session.is_leader or session.step != 3:
                training.optimizer.step()

    with pytest.raises(EvenstepError, match=r"in step 2: 1 on rank 0, 0 on rank 1"):
        run_ranks(2, body)


# As a DataLoader.


def test_a_loader_has_what_scripts_ask_of_a_data_loader() -> None:
    with fixed_session(StaticRank()) as session:
        loader = Training(session, drop_last=True).loader
        assert (len(loader), loader.batch_size, len(loader.dataset)) == (NUM // BATCH, BATCH, NUM)
        assert (loader.drop_last, loader.num_workers) == (True, 0)


def test_a_loader_has_the_options_of_the_data_loader_inside() -> None:
    given: dict[str, Any] = {
        "num_workers": 2,
        "collate_fn": torch.utils.data.default_collate,
        "generator": torch.Generator(),
        "pin_memory": True,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "timeout": 60.0,
        "worker_init_fn": print,
    }
    with fixed_session(StaticRank()) as session:
        loader = Training(session, multiprocessing_context="fork", **given).loader
        assert {name: getattr(loader, name) for name in given} == given
        assert loader.multiprocessing_context.get_start_method() == "fork"
        assert loader.batch_sampler is loader._sampler


def test_the_length_is_known_before_the_first_batch_of_a_run(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
        with elastic_session(where) as session:
            loader = session.loader(TensorDataset(torch.zeros(50, 2)), batch=8)
            assert len(loader) == 7


def test_the_length_is_refused_while_it_depends_on_workers_to_come(tmp_path: Path) -> None:
    with hosted(tmp_path / "run") as run:
        where = CoordinatorAddress(host=run.name, port=run.port, token=run.token)
        with elastic_session(where) as session:
            loader = session.loader(TensorDataset(torch.zeros(50, 2)), per_worker=8, limit=16)
            with pytest.raises(ConfigError, match="not known before the first one"):
                len(loader)


def test_set_epoch_names_the_epoch_that_follows() -> None:
    def body(session: Session, epochs: list[int]) -> list[int]:
        training = Training(session)
        for epoch in epochs:
            training.loader.sampler.set_epoch(epoch)
            for batch in training.loader:
                training.step(batch)
        return training.seen

    with fixed_session(StaticRank()) as session:
        seen = body(session, [0, 1, 4])
        order = session._job.loader.order
        assert seen == [i for e in (0, 1, 4) for i in order.samples.items(e, 0, NUM)]
    with fixed_session(StaticRank()) as session, pytest.raises(ConfigError, match="growing"):
        body(session, [0, 0])


def test_a_loop_that_fetches_ahead_is_told_how_to() -> None:
    with fixed_session(StaticRank()) as session:
        batches = iter(Training(session).loader)
        next(batches)
        with pytest.raises(EvenstepError, match="a loop that fetches ahead leaves that to the"):
            next(batches)


def test_learning_rates_that_differ_between_ranks_are_refused_before_the_step() -> None:
    nets: dict[int, torch.nn.Module] = {}

    def body(session: Session) -> None:
        training = Training(session)
        nets[session.rank] = training.net
        for x, y, *_ in training.loader:
            rate = 0.1 if session.step < 2 or session.rank != 1 else 0.2
            training.optimizer.param_groups[0]["lr"] = rate
            torch.nn.functional.mse_loss(training.net(x), y).backward()
            training.optimizer.step()

    with pytest.raises(EvenstepError, match="in step 2 the optimizer of rank 1 has another"):
        run_ranks(3, body)
    first, *others = (list(net.parameters()) for net in nets.values())
    for params in others:
        assert all(torch.equal(a, b) for a, b in zip(first, params, strict=True))
