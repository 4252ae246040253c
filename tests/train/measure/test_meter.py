"""What a step took, on the host's clock and on that of a card."""

from __future__ import annotations

import pytest
import torch

from evenstep.train.measure.meter import LEAST_S, Clock, Meter, StreamClock

CPU = torch.device("cpu")


class Hands:
    """A host's clock that a test turns."""

    late = False

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def between(self, earlier: float, later: float) -> float:
        return later - earlier


class Card:
    """Passes the events that the host has left it when it gets there: as CUDA's, no earlier."""

    def __init__(self) -> None:
        self.at_s = 0.0  # what it has been given to do ends here
        self.passed_s = 0.0  # how far it is
        self.waits = 0  # of the host, for what was still to come

    def work(self, seconds: float) -> None:
        self.at_s += seconds

    def catch_up(self) -> None:
        self.passed_s = self.at_s


class Event:
    """Of torch.cuda, as c10/cuda/CUDAEvent.h has it."""

    def __init__(self, card: Card) -> None:
        self._card, self._at_s = card, card.at_s

    @property
    def done(self) -> bool:
        return self._card.passed_s >= self._at_s

    def synchronize(self) -> None:
        if not self.done:
            self._card.waits += 1
            self._card.passed_s = self._at_s

    def elapsed_time(self, other: Event) -> float:
        if not (self.done and other.done):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (other._at_s - self._at_s) * 1000


class CardClock(StreamClock):
    """The real one, but for where events come from."""

    def __init__(self, card: Card) -> None:
        self.card = card

    def now(self) -> Event:  # type: ignore[override]
        return Event(self.card)


def step(meter: Meter, card: Card, seconds: float, samples: int, wait_s: float = 0.0) -> float:
    """What is reported of a step that the host is through with before its card has begun."""
    meter.begin()
    card.work(seconds)
    meter.ready()
    reported = meter.compute_s(samples)
    card.work(wait_s)
    meter.reduced()
    return reported


@pytest.fixture
def card() -> Card:
    return Card()


@pytest.fixture
def meter(card: Card) -> Meter:
    clock: Clock = CardClock(card)
    return Meter(CPU, clock)


def test_a_card_is_read_a_step_later_without_waiting(meter: Meter, card: Card) -> None:
    step(meter, card, 0.5, 8)
    card.catch_up()
    card.waits = 0
    assert step(meter, card, 0.7, 8) == pytest.approx(0.5)
    card.catch_up()
    assert step(meter, card, 0.9, 8) == pytest.approx(0.7)
    assert card.waits == 0


def test_a_card_that_is_still_behind_is_waited_for_and_nothing_raises(
    meter: Meter, card: Card
) -> None:
    step(meter, card, 0.5, 8)
    card.passed_s, card.waits = 0.0, 0  # nothing of it is done
    assert step(meter, card, 0.7, 8) == pytest.approx(0.5)
    assert card.waits == 1
    assert card.passed_s == 0.5  # for no more than it had to


def test_the_first_step_of_a_card_is_its_own(meter: Meter, card: Card) -> None:
    assert step(meter, card, 0.5, 8) == pytest.approx(0.5)


def test_seconds_belong_to_their_samples_when_shares_change(meter: Meter, card: Card) -> None:
    shares = [8, 8, 16, 16, 4, 4, 4]
    reported = [step(meter, card, 0.1 * samples, samples) for samples in shares]
    assert reported == pytest.approx([0.1 * samples for samples in shares])


@pytest.mark.parametrize("passes", [1, 3])
def test_a_card_that_waits_for_sums_does_not_compute(meter: Meter, card: Card, passes: int) -> None:
    meter.begin()
    for _ in range(passes):
        card.work(0.2)
        meter.ready()
        computed_s = meter.compute_s(8)
        card.work(0.3)
        meter.reduced()
    assert computed_s == pytest.approx(0.2 * passes)
    meter.begin()
    card.work(0.2)
    meter.ready()
    assert meter.wait_s == pytest.approx(0.3 * passes)


@pytest.mark.parametrize("gone", ["before", "after"])
def test_a_step_that_came_to_nothing_leaves_the_next_as_it_is(
    meter: Meter, card: Card, gone: str
) -> None:
    step(meter, card, 0.5, 8)
    meter.begin()
    card.work(5.0)
    if gone == "after":  # its gradients were ready, the group was gone
        meter.ready()
        meter.compute_s(3)
    assert step(meter, card, 0.6, 8) == pytest.approx(0.5 if gone == "before" else 0.6)


def test_a_pass_whose_sums_never_came_is_part_of_the_next(meter: Meter, card: Card) -> None:
    meter.begin()
    card.work(1.0)
    meter.ready()
    card.work(0.5)
    meter.ready()
    card.work(0.25)
    meter.reduced()
    assert meter.compute_s(8) == pytest.approx(1.5)
    meter.begin()
    assert meter.wait_s == pytest.approx(0.25)


def test_a_host_reports_the_step_at_hand_less_what_it_waited() -> None:
    clock = Hands()
    meter = Meter(CPU, clock)
    meter.begin()
    for _ in range(2):
        clock.now_s += 1.0
        meter.ready()
        clock.now_s += 0.5
        meter.reduced()
    meter.begin()
    assert meter.wait_s == 1.0
    clock.now_s += 2.0
    meter.waited(0.25)  # within a layer
    meter.ready()
    assert meter.compute_s(8) == 1.75
    meter.reduced()
    meter.begin()
    assert meter.wait_s == 0.25
    meter.ready()
    assert meter.compute_s(8) == LEAST_S
