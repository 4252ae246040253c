"""Loops over the loader that end early: samples trained on count exactly once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from evenstep.errors import EvenstepError
from evenstep.launch.ranks import StaticRank
from evenstep.train.data.loader import Loader
from evenstep.train.join import fixed_session
from evenstep.train.session import Session
from tests.train.ranks import run_ranks
from tests.train.test_exact import assert_exact
from tests.train.test_loop import NORMED, data, made, mse, result, sgd

NUM, BATCH = 48, 8  # six steps an epoch


def numbered() -> TensorDataset:
    return TensorDataset(*data(NUM).tensors, torch.arange(NUM))


class Stream(IterableDataset[Any]):
    """Samples that can only be read one after the other."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Training:
    """A model and the samples that it was trained on."""

    def __init__(
        self,
        session: Session,
        net: nn.Module | None = None,
        *,
        batch: int = BATCH,
        of: Any = None,
        **options: Any,
    ) -> None:
        self.session, self.net = session, net or made()
        self.net, self.optimizer = session.prepare(self.net, sgd(self.net))
        self.loader: Loader = session.loader(of or numbered(), batch=batch, **options)
        self.seen: list[int] = []

    def step(self, batch: list[torch.Tensor]) -> None:
        x, y, index = batch
        self.optimizer.zero_grad()
        mse(self.net(x), y).backward()
        self.optimizer.step()
        self.seen += index.tolist()[: self.session.counted]


Leave = Callable[[Training], None]


def by_break(training: Training) -> None:
    for i, batch in enumerate(training.loader):
        training.step(batch)
        if i == 1:
            break


def by_break_before_the_step(training: Training) -> None:
    for i, batch in enumerate(training.loader):
        if i == 2:
            break
        training.step(batch)


def by_islice(training: Training) -> None:
    for batch in islice(training.loader, 2):
        training.step(batch)


def by_zip_that_fetches_one_too_many(training: Training) -> None:
    for batch, _ in zip(training.loader, range(2), strict=False):
        training.step(batch)


def by_next(training: Training) -> None:
    for _ in range(2):
        training.step(next(iter(training.loader)))


KEPT: list[Iterator[Any]] = []


def by_an_iterator_that_is_kept(training: Training) -> None:
    batches = iter(training.loader)
    KEPT.append(batches)
    for _ in range(2):
        training.step(next(batches))


def by_an_error(training: Training) -> None:
    with suppress(ZeroDivisionError):
        for i, batch in enumerate(training.loader):
            training.step(batch)
            if i == 1:
                raise ZeroDivisionError


WAYS: list[Leave] = [
    by_break,
    by_break_before_the_step,
    by_islice,
    by_zip_that_fetches_one_too_many,
    by_next,
    by_an_iterator_that_is_kept,
    by_an_error,
]


def batches_of(leave: Leave) -> list[int]:
    """Batches of each loop in one way to leave."""
    return [1, 1] if leave is by_next else [2]


