"""Data of other kinds: loops of so many steps, replacement, samplers, streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
)

from evenstep.errors import ConfigError, EvenstepError
from evenstep.launch.ranks import StaticRank
from evenstep.train.join import fixed_session
from evenstep.train.session import Session
from tests.train.ranks import run_ranks
from tests.train.test_loop import made, mse, sgd

NUM, BATCH = 20, 8


class Lines(IterableDataset[int]):
    """A stream of numbers."""

    def __init__(self, num: int = NUM, first: int = 0) -> None:
        self.num, self.first = num, first

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.num))


class Stated(Lines):
    """A stream that says how long it is, or raises."""

    error: Exception | None = None

    def __len__(self) -> int:
        if self.error is not None:
            raise self.error
        return self.num


class Huge(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 9_000_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def decoded(number: int) -> torch.Tensor:
    return torch.tensor([number])


def train(session: Session, dataset: Any, *, loops: int = 1, **options: Any) -> list[list[int]]:
    """The samples of each step that count on this rank."""
    net, optimizer = session.prepare(net := made(), sgd(net))
    loader = session.loader(dataset, batch=BATCH, **options)
    seen = []
    for _ in range(loops):
        for index in loader:
            optimizer.zero_grad()
            x = index.double() / NUM
            mse(net(x.expand(-1, 6)), x).backward()
            optimizer.step()
            seen.append(index.flatten().tolist()[: session.counted])
    return seen


def batches_of(size: int, *, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(range(NUM), size, drop_last)


def numbers(num: int = NUM) -> list[torch.Tensor]:
    return [decoded(i) for i in range(num)]


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The samples of all ranks, step by step."""
    return [[i for part in parts for i in part] for parts in zip(*ranks, strict=True)]


def alone(body: Callable[[Session], Any]) -> Any:
    with fixed_session(StaticRank()) as session:
        return body(session)


# Loops of so many steps.


def test_a_loop_of_so_many_steps_crosses_epochs() -> None:
    """Each sample comes once in every pass over the dataset, and the next loop continues."""

    def body(session: Session) -> list[list[int]]:
        seen = train(session, numbers(), steps=4, loops=2)
        assert (len(session._job.loader), session.samples) == (4, 64)
        return seen

    ranks = run_ranks(3, body)
    used = [i for step in together(ranks) for i in step]
    passes = [sorted(used[begin : begin + NUM]) for begin in (0, 20, 40)]
    assert passes == [list(range(NUM))] * 3
    assert len(used) == 64
    assert used[:20] != used[20:40]


def test_steps_of_a_dataset_that_is_smaller_than_a_batch() -> None:
    used = [i for step in alone(lambda s: train(s, numbers(3), steps=2)) for i in step]
    assert sorted(used[:15]) == sorted([0, 1, 2] * 5)


def test_steps_are_numbered_in_their_loop() -> None:
    def body(session: Session) -> list[int]:
        net, optimizer = session.prepare(net := made(), sgd(net))
        loader = session.loader(numbers(), batch=BATCH, steps=5, replacement=True)
        found = []
        for i, index in session.enumerate(loader):
            mse(net(index.double().expand(-1, 6)), index.double()).backward()
            optimizer.step()
            found.append(i)
        return found

    assert alone(body) == [0, 1, 2, 3, 4]


def test_nine_billion_samples_are_shuffled_and_drawn_at_once() -> None:
    for replacement in (False, True):
        with fixed_session(StaticRank()) as session:
            seen = train(session, Huge(), steps=3, replacement=replacement)
        assert len({i for step in seen for i in step}) == 3 * BATCH
    with fixed_session(StaticRank()) as session:
        assert len(session.loader(Huge(), batch=BATCH)) == 9_000_000_000 // BATCH


# Replacement and samplers.


def test_drawing_with_replacement_is_the_same_for_any_number_of_workers() -> None:
    def body(session: Session) -> list[list[int]]:
        return train(session, numbers(), replacement=True, loops=3)

    expected = alone(body)
    assert together(run_ranks(3, body)) == expected
    assert [len(step) for step in expected] == [8, 8, 4] * 3
    assert len({i for step in expected[:3] for i in step}) < NUM


