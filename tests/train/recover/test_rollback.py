"""A void step leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenstep.errors import EvenstepError
from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.step import Batch, Step


def test_a_void_step_takes_its_reductions_and_sums_back() -> None:
    """Otherwise a new generation would take this worker's state for that of a later step."""
    step = Step()
    rollback = Rollback(step, torch.nn.Linear(1, 1), {}, TrainingState({}, {}, {}))
    step.number, step.num_reduced, step.num_sums = 7, 7, 3
    step.on_fetched.append(rollback.begin_step)
    step.fetched(Batch(step=7, samples=1), 0.0)
    step.reduced([], None)  # the first of two backward passes
    step.num_sums += 1
    assert (step.num_reduced, step.num_sums, step.num_unused) == (8, 4, 1)
    step.void()
    rollback.restore()
    assert (step.num_reduced, step.num_sums, step.num_unused) == (7, 3, 0)


class Box:
    """A counter of the script's own, with a state of any size."""

    def __init__(self, num_floats: int) -> None:
        self.num, self.floats = 0, torch.zeros(num_floats)

    def add(self) -> None:
        self.num += 1
        self.floats = self.floats + 1

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num, "floats": self.floats}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num, self.floats = state["num"], state["floats"]


class Script:
    """What a script keeps beside its model, in a step that turns out void."""

    def __init__(self, num_floats: int) -> None:
        model = torch.nn.Linear(4, 64)
        self.average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(num_floats, 1))
        self.box = Box(num_floats)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.optimizer.step()
        stateful = {"average": self.average, "box": self.box, "schedule": self.schedule}
        self.step = Step()
        self.rollback = Rollback(self.step, model, stateful, TrainingState({}, {}, {}))
        self.step.on_fetched.append(self.rollback.begin_step)
        self.step.fetched(Batch(samples=1), 0.0)

    def update(self) -> None:
        self.average.update_parameters(self.average.module)
        self.box.add()
        self.schedule.step()

    def void(self) -> None:
        self.step.void()
        self.rollback.step_is_void()

    def state(self) -> tuple[float, ...]:
        box, rate = self.box, float(self.optimizer.param_groups[0]["lr"])
        averaged = int(self.average.n_averaged)
        return averaged, box.num, float(box.floats[0]), rate, self.schedule.last_epoch


@pytest.mark.parametrize("num_floats", [1, 2**16])
def test_whatever_a_script_updates_after_the_loss_is_undone(num_floats: int) -> None:
    script = Script(num_floats)
    before = script.state()
    script.void()
    for _ in range(2):
        script.update()
        script.rollback.settle()
        assert script.state() == before


def test_small_states_are_undone_from_the_beginning_of_the_step() -> None:
    script = Script(1)
    before = script.state()
    script.update()
    assert script.state() != before
    script.void()
    script.rollback.settle()
    assert script.state() == before


@pytest.mark.parametrize("name", ["average", "box"])
def test_a_large_state_that_was_updated_before_the_loss_is_refused(name: str) -> None:
    """It is not copied in every step."""
    script = Script(2**16)
    if name == "average":
        script.average.update_parameters(script.average.module)
    else:
        script.box.add()
    with pytest.raises(EvenstepError, match=f"'{name}', registered with the session, was updated"):
        script.void()