@pytest.mark.parametrize(
    ("leave", "workers"),
    [*((way, 0) for way in WAYS), (by_break, 2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_next_loop_begins_the_next_epoch(leave: Leave, workers: int) -> None:
    loops = [*batches_of(leave), *batches_of(leave), NUM // BATCH]

    def body(session: Session) -> tuple[list[int], list[int], list[torch.Tensor]]:
        training = Training(session, num_workers=workers)
        leave(training)
        assert session.step == 2
        leave(training)
        for batch in training.loader:
            training.step(batch)
        assert (session.step, session.samples) == (sum(loops), sum(loops) * BATCH)
        order = training.loader.order
        epochs = [order.samples.items(e, 0, num * BATCH) for e, num in enumerate(loops)]
        return training.seen, [i for epoch in epochs for i in epoch], result(training.net)

    [(seen, expected, one)] = run_ranks(1, body, policy="uniform")
    assert seen == expected
    ranks = run_ranks(3, body, policy={"name": "fixed", "shares": [5, 2, 1]})
    assert sorted(i for seen, *_ in ranks for i in seen) == sorted(expected)
    for *_, parameters in ranks:
        for mine, theirs in zip(parameters, one, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("leave", [by_break, by_break_before_the_step, by_islice])
def test_the_last_step_of_a_loop_left_early_counts_at_once(leave: Leave) -> None:
    def body(session: Session) -> list[tuple[int, int]]:
        training = Training(session)
        leave(training)
        first = (session.step, session.samples)
        session.sum(1.0)
        return [first, (session.step, session.samples)]

    assert run_ranks(2, body) == [[(2, 2 * BATCH)] * 2] * 2


def test_a_position_taken_after_a_loop_was_left_is_the_next_epochs() -> None:
    with fixed_session(StaticRank()) as session:
        training = Training(session)
        by_break(training)
        state = training.loader.state_dict()
        assert (state["epoch"], state["cursor"], state["index"]) == (1, 0, 0)


def test_each_turn_of_session_epochs_begins_a_new_epoch() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        training = Training(session)
        for epoch in session.epochs(3):
            by_break(training)
            session.sum(1.0)
            assert session.samples == (epoch + 1) * 2 * BATCH
        assert session.step == 6
        assert training.loader.state_dict()["epoch"] == 3
        return result(training.net)

    assert_exact(body, [5, 2, 1])


def test_two_loops_in_one_turn_are_two_epochs() -> None:
    def body(session: Session) -> tuple[list[int], int]:
        training = Training(session)
        turns = []
        for epoch in session.epochs(4):
            turns.append(epoch)
            by_break(training)
            by_break(training)
        return turns, session.step

    assert run_ranks(2, body) == [([0, 2], 8)] * 2


# What was used, and what was only looked at.


def test_samples_of_epochs_that_were_skipped_are_not_counted() -> None:
    def body(session: Session) -> list[int]:
        training, counts = Training(session), []
        for epoch in (1, 4):
            training.loader.set_epoch(epoch)
            counts.append(session.samples)
            by_break(training)
        return [*counts, session.samples]

    assert run_ranks(2, body) == [[0, 2 * BATCH, 4 * BATCH]] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_samples_that_do_not_fill_a_batch_and_are_left_out_are_not_counted(stream: bool) -> None:
    samples = numbered()
    kept = Stream([samples[i] for i in range(NUM)]) if stream else samples

    def body(session: Session) -> int:
        training = Training(session, drop_last=True, batch=20, of=kept)
        for _ in range(3):
            for batch in training.loader:
                training.step(batch)
        return session.samples

    assert run_ranks(2, body) == [3 * 40] * 2


def test_the_count_goes_on_where_a_run_is_resumed() -> None:
    def begin(session: Session) -> dict[str, Any]:
        training = Training(session)
        by_break(training)
        by_break(training)
        return training.loader.state_dict()

    def resume(session: Session) -> tuple[int, int]:
        training = Training(session)
        training.loader.load_state_dict(state)
        before = session.samples
        for _ in session.epochs(3):
            by_break(training)
        return before, session.samples

    [state] = run_ranks(1, begin)
    assert state["epoch"] == 2
    assert run_ranks(2, resume) == [(4 * BATCH, 6 * BATCH)] * 2


def by_next_alone(loader: Loader) -> None:
    next(iter(loader))


def by_next_of_an_iterator_that_is_kept(loader: Loader) -> None:
    KEPT.append(iter(loader))
    next(KEPT[-1])


def by_a_loop(loader: Loader) -> None:
    for _ in loader:
        break


LOOKS = [by_next_alone, by_next_of_an_iterator_that_is_kept, by_a_loop]


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("names_epochs", [False, True])
def test_a_look_at_a_batch_before_each_epoch_uses_none(
    look: Callable[[Loader], None], workers: int, names_epochs: bool
) -> None:
    def body(session: Session) -> tuple[list[int], list[int]]:
        training = Training(session, num_workers=workers)
        look(training.loader)
        for epoch in range(2):
            assert training.loader.state_dict()["epoch"] == epoch
            look(training.loader)
            if names_epochs:
                training.loader.set_epoch(epoch)
            for batch in training.loader:
                training.step(batch)
        assert session.samples == 2 * NUM
        samples = training.loader.order.samples
        return training.seen, [i for epoch in range(2) for i in samples.items(epoch, 0, NUM)]

    [(seen, expected)] = run_ranks(1, body)
    assert seen == expected
    ranks = run_ranks(2, body)
    assert sorted(i for seen, _ in ranks for i in seen) == sorted(expected)


def test_a_resumed_run_goes_on_in_its_epoch_after_its_script_has_looked_at_a_batch() -> None:
    def begin(session: Session) -> tuple[dict[str, Any], list[int]]:
        training = Training(session)
        by_next_alone(training.loader)
        for batch in training.loader:
            training.step(batch)
            if session.step == 2:
                return training.loader.state_dict(), training.seen
        raise AssertionError("no second step")

    def resume(session: Session) -> list[int]:
        training = Training(session)
        training.loader.load_state_dict(state)
        by_next_alone(training.loader)
        for batch in training.loader:
            training.step(batch)
        assert session.samples == NUM
        return training.seen

    [(state, seen)] = run_ranks(1, begin)
    ranks = run_ranks(2, resume)
    assert sorted([*seen, *(i for rank in ranks for i in rank)]) == [*range(NUM)]


def test_a_loop_that_is_left_at_another_step_on_one_rank_is_refused() -> None:
    def body(session: Session) -> None:
        training = Training(session)
        for batch in islice(training.loader, 2 if session.rank else 3):
            training.step(batch)
        for batch in training.loader:
            training.step(batch)

    with pytest.raises(EvenstepError, match="step 2 is of epoch 0 on rank 0, 1 on rank 1: a loop"):
        run_ranks(2, body)


# Loops that never ask for the end of an epoch.


def by_range(training: Training) -> None:
    batches = iter(training.loader)
    for _ in range(len(training.loader)):
        training.step(next(batches))


def by_islice_of_all(training: Training) -> None:
    for batch in islice(training.loader, len(training.loader)):
        training.step(batch)


@pytest.mark.parametrize("loop", [by_range, by_islice_of_all])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loop_over_exactly_all_batches_is_an_epoch(loop: Leave, drop_last: bool) -> None:
    def body(session: Session) -> tuple[list[int], list[torch.Tensor]]:
        training = Training(session, made(NORMED), drop_last=drop_last)
        for _ in range(3):
            loop(training)
        return training.seen, result(training.net)

    ranks = run_ranks(3, body, policy={"name": "fixed", "shares": [3, 3, 2]})
    assert sorted(i for seen, _ in ranks for i in seen) == sorted([*range(NUM)] * 3)
    for _, parameters in ranks[1:]:
        assert all(map(torch.equal, parameters, ranks[0][1]))


def test_a_loop_that_asks_for_batches_when_it_needs_them_goes_on_for_ever() -> None:
    def body(session: Session) -> int:
        training = Training(session)
        batches = iter(training.loader)
        while session.step < 20:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(training.loader)
                batch = next(batches)
            training.step(batch)
        return session.step

    assert run_ranks(2, body) == [20, 20]


def test_the_last_step_counts_even_if_its_iterator_is_never_closed() -> None:
    KEPT.clear()
    with fixed_session(StaticRank()) as session:
        training = Training(session)
        by_an_iterator_that_is_kept(training)
        assert session.step == 2
    assert (session.step, session.samples) == (2, 2 * BATCH)
    KEPT.clear()
    gc.collect()
    assert (session.step, session.samples) == (2, 2 * BATCH)


def test_a_step_that_raised_is_not_counted_when_the_session_ends() -> None:
    def ends_by(error: BaseException) -> int:
        session = fixed_session(StaticRank())
        with suppress(type(error)), session:
            training = Training(session)
            for batch in training.loader:
                if session.step == 1:
                    raise error
                training.step(batch)
        return session.step

    assert ends_by(ZeroDivisionError()) == 1
    assert ends_by(SystemExit(75)) == 1


def test_an_iterator_superseded_by_a_newer_one_is_refused() -> None:
    def body(session: Session) -> None:
        training = Training(session)
        first = iter(training.loader)
        training.step(next(first))
        by_break(training)
        training.step(next(first))

    with pytest.raises(EvenstepError, match="Continue with the newest iterator"):
        run_ranks(1, body)


def test_a_batch_may_be_fetched_and_trained_on_before_any_loop() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        training = Training(session)
        batch = next(iter(training.loader))
        for _ in range(3):
            training.step(batch)
        return result(training.net)

    assert_exact(body, [5, 2, 1])


def test_batch_norm_statistics_are_equal_in_an_evaluation_after_an_early_break() -> None:
    def body(session: Session) -> list[torch.Tensor]:
        training = Training(session, made(NORMED))
        by_break(training)
        for _ in session.evaluation(numbered(), batch_size=5):
            return [b.detach().clone() for b in training.net.buffers()]
        raise AssertionError("no batch to evaluate")

    first, *others = run_ranks(3, body, policy={"name": "fixed", "shares": [3, 3, 2]})
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