def test_a_samplers_order_is_followed_by_all_workers_together() -> None:
    def body(session: Session) -> list[list[int]]:
        sampler = WeightedRandomSampler([0.0] * 10 + [1.0] * 10, 12, generator=torch.Generator())
        return train(session, numbers(), sampler=sampler, loops=2)

    expected = alone(body)
    assert together(run_ranks(3, body)) == expected
    assert [len(step) for step in expected] == [8, 4] * 2
    assert min(i for step in expected for i in step) >= 10
    assert expected[:2] != expected[2:]


def test_a_sampler_that_differs_between_ranks_is_refused_in_the_first_step() -> None:
    def body(session: Session) -> None:
        rank = session.rank
        train(session, numbers(), sampler=lambda epoch: [(i + rank) % NUM for i in range(NUM)])

    with pytest.raises(EvenstepError, match=r"in step 0 the sampler or stream of rank 1, 2 gives"):
        run_ranks(3, body)


def test_a_state_of_an_older_version_is_loaded() -> None:
    """It names no order, and a checkpoint of it had one permutation drawn whole."""

    def load(session: Session) -> int:
        loader = session.loader(numbers(), batch=BATCH)
        state = {"epoch": 2, "cursor": 8, "length": NUM, "seed": 0, "shuffle": True}
        sizes = {"batch": BATCH, "per_worker": 0, "limit": 0, "drop_last": False}
        loader.load_state_dict(state | sizes)
        return session.samples

    assert alone(load) == 2 * NUM + 8


def test_a_state_of_another_samplers_order_is_refused() -> None:
    def loader(session: Session, shift: int) -> Any:
        session.prepare(net := made(), sgd(net))
        sampler = [(i + shift) % NUM for i in range(NUM)]
        return session.loader(numbers(), batch=BATCH, sampler=sampler)

    state = alone(lambda s: loader(s, 0).state_dict())
    alone(lambda s: loader(s, 0).load_state_dict(state))
    with pytest.raises(ConfigError, match=r"'order': 'by list'.*'order': ''.* now"):
        alone(lambda s: s.loader(numbers(), batch=BATCH).load_state_dict(state))
    with pytest.raises(ConfigError, match="samples of epoch 0 in another order than the run"):
        alone(lambda s: loader(s, 1).load_state_dict(state))


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, iter])
def test_indices_may_come_in_any_container(kind: Any) -> None:
    indices = [*range(NUM - 1, -1, -1)]
    steps = alone(lambda s: train(s, numbers(), sampler=lambda epoch: kind(indices)))
    assert [i for step in steps for i in step] == indices


def test_batches_of_a_sampler_stay_whole_through_passes() -> None:
    sampler = batches_of(BATCH, drop_last=True)
    steps = alone(lambda s: train(s, numbers(), sampler=sampler, steps=5))
    assert steps == [[*range(8)], [*range(8, 16)]] * 2 + [[*range(8)]]


# Streams.


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_shared_out_and_decoded_once(num_workers: int) -> None:
    def body(session: Session) -> list[list[int]]:
        options: dict[str, Any] = {"transform": decoded, "num_workers": num_workers}
        seen = train(session, Lines(), loops=2, **options)
        assert session.samples == 2 * NUM
        return seen

    steps = together(run_ranks(2, body))
    assert steps == [list(range(8)), list(range(8, 16)), list(range(16, 20))] * 2


def test_a_stream_may_drop_its_last_short_step() -> None:
    steps = alone(lambda s: train(s, Lines(), transform=decoded, drop_last=True, loops=2))
    assert steps == [list(range(8)), list(range(8, 16))] * 2


def test_only_a_workers_own_samples_are_decoded() -> None:
    def body(session: Session) -> tuple[list[int], list[int]]:
        calls: list[int] = []

        def transform(number: int) -> torch.Tensor:
            calls.append(number)
            return decoded(number)

        return calls, [i for step in train(session, Lines(), transform=transform) for i in step]

    ranks = run_ranks(2, body)
    assert all(calls == seen for calls, seen in ranks)


def test_windows_over_a_stream_know_their_length() -> None:
    def body(session: Session) -> list[tuple[int, int]]:
        net, optimizer = session.prepare(net := made(), sgd(net))
        loader = session.loader(Lines(36), batch=BATCH, transform=decoded)
        sizes = []
        for window in session.accumulate(loader, 3):
            num = 0
            for index in window:
                mse(net(index.double().expand(-1, 6)), index.double()).backward()
                num += 1
            optimizer.step()
            sizes.append((len(window), num))
        return sizes

    assert run_ranks(2, body) == [[(3, 3), (2, 2)]] * 2


