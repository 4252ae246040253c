"""The GPU's random state: rolled back with a void step, handed over, kept in checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.train.comm.cards import card_random, set_card_random
from evenstep.train.job import Job
from evenstep.train.recover import checkpoint
from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.step import Step

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


class FakeGpus:
    """The random states of two GPUs as in torch.cuda: 16 bytes each, on the host."""

    def __init__(self) -> None:
        self.states = {n: torch.full((16,), n, dtype=torch.uint8) for n in (0, 1)}
        self.synchronised: list[torch.device] = []

    def get(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index].clone()

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()

    def draw(self) -> None:
        for state in self.states.values():
            state += 1

    @property
    def firsts(self) -> list[int]:
        return [int(state[0]) for state in self.states.values()]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    made = FakeGpus()
    monkeypatch.setattr(torch.cuda, "get_rng_state", made.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", made.set)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronised.append)
    return made


def test_a_void_step_restores_the_random_state_of_its_gpu(gpus: FakeGpus) -> None:
    rollback = Rollback(Step(), torch.nn.Linear(1, 1), {}, TrainingState({}, {}, {}))
    rollback._device = CUDA
    rollback.begin_step()
    gpus.draw()
    rollback.restore()
    assert gpus.firsts == [1, 1]  # the other GPU is not ours


def test_a_seed_of_zero_is_a_valid_state(gpus: FakeGpus) -> None:
    set_card_random(CUDA, torch.zeros(16, dtype=torch.uint8))
    assert gpus.firsts == [0, 0]


def test_workers_without_a_gpu_hand_over_a_placeholder_of_the_same_shape(gpus: FakeGpus) -> None:
    none, some = card_random(CPU), card_random(CUDA)
    assert (none.shape, none.dtype) == (some.shape, some.dtype)
    set_card_random(CUDA, none)
    set_card_random(CPU, some)
    assert gpus.firsts == [0, 1]


def worker(device: torch.device) -> Any:
    part = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    step, model = (
        SimpleNamespace(number=3, num_taken=3, num_unused=0),
        SimpleNamespace(device=device),
    )
    return SimpleNamespace(loader=part, lr_scale=part, settings=part, step=step, model=model)


@pytest.fixture
def _restored_rng() -> Any:
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.mark.usefixtures("_restored_rng")
def test_a_joiner_draws_the_same_random_numbers_as_the_others(gpus: FakeGpus) -> None:
    gpus.states[1][:] = 42
    plain = Job.plain_state(worker(CUDA))
    gpus.draw()
    Job.load_plain_state(worker(CUDA), plain)
    assert gpus.firsts == [1, 42]


@pytest.mark.usefixtures("_restored_rng")
def test_a_checkpoint_without_a_gpu_state_leaves_the_gpu_unchanged(gpus: FakeGpus) -> None:
    plain = Job.plain_state(worker(CUDA))
    del plain["card_random"]
    gpus.draw()
    Job.load_plain_state(worker(CUDA), plain)
    assert gpus.firsts == [1, 2]


def test_a_checkpoint_waits_for_every_gpu_that_it_copies_from(gpus: FakeGpus) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    checkpoint._synchronise([first, CPU, second, first])
    assert sorted(map(str, gpus.synchronised)) == ["cuda:0", "cuda:1"]


def test_a_checkpoint_of_cpu_tensors_waits_for_no_gpu(gpus: FakeGpus) -> None:
    checkpoint._copy([torch.ones(2)], [])
    assert gpus.synchronised == []
