"""A void step leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evenstep.errors import EvenstepError
from evenstep.train.recover.rollback import Rollback
from evenstep.train.recover.state import TrainingState
from evenstep.train.recover.undo import UndoRegistered
from evenstep.train.step import Batch, Step
from evenstep.train.updates import Change


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


class Around:
    """A module in an object of the script's own, whose state is views or copies of its tensors."""

    def __init__(self, *, copies: bool) -> None:
        self.module, self.copies, self.num = torch.nn.Linear(256, 256), copies, 0

    def state_dict(self) -> dict[str, Any]:
        state = self.module.state_dict()
        copied = {name: tensor.clone() for name, tensor in state.items()}
        return {"module": copied if self.copies else state, "num": self.num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.num = state["num"]


def test_a_change_is_told_from_being_asked_again() -> None:
    around = Around(copies=False)
    undo = UndoRegistered("around", around)
    undo.begin_step()
    assert undo.change() == Change()
    around.num += 1
    assert undo.change() == Change(numbers=True)
    with torch.no_grad():
        around.module.bias.add_(0)
    assert undo.change() == Change(numbers=True, tensors=True)
    undo.begin_step()
    assert undo.change() == Change()
    around.module = torch.nn.Linear(256, 256)
    assert undo.change() == Change(tensors=True)


def test_of_a_state_of_copies_only_numbers_are_compared_and_it_is_undone_all_the_same() -> None:
    around = Around(copies=True)
    undo = UndoRegistered("around", around)
    undo.begin_step()
    before = around.state_dict()["module"]["bias"]
    with torch.no_grad():
        around.module.bias.add_(1)
    around.num += 1
    assert undo.change() == Change(numbers=True)
    undo.step_is_void(3)
    undo.restore()
    assert torch.equal(around.state_dict()["module"]["bias"], before)