@pytest.mark.parametrize(
    ("streams", "step"),
    [
        ((Lines(), Lines(), Lines(first=1)), 0),  # split by rank, or another order
        ((Lines(24), Lines(24), Lines(22)), 1),  # shorter, noticed while it still has a step
        ((Lines(24), Lines(24), Lines(16)), 1),
        ((Lines(17), Lines(17), Lines(18)), 1),
    ],
)
def test_a_stream_that_differs_between_ranks_is_refused(streams: Any, step: int) -> None:
    def body(session: Session) -> None:
        train(session, streams[session.rank], transform=decoded)

    with pytest.raises(EvenstepError, match=f"in step {step} the sampler or stream of rank 2"):
        run_ranks(3, body)


def test_an_evaluation_of_a_data_loader_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is a DataLoader.*its dataset, and batch_size="):
        alone(lambda s: s.evaluation(DataLoader(Huge()), batch_size=4))


def test_a_stream_has_no_length_unless_steps_are_given() -> None:
    def length(session: Session, **options: Any) -> int:
        return len(session.loader(Lines(), batch=BATCH, **options))

    with pytest.raises(TypeError, match=r"no len\(\).*steps="):
        alone(length)
    assert alone(lambda s: length(s, steps=7)) == 7


def test_a_stream_may_say_how_long_it_is() -> None:
    def length(session: Session, stream: Stated, **options: Any) -> int:
        return len(session.loader(stream, batch=BATCH, **options))

    stream = Stated()
    assert alone(lambda s: length(s, stream)) == 3
    assert alone(lambda s: length(s, stream, drop_last=True)) == 2
    stream.error = NotImplementedError("nobody knows")
    with pytest.raises(TypeError, match=r"no len\(\)"):
        alone(lambda s: length(s, stream))


# What is said.


def test_the_leader_says_in_which_order_the_data_is_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenstep")
    run_ranks(2, lambda s: train(s, numbers(), loops=2))
    said = [r.message for r in caplog.records if r.message.startswith("data: ")]
    assert said == ["data: epochs of 20 samples, shuffled with seed 0; 8 samples a step"]


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (Lines(), {"shuffle": True}, "shuffle: is not possible with a stream"),
        (Lines(), {"replacement": True}, "replacement: is not possible with a stream"),
        (Lines(), {"sampler": [1]}, "sampler: is not possible with a stream"),
        (count(), {}, "dataset: is an iterator, which can be read once"),
        (numbers(), {"transform": decoded}, "transform: is for streams"),
        (numbers(), {"steps": -1}, "steps: must be 0 or more"),
        (numbers(), {"steps": 3, "batch": 0, "per_worker": 2, "limit": 8}, "steps: needs batch="),
        (numbers(), {"sampler": [1], "shuffle": True}, "shuffle: is up to the sampler"),
        (numbers(), {"sampler": [1], "replacement": True}, "replacement: is up to the sampler"),
        (numbers(), {"replacement": True, "shuffle": False}, "replacement: draws at random"),
        (numbers(), {"sampler": [1] * 7}, "8 is more than the 7 samples"),
        (numbers(), {"batch_sampler": [[1]]}, "batch_sampler: give it as sampler="),
        (numbers(), {"batch_size": 4}, "batch_size: is evenstep's to choose"),
        (object(), {}, "dataset: has no length"),
        (DataLoader(Huge()), {}, "is a DataLoader, whose batches would be taken for samples"),
        (numbers(), {"sampler": batches_of(BATCH), "steps": 9}, "its last batch has 4 of 8"),
        (numbers(), {"sampler": [1, 2.5] * 10}, "sampler: gave 2.5, but each sample is"),
        (numbers(), {"sampler": torch.rand(20)}, "sampler: gave 0."),
        (numbers(), {"sampler": ["a"] * 20}, "sampler: gave 'a', but each sample is"),
        (numbers(), {"sampler": [True] * 20}, "sampler: gave True, but"),
        (numbers(), {"sampler": torch.ones(20, dtype=torch.bool)}, "sampler: gave True, but"),
        (numbers(), {"sampler": lambda epoch: ["b"] * 20}, "sampler: gave 'b', but"),
        (numbers(), {"sampler": [2**63] * 20}, "sampler: gave 9223372036854775808, but"),
    ],
)
def test_what_does_not_go_together_is_refused(
    dataset: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        alone(lambda s: s.loader(dataset, **{"batch": BATCH, **options}))
    assert says in str(caught.value)
